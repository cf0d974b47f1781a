"""Values of a chain by number: which of them each step takes and makes, and when each is let go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Wire:
    """Numbers of the values that a step takes, and of those that it makes."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wiring:
    """Steps in a row. The caller owns the values that they take together.

    Attributes:
        wire: The values that all steps take together, and those that are wanted of them.
        steps: The wire of each step.
        dead: For each step, the values that nobody reads after it.
    """

    wire: Wire
    steps: tuple[Wire, ...]
    dead: tuple[tuple[int, ...], ...]
    _is_row: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Nearly every chain: each step takes the one value that the step before has made, and nothing else is wanted.
        made, taken = [self.wire.reads], []
        for step in self.steps:
            taken.append(step.reads)
            made.append(step.writes)
        taken.append(self.wire.writes)
        is_row = made == taken and set(map(len, made)) == {1}
        object.__setattr__(self, "_is_row", is_row)

    @classmethod
    def of(cls, steps: Iterable[Wire], wanted: Collection[int]) -> Wiring:
        """Wire steps up; ``wanted`` are the values that are needed afterwards, whoever makes them."""
        steps, wanted = tuple(steps), set(wanted)
        # Dicts, in the place of sets that keep their order.
        made: dict[int, None] = {}
        taken: set[int] = set()
        last_use: dict[int, int] = {}
        for index, step in enumerate(steps):
            made.update(dict.fromkeys(step.writes))
            taken.update(step.reads)
            last_use.update(dict.fromkeys((*step.writes, *step.reads), index))
        # What a step makes for a later one is no input of the whole.
        taken.difference_update(made)
        dead: list[list[int]] = [[] for _ in steps]
        for number in made:
            if number not in wanted:
                dead[last_use[number]].append(number)
        returned = tuple(number for number in made if number in wanted)
        return cls(Wire(tuple(sorted(taken)), returned), steps, tuple(map(tuple, dead)))

    def run(self, value: Any, functions: Sequence[Callable[[Any], Any]]) -> Any:
        """Run the steps, one function for each."""
        # A steady step of small layers spends more time in the host than in kernels, so it goes the short way.
        if self._is_row:
            for function in functions:
                value = function(value)
            return value
        values = dict(zip(self.wire.reads, unpacked(value, len(self.wire.reads)), strict=True))
        # No name may hold a value longer than the dict does: memory would be taken that the plan does not know of.
        del value
        for function, step, dead in zip(functions, self.steps, self.dead, strict=True):
            # The list is nobody's once the function has the values, which may let each go.
            made = function(packed([values[number] for number in step.reads]))
            values.update(zip(step.writes, unpacked(made, len(step.writes)), strict=True))
            del made
            for number in dead:
                del values[number]
        return packed([values[number] for number in self.wire.writes])


def packed(values: Sequence[Any]) -> Any:
    """One value as it is, several as a tuple."""
    return values[0] if len(values) == 1 else tuple(values)


def unpacked(value: Any, count: int) -> Sequence[Any]:
    """The values that :func:`packed` made one of."""
    return (value,) if count == 1 else value
