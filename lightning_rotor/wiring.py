r"""Which values a step takes and which it makes, by number, and what that means for several steps in a row.

Values are numbered through a whole chain. A step (a stage, a module in it, a segment) takes one value as it is and several as a tuple, and
gives back one or a tuple in the same way::

    value 0 ──stage 0──► 1 ──stage 1──► 2 ──stage 2──► 4          stage 2 reads (2, 3)
                              └───────► 3 ──────┘
"""

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
    """Steps in a row.

    Attributes:
        wire: What they take and make together.
        steps: Each of them.
        dead: For each step, the values that nobody needs once it is done. What the steps take together is the caller's and never among them.
    """

    wire: Wire
    steps: tuple[Wire, ...]
    dead: tuple[tuple[int, ...], ...]
    _is_row: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Nearly every chain: each step takes the one value that the step before has made, and nothing else is wanted.
        made = [self.wire.reads, *(step.writes for step in self.steps)]
        taken = [*(step.reads for step in self.steps), self.wire.writes]
        object.__setattr__(self, "_is_row", made == taken and all(len(numbers) == 1 for numbers in made))

    @classmethod
    def of(cls, steps: Iterable[Wire], wanted: Collection[int]) -> Wiring:
        """Wire steps up; ``wanted`` are the values that are needed afterwards, whoever makes them."""
        steps, wanted = tuple(steps), set(wanted)
        made = dict.fromkeys(number for step in steps for number in step.writes)
        taken = dict.fromkeys(number for step in steps for number in step.reads if number not in made)
        given = dict.fromkeys(number for number in made if number in wanted)
        last = {number: index for index, step in enumerate(steps) for number in (*step.writes, *step.reads)}
        dead: list[list[int]] = [[] for _ in steps]
        for number in made:
            if number not in given:
                dead[last[number]].append(number)
        return cls(Wire(tuple(sorted(taken)), tuple(given)), steps, tuple(map(tuple, dead)))

    def run(self, value: Any, functions: Sequence[Callable[[Any], Any]]) -> Any:
        """Run the steps, one function for each."""
        if self._is_row:
            for function in functions:
                value = function(value)
            return value
        values = dict(zip(self.wire.reads, unpacked(value, len(self.wire.reads)), strict=True))
        del value
        for function, step, dead in zip(functions, self.steps, self.dead, strict=True):
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
    """The other way round."""
    return (value,) if count == 1 else value
