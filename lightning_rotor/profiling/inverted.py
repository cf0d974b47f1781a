"""Measuring a stage as it runs when it is inverted, and finding out whether it may be."""

from __future__ import annotations

from dataclasses import replace

from lightning_rotor.chain import BackwardPeaks, Option, StageCost
from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.inversion import Way, is_whole
from lightning_rotor.private.values import address_of
from lightning_rotor.profiling.stage import (
    WORTH_MENTIONING_BYTES,
    StageMeasurement,
    StageProfiler,
    is_timed,
    timed_run,
    typical,
)
from lightning_rotor.stages.sequential import Stage, is_invertible


def with_inversion(profiler: StageProfiler, way: Way, measurement: StageMeasurement) -> StageMeasurement:
    """The measurement with an option that inverts the stage, or with the reason why there is none."""
    cost = measurement.cost
    option = objection(profiler, cost) or _option(replace(profiler, way=way), way, cost)
    if isinstance(option, str):
        return replace(measurement, not_inverted=option)
    return replace(measurement, cost=_joined(cost, option), not_inverted="")


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


def _option(profiler: StageProfiler, way: Way, cost: StageCost) -> Option | str:
    """The costs as an option, or why there is none."""
    keep = cost.keep
    try:
        alone = _run(profiler)
    except ExecutionError as error:  # it uses a tensor whose gradient would be lost
        return str(error)
    if alone.saved_input_bytes or alone.saved_output_bytes != profiler.ends.link_bytes:
        return "its graph keeps hold of the input"
    # Less is possible: autograd may leave slices where this leaves gradients that fill their memory.
    fewer_bytes = alone.input_gradient_bytes <= keep.input_gradient_bytes
    if not fewer_bytes or alone.parameter_gradient_bytes != keep.parameter_gradient_bytes:
        return f"its {'fused ' * way.fused}backward leaves other gradients"
    peaks, accumulating = _peaks(profiler, alone), None
    if keep.accumulating is not None:
        again = replace(profiler, gradients_exist=True)
        accumulating = _peaks(again, _run(again))
    return replace(
        alone,
        name="invert, fused" if way.fused else "invert",
        saved_bytes=max(alone.saved_bytes - cost.pinned_bytes, 0),  # those count whatever the option
        saved_tensors=1,
        replay_peak_bytes=alone.forward_peak_bytes,
        backward_peak_bytes=peaks.plain_bytes,
        backward_segment_peak_bytes=peaks.segment_bytes,
        backward_held_peak_bytes=peaks.held_bytes,
        # The same kernels: timed by itself either may seem faster by chance.
        forward_seconds=keep.forward_seconds,
        replay_seconds=keep.forward_seconds,
        backward_seconds=max(_backward_seconds(profiler), keep.backward_seconds),
        accumulating=accumulating,
        discard_peak_bytes=alone.forward_peak_bytes,
        needs_exact_output=False,
        inverts=True,
        fused=way.fused,
    )


def _run(profiler: StageProfiler, *, hold_input: bool = False) -> Option:
    """Bytes of one run, in which the rebuilt input is for this stage alone, or for others, too."""
    return profiler.recorded_run(hold_input=hold_input, hold_output=profiler.last)[0]


def _peaks(profiler: StageProfiler, alone: Option) -> BackwardPeaks:
    """Peaks of the backward, one of which is known from a run of the stage alone."""
    plain, held = alone.backward_peak_bytes, _run(profiler, hold_input=True).backward_peak_bytes
    return BackwardPeaks(plain, held, held, plain)


def _backward_seconds(profiler: StageProfiler) -> float:
    """Seconds of the backward."""
    seconds: list[float] = []
    while not is_timed(profiler, seconds):
        seconds.append(timed_run(profiler)[1])
    return typical(seconds)


def _joined(cost: StageCost, option: Option) -> StageCost:
    """The stage's costs with one more option."""
    options = tuple(replace(each, discard_peak_bytes=cost.discard_peak_of(each)) for each in cost.options)
    largest = max(cost.discard_peak_bytes, option.forward_peak_bytes)
    return replace(cost, options=(*options, option), discard_peak_bytes=largest)
