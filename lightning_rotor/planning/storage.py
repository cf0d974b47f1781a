"""Where the numbers of a table live.

A *body* row holds body(m, i, l) plus the first, discarded pass over ``i..l``: what a segment ``i..l`` costs in all, for every ``m``. Rows
that start at the same stage lie side by side. A *rest* row holds rest_c(m, i, l) under one ending of ``l``; those that end at the same
stage lie side by side. So what split() adds up for one interval is two blocks, each in one piece.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.planning.decisions import Decisions, Integers

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
