"""Namespaces keep apart skip connections of the same name."""

from __future__ import annotations

import uuid
from functools import total_ordering


@total_ordering
class Namespace:
    """Isolates the skip connections of layers that share it: ``layer.isolate(Namespace())``.

    Layers of one class use the same names over and over; each pair gets a namespace of its own. A namespace is equal to itself and to its
    copies, those in other processes included, and sorted in an order that means nothing.
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace {self._id}>"

    def __hash__(self) -> int:
        return hash((Namespace, self._id))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._id == other._id

    def __lt__(self, other: object) -> bool:
        return self._id < other._id if isinstance(other, Namespace) else NotImplemented
