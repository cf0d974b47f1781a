"""split(m, i, l): the best segment that starts at ``i`` and ends before ``l``. Nearly all of a table's time is spent here."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_rotor.planning.decisions import Decisions, Integers
from lightning_rotor.planning.packed import Seconds
from lightning_rotor.planning.storage import Numbers, Storage, windows

_Steps = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Interval:
    """What to add up.

    Attributes:
        first: First stage.
        last: Last stage.
        ending: How it ends.
        variant: Of the bodies.
        low: Nothing is finite before.
        stop: Nothing changes from there on.
        base: What is alive during discarded passes; None if none of them forbids anything.
    """

    first: int
    last: int
    ending: int
    variant: int
    low: int
    stop: int
    base: int | None


class SplitRows:
    """split() of some intervals, by variant of the body of their segments: ``(variants, intervals, size)``."""

    def __init__(self, variants: int, intervals: int, size: int, most_paid: int, number: Numbers) -> None:
        self._size, self._paid = size, min(most_paid, size)
        self._all: Seconds = np.full((variants, intervals, self._paid + size), math.inf, number)

    def rows(self, variant: int) -> Seconds:
        """All of one variant, to be changed in place."""
        rows: Seconds = self._all[variant, :, self._paid :]
        return rows

    def shifted(self, variants: Integers, intervals: Integers, paid: Integers) -> Seconds:
        """A copy of chosen ones, each with ``paid`` less memory."""
        starts = (variants * self._all.shape[1] + intervals) * self._all.shape[2]
        return windows(self._all.reshape(-1), starts + self._paid - np.minimum(paid, self._paid), self._size)


class Splits:
    """Finds the best segments, interval by interval.

    The minimum over all ends ``k`` of a segment is one addition of two blocks of the storage, bodies ``(i, k)`` and rests ``(k + 1, l)``, and
    one minimum over the rows of the sum. Before some slot no row is finite, and behind another none changes; there is nothing to do.

    Args:
        decisions: The chain.
        storage: Rows of shorter intervals.
    """

    def __init__(self, decisions: Decisions, storage: Storage) -> None:
        self._decisions, self._storage = decisions, storage
        self._size = storage.body_rows.shape[1]
        self._number: Numbers = storage.number
        self._local = threading.local()
        n = decisions.top + 1
        needs = decisions.thresholds
        # Discarded passes by first stage and length less one: the order in which the storage holds spans.
        self._peaks = {top: _by_length(peaks) for top, peaks in decisions.peak.items()}
        handed_on = needs.handed_on - storage.alive[1:] * (np.arange(n) >= np.arange(n)[:, None])
        self._handed_on = _by_length(needs.handed_on)
        # Segments from each stage on that hold and hand on the same: where the next such run begins, and how much.
        self._runs = [_runs(needs.held[first], handed_on[first], first) for first in range(n)]
        self._most_held = [int(needs.held[first, first:].max()) for first in range(n)]

    def of(self, first: Integers, last: Integers, ending: int, *, variants: int) -> SplitRows:
        """split() of some intervals of the same length."""
        decisions, length = self._decisions, int(last[0] - first[0])
        most_paid = int(decisions.input_slots[first].max())
        found = SplitRows(variants, len(first), self._size, most_paid, self._number)
        if length == 0:
            return found
        is_top = bool(last[0] == decisions.top)
        base = np.zeros(len(first), np.int64)
        if not is_top:
            base = decisions.ending_base[last, ending] + decisions.thresholds.remembered[first, last]
        for variant in range(variants):
            low, high, bound = self._spans(first, last, ending, variant, base)
            for row, (begin, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
                if variant < len(decisions.contexts[begin]):
                    guarded = int(base[row]) if bound[row] else None
                    stop = min(int(high[row]) + 1, self._size)
                    interval = _Interval(begin, end, ending, variant, int(low[row]), stop, guarded)
                    self._fill(found, row, interval)
        if decisions.thresholds.segment_seconds and not is_top:
            # A nested segment's first pass runs inside its parent's, too. (What is alike elsewhere was copied before.)
            for variant in range(variants):
                found.rows(variant)[...] += self._number(decisions.thresholds.segment_seconds)
        return found

    def _spans(
        self, first: Integers, last: Integers, ending: int, variant: int, base: Integers
    ) -> tuple[Integers, Integers, npt.NDArray[np.bool_]]:
        """By interval: where sums become finite, where they stop changing, and whether a discarded pass forbids any that is finite."""
        storage, length, is_top = self._storage, int(last[0] - first[0]), bool(last[0] == self._decisions.top)
        at: slice | Integers = slice(int(first[0]), int(first[-1]) + 1)
        ends: slice | Integers = slice(int(last[0]), int(last[-1]) + 1)
        if first[-1] - first[0] + 1 != len(first):
            at, ends = first, last
        columns, tail = slice(0, length), slice(storage.rest_low.shape[2] - length, None)
        handed_on = self._handed_on[at, columns]
        low = np.maximum(storage.body_low[variant, at, columns], storage.rest_low[ending, ends, tail] + handed_on)
        high = np.maximum(storage.body_high[variant, at, columns], storage.rest_high[ending, ends, tail] + handed_on)
        bound = (self._peaks[is_top][at, columns] + base[:, None] > low) & (low < self._size)
        # Where a sum is never finite it does not change either.
        high = np.where(low < self._size, high, 0)
        return low.min(axis=1), high.max(axis=1), bound.any(axis=1)

    def _fill(self, found: SplitRows, row: int, interval: _Interval) -> None:
        """One interval under one variant."""
        target, decisions, first, variant = (
            found.rows(interval.variant)[row],
            self._decisions,
            interval.first,
            interval.variant,
        )
        alike_from = int(decisions.alike_from[first, variant]) + self._most_held[first]
        if alike_from < self._size:
            target[alike_from:] = found.rows(int(decisions.alike[first, variant]))[row, alike_from:]
            target = target[:alike_from]
        runs = self._runs[first]
        for number, (begin, held, handed_on) in enumerate(runs):
            end = min(runs[number + 1][0] if number + 1 < len(runs) else interval.last, interval.last)
            if begin >= end or interval.low >= interval.stop:
                return
            if number == 0 and held == 0 and end == interval.last:
                self._reduce(target, interval, begin, end, handed_on)
            elif held < len(target):
                best = np.full(len(target) - held, math.inf, self._number)
                self._reduce(best, interval, begin, end, handed_on)
                np.minimum(target[held:], best, out=target[held:])

    def _reduce(self, target: Seconds, interval: _Interval, begin: int, end: int, handed_on: int) -> None:
        """Minimum over the segments ``first..k`` with ``begin <= k < end``, all of which hand on the same.

        The threshold of the discarded pass rises with ``k``. If it matters, then between two steps of it the same segments are allowed,
        and one sum and one minimum do each block::

            k = end - 1     ░░░░░░░░░░░░████████  ┐
            ...             ░░░░░░██████████████  │ before `low` nothing is finite, and from `stop` on nothing changes,
            k = begin       ░░██████████████████  ┘ so what is beyond is copied
                            0 s0  s1    s2    stop
        """
        size, first = len(target), interval.first
        if interval.base is None:
            self._add_up(target, interval, begin, end, interval.low, min(interval.stop, size), handed_on)
            target[interval.stop :] = target[min(interval.stop, size) - 1]
            return
        peaks = self._peaks[interval.last == self._decisions.top][first]
        steps = [(first + length, peak + interval.base) for length, peak in _steps(peaks, begin - first, end - first)]
        for (_, slot), (row_end, slot_end) in zip(steps, [*steps[1:], (end, size)], strict=True):
            self._add_up(target, interval, begin, row_end, max(interval.low, slot), min(slot_end, size), handed_on)

    def _add_up(
        self, target: Seconds, interval: _Interval, begin: int, end: int, low: int, stop: int, handed_on: int
    ) -> None:
        """The same between two slots, for segments that are all allowed there."""
        if low >= stop:
            return
        storage = self._storage
        body = int(storage.body_base[interval.variant, interval.first]) - interval.first
        rest = int(storage.rest_base[interval.ending, 0, interval.last]) + 1
        sums = self._workspace((end - begin) * (stop - low)).reshape(end - begin, stop - low)
        np.add(
            storage.body_rows[body + begin : body + end, low:stop],
            storage.rest_rows[rest + begin : rest + end, low - handed_on : stop - handed_on],
            out=sums,
        )
        np.minimum.reduce(sums, axis=0, out=target[low:stop])

    def _workspace(self, count: int) -> Seconds:
        """Room of this thread."""
        room: Seconds | None = getattr(self._local, "room", None)
        if room is None or len(room) < count:
            room = np.empty(max(count, (self._decisions.top + 1) * self._size), self._number)
            self._local.room = room
        return room[:count]


def _by_length(sizes: Integers) -> npt.NDArray[np.int32]:
    """``(i, k)`` rearranged to ``(i, k - i)``."""
    rows = np.zeros(sizes.shape, np.int32)
    for first in range(len(sizes)):
        rows[first, : len(sizes) - first] = np.minimum(sizes[first, first:], 1 << 30)
    return rows


def _steps(peaks: npt.NDArray[np.int32], begin: int, end: int) -> _Steps:
    """Where something that grows with the length of a segment rises: the length less one, and the slots from there on."""
    rises = np.flatnonzero(np.diff(peaks[begin:end], prepend=-1))
    return [(begin + int(rise), int(peaks[begin + rise])) for rise in rises]


def _runs(held: Integers, handed_on: Integers, first: int) -> list[tuple[int, int, int]]:
    """Where one of two sizes changes with the last stage of a segment from ``first`` on: the stage, and both from there on."""
    held, handed_on = held[first:], handed_on[first:]
    changes = np.flatnonzero((np.diff(held, prepend=-1) != 0) | (np.diff(handed_on, prepend=1) != 0))
    return [(first + int(at), int(held[at]), int(handed_on[at])) for at in changes]
