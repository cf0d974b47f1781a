"""The link of a device to another memory, and the copies that one step makes over it.

What a schedule moves (:class:`lightning_rotor.schedule.Move`) is copied out and back beside the computation, each way
in order and one at a time::

    compute   F0   F1   F2   F3   B3   B2  ▒▒▒ B1   B0      ▒ waits for the copy back of item 1
    out          ───0─── ───1───
    back                                ──1── ──0──
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightning_rotor.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Link:
    """The speed of copies between a device and another memory, and how much of that memory there is.

    Attributes:
        out: Bytes per second away from the device.
        back: Bytes per second back to it.
        latency: Seconds that a copy takes besides, on the link and of the host that asks for it.
        room_bytes: Most that may be in the other memory at a time; None if it holds everything.
    Raises:
        ScheduleError: A speed is not positive, or the latency or the room is negative.
    """

    out: float
    back: float
    latency: float = 10e-6
    room_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, speed in (("out", self.out), ("back", self.back)):
            if not (speed > 0 and math.isfinite(speed)):
                raise ScheduleError(f"a link carries {speed!r} bytes per second {name}: expected a positive number")
        if not (self.latency >= 0 and math.isfinite(self.latency)):
            raise ScheduleError(f"a link has a latency of {self.latency!r} s: expected a finite time, not negative")
        if self.room_bytes is not None and self.room_bytes < 0:
            raise ScheduleError(f"a link leads to {self.room_bytes} bytes of memory: expected no negative number")

    def holds(self, size_bytes: int) -> bool:
        """True if the other memory has room for so much."""
        return self.room_bytes is None or size_bytes <= self.room_bytes


Way: TypeAlias = Literal["out", "back"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy over the link.

    Attributes:
        begin_seconds: Since the step began, as is ``end_seconds``.
        stage: First stage of the item that asked for the copy.
    """

    way: Way
    stage: int
    begin_seconds: float
    end_seconds: float

    def seconds_between(self, begin_seconds: float, end_seconds: float) -> float:
        """The part of the copy that falls into some time."""
        return max(min(self.end_seconds, end_seconds) - max(self.begin_seconds, begin_seconds), 0.0)


class Copies:
    """When the copies of one step are done, by what they copy; all times are seconds since the step began.

    Attributes:
        host_seconds: That asking for them takes. Where kernels are small, nothing hides it.
        transfers: In the order in which they were asked for.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        # When each way is free again: a GPU has a copy engine for each, which makes one copy after the other.
        self._out_free = self._back_free = 0.0
        self.host_seconds = 0.0
        self.transfers: list[Transfer] = []
        self._out_done: dict[Hashable, float] = {}
        self._back_done: dict[Hashable, float] = {}

    def send(self, what: Hashable, size_bytes: int, now: float, stage: int) -> None:
        """Begin a copy out; one of no bytes is the rest of an earlier one, and takes no time."""
        if size_bytes:
            self.host_seconds += self._link.latency
            begin = max(self._out_free, now)
            self._out_free = begin + self._link.latency + size_bytes / self._link.out
            self.transfers.append(Transfer("out", stage, begin, self._out_free))
        self._out_done[what] = self._out_free if size_bytes else self.sent(what)

    def sent(self, what: Hashable) -> float:
        """When the copy out is done; 0 if there was none."""
        return self._out_done.get(what, 0.0)

    def fetch(self, what: Hashable, size_bytes: int, now: float, stage: int) -> None:
        """Begin a copy back, behind the copy out."""
        if size_bytes:
            self.host_seconds += self._link.latency
            # Not before the copy out has ended, or it would bring back what is not there yet.
            begin = max(self._back_free, now, self.sent(what))
            self._back_free = begin + self._link.latency + size_bytes / self._link.back
            self.transfers.append(Transfer("back", stage, begin, self._back_free))
            self._back_done[what] = self._back_free

    def fetched(self, what: Hashable) -> float:
        """When the copy back is done; 0 if there was none."""
        return self._back_done.get(what, 0.0)
