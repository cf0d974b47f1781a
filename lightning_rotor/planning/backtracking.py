"""Reads schedules out of a solved table. Decisions are not stored, but found again, in O(n) per item."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lightning_rotor.planning import kernel
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.kernel import CLASS, TAKEN, Choices, Integers, Seconds
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment, make_room_for

# Calls for one more segment inside others, the construction of tuples included.
_CALLS = 4


def schedule_at(table: Table, memory: int) -> Schedule:
    """The schedule behind ``table.seconds[memory]``, which must be finite."""
    make_room_for(_CALLS * len(table.requirements.endings))  # how deep it will be is not known before
    return Schedule(tuple(_Backtracking(table).recorded(memory, 0, len(table.requirements.endings) - 1, 0, 0)))


class _Decision(NamedTuple):
    """How an interval begins: with a leaf, or with a segment, whose body gets ``body_memory`` under a variant.

    What follows gets ``left`` slots, and its input comes from a source.
    """

    seconds: float
    leaf: Leaf | None
    end: int
    body_memory: int
    variant: int
    left: int
    source: int


class _Backtracking:
    def __init__(self, table: Table) -> None:
        self._a, self._t = table.requirements, table.rows
        self._top = len(self._a.endings) - 1
        self._variants, self._options = self._a.bare.shape[1] - 1, self._a.bare.shape[2]

    def recorded(self, memory: int, first: int, last: int, ending: int, source: int) -> Iterator[Item]:
        """Items behind a rest, or a body that needs a recomputation."""
        while first <= last:
            decision = self._decide(memory, first, last, ending, source)
            assert decision.seconds < np.inf, "the table holds no schedule here"
            yield decision.leaf or Segment(
                tuple(self._body(decision.body_memory, first, decision.end, decision.variant))
            )
            memory, first, source = decision.left, decision.end + 1, decision.source

    def _body(self, memory: int, first: int, last: int, variant: int) -> Iterator[Item]:
        """Items behind a body."""
        bare: list[Leaf] = []
        while first <= last:
            seconds = self._seconds(kernel.bare(self._a, self._t, first, last, variant), memory)
            row = kernel.body_row(self._a, self._t, first, last, variant)
            if seconds.min() > self._numbers(np.array([row]), np.array([memory]))[0]:
                endings = np.flatnonzero(self._a.trigger[last, : self._a.endings[last]] <= memory).tolist()
                best = min(endings, key=lambda ending: self._decide(memory, first, last, ending, variant).seconds)
                yield from self.recorded(memory, first, last, best, variant)
                break
            bare.append(Leaf(last, int(np.argmin(seconds))))
            last -= 1
        yield from reversed(bare)

    def _decide(self, memory: int, first: int, last: int, ending: int, source: int) -> _Decision:
        """The best beginning of an interval."""
        a, t = self._a, self._t
        choices = kernel.kept(a, t, first, last, ending, source)
        seconds = self._seconds(choices, memory)
        way = int(np.argmin(seconds))
        ways = (a.ended[last, ending] if first == last else a.kept[first])[source, :, way]
        leaf = Leaf(first, way % self._options)
        left, following = memory - int(ways[TAKEN]), self._variants + int(ways[CLASS])
        kept = _Decision(float(seconds[way]), leaf, first, 0, 0, left, following)
        variant = source
        if source >= self._variants:
            at = int(last == self._top), first, source - self._variants
            if memory < a.segment_least[at]:
                return kept
            memory, variant = memory - int(a.input_slots[first]), int(a.segment_variant[at])
        if first == last:
            return kept
        choices = kernel.segments(a, t, first, last, ending, variant)
        seconds = self._seconds(choices, memory)
        best = int(np.argmin(seconds))
        if kept.seconds <= seconds[best]:
            return kept
        body_memory, left = memory - int(choices.shift[best]), memory - int(choices.other_shift[best])
        return _Decision(float(seconds[best]), None, first + best, body_memory, variant, left, self._variants)

    def _seconds(self, choices: Choices, memory: int) -> Seconds:
        """What each choice takes, infinite where the memory is too little for it."""
        seconds = self._numbers(choices.row, memory - choices.shift)
        seconds = seconds + self._numbers(choices.other, memory - choices.other_shift) + choices.seconds
        return np.where(choices.low <= memory, seconds, np.inf)

    def _numbers(self, rows: Integers, slots: Integers) -> Seconds:
        """Numbers of the table by row and slot."""
        start, first, last = self._t.spans[rows].T
        there = slots >= first
        return np.where(there, self._t.values[np.where(there, start + np.minimum(slots, last), 0)], np.inf)
