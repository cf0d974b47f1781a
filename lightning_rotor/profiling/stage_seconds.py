"""Seconds of a stage: of its forward, of the part of it that a recomputation repeats, and of its backward.

Every number is typical of several runs (:func:`lightning_rotor.execution.stopwatch.typical`). Short stages run more
often, since one interruption decides what a few runs take. Runs that other work has interrupted are made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.chain import StageCost
from lightning_rotor.execution.isolated import lent_buffers
from lightning_rotor.execution.stopwatch import typical
from lightning_rotor.profiling.gradient_layouts import memories_elsewhere
from lightning_rotor.profiling.interruptions import Interruptions
from lightning_rotor.profiling.stage_profiler import StageMeasurement, StageProfiler

# Seconds in which the noise of a busy machine evens out.
_ENOUGH_SECONDS = 0.5
# Seconds so few that one interruption decides what a few runs take; such stages run more often.
_SHORT_SECONDS = 0.01
_MORE_OF_SHORT = 3
# So many times as many runs are made again at most, because other work has interrupted them. A machine that is always
# busy must not keep training from beginning.
_MOST_INTERRUPTED = 4


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
    # First runs may differ, and a compiler may compile the backward only when it is first asked for.
    if profiler.meter.needs_warm_up or profiler.is_compiled:
        profiler.recorded_run(hold_input=False, hold_output=False)
    (seconds,) = seconds_by_turns([profiler])
    measurement = profiler.measure()
    return replace(measurement, cost=seconds.of(measurement.cost))


def look_for_messages(profiler: StageProfiler) -> None:
    """Run a stage once, with its backward, before the clock decides how often it runs."""
    with profiler.ranks.watching(marks=False):
        _timed_run(profiler)


def seconds_by_turns(profilers: Sequence[StageProfiler]) -> tuple[StageSeconds, ...]:
    """Comparable seconds of one stage's options, which run by turns: what disturbs the machine meets all of them."""
    all_runs = [_Runs(profiler) for profiler in profilers]
    while not all(runs.are_enough for runs in all_runs):
        for runs in all_runs:
            runs.add_one()
    return tuple(runs.typical_seconds() for runs in all_runs)


class _Runs:
    """Timed runs of one option of a stage."""

    def __init__(self, profiler: StageProfiler) -> None:
        self._profiler = profiler
        self._forwards: list[float] = []
        self._backwards: list[float] = []
        self._retries_left = _MOST_INTERRUPTED * profiler.repeats

    @property
    def are_enough(self) -> bool:
        """True after ``repeats`` runs, of long ones fewer and of short ones more. Together, their number alone counts.

        Processes that exchange messages must run equally often, and their clocks differ.
        """
        number, repeats = len(self._forwards), self._profiler.repeats
        if self._profiler.ranks.together:
            return number >= repeats
        seconds = sum(self._forwards) + sum(self._backwards)
        if seconds >= _ENOUGH_SECONDS:
            return True
        return number >= (repeats if seconds >= _SHORT_SECONDS else _MORE_OF_SHORT * repeats)

    def add_one(self) -> None:
        """Run once more. The run does not count if other work has interrupted it."""
        with lent_buffers(self._profiler.stage):
            interruptions = Interruptions(self._profiler.meter)
            forward, backward = _timed_run(self._profiler)
        # In lockstep all processes run as often.
        if self._retries_left and not self._profiler.ranks.together and interruptions.any():
            self._retries_left -= 1
        else:
            self._forwards.append(forward)
            self._backwards.append(backward)

    def typical_seconds(self) -> StageSeconds:
        """Seconds of a run like most of these."""
        forward = typical(self._forwards)
        with lent_buffers(self._profiler.stage):
            replay = forward * _replayed_share(self._profiler)
        return StageSeconds(forward, replay, typical(self._backwards))


def _timed_run(profiler: StageProfiler) -> tuple[float, float]:
    """Seconds of a forward and its backward."""
    profiler.rewind()
    value = profiler.boundary.fresh()
    profiler.interlude()
    start = profiler.meter.now()
    output = profiler.run(value)
    forward = profiler.meter.seconds_between(start, profiler.meter.now())
    backward = profiler.backward_of(value, output, memories_elsewhere(profiler.layouts))
    # Freeing memory takes time, too, and in training it is part of the backward.
    del value, output
    profiler.interlude()
    backward.gradients()
    return forward, backward.seconds


def _replayed_share(profiler: StageProfiler) -> float:
    """The share of a forward that is over at its last saved tensor, from 0 to 1."""
    retries_left = 0 if profiler.ranks.together else _MOST_INTERRUPTED
    while True:
        interruptions = Interruptions(profiler.meter)
        share = _replayed_share_of_one_run(profiler)
        if not retries_left or not interruptions.any():
            return share
        retries_left -= 1


def _replayed_share_of_one_run(profiler: StageProfiler) -> float:
    profiler.rewind()
    value = profiler.boundary.fresh()
    times = [profiler.meter.now()]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        times.append(profiler.meter.now())
        # An output would hold the node that holds it, and no backward frees this one.
        return tensor.detach()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with saved_tensors_hooks(pack, unpack):
        profiler.run(value)
    seconds_to_last_save = profiler.meter.seconds_between(times[0], times[-1])
    total_seconds = profiler.meter.seconds_between(times[0], profiler.meter.now())
    if total_seconds <= 0:
        return 1.0
    return min(max(seconds_to_last_save / total_seconds, 0.0), 1.0)
