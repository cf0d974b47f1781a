"""Where the numbers of a table live.

A *body* row holds body(m, i, l) plus the first, discarded pass over ``i..l``: what a segment ``i..l`` costs in all, for every ``m``. Rows
that start at the same stage lie side by side. A *rest* row holds rest_c(m, i, l) under one ending of ``l``; those that end at the same
stage lie side by side. So what split() adds up for one interval is two blocks, each in one piece.

Skips that stages up to ``i - 1`` made and later ones read take memory from whatever follows a segment, more or less of it with every
end of the segment. Rests therefore start at the slot that counts all skips alive at their boundary: then the amount that differs
from one end to the next is zero but for the skips which are alive before the segment, see :class:`lightning_rotor.planning.splits.Splits`.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.planning.decisions import Decisions, Integers
from lightning_rotor.planning.packed import OpenRows, PackedRows, Seconds

Numbers: TypeAlias = type[np.float32] | type[np.float64]


def windows(flat: Seconds, starts: Integers, width: int) -> Seconds:
    """``(starts, width)``: a copy of ``width`` numbers from each start on."""
    step = flat.itemsize
    shape = (len(flat) - width + 1, width)
    overlapping: Seconds = np.ndarray(shape, flat.dtype, flat, strides=(step, step))
    return overlapping[starts]


class Storage:
    """Rows of seconds by interval, and between which slots they change.

    Args:
        decisions: The chain.
        size: Numbers per row.
        number: Their type.

    Attributes:
        body_low: ``(variants, n, n)``, by first stage and length less one: the first finite slot of a body; ``size`` if there is none.
        body_high: The same for the slot from which on it stays the same.
        rest_low: ``(endings, n, n)``, by last stage and length less one counted from the end: the same for class 0 of the rests.
        rest_high: The same.
    """

    def __init__(self, decisions: Decisions, size: int, number: Numbers) -> None:
        n = decisions.top + 1
        variants = max(map(len, decisions.contexts))
        endings = decisions.ending_base.shape[1]
        self._decisions, self.size, self.number = decisions, size, number
        self._lay_out_bodies(variants)
        self._lay_out_rests(endings)
        # By boundary, slots of all skips alive there.
        self.alive = np.concatenate(([0], decisions.carried[:-1], [0])).astype(np.int64)
        self.width = size + int(self.alive.max())
        # One piece each: the system gives large pieces large pages, far fewer of them. Windows reach beyond the first row, and into rows
        # that are not filled yet, where no NaN may stand.
        self.front = self.width + size
        self._bodies = np.zeros(self._body_rows * size, number)
        self.rests_flat = np.zeros(self.front + self._rest_rows * self.width + size, number)
        self.body_rows = self._bodies.reshape(-1, size)
        self.rest_rows = self.rests_flat[self.front : self.front + self._rest_rows * self.width].reshape(-1, self.width)
        self._asked_bodies: OpenRows | PackedRows = OpenRows(self.body_rows)
        self._asked_rests: OpenRows | PackedRows = OpenRows(self.rest_rows)
        self.body_low, self.body_high = (np.full((variants, n, n), size, np.int32) for _ in range(2))
        self.rest_low, self.rest_high = (np.full((endings, n, n), size, np.int32) for _ in range(2))

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

    # ---------------------------------------------------------------- bodies

    def bodies(self, first: Integers, last: Integers, variant: int | Integers) -> Seconds:
        """A copy of some bodies."""
        rows: Seconds = self.body_rows[self.body_base[variant, first] + last - first]
        return rows

    def put_bodies(self, first: Integers, last: Integers, bodies: Seconds) -> None:
        """Take in bodies, ``(variants, intervals, size)``; all intervals have the same length."""
        for variant, rows in enumerate(bodies):
            base = self.body_base[variant, first]
            if (base < 0).any():
                rows, base, at = rows[base >= 0], base[base >= 0], first[base >= 0]
            else:
                at = first
            length = int(last[0] - first[0])
            self.body_rows[base + length] = rows
            self.body_low[variant, at, length], self.body_high[variant, at, length] = spans(rows)

    def forbid_bodies(self, first: Integers, length: int) -> None:
        """No segment may have this length (less one) and start there."""
        for base in self.body_base[:, first]:
            self.body_rows[base[base >= 0] + length] = math.inf

    # ---------------------------------------------------------------- single numbers, once all rows are there

    def pack(self) -> None:
        """Keep what differs between neighbouring slots, about a quarter. No row can be asked for any more, single numbers can."""
        with ThreadPoolExecutor(2) as pool:
            bodies, rests = pool.map(PackedRows, (self.body_rows, self.rest_rows))
        self._asked_bodies, self._asked_rests = bodies, rests
        self.body_rows = self.rest_rows = self._bodies = self.rests_flat = np.zeros((0, 0), self.number)

    def body(self, first: int, last: int, variant: int, memory: int) -> np.floating[Any]:
        """One number of a body."""
        return self._asked_bodies.number(int(self.body_base[variant, first]) + last - first, memory)

    def rest(self, first: int, last: int, ending: int, number: int, memory: int) -> float:
        """One number of a rest."""
        row = int(self.rest_base[ending, number, last]) + int(self.rest_rank[number, first])
        return float(self._asked_rests.number(row, memory + int(self.alive[first])))

    def segments(
        self, first: int, last: int, ending: int, variant: int, left: Integers, rest_left: Integers
    ) -> npt.NDArray[np.float64]:
        """By end of a segment that starts at ``first``: its body with ``left`` slots and what follows up to ``last`` with ``rest_left``."""
        body, rest = int(self.body_base[variant, first]), int(self.rest_base[ending, 0, last]) + 1
        ends = np.arange(last - first)
        seconds = self._asked_bodies[body + ends, np.maximum(left, 0)].astype(np.float64)
        slots = np.maximum(rest_left, 0) + self.alive[first + 1 : last + 1]
        total: npt.NDArray[np.float64] = seconds + self._asked_rests[rest + first + ends, slots]
        return total

    # ---------------------------------------------------------------- rests

    def rest_ids(self, first: Integers, last: Integers, ending: int, number: int | Integers) -> Integers:
        """Which rows hold some rests."""
        ids: Integers = self.rest_base[ending, number, last] + self.rest_rank[number, first]
        return ids

    def rests(self, first: Integers, last: Integers, ending: int, number: Integers, taken: Integers) -> Seconds:
        """A copy of some rests, each with ``taken`` less memory than stands at the slot; meaningless where less is left than nothing."""
        ids = self.rest_ids(first, last, ending, number)
        starts = self.front + ids * self.width + self.alive[first] - np.minimum(taken, self.size)
        return windows(self.rests_flat, starts, self.size)

    def put_rests(self, first: Integers, last: Integers, ending: int, number: int, rests: Seconds) -> None:
        """Take in rests, ``(intervals, size)``; all intervals have the same length."""
        ids = self.rest_ids(first, last, ending, number)
        most = self.width - self.size
        if most:
            padded = np.full((len(rests), self.width + most), math.inf, rests.dtype)
            padded[:, most : self.width] = rests
            padded[:, self.width :] = rests[:, -1:]  # what nobody asks for packs best if it is no step
            starts = np.arange(len(rests)) * padded.shape[1] + most - self.alive[first]
            self.rest_rows[ids] = windows(padded.reshape(-1), starts, self.width)
        else:
            self.rest_rows[ids] = rests
        if number == 0:
            length = int(last[0] - first[0])
            at = ending, last, self.rest_low.shape[2] - 1 - length
            self.rest_low[at], self.rest_high[at] = spans(rests)

    # ---------------------------------------------------------------- both

    def copy(self, source: Integers, target: Integers, length: int) -> None:
        """Make intervals of one length, given by their first stages, the same as others of that length."""
        decisions = self._decisions
        variants = int(decisions.variant_count[source].max())
        bodies = [
            self.bodies(source, source + length, np.minimum(variant, decisions.variant_count[source] - 1))
            for variant in range(variants)
        ]
        self.put_bodies(target, target + length, np.stack(bodies))
        nothing = np.zeros(len(source), np.int64)
        for ending in range(decisions.ending_base.shape[1]):
            for number in range(decisions.class_held.shape[1]):
                has = (decisions.ending_count[source + length] > ending) & (decisions.class_count[source] > number)
                if has.any():
                    taken = source[has], target[has]
                    numbers = np.full(len(taken[0]), number)
                    rests = self.rests(taken[0], taken[0] + length, ending, numbers, nothing[has])
                    self.put_rests(taken[1], taken[1] + length, ending, number, rests)


def spans(rows: Seconds) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """By row, the first finite slot and the slot from which on it stays the same; rows never increase."""
    width = rows.shape[1]
    finite = rows[:, -1] < math.inf
    low = np.where(finite, np.argmax(rows < math.inf, axis=1), width)
    high = np.where(finite, np.argmax(rows == rows[:, -1:], axis=1), width)
    return low.astype(np.int32), high.astype(np.int32)
