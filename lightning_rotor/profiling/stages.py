"""Measuring one stage: bytes from one run each per case, seconds as the median of several.

Every run owns a fresh copy of the stage's input and starts its backward from a node that makes the gradient of the output on the spot,
so that everything dies exactly when it would in training: the gradient after the first operator that reads it, the input with the last
saved tensor that needs it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_rotor.chain import Option, StageCost
from lightning_rotor.generators import GeneratorStates
from lightning_rotor.options import run_stage
from lightning_rotor.profiling.boundary import Boundary, storage_bytes, tensors_in
from lightning_rotor.profiling.meters import Meter, MeteredPhase
from lightning_rotor.recomputation import recomputed
from lightning_rotor.sequential import Stage

# Long enough for the noise of a busy machine to even out within one run.
_ENOUGH_SECONDS = 0.5


class _GradientSource(torch.autograd.Function):
    """An empty tensor whose backward allocates the gradient of each input, as the backward of the stage behind would."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.likes = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in outputs]
        return torch.empty(0, device=outputs[0].device)  # nothing to count

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        # Ones, not empty: uninitialized memory may hold denormals, whose arithmetic is slow.
        return tuple(
            torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(1)
            for shape, stride, dtype, device in ctx.likes
        )


@dataclass(frozen=True, slots=True)
class _KeepRun:
    """Bytes of one recorded forward and its backward."""

    forward_peak_bytes: int
    replay_peak_bytes: int
    saved_bytes: int
    saved_input_bytes: int
    saved_output_bytes: int
    saved_tensors: int
    unpack_peak_bytes: int
    unpack_bytes: int
    backward_peak_bytes: int
    input_gradient_bytes: int
    parameter_gradient_bytes: int


@dataclass(frozen=True, slots=True)
class _SegmentRun:
    """Bytes of a stage that is a segment of its own; the backward counts from the state right after the recomputation."""

    discard_peak_bytes: int
    pinned_bytes: int
    recomputed_peak_bytes: int


@dataclass(frozen=True, slots=True)
class _Seconds:
    forward: float
    replay: float
    backward: float


@dataclass(frozen=True, slots=True)
class StageProfiler:
    """Measures one stage at one boundary.

    Attributes:
        stage: The stage.
        boundary: Its input.
        output_bytes: New storage in its output.
        meter: Of the device.
        last: The stage ends the chain, so the caller holds its output during the whole backward.
        repeats: Timed runs, the median counts; fewer if they are so long that noise does not matter.
        generators: If the stage may draw random numbers: where every run starts, so that all runs take the same course.
    """

    stage: Stage
    boundary: Boundary
    output_bytes: int
    meter: Meter
    last: bool
    repeats: int
    generators: GeneratorStates | None = None

    def measure(self, *, recomputable: bool) -> StageCost:
        """Bytes and seconds of the stage.

        Args:
            recomputable: Whether it may be in a segment; otherwise it is never run as one.
        """
        if self.meter.needs_warm_up:
            self._keep_run(hold_input=False, hold_output=False)
        sizes = self._keep_run(hold_input=False, hold_output=False)
        alone = self._keep_run(hold_input=False, hold_output=True) if self.last else sizes
        # An input that the stage does not save is no business of its backward, whoever holds it.
        held = self._keep_run(hold_input=True, hold_output=self.last) if sizes.saved_input_bytes else alone
        segment = self._segment_run() if recomputable else _never_a_segment(sizes)
        seconds = self._seconds()
        segment_peak = max(segment.recomputed_peak_bytes - sizes.saved_bytes - sizes.saved_output_bytes, 0)
        keep = Option(
            name="keep",
            saved_bytes=max(sizes.saved_bytes - segment.pinned_bytes, 0),
            saved_input_bytes=sizes.saved_input_bytes,
            saved_output_bytes=sizes.saved_output_bytes,
            saved_tensors=sizes.saved_tensors,
            forward_peak_bytes=sizes.forward_peak_bytes,
            replay_peak_bytes=sizes.replay_peak_bytes,
            unpack_peak_bytes=alone.unpack_peak_bytes,
            unpack_bytes=alone.unpack_bytes,
            backward_peak_bytes=alone.backward_peak_bytes,
            backward_segment_peak_bytes=segment_peak if sizes.saved_tensors else alone.backward_peak_bytes,
            backward_held_peak_bytes=held.backward_peak_bytes,
            input_gradient_bytes=sizes.input_gradient_bytes,
            parameter_gradient_bytes=sizes.parameter_gradient_bytes,
            forward_seconds=seconds.forward,
            replay_seconds=seconds.replay,
            backward_seconds=seconds.backward,
        )
        return StageCost(
            name=self.stage.name,
            output_bytes=self.output_bytes,
            discard_peak_bytes=segment.discard_peak_bytes,
            # The discarded forward runs the same kernels. Timed for itself it may come out faster by chance, and then a plan
            # would recompute for nothing.
            discard_seconds=seconds.forward,
            options=(keep,),
            pinned_bytes=segment.pinned_bytes,
            recomputable=recomputable,
        )

    def _keep_run(self, *, hold_input: bool, hold_output: bool) -> _KeepRun:
        saves = unpacks = 0
        in_backward = False  # a stage may differentiate in its own forward
        self._rewind()
        with self.meter.recording() as recording:

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal saves
                saves += 1
                recording.mark("save")
                return tensor

            def unpack(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal unpacks
                unpacks += in_backward
                if in_backward and unpacks == 1:
                    recording.mark("unpack")
                return tensor

            value = self.boundary.fresh()
            recording.mark("forward")
            with saved_tensors_hooks(pack, unpack):
                output = run_stage(self.stage, value)
            recording.mark("root")
            ends = _BackwardEnds.of(self.stage, value, output)
            recording.mark("drop input")
            if not hold_input:
                del value
            recording.mark("drop output")
            if not hold_output:
                del output
            recording.mark("backward")
            in_backward = True
            input_gradients, parameter_gradients = ends.gradients()
            recording.mark("done")
        phases = _Phases(recording.phases)
        start, level = phases.first("forward").start_bytes, phases.first("backward").start_bytes
        # All in the meter's bytes: CUDA's allocator hands out more than a tensor asks for. The copy of the input came first.
        saved_input = start - _freed(phases.first("drop input"))
        saved_output = min(max(self.output_bytes - _freed(phases.first("drop output")), 0), self.output_bytes)
        before, after = phases.between("backward", "unpack" if unpacks else "done"), phases.between("unpack", "done")
        unpack_peak = _peak(before) - level
        return _KeepRun(
            forward_peak_bytes=_peak(phases.between("forward", "root")) - start,
            replay_peak_bytes=max(_peak(phases.until_last_save()) - start, 0),
            saved_bytes=max(level - saved_input - saved_output, 0),
            saved_input_bytes=saved_input,
            saved_output_bytes=saved_output,
            saved_tensors=saves,
            unpack_peak_bytes=unpack_peak,
            unpack_bytes=max(before[-1].end_bytes - level, 0),
            backward_peak_bytes=max(_peak(after) - level, 0) if unpacks else unpack_peak,
            input_gradient_bytes=storage_bytes(input_gradients),
            parameter_gradient_bytes=parameter_gradients,
        )

    def _rewind(self) -> None:
        if self.generators is not None:
            self.generators.restore()

    def _segment_run(self) -> _SegmentRun:
        self._rewind()
        with self.meter.recording() as recording:
            calls = 0

            def function(*inputs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 1:
                    return run_stage(self.stage, tree_unflatten(inputs, spec))
                self._rewind()
                recording.mark("recompute")
                try:
                    return run_stage(self.stage, tree_unflatten(inputs, spec))
                finally:
                    recording.mark("recomputed")

            leaves, spec = tree_flatten(self.boundary.fresh())
            recording.mark("forward")
            output = recomputed(function, *leaves, draws_random=False)
            recording.mark("root")
            ends = _BackwardEnds.of(self.stage, leaves, output)
            del output
            recording.mark("drop input")
            leaves.clear()
            recording.mark("backward")
            ends.gradients()
            recording.mark("done")
        phases = _Phases(recording.phases)
        start, level = phases.first("forward").start_bytes, phases.first("backward").start_bytes
        after = phases.between("recomputed", "done")
        return _SegmentRun(
            discard_peak_bytes=_peak(phases.between("forward", "root")) - start,
            # A segment that saves nothing does not hold its input either.
            pinned_bytes=max(level - start + _freed(phases.first("drop input")), 0),
            recomputed_peak_bytes=max(_peak(after) - level, 0) if after else 0,
        )

    def _seconds(self) -> _Seconds:
        forward: list[float] = []
        backward: list[float] = []
        while len(forward) < self.repeats and sum(forward) + sum(backward) < _ENOUGH_SECONDS:
            value = self.boundary.fresh()
            start = self.meter.now()
            output = run_stage(self.stage, value)
            forward.append(self.meter.seconds_between(start, self.meter.now()))
            ends = _BackwardEnds.of(self.stage, value, output)
            del value, output
            start = self.meter.now()
            ends.gradients()
            backward.append(self.meter.seconds_between(start, self.meter.now()))
        forward_seconds = max(statistics.median(forward), 0.0)
        return _Seconds(forward_seconds, forward_seconds * self._replayed_part(), max(statistics.median(backward), 0.0))

    def _replayed_part(self) -> float:
        """How much of a forward is over at its last saved tensor, from 0 to 1."""
        value = self.boundary.fresh()
        times = [self.meter.now()]

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            times.append(self.meter.now())
            return tensor

        with saved_tensors_hooks(pack, _same):
            run_stage(self.stage, value)
        last_save = self.meter.seconds_between(times[0], times[-1])
        total = self.meter.seconds_between(times[0], self.meter.now())
        return min(max(last_save / total, 0.0), 1.0) if total > 0 else 1.0


class _BackwardEnds:
    """Where a backward starts and what it computes, without holding the tensors in between."""

    def __init__(
        self, root: torch.Tensor | None, inputs: list[GradientEdge], parameters: list[torch.nn.Parameter]
    ) -> None:
        self._root = root
        self._inputs = inputs
        self._parameters = parameters

    @classmethod
    def of(cls, stage: Stage, value: Any, output: Any) -> _BackwardEnds:
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        root = _GradientSource.apply(*outputs) if outputs else None
        inputs = [get_gradient_edge(tensor) for tensor in tensors_in(value) if tensor.requires_grad]
        return cls(root, inputs, [parameter for parameter in stage.parameters() if parameter.requires_grad])

    def gradients(self) -> tuple[list[torch.Tensor], int]:
        """Run the backward once; gradients of the inputs, and bytes of those of the parameters once they are accumulated."""
        root, self._root = self._root, None
        if root is None or not (self._inputs or self._parameters):
            return [], 0
        # Not backward(): .grad and the hooks of gradient accumulation are the user's.
        ends: Any = [*self._inputs, *self._parameters]
        gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(
            root, ends, torch.empty_like(root), allow_unused=True
        )
        inputs = [gradient for gradient in gradients[: len(self._inputs)] if gradient is not None]
        return inputs, sum(
            # Accumulation copies a gradient that is no dense tensor of its own (an expanded one, say).
            parameter.nbytes
            if gradient.layout == torch.strided
            else storage_bytes([gradient._indices(), gradient._values()])
            for parameter, gradient in zip(self._parameters, gradients[len(self._inputs) :], strict=True)
            if gradient is not None
        )


class _Phases:
    """Finds the phases of a recording by their labels."""

    def __init__(self, phases: Sequence[MeteredPhase]) -> None:
        self._phases = phases
        self._labels = [phase.label for phase in phases]

    def first(self, label: str) -> MeteredPhase:
        return self._phases[self._labels.index(label)]

    def between(self, begin: str, end: str) -> Sequence[MeteredPhase]:
        """From the first phase labelled ``begin`` up to the first labelled ``end``, without it."""
        if begin not in self._labels:
            return ()
        return self._phases[self._labels.index(begin) : self._labels.index(end)]

    def until_last_save(self) -> Sequence[MeteredPhase]:
        """The forward up to its last saved tensor; nothing if it saves none."""
        saves = [index for index, label in enumerate(self._labels) if label == "save"]
        return self._phases[self._labels.index("forward") : saves[-1]] if saves else ()


def _never_a_segment(sizes: _KeepRun) -> _SegmentRun:
    """Stands in for a run that cannot be made: the stage changes its input, and no schedule recomputes it."""
    recomputed_peak = sizes.backward_peak_bytes + sizes.saved_bytes + sizes.saved_output_bytes
    return _SegmentRun(sizes.forward_peak_bytes, 0, recomputed_peak)


def _peak(phases: Sequence[MeteredPhase]) -> int:
    return max((phase.peak_bytes for phase in phases), default=0)


def _freed(phase: MeteredPhase) -> int:
    return phase.start_bytes - phase.end_bytes


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
