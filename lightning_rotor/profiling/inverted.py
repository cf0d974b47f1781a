"""Measuring a stage as it runs when it is inverted, and finding out whether it may be."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.chain import BackwardPeaks, Option, StageCost
from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.inversion import Output, Way, is_whole, run_inverted
from lightning_rotor.private.values import address_of
from lightning_rotor.profiling.gradients import Gradients, memories_elsewhere
from lightning_rotor.profiling.stage import (
    WORTH_MENTIONING_BYTES,
    StageMeasurement,
    StageProfiler,
    is_timed,
    typical,
)
from lightning_rotor.stages.sequential import Stage, is_invertible


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


def with_inversion(
    profiler: StageProfiler, way: Way, measurement: StageMeasurement, *, not_fused: str
) -> tuple[StageMeasurement, str]:
    """The measurement with an option that inverts the stage; and why it is missing, or does without a fused backward."""
    reason = objection(profiler, measurement.cost)
    if reason:
        return measurement, reason
    option = _Inverted(profiler, replace(way, fused=way.fused and not not_fused)).option(measurement.cost)
    if isinstance(option, str):
        return measurement, option
    return replace(measurement, cost=_joined(measurement.cost, option)), not_fused


def lost_inverse(stage: Stage) -> str:
    """Why an inverse inside of a stage is of no use; empty if there is none, or if the stage itself has one."""
    kinds = dict.fromkeys(type(module).__name__ for _, module in stage.submodules() if is_invertible(module))
    if not kinds or stage.inverse is not None:
        return ""
    merged = ", since something in it changes its input in place or returns a view of it"
    return f"{', '.join(kinds)} is but a part of it{merged * (len(stage.modules) > 1)}"


def objection(profiler: StageProfiler, cost: StageCost) -> str:
    """Why a stage with an inverse cannot be inverted where it is; empty if it can."""
    leaves, ends = profiler.boundary.leaves, profiler.ends
    if any(place is not None for place in ends.inputs):
        return "its input is the caller's, or is read elsewhere, too"
    if any(place is not None for place in ends.outputs):
        return "its output is read by more than the next stage"
    if not any(profiler.boundary.requires_grad):
        return "nothing before it learns"
    if not all(map(is_whole, leaves)) or len(set(map(address_of, leaves))) < len(leaves):
        return "its input is a part of something larger"
    if not cost.recomputable:
        return "it gives other bits when it runs again"
    if cost.pinned_bytes >= WORTH_MENTIONING_BYTES:
        return f"it stores {cost.pinned_bytes} bytes on its graph, which nobody can drop"
    if not cost.keep.saved_tensors:
        return "it saves nothing anyway"
    return ""


@dataclass(frozen=True, slots=True)
class _Inverted:
    profiler: StageProfiler
    way: Way

    def option(self, cost: StageCost) -> Option | str:
        """The costs as an option, or why there is none."""
        keep, pinned_bytes = cost.keep, cost.pinned_bytes
        try:
            alone = self._run(hold_input=False)
        except ExecutionError as error:  # it uses a tensor whose gradient would be lost
            return str(error)
        if alone.input_bytes or alone.saved_output_bytes != self.profiler.ends.link_bytes:
            return "its graph keeps hold of the input"
        # Less is possible: autograd may leave slices where this leaves gradients that fill their memory.
        fewer_bytes = alone.gradients.link_bytes <= keep.input_gradient_bytes
        if not fewer_bytes or alone.gradients.parameter_bytes != keep.parameter_gradient_bytes:
            fused = "fused " if self.way.fused else ""
            return f"its {fused}backward leaves other gradients"
        held = self._run(hold_input=True)
        accumulating = None
        if keep.accumulating is not None:
            again = replace(self, profiler=replace(self.profiler, gradients_exist=True))
            accumulating = again._peaks(again._run(hold_input=False), again._run(hold_input=True))
        peaks = self._peaks(alone, held)
        return Option(
            name="invert, fused" if self.way.fused else "invert",
            saved_bytes=max(alone.saved_bytes - pinned_bytes, 0),  # those count whatever the option
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
            input_gradient_bytes=alone.gradients.link_bytes,
            parameter_gradient_bytes=keep.parameter_gradient_bytes,
            # The same kernels: timed by itself either may seem faster by chance.
            forward_seconds=keep.forward_seconds,
            replay_seconds=keep.forward_seconds,
            backward_seconds=max(self._backward_seconds(), keep.backward_seconds),
            accumulating=accumulating,
            discard_peak_bytes=alone.forward_peak_bytes,
            inverts=True,
            fused=self.way.fused,
        )

    @staticmethod
    def _peaks(alone: _Run, held: _Run) -> BackwardPeaks:
        plain, held_bytes = alone.backward_peak_bytes, held.backward_peak_bytes
        return BackwardPeaks(plain, held_bytes, held_bytes, plain)

    def _run(self, *, hold_input: bool) -> _Run:
        profiler, unpacks = self.profiler, 0
        profiler.rewind()
        elsewhere = memories_elsewhere(profiler.layouts)
        with profiler.meter.recording() as recording:

            def unpack(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal unpacks
                unpacks += 1
                if unpacks == 1:
                    recording.mark("unpack")
                return tensor

            value = profiler.boundary.fresh()
            boundary = Output(self.way.name)
            recording.mark("forward")
            # A surrounding segment is recomputed at the first of them.
            with saved_tensors_hooks(torch.Tensor.detach, unpack):
                output = run_inverted(self.way, value, boundary)
            recording.mark("root")
            backward = profiler.backward(value, output, elsewhere)
            recording.mark("drop input")
            if not hold_input:
                del boundary
            del value
            recording.mark("drop output")
            if not profiler.last:
                del output
            recording.mark("backward")
            gradients = backward.gradients()
            recording.mark("done")
        start, level = recording.first("forward").start_bytes, recording.first("backward").start_bytes
        link_bytes = profiler.ends.link_bytes
        saved_output = link_bytes - recording.first("drop output").freed_bytes
        return _Run(
            forward_peak_bytes=recording.peak_bytes("forward", "root") - start,
            saved_bytes=max(level - saved_output, 0),
            saved_output_bytes=saved_output,
            input_bytes=max(start - recording.first("drop input").freed_bytes, 0),
            unpack_peak_bytes=recording.peak_bytes("backward", "unpack") - level,
            unpack_bytes=max(recording.first("unpack").start_bytes - level, 0),
            backward_peak_bytes=max(recording.peak_bytes("unpack", "done") - level, 0),
            gradients=gradients,
        )

    def _backward_seconds(self) -> float:
        """Seconds of the backward."""
        seconds: list[float] = []
        while not is_timed(self.profiler, seconds):
            seconds.append(self._timed_backward())
        return typical(seconds)

    def _timed_backward(self) -> float:
        meter, value = self.profiler.meter, self.profiler.boundary.fresh()
        output = run_inverted(self.way, value)
        run = self.profiler.backward(value, output, memories_elsewhere(self.profiler.layouts))
        del value, output
        self.profiler.interlude()
        start = meter.now()
        run.gradients()
        return meter.seconds_between(start, meter.now())


def _joined(cost: StageCost, option: Option) -> StageCost:
    """The stage's costs with one more option."""
    options = tuple(replace(each, discard_peak_bytes=cost.discard_peak_of(each)) for each in cost.options)
    largest = max(cost.discard_peak_bytes, option.forward_peak_bytes)
    return replace(cost, options=(*options, option), discard_peak_bytes=largest)
