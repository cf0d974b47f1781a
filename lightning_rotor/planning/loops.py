"""The dynamic program as its recurrences read: a loop over intervals, and NumPy over the ends of a segment and over memory.

It fills the tables of short chains, and those of long ones where there is no Numba. It is also the oracle of
:mod:`lightning_rotor.planning.compiled`, which finds the same numbers bit by bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_rotor.planning.decisions import Context, Decisions, by_context
from lightning_rotor.planning.storage import Seconds, Storage
from lightning_rotor.planning.thresholds import BackwardNeed, Ending, LeafCost


@dataclass(frozen=True, slots=True)
class _Interval:
    """Stages whose backward is due.

    Attributes:
        first: First stage.
        last: Last stage.
        ending: How a recomputation of them ends.
        number: Number of the ending.
        base: Slots that are alive meanwhile; none in the step's own forward.
    """

    first: int
    last: int
    ending: Ending
    number: int
    base: int


class Loops:
    """Fills a storage, column by column.

    Args:
        decisions: The chain.
        storage: Where the rows go.
        whole: Where the numbers of the whole step go.
        is_filled: Some columns are there.
    """

    def __init__(self, decisions: Decisions, storage: Storage, whole: Seconds, *, is_filled: bool = False) -> None:
        self._decisions, self._storage, self._whole = decisions, storage, whole
        self._size, self._number = storage.size, storage.number
        self._top = decisions.top
        if not is_filled:  # what no segment may be is infinite
            storage.body_rows.fill(math.inf)
        self._sums: Seconds = np.empty((self._top, self._size), self._number)

    def solve(self) -> None:
        """Fill the whole table."""
        for last in range(self._top + 1):
            self.solve_column(last)

    def solve_column(self, last: int) -> None:
        """Fill all intervals that end in ``last``; those that end before it must be there."""
        outermost = 0 if last == self._top else int(self._decisions.outermost[last])
        for first in range(last, outermost - 1, -1):
            self._solve_interval(first, last)

    def _solve_interval(self, first: int, last: int) -> None:
        decisions, is_top = self._decisions, last == self._top
        contexts = decisions.contexts[first]
        bodies = self._nothing(len(contexts))
        for number, ending in enumerate(decisions.endings[last]):
            remembered = 0 if is_top else int(decisions.thresholds.remembered[first, last])
            at = _Interval(first, last, ending, number, 0 if is_top else ending.base + remembered)
            splits = self._nothing(len(contexts))
            if first < last:
                for variant, split in enumerate(splits):
                    self._split(at, variant, split)
            if first > 0:
                for held in range(len(decisions.stages[first].saved_before)):
                    self._storage.rest_row(first, last, number, held)[:] = self._rest(at, held, splits)
            if is_top and first > 0:
                continue
            for variant, context in enumerate(contexts):
                self._keep_first(at, context, splits[variant])
            if is_top:
                self._whole[:] = splits[0]
                return
            splits += self._number(decisions.discarded_seconds(first, last))
            np.minimum(bodies[:, ending.trigger :], splits[:, ending.trigger :], out=bodies[:, ending.trigger :])
        if not is_top:
            for variant, context in enumerate(contexts):
                self._end_bare(first, last, variant, context, bodies[variant])
                self._storage.body_row(first, last, variant)[:] = bodies[variant]

    # ---------------------------------------------------------------- decisions

    def _split(self, at: _Interval, variant: int, target: Seconds) -> None:
        """split(m, i, l): the best segment that starts at ``i`` and ends before ``l``."""
        decisions, storage, first, last = self._decisions, self._storage, at.first, at.last
        needs = decisions.thresholds
        bodies, rests = storage.split_rows(first, last, at.number, variant)
        held, handed_on = needs.held[first, first:last], needs.handed_on[first, first:last]
        lows = (held + np.maximum(decisions.peak[last == self._top][first, first:last] + at.base, handed_on)).tolist()
        if held.any() or handed_on.any():
            for end, (low, left, right) in enumerate(
                zip(lows, held.tolist(), (held + handed_on).tolist(), strict=True)
            ):
                if low < self._size:
                    body, rest = (
                        bodies[end, low - left : self._size - left],
                        rests[end, low - right : self._size - right],
                    )
                    _lower(target[low:], body + rest)
        else:
            sums = np.add(bodies, rests, out=self._sums[: last - first])
            for end, low in enumerate(lows):
                sums[end, :low] = math.inf
            np.minimum.reduce(sums, axis=0, out=target)
        if last < self._top:  # a nested segment's first pass runs inside its parent's, too
            target += self._number(needs.segment_seconds)

    def _rest(self, at: _Interval, held: int, splits: Seconds) -> Seconds:
        """rest_c(m, i, l): the input of ``i`` must be paid for, of which the stage before saved class ``held``."""
        decisions, stage = self._decisions, self._decisions.stages[at.first]
        context = decisions.segment_context(at.first, held, top=at.last == self._top)
        need = 0 if decisions.is_apart[at.first] else by_context(stage.needs_as_segment, context)
        low = min(stage.input_slots + need, self._size)
        rest = self._nothing()
        split = splits[decisions.variant_of(at.first, context)]
        rest[low:] = split[low - stage.input_slots : max(self._size - stage.input_slots, 0)]
        for leaf in self._leaves(at):
            paid, backward = leaf.input_retained[held], _backward(leaf, at, self._top)
            backward_need = backward.saved if stage.saved_before[held] else backward.plain
            low = max(stage.input_slots + self._forward(leaf, at), paid + backward_need)
            self._keep(at, leaf, paid, low, rest)
        return rest

    def _keep_first(self, at: _Interval, context: Context, target: Seconds) -> None:
        """Keep ``i``, whose input somebody else holds."""
        stage = self._decisions.stages[at.first]
        for leaf in self._leaves(at):
            if leaf.inverts:  # it may drop an input of its own only
                continue
            need = max(self._forward(leaf, at), by_context(_backward(leaf, at, self._top), context))
            self._keep(at, leaf, 0, need, target)
            freed = stage.input_slots - leaf.input_retained[0]
            if context == "nested" and freed > 0 and at.first < at.last:
                # A nested segment gives its input up when it has been recomputed; what the first stage does not save of it serves the
                # backwards. The recomputation itself must do without it, which is known to work if it could keep everything.
                recording = int(self._decisions.recording[at.number][at.first + 1, at.last])
                self._keep(at, leaf, -freed, max(need, leaf.retained + recording), target)

    def _keep(self, at: _Interval, leaf: LeafCost, paid: int, low: int, target: Seconds) -> None:
        """Keep ``i`` where ``low`` slots are left, of which its input takes ``paid``."""
        if at.first == at.last:
            seconds = leaf.seconds if at.last == self._top else leaf.last_seconds
            _lower(target[low:], self._number(seconds))
            return
        taken = paid + leaf.retained
        # Where `taken` is negative the input becomes free, beyond what the table holds.
        low, high = max(low, taken), min(self._size, self._size + taken)
        if low < high:
            rest = self._storage.rest_row(at.first + 1, at.last, at.number, leaf.output_class)
            _lower(target[low:high], rest[low - taken : high - taken] + self._number(leaf.seconds))

    def _end_bare(self, first: int, last: int, variant: int, context: Context, body: Seconds) -> None:
        """Options under which ``l`` saves nothing: its backward runs first, and what is recomputed ends before it."""
        needs, stage = self._decisions.thresholds, self._decisions.stages[last]
        for leaf in stage.leaves:
            if leaf.saves:
                continue
            seconds = leaf.backward_seconds + stage.discard_seconds
            if first < last:
                shorter = self._storage.body_row(first, last - 1, variant)
                _lower(body[leaf.bare :], shorter[leaf.bare :] + self._number(seconds))
            else:
                # Without a recomputation segments hold their input to the end.
                low = by_context(leaf.backward, "held" if context == "held" else "segment")
                _lower(body[low:], self._number(seconds + needs.segment_seconds))

    # ---------------------------------------------------------------- thresholds

    def _leaves(self, at: _Interval) -> tuple[LeafCost, ...]:
        return at.ending.leaves if at.first == at.last else self._decisions.stages[at.first].leaves

    def _forward(self, leaf: LeafCost, at: _Interval) -> int:
        if at.last == self._top:
            return leaf.forward + self._decisions.thresholds.forward_base[at.first]
        return (leaf.replay if at.first == at.last else leaf.forward) + at.base

    def _nothing(self, *rows: int) -> Seconds:
        return np.full((*rows, self._size), math.inf, self._number)


def _backward(leaf: LeafCost, at: _Interval, top: int) -> BackwardNeed:
    return leaf.last_backward if at.first == at.last < top else leaf.backward


def _lower(target: Seconds, seconds: Seconds | np.floating) -> None:
    np.minimum(target, seconds, out=target)
