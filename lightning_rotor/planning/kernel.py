"""The dynamic program as its recurrences read: a loop over intervals, and NumPy over the ends of a segment and over memory.

It fills the tables of short chains, and those of long ones where there is no Numba. It is also the oracle of
:mod:`lightning_rotor.planning.compiled`, which finds the same numbers bit by bit.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.chain import Chain
from lightning_rotor.planning.requirements import (
    BackwardNeed,
    Context,
    Decisions,
    Ending,
    Integers,
    LeafCost,
    by_context,
)

# ----------------------------------------------------------------------------------------------------
# Which intervals have the same table, because their stages are the same one by one.


# A period is worth fitting slots to if it holds for this part of the chain at least.
_PERIODIC = 0.5
# Looking for twins costs something everywhere, and pays if so many of all intervals have one.
_WORTHWHILE = 0.05


def first_twins(decisions: Decisions) -> npt.NDArray[np.int64] | None:
    """``(n, n)``, by length less one and first stage: where the first interval like this one starts; None if hardly any two are alike.

    Takes O(n² log n).
    """
    n = len(decisions.stages)
    numbers = _numbered([_stage_key(decisions, index) for index in range(n)])
    if len(set(numbers.tolist())) == n:
        return None
    needs = decisions.thresholds
    twins = np.tile(np.arange(n), (n, 1))
    for length in range(n):
        first = np.arange(n - length)
        own = [sizes[first, first + length] for sizes in (needs.discard, needs.remembered, needs.held, needs.handed_on)]
        parts = [numbers[:-1], numbers[1:]] if length else [numbers]
        _, begins, numbers = np.unique(np.stack([*parts, *own], axis=1), axis=0, return_index=True, return_inverse=True)
        numbers = numbers.reshape(-1)
        twins[length, first] = begins[numbers]
        if len(begins) == len(first):
            break  # what is longer holds something that is unique
    copied = np.count_nonzero(twins != np.arange(n))
    return twins if copied >= _WORTHWHILE * n * n / 2 else None


def aligned_unit(chain: Chain, unit: float) -> float:
    """The largest unit up to ``unit`` of which a period of the chain retains a whole number; ``unit`` if the chain has no period."""
    keys = _numbered([replace(stage, name="") for stage in chain])
    n = len(keys)
    for period in range(1, n // 3 + 1):
        alike = keys[period:] == keys[:-period]
        if alike.mean() < _PERIODIC:
            continue
        begin = int(np.argmax(alike))
        retained = sum(stage.output_bytes + stage.keep.saved_bytes for stage in chain.stages[begin : begin + period])
        return retained / math.ceil(retained / unit) if retained else unit
    return unit


def _numbered(keys: list[object]) -> npt.NDArray[np.int64]:
    """Equal keys get equal numbers."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _stage_key(decisions: Decisions, index: int) -> object:
    stage = decisions.stages[index]
    endings = tuple((ending.base, ending.trigger, ending.leaves) for ending in decisions.endings[index])
    return (
        stage.input_slots,
        stage.saved_before,
        stage.needs_as_segment,
        stage.discard_seconds,
        stage.recomputable,
        stage.leaves,
        endings,
        decisions.contexts[index],
        index == decisions.top,
    )


# ----------------------------------------------------------------------------------------------------
# Where the numbers of a table live.


Numbers: TypeAlias = type[np.float32] | type[np.float64]
Seconds: TypeAlias = npt.NDArray[np.floating[Any]]

# Rows that are looked at together when they are packed: what is compared fits the caches.
_ROWS = 256


class Storage:
    """Rows of seconds by interval.

    Args:
        decisions: The chain.
        size: Numbers per row.
        number: Their type.

    Attributes:
        body_rows: ``(rows, size)``, until they are packed.
        rest_rows: The same.
    """

    def __init__(self, decisions: Decisions, size: int, number: Numbers) -> None:
        variants = max(map(len, decisions.contexts))
        endings = decisions.ending_base.shape[1]
        self._decisions, self.size, self.number = decisions, size, number
        self._lay_out_bodies(variants)
        self._lay_out_rests(endings)
        self.body_rows = np.zeros((self._body_rows, size), number)
        self.rest_rows = np.zeros((self._rest_rows, size), number)
        self._asked_bodies: OpenRows | PackedRows = OpenRows(self.body_rows)
        self._asked_rests: OpenRows | PackedRows = OpenRows(self.rest_rows)

    def _lay_out_bodies(self, variants: int) -> None:
        n = self._decisions.top + 1
        self.body_base = np.full((variants, n), -1, np.int64)
        rows = 0
        for first, contexts in enumerate(self._decisions.contexts):
            for variant in range(len(contexts)):
                self.body_base[variant, first] = rows
                rows += n - first
        self._body_rows = rows

    def _lay_out_rests(self, endings: int) -> None:
        """Of classes other than 0, which only some boundaries have, rows for those boundaries alone."""
        decisions, n = self._decisions, self._decisions.top + 1
        classes = decisions.class_held.shape[1]
        has = np.arange(classes)[:, None] < decisions.class_count
        self.rest_rank = np.cumsum(has, axis=1) - 1
        self.rest_base = np.full((endings, classes, n), -1, np.int64)
        rows = 0
        for last in range(n):
            for ending in range(int(decisions.ending_count[last])):
                for number in range(classes):
                    self.rest_base[ending, number, last] = rows
                    rows += int(self.rest_rank[number, last]) + 1
        self._rest_rows = rows

    # ---------------------------------------------------------------- rows, while the table is filled

    def body_row(self, first: int, last: int, variant: int) -> Seconds:
        """One body, ``(size,)``, to be read or written."""
        row: Seconds = self.body_rows[self.body_base[variant, first] + last - first]
        return row

    def rest_row(self, first: int, last: int, ending: int, number: int) -> Seconds:
        """One rest, ``(size,)``, to be read or written."""
        row: Seconds = self.rest_rows[self.rest_base[ending, number, last] + self.rest_rank[number, first]]
        return row

    def split_rows(self, first: int, last: int, ending: int, variant: int) -> tuple[Seconds, Seconds]:
        """Bodies ``(first, k)`` and rests ``(k + 1, last)`` of class 0 for all ``first <= k < last``."""
        body, rest = self.body_base[variant, first], self.rest_base[ending, 0, last] + first + 1
        return self.body_rows[body : body + last - first], self.rest_rows[rest : rest + last - first]

    # ---------------------------------------------------------------- single numbers, once all rows are there

    def pack(self) -> None:
        """Keep what differs between neighbouring slots, about a quarter. No row can be asked for any more, single numbers can."""
        with ThreadPoolExecutor(2) as pool:
            bodies, rests = pool.map(PackedRows, (self.body_rows, self.rest_rows))
        self._asked_bodies, self._asked_rests = bodies, rests
        self.body_rows = self.rest_rows = np.zeros((0, 0), self.number)

    def body(self, first: int, last: int, variant: int, memory: int) -> np.floating[Any]:
        """One number of a body."""
        return self._asked_bodies.number(int(self.body_base[variant, first]) + last - first, memory)

    def rest(self, first: int, last: int, ending: int, number: int, memory: int) -> float:
        """One number of a rest."""
        row = int(self.rest_base[ending, number, last]) + int(self.rest_rank[number, first])
        return float(self._asked_rests.number(row, memory))

    def segments(
        self, first: int, last: int, ending: int, variant: int, left: Integers, rest_left: Integers
    ) -> npt.NDArray[np.float64]:
        """By end of a segment that starts at ``first``: its body with ``left`` slots and what follows up to ``last`` with ``rest_left``."""
        body, rest = int(self.body_base[variant, first]), int(self.rest_base[ending, 0, last]) + 1
        ends = np.arange(last - first)
        seconds = self._asked_bodies[body + ends, np.maximum(left, 0)].astype(np.float64)
        total: npt.NDArray[np.float64] = seconds + self._asked_rests[rest + first + ends, np.maximum(rest_left, 0)]
        return total


class OpenRows:
    """Rows as they are, which may still change, to be asked like packed ones.

    Args:
        rows: ``(rows, slots)`` seconds.
    """

    def __init__(self, rows: Seconds) -> None:
        self._rows = rows

    def __getitem__(self, at: tuple[Integers, Integers]) -> Seconds:
        """Numbers by row and slot, neither of them negative."""
        row, slot = at
        values: Seconds = self._rows[row, np.minimum(slot, self._rows.shape[1] - 1)]
        return values

    def number(self, row: int, slot: int) -> np.floating[Any]:
        """One number; the slot is not negative."""
        number: np.floating[Any] = self._rows[row, min(slot, self._rows.shape[1] - 1)]
        return number


class PackedRows:
    """Rows in a quarter of their room: each is infinite before some slot and stays the same from another one on.

    Args:
        rows: ``(rows, slots)`` seconds, infinite up to some slot.
    """

    def __init__(self, rows: Seconds) -> None:
        count, width = rows.shape
        self._low, self._high = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for begin in range(0, count, _ROWS):
            part = slice(begin, begin + _ROWS)
            self._low[part], self._high[part] = _changes(rows[part])
        lengths = self._high - self._low + 1
        self._starts: Integers = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        self._values = np.empty(int(self._starts[-1]), rows.dtype)
        slots = np.arange(width, dtype=np.int32)
        for begin in range(0, count, _ROWS):
            part = slice(begin, begin + _ROWS)
            kept = (slots >= self._low[part, None]) & (slots <= self._high[part, None])
            stop = self._starts[min(begin + _ROWS, count)]
            self._values[self._starts[begin] : stop] = rows[part][kept]

    @property
    def nbytes(self) -> int:
        """Memory that this takes."""
        return self._values.nbytes + self._starts.nbytes + self._low.nbytes + self._high.nbytes

    def __getitem__(self, at: tuple[Integers, Integers]) -> Seconds:
        """Numbers by row and slot, neither of them negative."""
        row, slot = at
        low = self._low[row]
        values: Seconds = self._values[self._starts[row] + np.clip(slot, low, self._high[row]) - low]
        return np.where(slot < low, math.inf, values)

    def number(self, row: int, slot: int) -> np.floating[Any]:
        """One number; the slot is not negative."""
        low = int(self._low[row])
        if slot < low:
            return self._values.dtype.type(math.inf)
        number: np.floating[Any] = self._values[int(self._starts[row]) + min(slot, int(self._high[row])) - low]
        return number


def _changes(rows: Seconds) -> tuple[Integers, Integers]:
    """By row, a slot before which everything is infinite, and the first slot from which on nothing changes."""
    width = rows.shape[1]
    differs = rows[:, ::-1] != rows[:, -1:]
    back = np.argmax(differs, axis=1)
    changing = differs[np.arange(len(rows)), back]
    high = np.where(changing, width - back, 0)
    low = np.where(changing, np.minimum(np.argmax(rows < math.inf, axis=1), high), 0)
    return low, high


# ----------------------------------------------------------------------------------------------------


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
