"""Python functions for runs of operations, so that a step costs the host no more than the user's own code does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import Size, fx


@dataclass(frozen=True, slots=True)
class Ref:
    """A value that an operation reads, by its place in the run."""

    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """An operation: what to call, with which values, and which values nobody needs afterwards."""

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    frees: tuple[int, ...]


def encoded(value: Any, places: Mapping[fx.Node, int]) -> Any:
    """Arguments with references in the place of nodes, and fx's immutable containers as plain ones."""
    if isinstance(value, fx.Node):
        return Ref(places[value])
    if isinstance(value, tuple) and not isinstance(value, Size):
        return tuple(encoded(entry, places) for entry in value)
    if isinstance(value, list):
        return [encoded(entry, places) for entry in value]
    if isinstance(value, dict):
        return {key: encoded(entry, places) for key, entry in value.items()}
    if isinstance(value, slice):
        return slice(*(encoded(entry, places) for entry in (value.start, value.stop, value.step)))
    return value


def function_of(inputs: int, steps: Sequence[Step], output: Any) -> Callable[[Any], Any]:
    """A function that runs operations.

    It holds no value longer than :attr:`Step.frees` says, as the user's code would. What it calls and reads is bound by name, so that equal
    operations on other modules share their code.

    Args:
        inputs: How many values it takes: one as it is, several as a tuple. They have the first places.
        steps: Each makes the value of the next place.
        output: What it returns, with references to values.
    """
    writer = _Writer()
    lines = [f"{', '.join(_value(place) for place in range(inputs))} = value"] if inputs else []
    lines.append("del value")
    for place, step in enumerate(steps, inputs):
        lines.append(f"{_value(place)} = {writer.call(step)}")
        if step.frees:
            lines.append(f"del {', '.join(map(_value, step.frees))}")
    lines.append(f"return {writer.spell(output)}")
    namespace = dict(writer.bound)
    exec(_code("\n    ".join(["def run(value):", *lines])), namespace)
    run: Callable[[Any], Any] = namespace["run"]
    return run


@lru_cache(maxsize=4096)  # recordings for other lengths have other numbers in them
def _code(source: str) -> CodeType:
    return compile(source, "<stage of lightning_rotor>", "exec")


def _value(place: int) -> str:
    return f"v{place}"


class _Writer:
    """Spells operations as Python, and binds what cannot be spelled to names."""

    def __init__(self) -> None:
        self.bound: dict[str, Any] = {}

    def call(self, step: Step) -> str:
        if step.kind == "constant":
            return self._bind(step.target)
        if step.kind == "read":
            owner, name = step.target
            return f"getattr({self._bind(owner)}, {name!r})"
        args = step.args
        if step.kind == "call_method":
            called, args = f"getattr({self.spell(args[0])}, {step.target!r})", args[1:]
        else:
            called = self._bind(step.target)
        words = [*map(self.spell, args)]
        if step.kwargs:
            words.append(f"**{self.spell(step.kwargs)}")
        return f"{called}({', '.join(words)})"

    def spell(self, value: Any) -> str:
        """An argument: containers are made anew at each call, as they would be by the user's code."""
        kind = type(value)
        if kind is Ref:
            return _value(value.index)
        if kind is tuple:
            return f"({''.join(f'{self.spell(entry)}, ' for entry in value)})"
        if kind is list:
            return f"[{', '.join(map(self.spell, value))}]"
        if kind is dict:
            return f"{{{', '.join(f'{self.spell(key)}: {self.spell(entry)}' for key, entry in value.items())}}}"
        if kind is slice:
            return f"slice({self.spell(value.start)}, {self.spell(value.stop)}, {self.spell(value.step)})"
        if kind in (bool, int, str) or value is None:
            return repr(value)
        return self._bind(value)

    def _bind(self, value: Any) -> str:
        name = f"c{len(self.bound)}"
        self.bound[name] = value
        return name
