"""Seconds of a stage: of its forward, of the part of it that a recomputation repeats, and of its backward.

Every number is typical of several runs (:func:`lightning_rotor.execution.stopwatch.typical`). Short stages run more
often, since one interruption decides what a few runs take. That number is of the faster runs, so only those need to be
undisturbed: a stage runs until as many of its runs as it looks at were interrupted by no other work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.chain import StageCost
from lightning_rotor.execution.isolated import lent_buffers
from lightning_rotor.execution.stopwatch import typical, typical_rank
from lightning_rotor.profiling.gradient_layouts import memories_elsewhere
from lightning_rotor.profiling.interruptions import Interruptions
from lightning_rotor.profiling.stage_profiler import StageMeasurement, StageProfiler

# Seconds in which the noise of a busy machine evens out.
_ENOUGH_SECONDS = 0.5
# Seconds so few that one interruption decides what a few runs take; such stages run more often.
_SHORT_SECONDS = 0.01
_MORE_OF_SHORT = 3
# So many times as many runs are made again at most, because other work has interrupted them, and after so many seconds
# of a stage's runs none is. A machine that is always busy must not keep training from beginning.
_MOST_INTERRUPTED = 4
_LONG_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a forward, of its part up to the last saved tensor, and of a backward."""

    forward: float
    replay: float
    backward: float

    def of(self, cost: StageCost) -> StageCost:
        """The costs of a stage that takes so long."""
        keep = replace(
            cost.keep,
            forward_seconds=self.forward,
            replay_seconds=self.replay,
            backward_seconds=self.backward,
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
        # Seconds of the forward and of the backward of each run, and of those that nothing has interrupted.
        self._all: list[tuple[float, float]] = []
        self._undisturbed: list[tuple[float, float]] = []

    @property
    def are_enough(self) -> bool:
        """True after ``repeats`` runs (long ones: fewer, short ones: more), if as many as count were undisturbed."""
        number = len(self._all)
        if self._profiler.meter.repeats_itself:
            return number > 0
        wanted = self._profiler.repeats
        # Processes that exchange messages must run equally often, and their clocks differ. So the number alone decides.
        if self._profiler.ranks.together:
            return number >= wanted
        # What all runs would have taken undisturbed.
        seconds = number * fmean(map(sum, self._counting)) if number else 0.0
        if seconds < _SHORT_SECONDS:
            wanted *= _MORE_OF_SHORT
        if seconds >= _ENOUGH_SECONDS:
            wanted = 1
        if number < wanted:
            return False
        if len(self._undisturbed) > typical_rank(wanted):
            return True
        # Two runs of a long stage at least, so that one interruption alone does not make its costs.
        is_long = number > 1 and sum(map(sum, self._all)) >= _LONG_SECONDS
        return is_long or number >= (1 + _MOST_INTERRUPTED) * wanted

    @property
    def _counting(self) -> list[tuple[float, float]]:
        """Runs that nothing has interrupted; all if something always has."""
        return self._undisturbed or self._all

    def add_one(self) -> None:
        """Run once more, and see whether other work interrupts that."""
        with lent_buffers(self._profiler.stage):
            interruptions = Interruptions(self._profiler.meter)
            seconds = _timed_run(self._profiler)
        self._all.append(seconds)
        if not interruptions.any():
            self._undisturbed.append(seconds)

    def typical_seconds(self) -> StageSeconds:
        """Seconds of a run like most of those that count."""
        # Each by itself: a run with a typical forward need have no typical backward.
        forwards, backwards = zip(*self._counting, strict=True)
        forward = typical(forwards)
        with lent_buffers(self._profiler.stage):
            replay = forward * _replayed_share(self._profiler)
        return StageSeconds(forward, replay, typical(backwards))


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
