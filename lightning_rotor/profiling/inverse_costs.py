"""Costs of a stage that drops its input and rebuilds it from the output, and the reasons why it may not.

A stage in its chain can be inverted if nobody else needs its input or output, and if inverting leaves the same
gradients as keeping. Its seconds of computation are those of the stage as it is kept: the kernels are the same, and
timed by itself either may seem faster by chance.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_rotor.chain import BackwardPeaks, Option, StageCost
from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.boundary import is_whole
from lightning_rotor.execution.inversion import Way
from lightning_rotor.private.values import address_of
from lightning_rotor.profiling.complaints import WORTH_MENTIONING_BYTES
from lightning_rotor.profiling.stage_profiler import StageMeasurement, StageProfiler
from lightning_rotor.profiling.stage_seconds import seconds_by_turns


def with_inverse(profiler: StageProfiler, measurement: StageMeasurement) -> StageMeasurement:
    """Costs of a stage that has an inverse with that option, or with the reason why there is none."""
    assert profiler.way is not None
    objection = _objection(profiler, measurement.cost)
    if not objection:
        option = _inverted(profiler, profiler.way, measurement.cost)
        if isinstance(option, Option):
            return measurement.with_options([option])
        objection = option
    return replace(measurement, cost=replace(measurement.cost, not_inverted=objection))


def _objection(profiler: StageProfiler, cost: StageCost) -> str:
    """Why a stage with an inverse cannot be inverted where it is; empty if it can."""
    leaves = profiler.boundary.leaves
    ends = profiler.ends
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


def _inverted(profiler: StageProfiler, way: Way, cost: StageCost) -> Option | str:
    """The costs as an option, or why there is none."""
    keep = cost.keep
    try:
        alone, peaks = _run_inverted(profiler)
    except ExecutionError as error:
        # It uses a tensor whose gradient would be lost.
        return str(error)
    if alone.saved_input_bytes or alone.saved_output_bytes != profiler.ends.link_bytes:
        return "its graph keeps hold of the input"
    # Less is possible: autograd may leave slices where this leaves gradients that fill their memory.
    is_no_larger = alone.input_gradient_bytes <= keep.input_gradient_bytes
    if not is_no_larger or alone.parameter_gradient_bytes != keep.parameter_gradient_bytes:
        return f"its {'fused ' if way.fused else ''}backward leaves other gradients"
    accumulating = None
    if keep.accumulating is not None:
        _, accumulating = _run_inverted(replace(profiler, gradients_exist=True))
    # Only the backward's, whose rebuilding of the input the kept stage does not have.
    (seconds,) = seconds_by_turns([profiler])
    return replace(
        alone,
        name="invert, fused" if way.fused else "invert",
        # Pinned bytes count for the stage, whatever the option.
        saved_bytes=max(alone.saved_bytes - cost.pinned_bytes, 0),
        saved_tensors=1,
        replay_peak_bytes=alone.forward_peak_bytes,
        backward_peak_bytes=peaks.plain_bytes,
        backward_segment_peak_bytes=peaks.segment_bytes,
        backward_held_peak_bytes=peaks.held_bytes,
        forward_seconds=keep.forward_seconds,
        replay_seconds=keep.forward_seconds,
        # Rebuilding the input comes on top of the same backward.
        backward_seconds=max(seconds.backward, keep.backward_seconds),
        accumulating=accumulating,
        discard_peak_bytes=alone.forward_peak_bytes,
        needs_exact_output=False,
        inverts=True,
        fused=way.fused,
    )


def _run_inverted(profiler: StageProfiler) -> tuple[Option, BackwardPeaks]:
    """Bytes of a run, and peaks of the backward, in which the rebuilt input is for the stage alone, or for others."""
    alone, _ = profiler.recorded_run(hold_input=False, hold_output=profiler.last)
    # Who holds the input wants it rebuilt, and has it until its own backward is done.
    held, _ = profiler.recorded_run(hold_input=True, hold_output=profiler.last)
    peaks = BackwardPeaks(
        plain_bytes=alone.backward_peak_bytes,
        segment_bytes=held.backward_peak_bytes,
        held_bytes=held.backward_peak_bytes,
        replayed_bytes=alone.backward_peak_bytes,
    )
    return alone, peaks
