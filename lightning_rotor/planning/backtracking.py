"""Reads schedules out of a solved table. Decisions are not stored, so they are found again, in O(n) per item of the schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.requirements import BackwardNeed, Context, Ending, LeafCost, by_context
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment, make_room_for

# Calls for one more segment inside others, the construction of tuples included.
_CALLS = 4


@dataclass(frozen=True, slots=True)
class _Decision:
    """An item of a schedule: the leaf, or a segment if there is none; its last stage; the memory left for its body and what follows.

    ``rest_left`` is what is left for what follows if that is less.
    """

    seconds: float
    leaf: LeafCost | None
    end: int
    left: int
    context: Context
    rest_left: int | None = None


class Extraction:
    """The schedules of one table.

    Args:
        table: The solved table.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._decisions, self._storage = table.decisions, table.storage
        self._needs = table.decisions.thresholds
        self._stages = self._needs.stages
        self._top = len(self._stages) - 1
        self._size = table.size

    def schedule(self, memory: int) -> Schedule:
        """The schedule behind ``table.seconds[memory]``, which must be finite."""
        make_room_for(_CALLS * len(self._stages))  # how deep it will be is not known before
        return Schedule(tuple(self._body_items(memory, 0, self._top, "held")))

    def _body_items(self, memory: int, first: int, last: int, context: Context) -> Iterator[Item]:
        """Items behind body(memory, first, last)."""
        bare: list[Leaf] = []
        while (
            last < self._top and first <= last and (leaf := self._bare_leaf(memory, first, last, context)) is not None
        ):
            bare.append(Leaf(last, leaf.option))
            last -= 1
        if first <= last:
            endings = [number for number, each in enumerate(self._decisions.endings[last]) if memory >= each.trigger]
            best = endings[0]
            if len(endings) > 1:
                best = min(endings, key=lambda number: self._decide(memory, first, last, number, context).seconds)
            yield from self._recorded_items(memory, first, last, best, context)
        yield from reversed(bare)

    def _recorded_items(self, memory: int, first: int, last: int, number: int, context: Context) -> Iterator[Item]:
        # Who holds the input of `first`, or the class of the boundary if it must be paid for.
        paid: Context | int = context
        while first <= last:
            decision = self._decide(memory, first, last, number, paid)
            assert decision.seconds < math.inf, "the table holds no schedule here"
            if decision.leaf is None:
                yield Segment(tuple(self._body_items(decision.left, first, decision.end, decision.context)))
                paid = 0
            else:
                yield Leaf(first, decision.leaf.option)
                paid = decision.leaf.output_class
            memory, first = decision.left if decision.rest_left is None else decision.rest_left, decision.end + 1

    # ---------------------------------------------------------------- one decision

    def _decide(self, memory: int, first: int, last: int, number: int, paid: Context | int) -> _Decision:
        """The best item that starts at ``first``."""
        ending = self._decisions.endings[last][number]
        leaves = [
            self._decide_leaf(memory, leaf, first, ending, number, taken, need)
            for leaf in (ending.leaves if first == last else self._stages[first].leaves)
            for taken, need in self._ways(leaf, first, ending, number, paid)
        ]
        nothing = _Decision(math.inf, None, first, memory, "any")
        best = min(leaves, key=lambda decision: decision.seconds, default=nothing)
        # What the table holds is the least of all, so a leaf that is no worse needs no comparison.
        if best.seconds < math.inf and best.seconds <= self._known(memory, first, last, number, paid):
            return best
        return min(
            best, self._decide_segment(memory, first, ending, number, paid), key=lambda decision: decision.seconds
        )

    def _known(self, memory: int, first: int, last: int, number: int, paid: Context | int) -> float:
        """The seconds that the table holds for a decision, rounded up; nothing if it holds none."""
        if isinstance(paid, int):
            seconds = self._storage.rest(first, last, number, paid, memory)
        elif last == self._top:
            seconds = float(self._table.seconds[memory])
        else:
            return -math.inf
        return seconds * (2 - self._table.accuracy)

    def _ways(
        self, leaf: LeafCost, first: int, ending: Ending, number: int, paid: Context | int
    ) -> list[tuple[int, int]]:
        """How ``first`` may be kept: what goes to its input, and the least memory."""
        last = ending.last
        forward, backward = self._forward_need(leaf, first, ending), self._backward_need(leaf, first, last)
        stage = self._stages[first]
        if isinstance(paid, int):
            taken, held = leaf.input_retained[paid], stage.saved_before[paid] > 0
            return [(taken, max(stage.input_slots + forward, taken + (backward.saved if held else backward.plain)))]
        if leaf.inverts:
            return []
        need = max(forward, by_context(backward, paid))
        freed = stage.input_slots - leaf.input_retained[0]
        if paid != "nested" or not freed or first == last:
            return [(0, need)]
        recording = int(self._decisions.recording[number][first + 1, last])
        return [(0, need), (-freed, max(need, leaf.retained + recording))]

    def _forward_need(self, leaf: LeafCost, first: int, ending: Ending) -> int:
        if ending.last == self._top:
            return leaf.forward + self._needs.forward_base[first]
        base = ending.base + int(self._needs.remembered[first, ending.last])  # states are put aside meanwhile
        return (leaf.replay if first == ending.last else leaf.forward) + base

    def _backward_need(self, leaf: LeafCost, first: int, last: int) -> BackwardNeed:
        return leaf.last_backward if first == last < self._top else leaf.backward

    def _decide_leaf(
        self, memory: int, leaf: LeafCost, first: int, ending: Ending, number: int, paid: int, need: int
    ) -> _Decision:
        left = memory - leaf.retained - paid
        if memory < need or (first < ending.last and not 0 <= left < self._size):
            seconds = math.inf
        elif first == ending.last:
            seconds = leaf.seconds if first == self._top else leaf.last_seconds
        else:
            seconds = leaf.seconds + self._storage.rest(first + 1, ending.last, number, leaf.output_class, left)
        return _Decision(seconds, leaf, first, left, "any")

    def _decide_segment(self, memory: int, first: int, ending: Ending, number: int, paid: Context | int) -> _Decision:
        last, need = ending.last, 0
        if isinstance(paid, int):
            memory -= self._stages[first].input_slots
            context, need = self._segment_context(first, last, paid)
        else:
            context = paid
        if first == last or memory < need:
            return _Decision(math.inf, None, first, memory, context)
        left = memory - self._needs.held[first, first:last]
        rest_left = left - self._needs.handed_on[first, first:last]
        base = 0
        if last < self._top:
            base = ending.base + int(self._needs.remembered[first, last])
        needs = self._decisions.peak[last == self._top][first, first:last] + base
        variant = self._decisions.variant_of(first, context)
        seconds = self._storage.segments(first, last, number, variant, left, rest_left)
        seconds[(left < needs) | (rest_left < 0)] = math.inf
        best = int(np.argmin(seconds))
        again = self._needs.segment_seconds if last < self._top else 0.0
        return _Decision(
            float(seconds[best]) + again, None, first + best, int(left[best]), context, int(rest_left[best])
        )

    def _segment_context(self, first: int, last: int, number: int) -> tuple[Context, int]:
        """Where to find a segment that starts at ``first``, and the least memory for it beyond what is counted there."""
        context = self._decisions.segment_context(first, number, top=last == self._top)
        if first == 0 or self._decisions.is_apart[first]:
            return context, 0
        return "any", by_context(self._stages[first].needs_as_segment, context)

    def _bare_leaf(self, memory: int, first: int, last: int, context: Context) -> LeafCost | None:
        """The option under which ``last`` saves nothing, if the table's value comes from it."""
        variant = self._decisions.variant_of(first, context)
        for leaf in self._stages[last].leaves:
            if leaf.saves or memory < self._bare_need(leaf, first, last, context):
                continue
            number = self._storage.number
            if first == last:
                seconds = number(
                    leaf.backward_seconds + self._stages[last].discard_seconds + self._needs.segment_seconds
                )
            else:
                more = number(leaf.backward_seconds + self._stages[last].discard_seconds)
                seconds = self._storage.body(first, last - 1, variant, memory) + more
            if seconds <= self._storage.body(first, last, variant, memory):
                return leaf
        return None

    def _bare_need(self, leaf: LeafCost, first: int, last: int, context: Context) -> int:
        if first < last:
            return leaf.bare
        # Without a recomputation segments hold their input to the end.
        return by_context(leaf.backward, "held" if context == "held" else "segment")
