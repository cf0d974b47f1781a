"""Bodies of segments from a table, for the program over memory and link: its decisions found again.

:mod:`.backtracking` does the same for whole schedules, in one compiled loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.kernels import CLASS, TAKEN, Choices, Integers, Seconds, bare, body_row, kept, segments
from lightning_rotor.schedule import Item, Leaf, Segment, make_room_for

# Calls per level of nested segments, the construction of tuples included.
_CALLS = 4


class _Decision(NamedTuple):
    """The best beginning of an interval: a leaf, or a segment of ``body_memory`` slots; the rest gets ``left``."""

    seconds: float
    leaf: Leaf | None
    end: int
    body_memory: int
    variant: int
    left: int
    source: int


class Bodies:
    """Decisions of one table."""

    def __init__(self, table: Table) -> None:
        make_room_for(_CALLS * len(table.requirements.endings))  # the depth is not known before
        self._a, self._t = table.requirements, table.rows
        self._top = len(self._a.endings) - 1
        self._variants, self._options = self._a.bare.shape[1] - 1, self._a.bare.shape[2]

    def _recorded(self, memory: int, first: int, last: int, ending: int, source: int) -> Iterator[Item]:
        """Items of a rest, or of a body that needs a recomputation."""
        while first <= last:
            decision = self._decide(memory, first, last, ending, source)
            assert decision.seconds < np.inf, "the table holds no schedule here"
            yield decision.leaf or Segment(self.body(decision.body_memory, first, decision.end, decision.variant))
            memory, first, source = decision.left, decision.end + 1, decision.source

    def body(self, memory: int, first: int, last: int, variant: int) -> tuple[Item, ...]:
        """Items of a segment, recomputed with so many slots."""
        return tuple(self._body(memory, first, last, variant))

    def _body(self, memory: int, first: int, last: int, variant: int) -> Iterator[Item]:
        """Items of a body."""
        alone: list[Leaf] = []
        while first <= last:
            seconds = self._seconds(bare(self._a, self._t, first, last, variant), memory)
            row = body_row(self._a, self._t, first, last, variant)
            if seconds.min() > self._numbers(np.array([row]), np.array([memory]))[0]:
                endings = np.flatnonzero(self._a.trigger[last, : self._a.endings[last]] <= memory).tolist()
                best = min(endings, key=lambda ending: self._decide(memory, first, last, ending, variant).seconds)
                yield from self._recorded(memory, first, last, best, variant)
                break
            alone.append(Leaf(last, int(np.argmin(seconds))))
            last -= 1
        yield from reversed(alone)

    def _decide(self, memory: int, first: int, last: int, ending: int, source: int) -> _Decision:
        """The best beginning of an interval."""
        a, t = self._a, self._t
        choices = kept(a, t, first, last, ending, source)
        seconds = self._seconds(choices, memory)
        way = int(np.argmin(seconds))
        ways = (a.ended[last, ending] if first == last else a.kept[first])[source, :, way]
        leaf = Leaf(first, way % self._options)
        left, following = memory - int(ways[TAKEN]), self._variants + int(ways[CLASS])
        keeping = _Decision(float(seconds[way]), leaf, first, 0, 0, left, following)
        variant = source
        if source >= self._variants:
            at = int(last == self._top), first, source - self._variants
            if memory < a.segment_least[at]:
                return keeping
            memory, variant = memory - int(a.input_slots[first]), int(a.segment_variant[at])
        if first == last:
            return keeping
        choices = segments(a, t, first, last, ending, variant)
        seconds = self._seconds(choices, memory)
        best = int(np.argmin(seconds))
        if keeping.seconds <= seconds[best]:
            return keeping
        body_memory, left = memory - int(choices.shift[best]), memory - int(choices.other_shift[best])
        return _Decision(float(seconds[best]), None, first + best, body_memory, variant, left, self._variants)

    def _seconds(self, choices: Choices, memory: int) -> Seconds:
        """Seconds of each choice; infinite where the memory is too little."""
        seconds = self._numbers(choices.row, memory - choices.shift)
        seconds = seconds + self._numbers(choices.other, memory - choices.other_shift) + choices.seconds
        return np.where(choices.low <= memory, seconds, np.inf)

    def _numbers(self, rows: Integers, slots: Integers) -> Seconds:
        """Numbers of the table by row and slot."""
        start, first, last = self._t.spans[rows].T
        there = slots >= first
        return np.where(there, self._t.values[np.where(there, start + np.minimum(slots, last), 0)], np.inf)
