"""Numbers of recorded code that know the node they come from, so that the recording holds for other ones.

::

    batch = x.shape[0]               ─► getattr(x, "shape"), getitem(…, 0)
    x.view(batch * 2, -1)            ─► mul(…, 2), view(x, …, -1)
    if batch > self.longest: …       ─► a question: gt(…, longest) is False, and must be for other sizes as well
    math.sqrt(batch)                 ─► a question: the size is 8
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import fx

from lightning_rotor.capture.dispatch_check import DispatchCheck
from lightning_rotor.private.python_names import PassesForItsValue


class NumberRecorder(Protocol):
    """The graph writer, as numbers see it."""

    check: DispatchCheck

    def ask(self, function: Callable[..., Any], left: Any, right: Any, answer: Any) -> None:
        """Record a question about sizes."""

    def compute(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Record arithmetic with sizes."""


class _Traced:
    """A number of the recorded code with the node that computes it. Using it adds nodes or questions to the graph."""

    notebook: NumberRecorder
    node: fx.Node

    def pin(self) -> None:
        """Hold for this very number alone, as its further use is not recorded."""
        # Inside of an operation, torch's own code uses the number, which the operation does again.
        if self.notebook.check.listens:
            self.notebook.ask(operator.eq, self, plain(self), True)

    # ``if size:`` asks whether it is 0, and nothing more, so that it holds for all other sizes.
    def __bool__(self) -> bool:
        return bool(operator.ne(self, 0))


def _computed(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    """A method that records arithmetic."""

    def operate(self: _Traced, *others: Any) -> Any:
        # A tensor takes it from here: ``2 * x`` asks the tensor when the number does not know.
        # As Python has it for operators: NotImplemented, and the other operand is asked.
        if not all(isinstance(other, (int, float, complex)) for other in others):
            return NotImplemented
        operands = (*others, self) if swapped else (self, *others)
        return self.notebook.compute(function, *operands)

    return operate


def _asked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that records a question with its answer."""

    def compare(self: _Traced, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        answer = function(plain(self), plain(other))
        if self.notebook.check.listens:
            self.notebook.ask(function, self, other, answer)
        return answer

    return compare


def _pinned(name: str) -> Callable[..., Any]:
    """A method that gives the plain number, for which alone the recording then holds."""

    def read(self: _Traced, *others: Any) -> Any:
        self.pin()
        return getattr(plain(self), name)(*others)

    return read


# Methods by name, as Python looks operators up in the class. An operation that is missing here holds for the plain
# number alone: Python asks for that by __index__ or __float__.
for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
    setattr(_Traced, f"__{_name}__", _computed(getattr(operator, _name)))
    setattr(_Traced, f"__r{_name}__", _computed(getattr(operator, _name), swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(_Traced, f"__{_name}__", _computed(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Traced, f"__{_name}__", _asked(getattr(operator, _name)))
for _name in ("float", "int", "hash", "round", "floor", "ceil", "trunc"):
    setattr(_Traced, f"__{_name}__", _pinned(f"__{_name}__"))


class Size(_Traced, int):
    """A size that the recorded code has asked for."""

    def __new__(cls, number: int, node: fx.Node, notebook: NumberRecorder) -> Size:
        """The number as a size that a node computes."""
        self = int.__new__(cls, number)
        self.node, self.notebook = node, notebook
        return self

    # Copied or pickled, it is a plain number: the graph must not go with it.
    def __reduce__(self) -> Any:
        return int, (int.__int__(self),)


class Number(PassesForItsValue, _Traced):
    """A module's number, which may differ from call to call, or what was computed of it. It passes for an int or float.

    It is none, so that C code which wants one has to ask for it.
    """

    def __init__(self, value: float, node: fx.Node, notebook: NumberRecorder) -> None:
        self.value = value
        self.node = node
        self.notebook = notebook

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        # The mode that records takes the call.
        return NotImplemented

    def __getattr__(self, name: str) -> Any:
        self.pin()
        return getattr(self.value, name)


for _name in ("index", "repr", "str", "format"):
    setattr(Number, f"__{_name}__", _pinned(f"__{_name}__"))


def plain(value: Any) -> Any:
    """A number, or what is in tuples, lists, dicts and slices, without nodes."""
    kind = type(value)
    if kind is Size:
        return int.__int__(value)
    if kind is Number:
        return value.value
    if kind in (tuple, list):
        return kind(map(plain, value))
    if kind is dict:
        return {plain(key): plain(entry) for key, entry in value.items()}
    if kind is slice:
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    if kind is torch.Size:
        return torch.Size(map(plain, value))
    return value


def traced_in(value: Any) -> list[_Traced]:
    """Numbers that know their nodes: the value itself, or what is in tuples, lists, dicts and slices."""
    if isinstance(value, _Traced):
        return [value]
    entries: Iterable[Any] = ()
    if isinstance(value, (tuple, list)):
        entries = value
    elif isinstance(value, dict):
        entries = (*value, *value.values())
    elif isinstance(value, slice):
        entries = (value.start, value.stop, value.step)
    return [traced for entry in entries for traced in traced_in(entry)]
