"""Rows of a solved table in a quarter of the room: each is infinite before some slot and stays the same from another one on."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Seconds: TypeAlias = npt.NDArray[np.floating[Any]]
_Integers: TypeAlias = npt.NDArray[np.int64]

# Rows that are looked at together: what is compared fits the caches.
_ROWS = 256


class OpenRows:
    """Rows as they are, which may still change, to be asked like packed ones.

    Args:
        rows: ``(rows, slots)`` seconds.
    """

    def __init__(self, rows: Seconds) -> None:
        self._rows = rows

    def __getitem__(self, at: tuple[_Integers, _Integers]) -> Seconds:
        """Numbers by row and slot, neither of them negative."""
        row, slot = at
        values: Seconds = self._rows[row, np.minimum(slot, self._rows.shape[1] - 1)]
        return values

    def number(self, row: int, slot: int) -> np.floating[Any]:
        """One number; the slot is not negative."""
        number: np.floating[Any] = self._rows[row, min(slot, self._rows.shape[1] - 1)]
        return number


class PackedRows:
    """What differs between neighbouring slots, row by row.

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
        self._starts: _Integers = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
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

    def __getitem__(self, at: tuple[_Integers, _Integers]) -> Seconds:
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


def _changes(rows: Seconds) -> tuple[_Integers, _Integers]:
    """By row, a slot before which everything is infinite, and the first slot from which on nothing changes."""
    width = rows.shape[1]
    differs = rows[:, ::-1] != rows[:, -1:]
    back = np.argmax(differs, axis=1)
    changing = differs[np.arange(len(rows)), back]
    high = np.where(changing, width - back, 0)
    low = np.where(changing, np.minimum(np.argmax(rows < math.inf, axis=1), high), 0)
    return low, high
