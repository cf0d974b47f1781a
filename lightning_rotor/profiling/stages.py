"""Measuring one stage: bytes from one run each per case, seconds as the median of several.

Every run owns a fresh copy of the stage's input and starts its backward from a node that makes the gradient of the output on the spot,
so that everything dies exactly when it would in training: the gradient after the first operator that reads it, the input with the last
saved tensor that needs it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_rotor.chain import Option, StageCost
from lightning_rotor.generators import GeneratorStates
from lightning_rotor.options import run_stage
from lightning_rotor.profiling.boundary import Boundary
from lightning_rotor.profiling.meters import Meter, MeteredPhase
from lightning_rotor.profiling.storages import Scouting, Storage, UnmeasuredSkip
from lightning_rotor.recomputation import recomputed
from lightning_rotor.sequential import Stage
from lightning_rotor.tensors import requested_bytes, tensors_in

# Long enough for the noise of a busy machine to even out within one run.
_ENOUGH_SECONDS = 0.5


class _GradientSource(torch.autograd.Function):
    """An empty tensor whose backward allocates the gradient of each input, as the backward of the stage behind would.

    The last ``apart`` gradients are slices of something larger.
    """

    @staticmethod
    def forward(ctx: Any, apart: int, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.likes = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in outputs]
        ctx.apart = apart
        return torch.empty(0, device=outputs[0].device)  # nothing to count

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        # Ones, not empty: uninitialized memory may hold denormals, whose arithmetic is slow.
        whole = len(ctx.likes) - ctx.apart
        dense = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(1)
            for shape, stride, dtype, device in ctx.likes[:whole]
        ]
        slices = [_slice_like(shape, dtype, device) for shape, _, dtype, device in ctx.likes[whole:]]
        return None, *dense, *slices


def _slice_like(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Ones that do not lie densely in their memory, though it is hardly larger."""
    if not shape:
        return torch.ones((), dtype=dtype, device=device)
    rows = torch.ones(shape[0], shape[1:].numel() + 1, dtype=dtype, device=device)
    return rows[:, :-1].unflatten(1, shape[1:]) if len(shape) > 1 else rows[:, 0]


@dataclass(frozen=True, slots=True, eq=False)
class StageEnds:
    """Which storages a stage takes and leaves behind, apart from its link.

    Attributes:
        skips: Numbers of the skips that it reads or makes. What is measured speaks of their places in here, so that it serves equal stages.
        inputs: For each leaf of its input, the place of its skip, or None for the link.
        outputs: For each leaf of its output likewise.
        passed: For each leaf of its input, whether it is a skip that somebody reads later.
        link_bytes: What it makes for the next stage alone, or for the caller.
        made_bytes: Sizes of the skips that it makes.
    """

    skips: tuple[int, ...]
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    passed: tuple[bool, ...]
    link_bytes: int
    made_bytes: Mapping[int, int]

    @classmethod
    def of(
        cls, stage: Stage, number: int, seen: Scouting, numbered: Mapping[Storage, tuple[int, UnmeasuredSkip]]
    ) -> StageEnds:
        """What is known of the stage with this number among the merged ones."""
        group = seen.groups[number]
        taken = [storage for read in stage.reads for storage in seen.storages[read]]
        given = [storage for write in stage.writes for storage in seen.storages[write]]
        own = dict.fromkeys(storage for storage in (*taken, *given) if storage is not None and storage in numbered)
        places = {storage: place for place, storage in enumerate(own)}

        def is_read_later(storage: Storage | None) -> bool:
            if storage is None or storage not in numbered:
                return False
            _, skip = numbered[storage]
            return skip.is_needed_after(number)

        made = {storage for storage in given if storage is not None and storage.born in group}
        return cls(
            tuple(numbered[storage][0] for storage in own),
            tuple(None if storage is None else places.get(storage) for storage in taken),
            tuple(None if storage is None else places.get(storage) for storage in given),
            tuple(map(is_read_later, taken)),
            sum(storage.size_bytes for storage in made if storage not in numbered),
            {places[storage]: storage.size_bytes for storage in made if storage in numbered},
        )

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for stages that are alike in this."""
        return self.inputs, self.outputs, self.passed, self.link_bytes, tuple(sorted(self.made_bytes.items()))

    def lasting(self, leaves: Sequence[Any]) -> list[Any]:
        """Those leaves of an input that are skips: somebody else holds them, too."""
        return [leaf for leaf, place in zip(leaves, self.inputs, strict=True) if place is not None]


@dataclass(frozen=True, slots=True)
class SkipGradient:
    """What a reader of a skip leaves of its gradient.

    Attributes:
        size_bytes: Memory that it keeps alive, which may be more than its own: a slice of a larger gradient.
        is_dense: It has its memory for itself, so that earlier readers can add to it in place.
    """

    size_bytes: int
    is_dense: bool


@dataclass(frozen=True, slots=True)
class StageMeasurement:
    """Costs of a stage, and what it does to gradients of skips.

    Attributes:
        cost: Where later readers leave dense gradients.
        cost_apart: Where they leave slices, so that the stage's own gradients cannot be added in place.
        skip_gradients: By the place of the skip, see :class:`StageEnds`.
    """

    cost: StageCost
    cost_apart: StageCost
    skip_gradients: Mapping[int, SkipGradient]


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
    saved_skips: tuple[int, ...]
    skip_gradients: Mapping[int, SkipGradient]


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
        ends: Storages that it takes and leaves behind.
        meter: Of the device.
        last: The stage ends the chain, so the caller holds its output during the whole backward.
        repeats: Timed runs, the median counts; fewer if they are so long that noise does not matter.
        generators: If the stage may draw random numbers: where every run starts, so that all runs take the same course.
        gradients_apart: Gradients that later readers of a skip leave are slices, to which nothing can be added in place.
    """

    stage: Stage
    boundary: Boundary
    ends: StageEnds
    meter: Meter
    last: bool
    repeats: int
    generators: GeneratorStates | None = None
    gradients_apart: bool = False

    def measure(self, *, recomputable: bool) -> StageMeasurement:
        """Bytes and seconds of the stage.

        Args:
            recomputable: Whether it may be in a segment; otherwise it is never run as one.
        """
        if self.meter.needs_warm_up:
            self._keep_run(hold_input=False, hold_output=False)
        seconds = self._seconds()
        cost, gradients = self._cost(seconds, recomputable=recomputable)
        apart = cost
        if any(self.ends.passed) and gradients:
            apart, _ = replace(self, gradients_apart=True)._cost(seconds, recomputable=recomputable)
        return StageMeasurement(cost, apart, gradients)

    def _cost(self, seconds: _Seconds, *, recomputable: bool) -> tuple[StageCost, Mapping[int, SkipGradient]]:
        sizes = self._keep_run(hold_input=False, hold_output=False)
        alone = self._keep_run(hold_input=False, hold_output=True) if self.last else sizes
        # An input that the stage does not save is no business of its backward, whoever holds it.
        held = self._keep_run(hold_input=True, hold_output=self.last) if sizes.saved_input_bytes else alone
        segment = self._segment_run() if recomputable else _never_a_segment(sizes)
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
            saved_skips=sizes.saved_skips,
        )
        cost = StageCost(
            name=self.stage.name,
            output_bytes=self.ends.link_bytes,
            discard_peak_bytes=segment.discard_peak_bytes,
            # The discarded forward runs the same kernels. Timed for itself it may come out faster by chance, and then a plan
            # would recompute for nothing.
            discard_seconds=seconds.forward,
            options=(keep,),
            pinned_bytes=segment.pinned_bytes,
            recomputable=recomputable,
        )
        return cost, sizes.skip_gradients

    def _keep_run(self, *, hold_input: bool, hold_output: bool) -> _KeepRun:
        saves = unpacks = 0
        in_backward = False  # a stage may differentiate in its own forward
        saved: set[int] = set()
        self._rewind()
        with self.meter.recording() as recording:

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal saves
                saves += 1
                saved.add(tensor.untyped_storage().data_ptr())
                recording.mark("save")
                return tensor

            def unpack(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal unpacks
                unpacks += in_backward
                if in_backward and unpacks == 1:
                    recording.mark("unpack")
                return tensor

            value = self.boundary.fresh()
            lasting = self.ends.lasting(tree_flatten(value)[0])
            recording.mark("forward")
            with saved_tensors_hooks(pack, unpack):
                output = run_stage(self.stage, value)
            saved_skips = self._saved_skips(value, output, saved)
            recording.mark("root")
            ends = _BackwardEnds.of(self.stage, self.ends, value, output, apart=self.gradients_apart)
            recording.mark("drop input")
            if not hold_input:
                del value
            recording.mark("drop output")
            if not hold_output:
                del output
            recording.mark("backward")
            in_backward = True
            gradients = ends.gradients()
            recording.mark("done")
        phases = _Phases(recording.phases)
        start, level = phases.first("forward").start_bytes, phases.first("backward").start_bytes
        # All in the meter's bytes: CUDA's allocator hands out more than a tensor asks for. The copy of the input came first.
        lasting_bytes = requested_bytes(lasting)
        saved_input = max(start - lasting_bytes - _freed(phases.first("drop input")), 0)
        link_bytes, made_bytes = self.ends.link_bytes, sum(self.ends.made_bytes.values())
        saved_made = sum(self.ends.made_bytes.get(place, 0) for place in saved_skips)
        kept = link_bytes + made_bytes - saved_made - _freed(phases.first("drop output"))
        saved_output = min(max(kept, 0), link_bytes)
        before, after = phases.between("backward", "unpack" if unpacks else "done"), phases.between("unpack", "done")
        unpack_peak = _peak(before) - level
        return _KeepRun(
            forward_peak_bytes=_peak(phases.between("forward", "root")) - start,
            replay_peak_bytes=max(_peak(phases.until_last_save()) - start, 0),
            saved_bytes=max(level - lasting_bytes - saved_input - saved_output - saved_made, 0),
            saved_input_bytes=saved_input,
            saved_output_bytes=saved_output,
            saved_tensors=saves,
            unpack_peak_bytes=unpack_peak,
            unpack_bytes=max(before[-1].end_bytes - level, 0),
            backward_peak_bytes=max(_peak(after) - level, 0) if unpacks else unpack_peak,
            input_gradient_bytes=gradients.link_bytes,
            parameter_gradient_bytes=gradients.parameter_bytes,
            saved_skips=saved_skips,
            skip_gradients=gradients.of_skips,
        )

    def _saved_skips(self, value: Any, output: Any, saved: set[int]) -> tuple[int, ...]:
        """Places of the skips among the saved storages."""
        leaves = (*tree_flatten(value)[0], *tree_flatten(output)[0])
        places = (*self.ends.inputs, *self.ends.outputs)
        pairs = ((leaf, place) for leaf, place in zip(leaves, places, strict=True) if place is not None)
        return tuple(sorted({place for leaf, place in pairs if leaf.untyped_storage().data_ptr() in saved}))

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
            lasting = self.ends.lasting(leaves)
            recording.mark("forward")
            output = recomputed(function, *leaves, draws_random=False)
            recording.mark("root")
            ends = _BackwardEnds.of(self.stage, self.ends, leaves, output, apart=self.gradients_apart)
            del output
            recording.mark("drop input")
            leaves.clear()
            recording.mark("backward")
            ends.gradients()
            recording.mark("done")
            del lasting
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
            ends = _BackwardEnds.of(self.stage, self.ends, value, output, apart=self.gradients_apart)
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

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            run_stage(self.stage, value)
        last_save = self.meter.seconds_between(times[0], times[-1])
        total = self.meter.seconds_between(times[0], self.meter.now())
        return min(max(last_save / total, 0.0), 1.0) if total > 0 else 1.0


class _BackwardEnds:
    """Where a backward starts and what it computes, without holding the tensors in between."""

    def __init__(
        self,
        root: torch.Tensor | None,
        inputs: list[GradientEdge],
        places: list[int | None],
        parameters: list[torch.nn.Parameter],
    ) -> None:
        self._root = root
        self._inputs = inputs
        self._places = places
        self._parameters = parameters

    @classmethod
    def of(cls, stage: Stage, ends: StageEnds, value: Any, output: Any, *, apart: bool) -> _BackwardEnds:
        leaves = tree_flatten(value)[0]
        # Later readers of a skip have left its gradient; what the stage hands on itself gets it as an output.
        handed_on = {id(tensor) for tensor in tensors_in(output)}
        passed = [
            leaf
            for leaf, later in zip(leaves, ends.passed, strict=True)
            if later and leaf.requires_grad and id(leaf) not in handed_on
        ]
        outputs = [*(tensor for tensor in tensors_in(output) if tensor.requires_grad), *passed]
        root = _GradientSource.apply(len(passed) if apart else 0, *outputs) if outputs else None
        learning = [
            (leaf, place)
            for leaf, place in zip(leaves, ends.inputs, strict=True)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        inputs = [get_gradient_edge(leaf) for leaf, _ in learning]
        parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        return cls(root, inputs, [place for _, place in learning], parameters)

    def gradients(self) -> _Gradients:
        """Run the backward once."""
        root, self._root = self._root, None
        if root is None or not (self._inputs or self._parameters):
            return _Gradients(0, {}, 0)
        # Not backward(): .grad and the hooks of gradient accumulation are the user's.
        ends: Any = [*self._inputs, *self._parameters]
        gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(
            root, ends, torch.empty_like(root), allow_unused=True
        )
        by_storage: dict[int, int] = {}
        of_skips: dict[int, SkipGradient] = {}
        # What several share counts for the skip that was made first, whose gradient is needed longest.
        pairs = [
            (place, gradient) for place, gradient in zip(self._places, gradients, strict=False) if gradient is not None
        ]
        for place, gradient in sorted(
            ((place, gradient) for place, gradient in pairs if place is not None), key=lambda pair: pair[0]
        ):
            size = gradient.untyped_storage().nbytes()
            is_new = by_storage.setdefault(gradient.untyped_storage().data_ptr(), place) == place
            of_skips[place] = SkipGradient(size if is_new else 0, size == gradient.nbytes)
        link = [
            gradient
            for place, gradient in pairs
            if place is None and gradient.untyped_storage().data_ptr() not in by_storage
        ]
        parameter_bytes = sum(
            # Accumulation copies a gradient that is no dense tensor of its own (an expanded one, say).
            parameter.nbytes
            if gradient.layout == torch.strided
            else requested_bytes([gradient._indices(), gradient._values()])
            for parameter, gradient in zip(self._parameters, gradients[len(self._inputs) :], strict=True)
            if gradient is not None
        )
        return _Gradients(requested_bytes(link), of_skips, parameter_bytes)


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Bytes that a backward leaves: for its link, for skips by place, and for parameters once they are accumulated."""

    link_bytes: int
    of_skips: Mapping[int, SkipGradient]
    parameter_bytes: int


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
