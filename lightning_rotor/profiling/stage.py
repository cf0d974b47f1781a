"""Measuring one stage: bytes from one run each per case, seconds from several.

Every run owns a fresh copy of the stage's input, and a node makes the gradient of the output on the spot. So everything
dies as in training: the gradient after the first operator that reads it, the input with the last saved tensor that
needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from lightning_rotor.chain import Option, StageCost
from lightning_rotor.errors import ModelError
from lightning_rotor.execution.executor import recomputed
from lightning_rotor.execution.inversion import Output, Way, run_inverted
from lightning_rotor.execution.isolated import lent_buffers
from lightning_rotor.execution.passes import buffers_of, run_stage
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.private.torch_names import is_compiled, sparse_parts, version_of
from lightning_rotor.private.values import address_of, bytes_in_blocks, tree_leaves
from lightning_rotor.profiling.gradients import (
    Gradients,
    Layout,
    Layouts,
    Memories,
    StageEnds,
    ending,
    layouts_of,
    learning,
    lying,
    memories_elsewhere,
    memory_bytes,
)
from lightning_rotor.profiling.meters import Meter, Recording
from lightning_rotor.profiling.scan import NOTHING, Boundary
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.snapshot import Snapshot
from lightning_rotor.units import in_blocks

# ---------------------------------------------------------- How often to time a run, and what to take for its duration.


_ENOUGH_SECONDS = 0.5
"""Seconds in which the noise of a busy machine evens out."""
_SHORT_SECONDS = 0.01
"""Seconds so few that one interruption decides what a few runs take."""
_MORE = 3


def typical(seconds: Sequence[float]) -> float:
    """The middle of the faster half, for interruptions never make a run faster."""
    return max(sorted(seconds)[len(seconds) // 4], 0.0)


WORTH_MENTIONING_BYTES = 1024
"""More than the 8 bytes for a Python number (x * 2) that stays with the graph."""
# Smaller shares of a backward's peak are not measured again with existing gradients, to save time.
_NEGLIGIBLE = 1 / 256


@dataclass(frozen=True, slots=True)
class StageMeasurement:
    """Costs of a stage and what it does to gradients."""

    cost: StageCost
    gradients: Gradients


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a forward, of its part up to the last saved tensor, and of a backward."""

    forward: float = 0.0
    replay: float = 0.0
    backward: float = 0.0

    def of(self, cost: StageCost) -> StageCost:
        """The costs of a stage that takes so long."""
        keep = replace(
            cost.keep, forward_seconds=self.forward, replay_seconds=self.replay, backward_seconds=self.backward
        )
        # The discarded forward runs the same kernels. Timed by itself it may seem faster by chance, and a plan would
        # recompute for nothing.
        return replace(cost, options=(keep,), discard_seconds=self.forward)


class _Saves:
    """What autograd saves in a run (a stage may differentiate in its forward), and when its own backward reads it."""

    recording: Recording

    def __init__(self, stage: str, *, gives_up: bool) -> None:
        self.count = self.read = 0
        self.skips: tuple[int, ...] = ()
        self.addresses: set[int] = set()
        self.is_over = False  # the forward
        self._stage, self._gives_up = stage, gives_up

    def pack(self, tensor: torch.Tensor) -> list[Any]:
        """The saved tensor with its version and its maker."""
        self.count += 1
        self.addresses.add(address_of(tensor))
        self.recording.mark(f"save {self.count}")
        return [tensor, version_of(tensor), _maker(tensor)]

    def unpack(self, packed: list[Any]) -> torch.Tensor:
        """The saved tensor, if it is unchanged."""
        tensor: torch.Tensor
        tensor, version, maker = packed
        if self.is_over and self._gives_up:  # as a checkpoint does with what it has recomputed
            packed.clear()
        self.read += self.is_over
        if self.is_over and self.read == 1:
            self.recording.mark("unpack")
        if version_of(tensor) != version:
            raise _spoilt(self._stage, tensor, maker)
        return tensor


@dataclass(frozen=True, slots=True)
class StageProfiler:
    """Measures one stage at one boundary, whose output the caller holds during the backward if it is the last.

    ``in_lockstep`` other processes measure the same stage and wait, so neither times nor batch sizes may decide how
    often it runs.
    """

    stage: Stage
    ends: StageEnds
    state: SegmentState  # what a recomputation must leave alone
    last: bool
    recomputable: bool  # it may run as a segment
    generators: GeneratorStates | None  # where every run of a stage that may draw starts
    meter: Meter
    repeats: int
    interlude: Callable[[], None]  # called before each timed run
    in_lockstep: bool
    boundary: Boundary = NOTHING
    layouts: Layouts = ()  # how later stages leave the gradients that it is given
    before: Snapshot | None = None  # what user code can reach where every run starts
    gradients_exist: bool = False  # new ones are freed at once, as where autograd adds them to others
    option: int = 0
    way: Way | None = None  # how it is inverted

    def measure(self, *, timed: bool = True) -> StageMeasurement:
        """Bytes and seconds of the stage."""
        # A compiler may compile the backward only when it is first asked for.
        if self.meter.needs_warm_up or any(is_compiled(module) for _, module in self.stage.submodules()):
            self.recorded_run(hold_input=False, hold_output=False)
        seconds = seconds_by_turns([self])[0] if timed else StageSeconds()
        found = self._bytes()
        keep = found.cost.keep
        if self.in_lockstep or keep.parameter_gradient_bytes > _NEGLIGIBLE * keep.backward_held_peak_bytes:
            again = replace(self, gradients_exist=True)._bytes().cost.keep
            keep = replace(keep, accumulating=again.backward_peaks(gradients_exist=False))
        return replace(found, cost=seconds.of(replace(found.cost, options=(keep,))))

    def _bytes(self) -> StageMeasurement:
        """Bytes, from a run for each case that differs."""
        keep, gradients = self.recorded_run(hold_input=False, hold_output=False)
        alone = self.recorded_run(hold_input=False, hold_output=True)[0] if self.last else keep
        # An input that the stage does not save does not matter to its backward, whoever holds it.
        held = self.recorded_run(hold_input=True, hold_output=self.last)[0] if keep.saved_input_bytes else alone
        replayed, segment_peak = alone, keep.backward_peak_bytes
        discard_peak, pinned_bytes = keep.forward_peak_bytes, 0
        if self.recomputable:
            discard_peak, pinned_bytes, recomputed_peak = self._segment_run()
            segment_peak = max(recomputed_peak - keep.saved_bytes - keep.saved_output_bytes, 0)
        if self.recomputable and keep.saved_tensors:
            replayed, _ = self.recorded_run(hold_input=False, hold_output=self.last, gives_up_saved=True)
        option = replace(
            keep,
            saved_bytes=max(keep.saved_bytes - pinned_bytes, 0),
            unpack_peak_bytes=alone.unpack_peak_bytes,
            unpack_bytes=alone.unpack_bytes,
            backward_peak_bytes=alone.backward_peak_bytes,
            backward_segment_peak_bytes=segment_peak if keep.saved_tensors else alone.backward_peak_bytes,
            backward_held_peak_bytes=held.backward_peak_bytes,
            backward_replayed_peak_bytes=min(replayed.backward_peak_bytes, alone.backward_peak_bytes),
        )
        cost = StageCost(
            name=self.stage.name,
            output_bytes=self.ends.link_bytes,
            discard_peak_bytes=discard_peak,
            discard_seconds=0.0,
            options=(option,),
            pinned_bytes=pinned_bytes,
            recomputable=self.recomputable,
            takes=self.boundary.tensors,
        )
        return StageMeasurement(cost, gradients)

    def recorded_run(
        self, *, hold_input: bool, hold_output: bool, gives_up_saved: bool = False
    ) -> tuple[Option, Gradients]:
        """One recorded forward and its backward. Who holds the input of an inverted stage wants it rebuilt."""
        saves = _Saves(self.stage.name, gives_up=gives_up_saved)

        def forward(recording: Recording, value: Any, source: Output | None) -> Any:
            saves.recording = recording
            with saved_tensors_hooks(saves.pack, saves.unpack):
                output = self.run(value, source)
            saves.is_over = True
            leaves = zip(tree_leaves((value, output)), (*self.ends.inputs, *self.ends.outputs), strict=True)
            skips = {place for leaf, place in leaves if place is not None and address_of(leaf) in saves.addresses}
            saves.skips = tuple(sorted(skips))
            return output

        recording, gradients, lasting_bytes = self._recorded(forward, hold_input=hold_input, hold_output=hold_output)
        return self._option(recording, saves, lasting_bytes, gradients), gradients

    def _recorded(
        self,
        forward: Callable[[Recording, Any, Output | None], Any],
        *,
        hold_input: bool = False,
        hold_output: bool = False,
    ) -> tuple[Recording, Gradients, int]:
        """The recording of a forward and its backward, the gradients, and the bytes of skips among the input."""
        self.rewind()
        elsewhere = memories_elsewhere(self.layouts)
        with self.meter.recording() as recording:
            value = self.boundary.fresh()
            # Skips, which others hold, too.
            lasting = [
                leaf for leaf, place in zip(tree_leaves(value), self.ends.inputs, strict=True) if place is not None
            ]
            source = None if self.way is None else Output(self.stage.name)
            recording.mark("forward")
            output = forward(recording, value, source)
            recording.mark("root")
            backward = StageBackward(self, value, output, elsewhere)
            recording.mark("drop input")
            if not hold_input or self.way is not None:
                del value
            if not hold_input:
                del source
            recording.mark("drop output")
            if not hold_output:
                del output
            recording.mark("backward")
            gradients = backward.gradients()
            recording.mark("done")
        return recording, gradients, bytes_in_blocks(lasting, self.meter.block_bytes)

    def _option(self, recording: Recording, saves: _Saves, lasting_bytes: int, gradients: Gradients) -> Option:
        """The bytes of a run, from its recording, in which only this stage's backward counts."""
        start, level = recording.first("forward").start_bytes, recording.first("backward").start_bytes
        # The copy of the input came first.
        saved_input = max(start - lasting_bytes - recording.first("drop input").freed_bytes, 0)
        link_bytes, made_bytes = self.ends.link_bytes, sum(self.ends.made_bytes)
        saved_made = sum(self.ends.made_bytes[place] for place in saves.skips)
        kept = link_bytes + made_bytes - saved_made - recording.first("drop output").freed_bytes
        saved_output = min(max(kept, 0), link_bytes)
        replay_peak = recording.peak_bytes("forward", f"save {saves.count}") - start if saves.count else 0
        buffers = (buffer for *_, buffer in buffers_of(self.state.remembered))
        saved_states = [buffer for buffer in buffers if address_of(buffer) in saves.addresses]
        begun = "unpack" if saves.read else "done"
        unpack_peak = recording.peak_bytes("backward", begun) - level
        backward_peak = max(recording.peak_bytes("unpack", "done") - level, 0) if saves.read else unpack_peak
        return Option(
            name="keep",
            saved_bytes=max(level - lasting_bytes - saved_input - saved_output - saved_made, 0),
            saved_input_bytes=saved_input,
            saved_output_bytes=saved_output,
            saved_tensors=saves.count,
            forward_peak_bytes=recording.peak_bytes("forward", "root") - start,
            replay_peak_bytes=replay_peak,
            unpack_peak_bytes=unpack_peak,
            unpack_bytes=max(recording.first(begun).start_bytes - level, 0),
            backward_peak_bytes=backward_peak,
            backward_segment_peak_bytes=backward_peak,
            backward_held_peak_bytes=backward_peak,
            input_gradient_bytes=gradients.link_bytes,
            parameter_gradient_bytes=gradients.parameter_bytes,
            needs_exact_output=saved_output > 0,
            forward_seconds=0.0,
            replay_seconds=0.0,
            backward_seconds=0.0,
            saved_skips=saves.skips,
            saved_state_bytes=bytes_in_blocks(saved_states, self.meter.block_bytes),
        )

    def run(self, value: Any, source: Output | None = None) -> Any:
        """The output of one forward under the option, or inverted; ``source`` refers to the input that is dropped."""
        if self.way is not None:
            return run_inverted(self.way, value, source)
        return run_stage(self.stage, value, self.option)

    def timed_enough(self, options: Sequence[Sequence[tuple[float, float]]]) -> bool:
        """True if each option ran ``repeats`` times, fewer times if its runs are long and more if they are short.

        Where other processes run along, only their number counts.
        """
        return all(self._is_timed(sum(map(sum, runs)), len(runs)) for runs in options)

    def _is_timed(self, seconds: float, runs: int) -> bool:
        if not self.in_lockstep and seconds >= _ENOUGH_SECONDS:
            return True
        return runs >= self.repeats * (1 if self.in_lockstep or seconds >= _SHORT_SECONDS else _MORE)

    def rewind(self) -> None:
        """Set the generators, and what user code can reach, to where every run starts."""
        if self.generators is not None:
            self.generators.restore()
        if self.before is not None:
            self.before.rewind()

    def _segment_run(self) -> tuple[int, int, int]:
        """Peak of a segment's first pass, what it leaves pinned, and its backward's peak after the recomputation."""
        state = SegmentState(attributed=self.state.attributed)

        def forward(recording: Recording, value: Any, _: Output | None) -> Any:
            passes = count()

            def function(value: Any) -> Any:
                again = next(passes) > 0
                if again and self.generators is not None:
                    self.generators.restore()
                try:
                    return self.run(value)
                finally:
                    if again:
                        recording.mark("recomputed")

            return recomputed(function, value, draws_random=False, state=state)

        recording, _, _ = self._recorded(forward)
        start, level = recording.first("forward").start_bytes, recording.first("backward").start_bytes
        # A segment that saves nothing does not hold its input either.
        pinned_bytes = max(level - start + recording.first("drop input").freed_bytes, 0)
        recomputed_peak = max(recording.peak_bytes("recomputed", "done") - level, 0)
        return recording.peak_bytes("forward", "root") - start, pinned_bytes, recomputed_peak


class StageBackward:
    """The backward of a stage that has just run, without holding the tensors in between.

    Gradients are given as the profiler's layouts say, those that are counted elsewhere in the memory ``elsewhere``. The
    time in which they are made is another stage's in training.
    """

    def __init__(self, profiler: StageProfiler, value: Any, output: Any, elsewhere: Memories) -> None:
        ends, self._block_bytes = profiler.ends, profiler.meter.block_bytes
        leaves = tree_leaves(value)
        outputs = ending(ends, leaves, output)
        self._lie, self._elsewhere = lying(outputs, dict(profiler.layouts)), elsewhere
        of_skips = (layout for (_, key), layout in zip(outputs, self._lie, strict=True) if key >= 0)
        self._given_bytes = memory_bytes(of_skips, self._block_bytes)
        self._meter, self._times = profiler.meter, list[Any]()
        self._root = _GradientSource.apply(self, *(tensor for tensor, _ in outputs)) if outputs else None
        inputs = learning(leaves, ends.inputs)
        self._inputs = [get_gradient_edge(leaf) for leaf, _ in inputs]
        self._keys = [(key, leaf.stride()) for leaf, key in inputs]
        self._parameters = [parameter for parameter in profiler.stage.parameters() if parameter.requires_grad]
        self._given_up = self._parameters if profiler.gradients_exist else []

    def given(self) -> list[torch.Tensor]:
        """The gradients of its outputs, made now. Then its time begins."""
        memories = {**self._elsewhere}
        gradients = [layout.ones(memories) for layout in self._lie]
        self._times.append(self._meter.now())
        return gradients

    @property
    def seconds(self) -> float:
        """Seconds from the gradients of its outputs to those of its inputs; 0 if nothing learns."""
        return self._meter.seconds_between(self._times[0], self._times[-1]) if self._times else 0.0

    def gradients(self) -> Gradients:
        """Run the backward once."""
        root, self._root = self._root, None
        if root is None or not (self._inputs or self._parameters):
            return Gradients(given_bytes=self._given_bytes)
        # Not backward(): .grad and the hooks of gradient accumulation are the user's.
        ends: Any = [*self._inputs, *self._parameters]
        # A tensor like the gradient takes its place, and no memory.
        hooks = [
            parameter.register_hook(lambda g, p=parameter: p.detach() if g.layout == torch.strided else None)
            for parameter in self._given_up
        ]
        try:
            gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(
                root, ends, torch.empty_like(root), allow_unused=True
            )
        finally:
            self._times.append(self._meter.now())
            for hook in hooks:
                hook.remove()
        of_inputs = [
            (key, stride, gradient)
            for (key, stride), gradient in zip(self._keys, gradients, strict=False)
            if gradient is not None
        ]
        by_key: dict[int, list[Layout]] = {}
        for (key, *_), layout in zip(of_inputs, layouts_of(of_inputs), strict=True):
            by_key.setdefault(key, []).append(layout)
        link = [layout for key, layouts in by_key.items() if key < 0 for layout in layouts]
        return Gradients(
            link_bytes=memory_bytes(link, self._block_bytes),
            skip_bytes={key: memory_bytes(each, self._block_bytes) for key, each in by_key.items() if key >= 0},
            layouts={key: layouts[0] for key, layouts in by_key.items() if len(layouts) == 1},
            parameter_bytes=self._parameter_bytes(gradients[len(self._inputs) :]),
            given_bytes=self._given_bytes,
        )

    def _parameter_bytes(self, gradients: Sequence[torch.Tensor | None]) -> int:
        return sum(
            # Accumulation copies a gradient that is no dense tensor of its own (an expanded one, say).
            in_blocks(parameter.nbytes, self._block_bytes)
            if gradient.layout == torch.strided
            else bytes_in_blocks(sparse_parts(gradient), self._block_bytes)
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
            if gradient is not None
        )


class _GradientSource(torch.autograd.Function):
    """A tensor without elements whose backward allocates the gradient of each output, as later stages' would."""

    @staticmethod
    def forward(ctx: Any, run: StageBackward, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        return torch.empty(0, device=outputs[0].device)  # nothing to count

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.run.given()


Enough: TypeAlias = Callable[[Sequence[Sequence[tuple[float, float]]]], bool]
"""Says of the seconds that each option has taken so far, forward and backward, whether they will do."""


def seconds_by_turns(profilers: Sequence[StageProfiler], enough: Enough | None = None) -> tuple[StageSeconds, ...]:
    """Comparable seconds of one stage's options, which run by turns, by default until each is timed."""
    runs: list[list[tuple[float, float]]] = [[] for _ in profilers]
    while not (enough or profilers[0].timed_enough)(runs):
        for profiler, each in zip(profilers, runs, strict=True):
            with lent_buffers(profiler.stage):
                each.append(timed_run(profiler))
    return tuple(map(seconds_of, profilers, runs))


def seconds_of(profiler: StageProfiler, runs: Sequence[tuple[float, float]]) -> StageSeconds:
    """The typical seconds of timed runs."""
    forward, backward = map(typical, zip(*runs, strict=True))
    with lent_buffers(profiler.stage):
        return StageSeconds(forward, forward * _replayed_part(profiler), backward)


def timed_run(profiler: StageProfiler) -> tuple[float, float]:
    """Seconds of a forward and its backward."""
    profiler.rewind()
    value = profiler.boundary.fresh()
    profiler.interlude()
    start = profiler.meter.now()
    output = profiler.run(value)
    forward = profiler.meter.seconds_between(start, profiler.meter.now())
    run = StageBackward(profiler, value, output, memories_elsewhere(profiler.layouts))
    del value, output
    profiler.interlude()
    run.gradients()
    return forward, run.seconds


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
