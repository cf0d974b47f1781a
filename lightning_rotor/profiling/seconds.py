"""Seconds of one stage, behind what else a step does; and what a segment costs the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.chain import StageCost
from lightning_rotor.execution.executor import recomputed
from lightning_rotor.execution.isolated import lent_buffers
from lightning_rotor.execution.passes import repeating
from lightning_rotor.planning import Plan
from lightning_rotor.profiling.meters import CpuMeter, CudaMeter, Meter, meter_for
from lightning_rotor.profiling.stage import StageBackward, StageMeasurement, StageProfiler, memories_elsewhere
from lightning_rotor.schedule import segments_in

_ENOUGH_SECONDS = 0.5
"""Seconds in which the noise of a busy machine evens out."""
_SHORT_SECONDS = 0.01
"""Seconds so few that one interruption decides what a few runs take."""
_MORE = 3


def typical(seconds: Sequence[float]) -> float:
    """The middle of the faster half, for interruptions never make a run faster."""
    return max(sorted(seconds)[len(seconds) // 4], 0.0)


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a forward, of its part up to the last saved tensor, and of a backward."""

    forward: float
    replay: float
    backward: float

    def of(self, cost: StageCost) -> StageCost:
        """The costs of a stage that takes so long."""
        keep = replace(
            cost.keep, forward_seconds=self.forward, replay_seconds=self.replay, backward_seconds=self.backward
        )
        # The discarded forward runs the same kernels. Timed by itself it may seem faster by chance, and a plan would
        # recompute for nothing.
        return replace(cost, options=(keep,), discard_seconds=self.forward)


def measure(profiler: StageProfiler) -> StageMeasurement:
    """Bytes and seconds of a stage."""
    profiler.warm_up()
    seconds = seconds_by_turns([profiler])[0]
    found = profiler.measure()
    return replace(found, cost=seconds.of(found.cost))


def seconds_by_turns(profilers: Sequence[StageProfiler]) -> tuple[StageSeconds, ...]:
    """Comparable seconds of one stage's options, which run by turns."""
    runs: list[list[tuple[float, float]]] = [[] for _ in profilers]
    while not all(map(_is_timed, profilers, runs)):
        for profiler, each in zip(profilers, runs, strict=True):
            with lent_buffers(profiler.stage):
                each.append(_timed_run(profiler))
    return tuple(map(_seconds_of, profilers, runs))


def _is_timed(profiler: StageProfiler, runs: Sequence[tuple[float, float]]) -> bool:
    """True after ``repeats`` runs, of long ones fewer and of short ones more. In lockstep their number alone counts."""
    seconds = sum(map(sum, runs))
    if not profiler.in_lockstep and seconds >= _ENOUGH_SECONDS:
        return True
    return len(runs) >= profiler.repeats * (1 if profiler.in_lockstep or seconds >= _SHORT_SECONDS else _MORE)


def _seconds_of(profiler: StageProfiler, runs: Sequence[tuple[float, float]]) -> StageSeconds:
    forward, backward = map(typical, zip(*runs, strict=True))
    with lent_buffers(profiler.stage):
        return StageSeconds(forward, forward * _replayed_part(profiler), backward)


def _timed_run(profiler: StageProfiler) -> tuple[float, float]:
    """Seconds of a forward and its backward."""
    profiler.rewind()
    value = profiler.boundary.fresh()
    profiler.interlude()
    start = profiler.meter.now()
    output = profiler.run(value)
    forward = profiler.meter.seconds_between(start, profiler.meter.now())
    run = StageBackward(profiler, value, output, memories_elsewhere(profiler.layouts))
    del value, output
    profiler.interlude()
    run.gradients()
    return forward, run.seconds


def _replayed_part(profiler: StageProfiler) -> float:
    """The share of a forward that is over at its last saved tensor, from 0 to 1."""
    value = profiler.boundary.fresh()
    times = [profiler.meter.now()]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        times.append(profiler.meter.now())
        return tensor.detach()  # an output would hold the node that holds it, and no backward frees this one

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        profiler.run(value)
    last_save = profiler.meter.seconds_between(times[0], times[-1])
    total = profiler.meter.seconds_between(times[0], profiler.meter.now())
    return min(max(last_save / total, 0.0), 1.0) if total > 0 else 1.0


# ----------- What the other stages of a step do to the one that is timed, and what a segment costs the host among them.


_NEAR_BYTES, _ALL_BYTES = 4 * 2**20, 32 * 2**20
"""More than the caches of one processor core hold, and as much as all of its caches hold."""
_LINE_BYTES = 64
_ROUNDS = 6


class Interlude:
    """Stands for what comes between two timed runs in a step: fills the processor's caches with something else.

    A run repeated at once finds its code and data there, which in a step it seldom does: a segment around next to
    nothing takes 0.16 ms of the host's time, and 0.65 ms behind another model's step, or a sweep through 32 MiB (one
    core of an EPYC). Plans would get too many short segments. Other devices queue kernels, so that caches matter less.
    """

    def __init__(self, device: torch.device, swept_bytes: int = _NEAR_BYTES) -> None:
        # NumPy's memory, so that torch's allocator does not count it; one number of each line.
        self._lines = np.ones(swept_bytes // 8 if device.type == "cpu" else 0)[:: _LINE_BYTES // 8]

    def __call__(self) -> None:
        """Flush caches between two timings."""
        self._lines.sum()


SAVED_TENSOR, _UNWATCHED = 0.02, 0.4
"""Shares of a segment's time: for each tensor that autograd would save in it, which torch's checkpoint packs; and what
a :class:`.Stopwatch` does not see, for torch does it around what it calls. 15 and 300 of 760 µs (one core of an EPYC).
"""


def unwatched_seconds(plan: Plan) -> float:
    """Seconds of a plan's segments that a stopwatch does not see in a step."""
    return _UNWATCHED * plan.chain.segment_seconds * len(list(segments_in(plan.schedule.items)))


def segment_seconds(device: torch.device, meter: Meter) -> float:
    """Time that a segment takes of the host beyond what runs in it, forward and recomputation together.

    As measured first in this process: it takes a fifth of a second, and models do not matter.
    """
    return _known(device) if type(meter) in (CpuMeter, CudaMeter) else _measured(device, meter)


@cache
def _known(device: torch.device) -> float:
    return _measured(device, meter_for(device))


def _measured(device: torch.device, meter: Meter) -> float:
    """Seconds of a segment around next to nothing, behind other work, beyond those of the same without a segment."""
    tensor = torch.zeros(1, device=device, requires_grad=True)
    interlude = Interlude(device, _ALL_BYTES)
    flushing: list[float] = []

    def flush() -> None:
        start = meter.now()
        interlude()
        flushing.append(meter.seconds_between(start, meter.now()))

    def operation(value: torch.Tensor) -> torch.Tensor:
        flush()
        return value.tanh()

    def seconds(*, segmented: bool) -> float:
        interlude()
        flushing.clear()
        start = meter.now()
        if segmented:
            output = recomputed(operation, tensor, draws_random=False)
        else:
            with torch.no_grad():
                operation(tensor)
            output = operation(tensor)
        flush()
        torch.autograd.grad(output, tensor)
        return meter.seconds_between(start, meter.now()) - sum(flushing)

    with repeating(False), torch.enable_grad():  # as in a step
        # By turns, so that a disturbance of the machine meets both; the first time warms up.
        _, *times = [(seconds(segmented=True), seconds(segmented=False)) for _ in range(_ROUNDS)]
    segmented, plain = map(typical, zip(*times, strict=True))
    return max(segmented - plain, 0.0)
