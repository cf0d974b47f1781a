"""Measuring one stage: bytes from one run each per case, seconds from several.

Every run owns a fresh copy of the stage's input, and a node makes the gradient of the output on the spot. So everything
dies as in training: the gradient after the first operator that reads it, the input with the last saved tensor that
needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.capture.compiled import is_compiled
from lightning_rotor.chain import Option, StageCost
from lightning_rotor.errors import ModelError
from lightning_rotor.execution.options import run_stage
from lightning_rotor.execution.recomputation import NO_STATE, recomputed
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.private.torch_names import version_of
from lightning_rotor.private.values import address_of, bytes_in_blocks, tensors_in, tree_flatten, tree_unflatten
from lightning_rotor.profiling.gradients import (
    NO_LAYOUTS,
    Layouts,
    LinkLayouts,
    Memories,
    SkipGradient,
    StageBackward,
    StageEnds,
)
from lightning_rotor.profiling.meters import Meter, MeteredPhase, Recording
from lightning_rotor.profiling.storages import Boundary
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.snapshot import Snapshot
from lightning_rotor.stages.state import GeneratorStates

# ----------------------------------------------------------------------------------------------------
# Reading what a meter has recorded, by the labels of its marks.


class Phases:
    """The phases of a recording, found by their labels."""

    def __init__(self, phases: Sequence[MeteredPhase]) -> None:
        self._phases = phases
        self._labels = [phase.label for phase in phases]

    def first(self, label: str) -> MeteredPhase:
        """The first phase with this label."""
        return self._phases[self._labels.index(label)]

    def between(self, begin: str, end: str) -> Sequence[MeteredPhase]:
        """The phases from the first labelled ``begin`` up to the first labelled ``end``, without it."""
        if begin not in self._labels:
            return ()
        return self._phases[self._labels.index(begin) : self._labels.index(end)]

    def until_last_save(self) -> Sequence[MeteredPhase]:
        """The forward's phases up to its last saved tensor; none if it saves none."""
        saves = [index for index, label in enumerate(self._labels) if label == "save"]
        return self._phases[self._labels.index("forward") : saves[-1]] if saves else ()


def peak_bytes_of(phases: Sequence[MeteredPhase]) -> int:
    """The highest level in several phases; 0 if there are none."""
    return max((phase.peak_bytes for phase in phases), default=0)


# ----------------------------------------------------------------------------------------------------
# How often to time a run, and what to take for its duration.


_ENOUGH_SECONDS = 0.5
"""Seconds in which the noise of a busy machine evens out."""
_SHORT_SECONDS = 0.01
"""Seconds so few that one interruption decides what a few runs take."""
_MORE = 3


def is_enough(seconds: Sequence[float], repeats: int) -> bool:
    """True if a run was timed often enough: ``repeats`` times, less often if it is long, more often if it is short."""
    total = sum(seconds)
    return total >= _ENOUGH_SECONDS or len(seconds) >= (repeats if total >= _SHORT_SECONDS else _MORE * repeats)


def typical(seconds: Sequence[float]) -> float:
    """The middle of the faster half, for interruptions never make a run faster."""
    return max(sorted(seconds)[len(seconds) // 4], 0.0)


# ----------------------------------------------------------------------------------------------------


WORTH_MENTIONING_BYTES = 1024
"""More than the 8 bytes for a Python number (x * 2) that stays with the graph."""
# Smaller shares of a backward's peak are not measured again with existing gradients, to save time.
_NEGLIGIBLE = 1 / 256


@dataclass(frozen=True, slots=True)
class StageMeasurement:
    """Costs of a stage, and what it does to gradients of skips (by place, see :class:`StageEnds`).

    ``given_bytes`` are gradients of skips that it was given, as far as its peaks count them.
    """

    cost: StageCost
    skip_gradients: Mapping[int, SkipGradient]
    link_layouts: LinkLayouts
    passes_on: bool
    given_bytes: int


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
    saved_state_bytes: int
    skip_gradients: Mapping[int, SkipGradient]
    link_layouts: LinkLayouts
    passes_on: bool
    given_bytes: int
    needs_exact_output: bool


@dataclass(frozen=True, slots=True)
class _SegmentRun:
    """Bytes of a stage run as a segment; the backward counts from the state right after the recomputation."""

    discard_peak_bytes: int
    pinned_bytes: int
    recomputed_peak_bytes: int


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a forward, of its part up to the last saved tensor, and of a backward."""

    forward: float
    replay: float
    backward: float


class _Saves:
    """What autograd saves in a run (a stage may differentiate in its forward), and when its own backward reads it."""

    def __init__(self, recording: Recording, stage: str, *, gives_up: bool) -> None:
        self.count = self.read = 0
        self.addresses: Counter[int] = Counter()
        self.in_backward = False
        self._recording, self._stage, self._gives_up = recording, stage, gives_up

    def pack(self, tensor: torch.Tensor) -> list[Any]:
        """The saved tensor with its version and its maker."""
        self.count += 1
        self.addresses[address_of(tensor)] += 1
        self._recording.mark("save")
        return [tensor, version_of(tensor), _maker(tensor)]

    def unpack(self, packed: list[Any]) -> torch.Tensor:
        """The saved tensor, if it is unchanged."""
        tensor: torch.Tensor
        tensor, version, maker = packed
        if self.in_backward and self._gives_up:  # as a checkpoint does with what it has recomputed
            packed.clear()
        self.read += self.in_backward
        if self.in_backward and self.read == 1:
            self._recording.mark("unpack")
        if version_of(tensor) != version:
            raise _spoilt(self._stage, tensor, maker)
        return tensor


@dataclass(frozen=True, slots=True)
class StageProfiler:
    """Measures one stage at one boundary, whose output the caller holds during the backward if it is the last.

    Attributes:
        remembered: Modules whose buffers a recomputation works on copies of.
        state: What else a recomputation must leave alone.
        generators: Where every run of a stage that may draw starts; ``before`` is what user code can reach then.
        gradients_exist: Parameters' gradients are freed at once, as where autograd adds them to existing ones.
        layouts: How later stages leave the gradients that it is given.
        interlude: Called before each timed run.
        in_lockstep: Other processes measure the same stage and wait, so neither times nor batch sizes may decide how
            often it runs.
    """

    stage: Stage
    boundary: Boundary
    ends: StageEnds
    meter: Meter
    last: bool
    repeats: int
    remembered: tuple[torch.nn.Module, ...] = ()
    state: SegmentState = NO_STATE
    generators: GeneratorStates | None = None
    before: Snapshot | None = None
    gradients_exist: bool = False
    option: int = 0
    layouts: Layouts = NO_LAYOUTS
    interlude: Callable[[], None] = lambda: None
    in_lockstep: bool = False

    def measure(self, *, recomputable: bool, seconds: StageSeconds | None = None) -> StageMeasurement:
        """Bytes and seconds of the stage, which runs as a segment only if it is recomputable."""
        # A compiler may compile the backward only when it is first asked for.
        if self.meter.needs_warm_up or any(is_compiled(module) for _, module in self.stage.submodules()):
            self._keep_run(hold_input=False, hold_output=False)
        seconds = _timed(self) if seconds is None else seconds
        cost, run = self._both_costs(seconds, recomputable=recomputable)
        return StageMeasurement(cost, run.skip_gradients, run.link_layouts, run.passes_on, run.given_bytes)

    def _both_costs(self, seconds: StageSeconds, *, recomputable: bool) -> tuple[StageCost, _KeepRun]:
        """Costs where parameters have no gradients yet, with a backward's peaks where they have."""
        cost, run = self._cost(seconds, recomputable=recomputable)
        negligible = cost.keep.parameter_gradient_bytes <= _NEGLIGIBLE * cost.keep.backward_held_peak_bytes
        if negligible and not self.in_lockstep:
            return cost, run
        again, _ = replace(self, gradients_exist=True)._cost(seconds, recomputable=recomputable)
        keep = replace(cost.keep, accumulating=again.keep.backward_peaks(gradients_exist=False))
        return replace(cost, options=(keep,)), run

    def _cost(self, seconds: StageSeconds, *, recomputable: bool) -> tuple[StageCost, _KeepRun]:
        sizes = self._keep_run(hold_input=False, hold_output=False)
        alone = self._keep_run(hold_input=False, hold_output=True) if self.last else sizes
        # An input that the stage does not save does not matter to its backward, whoever holds it.
        held = self._keep_run(hold_input=True, hold_output=self.last) if sizes.saved_input_bytes else alone
        segment = self._segment_run() if recomputable else _never_a_segment(sizes)
        replayed = alone
        if recomputable and sizes.saved_tensors:
            replayed = self._keep_run(hold_input=False, hold_output=self.last, gives_up_saved=True)
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
            saved_state_bytes=sizes.saved_state_bytes,
            needs_exact_output=sizes.needs_exact_output,
            backward_replayed_peak_bytes=min(replayed.backward_peak_bytes, alone.backward_peak_bytes),
        )
        cost = StageCost(
            name=self.stage.name,
            output_bytes=self.ends.link_bytes,
            discard_peak_bytes=segment.discard_peak_bytes,
            # The discarded forward runs the same kernels. Timed by itself it may seem faster by chance, and a plan
            # would recompute for nothing.
            discard_seconds=seconds.forward,
            options=(keep,),
            pinned_bytes=segment.pinned_bytes,
            recomputable=recomputable,
        )
        return cost, sizes

    def _keep_run(self, *, hold_input: bool, hold_output: bool, gives_up_saved: bool = False) -> _KeepRun:
        self.rewind()
        elsewhere = self.layouts.memories_elsewhere()
        with self.meter.recording() as recording:
            saves = _Saves(recording, self.stage.name, gives_up=gives_up_saved)
            value = self.boundary.fresh()
            lasting = self.ends.lasting(tree_flatten(value)[0])
            recording.mark("forward")
            with saved_tensors_hooks(saves.pack, saves.unpack):
                output = self.run(value)
            saved_skips = self._saved_skips(value, output, saves.addresses.keys())
            needs_exact_output = _needs_exact_output(output, saves.addresses)
            recording.mark("root")
            backward = self.backward(value, output, elsewhere)
            recording.mark("drop input")
            if not hold_input:
                del value
            recording.mark("drop output")
            if not hold_output:
                del output
            recording.mark("backward")
            saves.in_backward = True
            gradients = backward.gradients()
            recording.mark("done")
        lasting_bytes = bytes_in_blocks(lasting, self.meter.block_bytes)
        sizes = self._sizes(Phases(recording.phases), saves, lasting_bytes, saved_skips)
        return _KeepRun(
            **sizes,
            saved_tensors=saves.count,
            input_gradient_bytes=gradients.link_bytes,
            parameter_gradient_bytes=gradients.parameter_bytes,
            saved_skips=saved_skips,
            saved_state_bytes=self._saved_state_bytes(saves),
            skip_gradients=gradients.of_skips,
            link_layouts=gradients.link_layouts,
            passes_on=gradients.passes_on,
            given_bytes=backward.skip_bytes,
            needs_exact_output=needs_exact_output and sizes["saved_output_bytes"] > 0,
        )

    def _sizes(self, phases: Phases, saves: _Saves, lasting_bytes: int, saved_skips: tuple[int, ...]) -> dict[str, int]:
        """The sizes of a run's phases, by the field names of :class:`_KeepRun`."""
        start, level = phases.first("forward").start_bytes, phases.first("backward").start_bytes
        # The copy of the input came first.
        saved_input = max(start - lasting_bytes - phases.first("drop input").freed_bytes, 0)
        link_bytes, made_bytes = self.ends.link_bytes, sum(self.ends.made_bytes.values())
        saved_made = sum(self.ends.made_bytes.get(place, 0) for place in saved_skips)
        kept = link_bytes + made_bytes - saved_made - phases.first("drop output").freed_bytes
        saved_output = min(max(kept, 0), link_bytes)
        before = phases.between("backward", "unpack" if saves.read else "done")
        after = phases.between("unpack", "done")
        unpack_peak = peak_bytes_of(before) - level
        return {
            "forward_peak_bytes": peak_bytes_of(phases.between("forward", "root")) - start,
            "replay_peak_bytes": max(peak_bytes_of(phases.until_last_save()) - start, 0),
            "saved_bytes": max(level - lasting_bytes - saved_input - saved_output - saved_made, 0),
            "saved_input_bytes": saved_input,
            "saved_output_bytes": saved_output,
            "unpack_peak_bytes": unpack_peak,
            "unpack_bytes": max(before[-1].end_bytes - level, 0),
            "backward_peak_bytes": max(peak_bytes_of(after) - level, 0) if saves.read else unpack_peak,
        }

    def _saved_state_bytes(self, saves: _Saves) -> int:
        """Bytes of remembered buffers that autograd has saved."""
        buffers = [buffer for module in self.remembered for buffer in module._buffers.values() if buffer is not None]
        saved = (buffer for buffer in buffers if address_of(buffer) in saves.addresses)
        return bytes_in_blocks(saved, self.meter.block_bytes)

    def run(self, value: Any) -> Any:
        """The output of one forward under the option."""
        return run_stage(self.stage, value, self.option)

    def _saved_skips(self, value: Any, output: Any, saved: Set[int]) -> tuple[int, ...]:
        """The places of the skips among the saved storages."""
        leaves = (*tree_flatten(value)[0], *tree_flatten(output)[0])
        places = (*self.ends.inputs, *self.ends.outputs)
        pairs = ((leaf, place) for leaf, place in zip(leaves, places, strict=True) if place is not None)
        return tuple(sorted({place for leaf, place in pairs if address_of(leaf) in saved}))

    def backward(self, value: Any, output: Any, elsewhere: Memories) -> StageBackward:
        """The backward of a run, given gradients as later stages leave them, some in the memory ``elsewhere``."""
        return StageBackward.of(
            self.stage,
            self.ends,
            value,
            output,
            gradients_exist=self.gradients_exist,
            layouts=self.layouts,
            elsewhere=elsewhere,
            block_bytes=self.meter.block_bytes,
        )

    def rewind(self) -> None:
        """Set the generators, and what user code can reach, to where every run starts."""
        if self.generators is not None:
            self.generators.restore()
        if self.before is not None:
            self.before.rewind()

    def _segment_run(self) -> _SegmentRun:
        self.rewind()
        elsewhere = self.layouts.memories_elsewhere()
        with self.meter.recording() as recording:
            calls = 0

            def function(*inputs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 1:
                    return self.run(tree_unflatten(inputs, spec))
                if self.generators is not None:
                    self.generators.restore()
                recording.mark("recompute")
                try:
                    return self.run(tree_unflatten(inputs, spec))
                finally:
                    recording.mark("recomputed")

            leaves, spec = tree_flatten(self.boundary.fresh())
            lasting = self.ends.lasting(leaves)
            recording.mark("forward")
            output = recomputed(function, *leaves, draws_random=False, state=self.state)
            recording.mark("root")
            backward = self.backward(leaves, output, elsewhere)
            del output
            recording.mark("drop input")
            leaves.clear()
            recording.mark("backward")
            backward.gradients()
            recording.mark("done")
            del lasting
        phases = Phases(recording.phases)
        start, level = phases.first("forward").start_bytes, phases.first("backward").start_bytes
        after = phases.between("recomputed", "done")
        return _SegmentRun(
            discard_peak_bytes=peak_bytes_of(phases.between("forward", "root")) - start,
            # A segment that saves nothing does not hold its input either.
            pinned_bytes=max(level - start + phases.first("drop input").freed_bytes, 0),
            recomputed_peak_bytes=max(peak_bytes_of(after) - level, 0) if after else 0,
        )


def _timed(profiler: StageProfiler) -> StageSeconds:
    runs: list[tuple[float, float]] = []
    while not is_timed(profiler, list(map(sum, runs))):
        runs.append(timed_run(profiler))
    return seconds_of(profiler, runs)


def seconds_of(profiler: StageProfiler, runs: Sequence[tuple[float, float]]) -> StageSeconds:
    """The typical seconds of timed runs."""
    forward, backward = map(typical, zip(*runs, strict=True))
    return StageSeconds(forward, forward * _replayed_part(profiler), backward)


def timed_run(profiler: StageProfiler) -> tuple[float, float]:
    """Seconds of a forward and its backward."""
    profiler.rewind()
    value = profiler.boundary.fresh()
    profiler.interlude()
    start = profiler.meter.now()
    output = profiler.run(value)
    forward = profiler.meter.seconds_between(start, profiler.meter.now())
    run = profiler.backward(value, output, profiler.layouts.memories_elsewhere())
    del value, output
    profiler.interlude()
    start = profiler.meter.now()
    run.gradients()
    return forward, profiler.meter.seconds_between(start, profiler.meter.now())


def is_timed(profiler: StageProfiler, seconds: Sequence[float]) -> bool:
    """True if runs that took so long are enough. Where other processes run along, only their number counts."""
    return len(seconds) >= profiler.repeats if profiler.in_lockstep else is_enough(seconds, profiler.repeats)


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


_SMOOTH = ("ExpBackward0", "LogSoftmaxBackward0", "SigmoidBackward0", "SoftmaxBackward0", "TanhBackward0")
"""Operations whose backward is smooth in the output they save. ReLU's is not: it asks where the output is zero."""


def _needs_exact_output(output: Any, saved: Counter[int]) -> bool:
    """True if rounding errors in a saved output could change gradients by more than rounding errors."""
    return any(
        saved[address_of(tensor)] > (tensor.grad_fn is not None and tensor.grad_fn.name() in _SMOOTH)
        for tensor in tensors_in(output)
    )


def _spoilt(stage: str, tensor: torch.Tensor, maker: str) -> ModelError:
    """The error of a changed saved tensor. Autograd does not compare versions of what a hook has packed."""
    changer = _maker(tensor)
    made, changed = f", made by {maker}" * bool(maker), f", changed by {changer}" * (changer != maker)
    return ModelError(
        f"stage {stage!r} changes a tensor in place that its backward needs as it was (shape "
        f"{tuple(tensor.shape)}{made}{changed}): plain training fails here, too, but a recomputation would give wrong "
        "gradients. Expected an operation that is not in place"
    )


def _maker(tensor: torch.Tensor) -> str:
    """Autograd's name of the operation that made or last changed a tensor; empty for a leaf."""
    return "" if tensor.grad_fn is None else tensor.grad_fn.name().removesuffix("Backward0")


def _never_a_segment(sizes: _KeepRun) -> _SegmentRun:
    """The run of a stage that changes its input, which no schedule recomputes."""
    recomputed_peak = sizes.backward_peak_bytes + sizes.saved_bytes + sizes.saved_output_bytes
    return _SegmentRun(sizes.forward_peak_bytes, 0, recomputed_peak)
