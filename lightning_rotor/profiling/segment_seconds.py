"""Seconds that a segment takes of the host beyond what runs in it, and the memory traffic of a step around it.

A run repeated at once finds its code and data in the caches of the processor, which in a step it seldom does. A segment
around next to nothing takes 0.08 ms of the host's time, and 0.5 ms behind another model's step, or behind a sweep
through 32 MiB (one core of an EPYC). Plans would get too many short segments. Other devices queue kernels, so that
caches of the host matter less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from lightning_rotor.chain import Chain
from lightning_rotor.execution.passes import repeating
from lightning_rotor.execution.segment import recomputed
from lightning_rotor.profiling.meters import AllocatorMeter, CpuMeter, Meter, meter_for
from lightning_rotor.schedule import Schedule

# More than the caches of one processor core hold, and as much as all caches of the processor hold.
_NEAR_BYTES = 4 * 2**20
_ALL_BYTES = 32 * 2**20
_CACHE_LINE_BYTES = 64
_FLOAT_BYTES = 8
_ROUNDS = 12

SAVED_TENSOR_SHARE = 0.02
"""Share of a segment's time that each tensor adds which autograd would save in it: 10 of 525 µs."""
# Share of a segment's time that a stopwatch does not see, since it comes around what runs again: 105 of 525 µs.
_UNWATCHED_SHARE = 0.2


def interlude(device: torch.device, meter: Meter, swept_bytes: int = _NEAR_BYTES) -> Callable[[], object]:
    """A function that fills the processor's caches with something else, as what comes between two runs in a step does.

    On other devices it does nothing.
    """
    # Others queue kernels, so that caches of the host matter less, and a roofline knows no caches.
    if device.type != "cpu" or meter.repeats_itself:
        swept_bytes = 0
    # NumPy's memory, so that torch's allocator does not count it; one number of each line.
    numbers = np.ones(swept_bytes // _FLOAT_BYTES)
    lines = numbers[:: _CACHE_LINE_BYTES // _FLOAT_BYTES]
    return lines.sum


def unwatched_seconds(chain: Chain, schedule: Schedule) -> float:
    """Seconds of a schedule's segments that a stopwatch does not see in a step."""
    return _UNWATCHED_SHARE * chain.segment_seconds * schedule.segments


def segment_seconds(device: torch.device, meter: Meter) -> float:
    """Time that a segment takes of the host beyond what runs in it, measured once a process: models do not matter."""
    # A meter of somebody else's may count in other units.
    if type(meter) in (CpuMeter, AllocatorMeter):
        return _measured_once(device)
    return _measured(device, meter)


@cache
def _measured_once(device: torch.device) -> float:
    return _measured(device, meter_for(device))


def _measured(device: torch.device, meter: Meter) -> float:
    """Seconds of a segment around next to nothing, behind other work, beyond those of the same without a segment."""
    clock = _SegmentClock(device, meter)
    segmented = []
    plain = []
    # With gradients and without a recomputation around, as in a step.
    with repeating(False), torch.enable_grad():
        # The first time warms up.
        clock.seconds(segmented=True)
        clock.seconds(segmented=False)
        # By turns, so that a disturbance of the machine meets both.
        for _ in range(1 if meter.repeats_itself else _ROUNDS):
            segmented.append(clock.seconds(segmented=True))
            plain.append(clock.seconds(segmented=False))
    return float(max(statistics.median(segmented) - statistics.median(plain), 0.0))


class _ThreadClock(CpuMeter):
    """Counts the processor time of this thread."""

    def now(self) -> float:
        """Seconds for which this thread has run."""
        return time.thread_time()


class _SegmentClock:
    """Times one small operation in a segment, and without one, with the caches swept before each part of it."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self._tensor = torch.zeros(1, device=device, requires_grad=True)
        self._sweep = interlude(device, meter, _ALL_BYTES)
        self._sweeping_seconds = 0.0
        # All of it is work of this thread, of which its processor time tells whatever else runs on the machine.
        self._clock: Meter = _ThreadClock() if type(meter) is CpuMeter else meter

    def seconds(self, *, segmented: bool) -> float:
        """Seconds of one forward that is discarded, one that is recorded, and a backward, without the sweeps."""
        self._sweep()
        self._sweeping_seconds = 0.0
        start = self._clock.now()
        if segmented:
            output = recomputed(self._operation, self._tensor, draws_random=False)
        else:
            with torch.no_grad():
                self._operation(self._tensor)
            output = self._operation(self._tensor)
        self._timed_sweep()
        torch.autograd.grad(output, self._tensor)
        return self._clock.seconds_between(start, self._clock.now()) - self._sweeping_seconds

    def _operation(self, value: torch.Tensor) -> torch.Tensor:
        self._timed_sweep()
        return value.tanh()

    def _timed_sweep(self) -> None:
        start = self._clock.now()
        self._sweep()
        self._sweeping_seconds += self._clock.seconds_between(start, self._clock.now())
