"""Whether tensors are still what they were when a forward read them, as far as torch can tell.

torch counts the writes in place to a tensor and all its views, and a tensor's ``data`` that is set gives it another storage. It does not count
what is written through ``tensor.data``, through NumPy, or by fused optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from lightning_rotor.errors import ExecutionError
from lightning_rotor.private.torch_names import stamps

Slot: TypeAlias = tuple[dict[str, Any], str, Any]
"""A module's table of parameters or buffers, a name in it, and what is there."""
_requires_grad = attrgetter("requires_grad")


def first_changed(before: Sequence[int], tensors: Sequence[torch.Tensor], *, or_copies: bool = False) -> int | None:
    """Number of the first tensor that has changed since, or None.

    Args:
        before: Stamps of the tensors, or the first of these: what is left out is not compared.
        tensors: As many.
        or_copies: They may be copies, in other memory.
    """
    now = stamps(tensors)[: len(before)]
    if now == before:
        return None
    if or_copies:
        count = len(tensors)
        changed = (now[n + count] == before[n + count] and now[n] > before[n] for n in range(count))
        return next((number for number, has_changed in enumerate(changed) if has_changed), None)
    return min(place % len(tensors) for place in range(len(now)) if now[place] != before[place])


def _spell(_: dict[str, Any], name: str) -> str:
    return f"tensor {name!r}"


class TensorsRead:
    """Parameters and buffers of modules that a forward reads.

    Args:
        slots: Where they are.
        spell: How messages call what is in a slot.

    Attributes:
        slots: Where they are; None may be there, too.
    """

    def __init__(self, slots: Iterable[Slot] = (), spell: Callable[[dict[str, Any], str], str] = _spell) -> None:
        self.slots = list(slots)
        self._spell = spell
        self._read = [slot for slot in self.slots if isinstance(slot[2], torch.Tensor)]
        self._tensors = [tensor for _, _, tensor in self._read]
        self._stamps = stamps(self._tensors)
        self._learning = list(map(_requires_grad, self._tensors))

    def require_untouched(self) -> None:
        """Check at its end that the forward itself has not changed them.

        Raises:
            ExecutionError: It has.
        """
        for table, name, tensor in self._read:
            if table.get(name) is not tensor:
                raise self._changed_inside(table, name)
        number = first_changed(self._stamps, self._tensors)
        if number is not None:
            raise self._changed_inside(*self._read[number][:2])

    def require_unchanged(self) -> None:
        """Check, when the forward is about to be repeated, that nobody else has changed them either.

        Raises:
            ExecutionError: Somebody has.
        """
        number = first_changed(self._stamps, self._tensors)
        if number is not None:
            raise changed_meanwhile(
                self._spell(*self._read[number][:2]), "Step optimizers, average weights and update buffers behind it"
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which those that were frozen, or set free, since the forward read them are what they were."""
        now = list(map(_requires_grad, self._tensors))
        frozen = [] if now == self._learning else list(zip(self._tensors, now, self._learning, strict=True))
        try:
            for tensor, _, then in frozen:
                tensor.requires_grad_(then)
            yield
        finally:
            for tensor, after, _ in frozen:
                tensor.requires_grad_(after)

    def standing_in(self, substitutes: Mapping[int, torch.Tensor]) -> TensorsRead:
        """The same with others in the slots of some tensors, by the ``id`` of each."""
        other = copy(self)
        other.slots = [(table, name, substitutes.get(id(tensor), tensor)) for table, name, tensor in self.slots]
        return other

    def _changed_inside(self, table: dict[str, Any], name: str) -> ExecutionError:
        return ExecutionError(
            f"the {self._spell(table, name)} changed in a segment that is to be recomputed, but did not while it was measured, so its earlier "
            "value is gone: expected a forward that leaves parameters and large buffers alone, or updates them every time. Measure again with "
            "the module in its present state"
        )


def changed_meanwhile(what: str, remedy: str) -> ExecutionError:
    """The error for what has changed between the forward that read it and the backward that recomputes with it.

    Args:
        what: Has changed.
        remedy: What to do instead.
    """
    return ExecutionError(
        f"the {what} has changed since the forward read it, and the backward would recompute with another value: expected it unchanged until "
        f"the backward is over. {remedy}, or run the forward again"
    )
