"""Measuring a stage as it runs when it is inverted, and finding out whether it may be."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.chain import BackwardPeaks, Option, StageCost
from lightning_rotor.errors import InverseError
from lightning_rotor.inversion import Inversion, Way, is_whole
from lightning_rotor.invertible.check import check_inverse
from lightning_rotor.invertible.guard import precision_of, tolerance_of
from lightning_rotor.profiling.boundary import Boundary
from lightning_rotor.profiling.gradients import Gradients, StageBackward
from lightning_rotor.profiling.phases import Phases, peak_bytes_of
from lightning_rotor.profiling.stages import StageMeasurement, StageProfiler
from lightning_rotor.sequential import Stage
from lightning_rotor.tensors import is_fake, tensors_in

_RTOL = 1e-4

NAME = "invert"
"""Of the option."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of one inverted forward and its backward."""

    forward_peak_bytes: int
    saved_bytes: int
    saved_output_bytes: int
    input_bytes: int
    unpack_peak_bytes: int
    unpack_bytes: int
    backward_peak_bytes: int
    gradients: Gradients


def with_inversion(profiler: StageProfiler, way: Way, measurement: StageMeasurement) -> tuple[StageMeasurement, str]:
    """Add the option that inverts a stage.

    Args:
        profiler: Of the stage.
        way: How it runs.
        measurement: Its other options.
    Returns:
        The measurement, with the option if there may be one; else as it was, and why not.
    """
    reason = objection(profiler, measurement.cost)
    if not reason:
        option = _Inverted(profiler, way).option(measurement.cost.keep)
        if isinstance(option, Option):
            cost, apart = (_joined(each, option) for each in (measurement.cost, measurement.cost_apart))
            return replace(measurement, cost=cost, cost_apart=apart), ""
        reason = option
    return measurement, reason


def why_not(stage: Stage, boundary: Boundary) -> str:
    """Why a stage's inverse cannot be relied on, tried on its input with its present parameters; empty if it can."""
    if any(map(is_fake, tensors_in(boundary.leaves))):
        return "it is only estimated, and whether its inverse is right shows with values"
    value = boundary.fresh()
    precision = max(map(precision_of, tensors_in(value)), key=tolerance_of)
    # Half the digits are half the digits of the inverse, too: what the guard allows there is allowed here.
    rtol = tolerance_of(precision) if precision in (torch.float16, torch.bfloat16) else _RTOL
    module = stage.invertible
    assert module is not None
    try:
        check_inverse(module, value, rtol=rtol, name=stage.name)
    except InverseError as error:
        return str(error)
    return ""


def objection(profiler: StageProfiler, cost: StageCost) -> str:
    """Why a stage with an inverse cannot be inverted where it is; empty if it can."""
    leaves, ends = profiler.boundary.leaves, profiler.ends
    if len(leaves) != 1 or len(ends.inputs) != 1 or len(ends.outputs) != 1 or not isinstance(leaves[0], torch.Tensor):
        return "it takes or makes several values: expected one tensor each"
    if ends.inputs[0] is not None:
        return "its input is the caller's, or is read elsewhere, too"
    if ends.outputs[0] is not None:
        return "its output is read by more than the next stage"
    if not profiler.boundary.requires_grad[0]:
        return "nothing before it learns"
    if not is_whole(leaves[0]):
        return "its input is a part of something larger"
    if not cost.recomputable:
        return "it gives other bits when it runs again"
    if cost.pinned_bytes:
        return f"it stores {cost.pinned_bytes} bytes on its graph, which nobody can drop"
    if not cost.keep.saved_tensors:
        return "it saves nothing anyway"
    return ""


@dataclass(frozen=True, slots=True)
class _Inverted:
    profiler: StageProfiler
    way: Way

    def option(self, keep: Option) -> Option | str:
        """The costs, or why there is none."""
        alone = self._run(hold_input=False)
        if alone.input_bytes or alone.saved_output_bytes != self.profiler.ends.link_bytes:
            return "its graph keeps hold of the input"
        if (alone.gradients.link_bytes, alone.gradients.parameter_bytes) != (
            keep.input_gradient_bytes,
            keep.parameter_gradient_bytes,
        ):
            return "its backward leaves other gradients"
        held = self._run(hold_input=True)
        accumulating = None
        if keep.accumulating is not None:
            again = replace(self, profiler=replace(self.profiler, gradients_exist=True))
            accumulating = again._peaks(again._run(hold_input=False), again._run(hold_input=True))
        peaks = self._peaks(alone, held)
        return Option(
            name=NAME,
            saved_bytes=alone.saved_bytes,
            saved_input_bytes=0,
            saved_output_bytes=alone.saved_output_bytes,
            saved_tensors=1,
            forward_peak_bytes=alone.forward_peak_bytes,
            replay_peak_bytes=alone.forward_peak_bytes,
            unpack_peak_bytes=alone.unpack_peak_bytes,
            unpack_bytes=alone.unpack_bytes,
            backward_peak_bytes=peaks.plain_bytes,
            backward_segment_peak_bytes=peaks.segment_bytes,
            backward_held_peak_bytes=peaks.held_bytes,
            input_gradient_bytes=keep.input_gradient_bytes,
            parameter_gradient_bytes=keep.parameter_gradient_bytes,
            # The same kernels. Timed by itself either may come out faster by chance.
            forward_seconds=keep.forward_seconds,
            replay_seconds=keep.forward_seconds,
            backward_seconds=max(self._backward_seconds(), keep.backward_seconds),
            accumulating=accumulating,
            discard_peak_bytes=alone.forward_peak_bytes,
            inverts=True,
        )

    @staticmethod
    def _peaks(alone: _Run, held: _Run) -> BackwardPeaks:
        return BackwardPeaks(alone.backward_peak_bytes, held.backward_peak_bytes, held.backward_peak_bytes)

    def _run(self, *, hold_input: bool) -> _Run:
        profiler, unpacks = self.profiler, 0
        profiler.rewind()
        with profiler.meter.recording() as recording:

            def unpack(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal unpacks
                unpacks += 1
                if unpacks == 1:
                    recording.mark("unpack")
                return tensor

            value = profiler.boundary.fresh()
            recording.mark("forward")
            with saved_tensors_hooks(_same, unpack):  # a segment around is recomputed at the first of them
                inversion, output = self._forward(value, self.way)
            recording.mark("root")
            backward = self._backward(value, output)
            recording.mark("drop input")
            boundary = inversion.boundary
            if hold_input:
                boundary.refer()
            del value, inversion
            recording.mark("drop output")
            if not profiler.last:
                del output
            recording.mark("backward")
            gradients = backward.gradients()
            recording.mark("done")
            del boundary
        phases = Phases(recording.phases)
        start, level = phases.first("forward").start_bytes, phases.first("backward").start_bytes
        link_bytes = profiler.ends.link_bytes
        saved_output = link_bytes - phases.first("drop output").freed_bytes
        before, after = phases.between("backward", "unpack"), phases.between("unpack", "done")
        return _Run(
            forward_peak_bytes=peak_bytes_of(phases.between("forward", "root")) - start,
            saved_bytes=max(level - saved_output, 0),
            saved_output_bytes=saved_output,
            input_bytes=max(start - phases.first("drop input").freed_bytes, 0),
            unpack_peak_bytes=peak_bytes_of(before) - level,
            unpack_bytes=max(before[-1].end_bytes - level, 0),
            backward_peak_bytes=max(peak_bytes_of(after) - level, 0),
            gradients=gradients,
        )

    def _forward(self, value: torch.Tensor, way: Way) -> tuple[Inversion, torch.Tensor]:
        inversion = Inversion(way, value)
        output = inversion.run()
        inversion.output.keep(output)
        return inversion, output

    def _backward(self, value: Any, output: Any) -> StageBackward:
        profiler = self.profiler
        return StageBackward.of(
            profiler.stage,
            profiler.ends,
            value,
            output,
            apart=False,
            gradients_exist=profiler.gradients_exist,
            layout=profiler.layout,
        )

    def _backward_seconds(self) -> float:
        meter, seconds = self.profiler.meter, list[float]()
        while self.profiler.repeats_again(len(seconds), sum(seconds)):
            value = self.profiler.boundary.fresh()
            _, output = self._forward(value, self.way)
            run = self._backward(value, output)
            del value, output
            start = meter.now()
            run.gradients()
            seconds.append(meter.seconds_between(start, meter.now()))
        return max(statistics.median(seconds), 0.0)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _joined(cost: StageCost, option: Option) -> StageCost:
    """The stage with one option more."""
    options = tuple(replace(each, discard_peak_bytes=cost.discard_peak_of(each)) for each in cost.options)
    largest = max(cost.discard_peak_bytes, option.forward_peak_bytes)
    return replace(cost, options=(*options, option), discard_peak_bytes=largest)
