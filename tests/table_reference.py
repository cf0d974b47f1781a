"""The dynamic program once more, written for reading: one loop per index of the recurrences, one array over memory.

No sharing, no spans, no order but the obvious one. It is the oracle of the fast table, and what its speed is compared with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_rotor.planning.thresholds import BackwardNeed, Ending, LeafCost, Thresholds

Seconds = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Loops:
    """A solved table.

    Attributes:
        seconds: Least seconds of the step by memory.
        body: By first stage, last stage and context: the interval as a segment, its first pass included.
        rest: By first stage, last stage, number of the ending, class of the boundary.
    """

    seconds: Seconds
    body: dict[tuple[int, int, str], Seconds]
    rest: dict[tuple[int, int, int, int], Seconds]


def solve_by_loops(thresholds: Thresholds, *, slots: int, refined: bool) -> Loops:
    """Fill the table, interval by interval and segment by segment."""
    return _Solver(thresholds, slots + 1, refined).solve()


class _Solver:
    def __init__(self, thresholds: Thresholds, size: int, refined: bool) -> None:
        self.needs, self.size, self.refined = thresholds, size, refined
        self.stages = thresholds.stages
        self.top = len(self.stages) - 1
        self.number = np.float64 if refined else np.float32
        self.endings = [*(stage.endings for stage in self.stages[:-1])]
        self.endings.append((Ending(self.top, self.stages[-1].leaves, base=0, trigger=0),))
        self.body: dict[tuple[int, int, str], Seconds] = {}
        self.rest: dict[tuple[int, int, int, int], Seconds] = {}

    def solve(self) -> Loops:
        for last in range(self.top + 1):
            for first in range(last, -1, -1):
                if last == self.top or all(stage.recomputable for stage in self.stages[first : last + 1]):
                    self.solve_interval(first, last)
        return Loops(self.whole, self.body, self.rest)

    def nothing(self) -> Seconds:
        return np.full(self.size, math.inf, self.number)

    def solve_interval(self, first: int, last: int) -> None:
        for number, ending in enumerate(self.endings[last]):
            splits = {context: self.split(first, number, ending, context) for context in self.contexts(first)}
            if first > 0:
                for held, saved in enumerate(self.stages[first].saved_before):
                    self.rest[first, last, number, held] = self.solve_rest(
                        first, number, ending, held, saved > 0, splits
                    )
            for context, split in splits.items():
                start = self.solve_start(first, number, ending, context, split)
                if last == self.top:
                    self.whole = start
                    continue
                start[: ending.trigger] = math.inf
                discarded = sum(stage.discard_seconds for stage in self.stages[first : last + 1])
                start = start + self.number(discarded + self.needs.segment_seconds)
                self.body[first, last, context] = np.minimum(
                    self.body.get((first, last, context), self.nothing()), start
                )
        if last < self.top:
            for context in self.contexts(first):
                body = self.body.setdefault((first, last, context), self.nothing())
                self.end_bare(first, last, context, body)

    def contexts(self, first: int) -> tuple[str, ...]:
        stage = self.stages[first]
        if first == 0:
            return ("held",)
        remembering = self.needs.held[first, first:].any()
        leaves = [leaf for leaf in stage.leaves if not leaf.inverts]
        freeing = any(leaf.input_retained[0] < stage.input_slots for leaf in leaves)
        apart = len(leaves) > 1 or (self.refined and (remembering or freeing))
        return ("nested", "segment", "held") if apart else ("any",)

    def base(self, first: int, ending: Ending) -> int:
        return 0 if ending.last == self.top else ending.base + int(self.needs.remembered[first, ending.last])

    # ---------------------------------------------------------------- decisions

    def split(self, first: int, number: int, ending: Ending, context: str) -> Seconds:
        last, found = ending.last, self.nothing()
        peaks = self.needs.first_discard if last == self.top else self.needs.discard
        for end in range(first, last):
            body = self.body.get((first, end, context))
            if body is None:
                continue
            held, handed_on = int(self.needs.held[first, end]), int(self.needs.handed_on[first, end])
            low = held + max(int(peaks[first, end]) + self.base(first, ending), handed_on)
            if low < self.size:
                rest = self.rest[end + 1, last, number, 0]
                stop = self.size - held
                found[low:] = np.minimum(
                    found[low:], body[low - held : stop] + rest[low - held - handed_on : stop - handed_on]
                )
        again = self.needs.segment_seconds if last < self.top else 0.0
        return found + self.number(again)

    def solve_rest(
        self, first: int, number: int, ending: Ending, held: int, saved: bool, splits: dict[str, Seconds]
    ) -> Seconds:
        stage, last = self.stages[first], ending.last
        context = "held" if saved else "segment" if last == self.top and not stage.gives_up_input else "nested"
        need = 0
        if context not in splits:
            context, need = "any", by_context(stage.needs_as_segment, context)
        rest = self.nothing()
        low = min(stage.input_slots + need, self.size)
        rest[low:] = splits[context][low - stage.input_slots : max(self.size - stage.input_slots, 0)]
        for leaf in self.leaves(first, ending):
            paid, backward = leaf.input_retained[held], self.backward(leaf, first, last)
            forward = stage.input_slots + self.forward(leaf, first, ending)
            self.keep(
                rest,
                leaf,
                first,
                number,
                ending,
                paid,
                max(forward, paid + (backward.saved if saved else backward.plain)),
            )
        return rest

    def solve_start(self, first: int, number: int, ending: Ending, context: str, split: Seconds) -> Seconds:
        start, last = split.copy(), ending.last
        for leaf in self.leaves(first, ending):
            if leaf.inverts:  # its input is somebody else's here
                continue
            backward, freed = self.backward(leaf, first, last), self.stages[first].input_slots - leaf.input_retained[0]
            need = max(self.forward(leaf, first, ending), by_context(backward, context))
            self.keep(start, leaf, first, number, ending, 0, need)
            if context == "nested" and freed and first < last:
                need = max(need, leaf.retained + self.recording(first + 1, ending))
                self.keep(start, leaf, first, number, ending, -freed, need)
        return start

    def end_bare(self, first: int, last: int, context: str, body: Seconds) -> None:
        for leaf in self.stages[last].leaves:
            if leaf.saves:
                continue
            seconds = leaf.backward_seconds + self.stages[last].discard_seconds
            if first < last:
                low, ended = leaf.bare, self.body[first, last - 1, context] + self.number(seconds)
            else:
                low = by_context(leaf.backward, "held" if context == "held" else "segment")
                ended = np.full(self.size, seconds + self.needs.segment_seconds, self.number)
            body[low:] = np.minimum(body[low:], ended[low:])

    def keep(
        self, target: Seconds, leaf: LeafCost, first: int, number: int, ending: Ending, paid: int, low: int
    ) -> None:
        last = ending.last
        if first == last:
            seconds = leaf.seconds if last == self.top else leaf.last_seconds
            target[low:] = np.minimum(target[low:], self.number(seconds))
            return
        taken = paid + leaf.retained
        rest = self.rest[first + 1, last, number, leaf.output_class]
        low, high = (
            max(low, taken),
            min(self.size, self.size + taken),
        )  # `taken` is negative where the input becomes free
        if low < high:
            kept = rest[low - taken : high - taken] + self.number(leaf.seconds)
            target[low:high] = np.minimum(target[low:high], kept)

    # ---------------------------------------------------------------- thresholds

    def leaves(self, first: int, ending: Ending) -> tuple[LeafCost, ...]:
        return ending.leaves if first == ending.last else self.stages[first].leaves

    def forward(self, leaf: LeafCost, first: int, ending: Ending) -> int:
        if ending.last == self.top:
            return leaf.forward + self.needs.forward_base[first]
        return (leaf.replay if first == ending.last else leaf.forward) + self.base(first, ending)

    def backward(self, leaf: LeafCost, first: int, last: int) -> BackwardNeed:
        return leaf.last_backward if first == last < self.top else leaf.backward

    def recording(self, first: int, ending: Ending) -> int:
        need = retained = 0
        for index in range(first, ending.last + 1):
            leaf = self.leaves(index, ending)[0]
            need = max(need, retained + self.stages[index].input_slots + self.forward(leaf, index, ending))
            retained += leaf.input_retained[0] + leaf.retained
        return need


def by_context(need: BackwardNeed, context: str) -> int:
    """The need that counts in a context."""
    return {"any": need.nested, "nested": need.nested, "segment": need.segment, "held": need.held}[context]
