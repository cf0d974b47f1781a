"""Sizes that recorded code asks for: numbers that know their node, so that the recording holds for tensors of other sizes.

::

    batch = x.shape[0]               ─► getattr(x, "shape"), getitem(…, 0)
    x.view(batch * 2, -1)            ─► mul(…, 2), view(x, …, -1)
    if batch > self.longest: …       ─► a question: gt(…, longest) is False, and must be for other sizes as well
    math.sqrt(batch)                 ─► a question: the size is 8
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx

SIZE = "size"
"""Where the node of a size keeps what it was in the recording."""


class Notebook(Protocol):
    """Writes down what is done with sizes."""

    @property
    def listens(self) -> bool:
        """True while the recorded code runs, and no operation of it."""

    def compute(self, function: Callable[..., Any], *operands: Any) -> int:
        """Record arithmetic."""

    def ask(self, function: Callable[..., Any], left: Any, right: Any, answer: Any) -> None:
        """Record a question."""


class Size(int):
    """A size that the recorded code has asked for."""

    notebook: Notebook
    node: fx.Node

    @classmethod
    def of(cls, number: int, node: fx.Node, notebook: Notebook) -> Size:
        """The number as a size that a node computes."""
        self = cls(number)
        self.node, self.notebook = node, notebook
        return self

    def pin(self) -> None:
        """Hold for this very size alone: what becomes of it is not recorded."""
        if self.notebook.listens:
            self.notebook.ask(operator.eq, self, int.__int__(self), True)

    def __hash__(self) -> int:
        self.pin()
        return int.__hash__(self)

    def __int__(self) -> int:
        self.pin()
        return int.__int__(self)

    def __float__(self) -> float:
        self.pin()
        return int.__float__(self)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __reduce__(self) -> Any:
        return int, (int.__int__(self),)


def _arithmetic(name: str, *, swapped: bool = False) -> Callable[..., Any]:
    function = getattr(operator, name)

    def operate(self: Size, other: Any) -> Any:
        if not isinstance(other, int):
            if isinstance(other, (float, complex)):
                self.pin()
            return getattr(int, f"__{'r' * swapped}{name}__")(self, other)
        return self.notebook.compute(function, *((other, self) if swapped else (self, other)))

    return operate


def _comparison(name: str) -> Callable[..., Any]:
    function, compare = getattr(operator, name), getattr(int, f"__{name}__")

    def answer(self: Size, other: Any) -> Any:
        if isinstance(other, float):
            self.pin()
        found = compare(self, other)
        if found is not NotImplemented and self.notebook.listens:
            self.notebook.ask(function, self, other, found)
        return found

    return answer


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
    setattr(Size, f"__{_name}__", _arithmetic(_name))
    setattr(Size, f"__r{_name}__", _arithmetic(_name, swapped=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Size, f"__{_name}__", _comparison(_name))
Size.__neg__ = lambda self: self.notebook.compute(operator.neg, self)  # type: ignore[method-assign]


def plain(value: Any) -> Any:
    """A number, or what is in tuples, lists, dicts and slices, without nodes."""
    kind = type(value)
    if kind is Size:
        return int.__int__(value)
    if kind in (tuple, list):
        return kind(map(plain, value))
    if kind is dict:
        return {plain(key): plain(entry) for key, entry in value.items()}
    if kind is slice:
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return torch.Size(map(plain, value)) if kind is torch.Size else value
