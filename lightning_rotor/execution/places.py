"""Ranges of another memory that copies take, and give back when they are dropped.

One step takes and gives back the same ranges as the one before, so nothing is asked of the system in a steady step.
"""

from __future__ import annotations

import threading
from collections import deque


class Places:
    """Ranges that are taken; the first that is large enough is given out. Threads may ask at once.

    Args:
        end: No range goes beyond it; None if there is always room.
        unit_bytes: Ranges begin and end at multiples of it.
    """

    def __init__(self, end: int | None = None, *, unit_bytes: int = 1) -> None:
        self._most = end
        self._unit = unit_bytes
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = []  # beginnings and ends, rising
        self._end = 0
        self._used_bytes = 0
        # Ranges come back when Python collects garbage, which it does at any line, also where the lock is held.
        self._given_back: deque[tuple[int, int]] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes of all ranges that are taken."""
        with self._lock:
            self._settle()
            return self._used_bytes

    def take(self, size_bytes: int) -> int | None:
        """The beginning of a range that is free; None if there is none."""
        size_bytes = self._in_units(size_bytes)
        with self._lock:
            self._settle()
            for number, (begin, end) in enumerate(self._free):
                if end - begin >= size_bytes:
                    self._free[number] = begin + size_bytes, end
                    self._used_bytes += size_bytes
                    return begin
            if self._most is not None and self._end + size_bytes > self._most:
                return None
            begin = self._end
            self._end += size_bytes
            self._used_bytes += size_bytes
            return begin

    def give_back(self, begin: int, size_bytes: int) -> None:
        """Give a range back."""
        # Without the lock, which this thread may have (see above): a deque takes entries from any thread.
        self._given_back.append((begin, self._in_units(size_bytes)))

    def _in_units(self, size_bytes: int) -> int:
        return -(-size_bytes // self._unit) * self._unit

    def _settle(self) -> None:
        """Join what has come back to what is free."""
        if not self._given_back:
            return
        while self._given_back:
            begin, size_bytes = self._given_back.popleft()
            self._used_bytes -= size_bytes
            self._free.append((begin, begin + size_bytes))
        joined: list[tuple[int, int]] = []
        for left, right in sorted(self._free):
            if joined and joined[-1][1] == left:
                joined[-1] = joined[-1][0], right
            elif left < right:
                joined.append((left, right))
        if joined and joined[-1][1] == self._end:
            self._end, _ = joined.pop()
        self._free = joined
