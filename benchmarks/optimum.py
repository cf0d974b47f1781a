"""The true optimum: the fastest of all executions of a step, not only of those that a schedule tree describes.

An execution may run any stage again at any time, if its input is there, and drop anything at any time. What it has is a *state*:

    ================  ===========================================================================================
    set of stage i    absent, or what one of the stage's options saves
    boundary i        held or not; the chain's input is always there, its output belongs to the caller
    progress          how many stages have run for the first time, or which backward is next and whether it has
                      begun, that is, stands where it reads its first saved tensor
    ================  ===========================================================================================

and these operations change it, with the bytes and seconds of :mod:`lightning_rotor.chain`, as the simulator counts them:

    ================  ========================  ========================  =====================================
    operation         needs                     leaves                    peak above what is alive, seconds
    ================  ========================  ========================  =====================================
    record i, option  boundary i                set of i, boundary i + 1  ``forward_peak_bytes``
    replay i, option  boundary i                set of i                  ``replay_peak_bytes``
    discard i         boundary i                boundary i + 1            ``discard_peak_bytes``, the least of any option
    drop              a set or a boundary       the rest                  nothing, nothing
    begin l, option   progress                  ``unpack_bytes``          ``unpack_peak_bytes``, nothing
    finish l          begun, set of l           gradients                 ``backward…_peak_bytes`` by who holds l
    ================  ========================  ========================  =====================================

A boundary that nobody holds takes what the sets of the stages before and behind it save of it; nothing beside the set of an option that inverts
the stage behind it, whose backward rebuilds it. That what the stage before saved is lost if that set is dropped, and that it may need its exact
bits, is not looked at: the optimum is too low rather than too high. Every schedule tree is such an
execution, of the same seconds and no more memory. Segments remember nothing here and take no host time, and chains have no skips.

For each state the least seconds to the end, found from the end of the step to its start: one array per progress, an axis per set and
boundary, so an operation is a sum and a minimum of two slices. ``n`` stages with one option each have 4ⁿ states, so ten are slow.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.chain import BackwardPeaks, Chain, Option

Seconds: TypeAlias = npt.NDArray[np.float64]
Sizes: TypeAlias = npt.NDArray[np.int64]


class Optimum:
    """Fastest execution of a chain for any number of budgets.

    Args:
        chain: Up to about ten stages. No skips; options of a stage may differ in everything but the gradients that they leave.
        gradients_exist: As for :func:`lightning_rotor.simulator.simulate`.
        lingering_bytes: As for :func:`lightning_rotor.simulator.simulate`.
    """

    def __init__(self, chain: Chain, *, gradients_exist: bool = False, lingering_bytes: int = 0) -> None:
        if chain.skips:
            raise ValueError("the true optimum of a chain with skips is not known here")
        for stage in chain:
            if len({(each.input_gradient_bytes, each.parameter_gradient_bytes) for each in stage.options}) > 1:
                raise ValueError(
                    f"options of stage {stage.name!r} leave different gradients: progress would depend on them"
                )
        self._chain = chain
        self._gradients_exist = gradients_exist
        self._lingering_bytes = lingering_bytes
        n = len(chain)
        self._forward = [_Space(chain, stages, stages) for stages in range(n)]
        self._backward = [_Space(chain, stages, stages - 1) for stages in range(1, n + 1)]

    def seconds(self, budget_bytes: int) -> float:
        """Least seconds of a step whose peak is within the budget; infinite if there is none."""
        after: Seconds = np.zeros(())
        for stage in range(len(self._chain)):
            after = self._before_backward(stage, after, budget_bytes)
        for stage in reversed(range(len(self._chain))):
            after = self._before_forward(stage, after, budget_bytes)
        return float(after)

    def _before_forward(self, stage: int, after: Seconds, budget_bytes: int) -> Seconds:
        """Stages before ``stage`` have run for the first time; ``after`` is the same with this one."""
        space, cost = self._forward[stage], self._chain.stages[stage]
        pinned = sum(each.pinned_bytes for each in self._chain.stages[:stage])
        room = budget_bytes - self._lingering_bytes - pinned - space.bytes
        # The new set is the last of the sets, the new boundary the last of all axes, which the chain's output does not have.
        output = () if stage == len(self._chain) - 1 else (1,)
        every = (slice(None),) * stage
        ready = space.where(held=stage)
        seconds = np.full(space.shape, math.inf)
        runs = [(0, min(map(cost.discard_peak_of, cost.options)), cost.discard_seconds)]
        for digit, option in space.recordings(stage):
            runs.append((digit, option.forward_peak_bytes, option.forward_seconds))
        for digit, peak, duration in runs:
            into = after[(*every, digit, *every, *output)]
            new = np.where(room >= peak, duration + into, math.inf)
            seconds[ready] = np.minimum(seconds[ready], new[ready])
        return space.settle(seconds, room)

    def _before_backward(self, stage: int, after: Seconds, budget_bytes: int) -> Seconds:
        """The backward of ``stage`` is next; ``after`` is the same for the stage before it."""
        space, chain = self._backward[stage], self._chain
        alive = chain.stages[-1].output_bytes + sum(each.pinned_bytes for each in chain)
        if not self._gradients_exist:
            alive += sum(each.keep.parameter_gradient_bytes for each in chain.stages[stage + 1 :])
        gradient = chain.stages[stage + 1].keep.input_gradient_bytes if stage + 1 < len(chain) else 0
        room = budget_bytes - alive - space.bytes
        seconds = np.full(space.shape, math.inf)
        for option in chain.stages[stage].options:
            begun = self._finish(space, stage, option, after, room)
            begun = space.settle(begun, room - option.unpack_bytes)
            np.minimum(seconds, np.where(room >= option.unpack_peak_bytes, begun, math.inf), out=seconds)
        return space.settle(seconds, room - gradient)

    def _finish(self, space: _Space, stage: int, option: Option, after: Seconds, room: Sizes) -> Seconds:
        seconds = np.full(space.shape, math.inf)
        needed = space.where(present=(stage, option))
        # ``after`` knows neither this stage's set nor its input.
        rest = np.expand_dims(after, stage)
        if stage:
            rest = np.expand_dims(rest, -1)
        fits = room >= space.backward_peaks(stage, option.backward_peaks(gradients_exist=self._gradients_exist))
        seconds[needed] = np.where(fits, option.backward_seconds + rest, math.inf)[needed]
        return seconds


class _Space:
    """All states with the sets of the first ``stages`` stages and the boundaries ``1 .. boundaries``."""

    def __init__(self, chain: Chain, stages: int, boundaries: int) -> None:
        self._chain = chain
        self._stages = stages
        self._boundaries = boundaries
        # Options whose backward reads nothing have no set.
        self._options = [[each for each in stage.options if each.saved_tensors] for stage in chain.stages[:stages]]
        self.shape = tuple(1 + len(options) for options in self._options) + (2,) * boundaries

    @cached_property
    def bytes(self) -> Sizes:
        """Memory that sets and boundaries take."""
        total = np.zeros(self.shape, np.int64)
        for stage in range(self._stages):
            total += self._by_set(stage, "saved_bytes")
        for boundary in range(1, min(self._stages + 1, len(self._chain))):
            size = self._chain.stages[boundary - 1].output_bytes
            saved = self._by_set(boundary - 1, "saved_output_bytes")
            if boundary < self._stages:
                saved = saved + self._by_set(boundary, "saved_input_bytes")
            live = np.minimum(size, saved)
            if boundary < self._stages:
                live = np.where(self._by_set(boundary, "inverts") > 0, 0, live)
            if boundary <= self._boundaries:
                live = np.maximum(live, self._along(self._axis(boundary), [0, size]))
            total += live
        return total

    def backward_peaks(self, stage: int, peaks: BackwardPeaks) -> Sizes:
        """Peak of the stage's backward by who holds its input."""
        if stage == 0:
            return np.full(self.shape, peaks.held_bytes)
        saved = self._by_set(stage - 1, "saved_output_bytes") > 0
        holds = self._along(self._axis(stage), [0, 1]) > 0
        return np.broadcast_to(
            np.where(saved, peaks.held_bytes, np.where(holds, peaks.segment_bytes, peaks.plain_bytes)), self.shape
        )

    def recordings(self, stage: int) -> list[tuple[int, Option]]:
        """The options of a stage with the place on the axis of its set that each leads to."""
        found = [each for each in self._chain.stages[stage].options if each.saved_tensors]
        return [
            (found.index(option) + 1 if option.saved_tensors else 0, option)
            for option in self._chain.stages[stage].options
        ]

    def where(self, *, held: int = 0, present: tuple[int, Option] | None = None) -> tuple[Any, ...]:
        """The states where a boundary is held and a set is present; the chain's input always is, and what saves nothing."""
        index = [slice(None)] * len(self.shape)
        if held:
            index[self._axis(held)] = slice(1, 2)
        if present and present[1].saved_tensors:
            digit = self._options[present[0]].index(present[1]) + 1
            index[present[0]] = slice(digit, digit + 1)
        return tuple(index)

    def settle(self, seconds: Seconds, room: Sizes) -> Seconds:
        """Let stages run again and things be dropped for as long as it helps."""
        runs = [run for stage in reversed(range(self._stages)) for run in self._runs(stage, room)]
        while True:
            before = seconds.copy()
            self._drop(seconds)
            for source, target, duration in runs:
                np.minimum(seconds[source], duration + seconds[target], out=seconds[source])
            if np.array_equal(before, seconds):
                return seconds

    def _drop(self, seconds: Seconds) -> None:
        for axis, size in enumerate(self.shape):
            along = np.moveaxis(seconds, axis, 0)
            for digit in range(1, size):
                np.minimum(along[digit : digit + 1], along[:1], out=along[digit : digit + 1])

    def _runs(self, stage: int, room: Sizes) -> list[tuple[Any, Any, Seconds]]:
        """From which states a stage can run again, where that leads, and what it costs: infinitely much if it does not fit."""
        cost = self._chain.stages[stage]
        if not cost.recomputable:
            return []
        inside = stage < self._boundaries
        runs = []
        if inside:
            source, target = self._between(stage, {self._axis(stage + 1): (0, 1)})
            peak = min(map(cost.discard_peak_of, cost.options))
            runs.append((source, target, _allowed(room[source], peak, cost.discard_seconds)))
        for digit, option in enumerate(self._options[stage], 1):
            source, target = self._between(stage, {stage: (0, digit)})
            runs.append((source, target, _allowed(room[source], option.replay_peak_bytes, option.replay_seconds)))
            changes = {stage: (0, digit)} | ({self._axis(stage + 1): (0, 1)} if inside else {})
            source, target = self._between(stage, changes)
            runs.append((source, target, _allowed(room[source], option.forward_peak_bytes, option.forward_seconds)))
        return runs

    def _between(self, stage: int, changes: dict[int, tuple[int, int]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        source, target = list(self.where(held=stage)), list(self.where(held=stage))
        for axis, (before, after) in changes.items():
            source[axis], target[axis] = slice(before, before + 1), slice(after, after + 1)
        return tuple(source), tuple(target)

    def _axis(self, boundary: int) -> int:
        return self._stages + boundary - 1

    def _by_set(self, stage: int, size: str) -> Sizes:
        return self._along(stage, [0, *(getattr(option, size) for option in self._options[stage])])

    def _along(self, axis: int, values: list[int]) -> Sizes:
        return np.array(values, np.int64).reshape([-1 if each == axis else 1 for each in range(len(self.shape))])


def _allowed(room: Sizes, peak_bytes: int, seconds: float) -> Seconds:
    return np.where(room >= peak_bytes, seconds, math.inf)
