"""Bytes of one stage: what its forward and backward take, what it is given, and what it leaves.

Every run owns a fresh copy of the stage's input, and a node makes the gradient of the output on the spot. So everything
dies as in training: the gradient after the first operator that reads it, the input with the last saved tensor that
needs it. A run is cut by marks::

    fresh input │ forward │ root   │ drop input │ drop output │ backward            │ done
                │         │ a node │ let go of what nobody    │ before    │ unpack … │
                │         │        │ holds in this case       │ any saved │          │

Whoever adds a local variable to such a run holds a tensor longer than training does, and so changes what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.chain import Option, StageCost
from lightning_rotor.errors import ModelError
from lightning_rotor.execution.boundary import Output
from lightning_rotor.execution.inversion import Way, run_inverted
from lightning_rotor.execution.lent_tensors import buffers_of
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.execution.segment import recomputed
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.private.torch_names import is_compiled, name_of_node, version_of
from lightning_rotor.private.values import address_of, bytes_in_blocks, tree_leaves
from lightning_rotor.profiling.gradient_layouts import Gradients, Layouts, Memories, memories_elsewhere
from lightning_rotor.profiling.memory_recording import Recording
from lightning_rotor.profiling.meters import Meter
from lightning_rotor.profiling.ranks import Ranks
from lightning_rotor.profiling.stage_backward import StageBackward
from lightning_rotor.profiling.stage_ends import StageEnds
from lightning_rotor.profiling.stage_input import NOTHING, Boundary
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.snapshot import Snapshot

# Smaller shares of a backward's peak are not measured again with existing gradients, to save time.
_NEGLIGIBLE_SHARE = 1 / 256
# Recordings of a stage in which the processes exchange messages, of which the least counts.
_RECORDINGS_TOGETHER = 3
_T = TypeVar("_T")


def _option_bytes(found: tuple[Option, Gradients]) -> int:
    option, _ = found
    return option.saved_bytes + option.backward_peak_bytes


class _ForeignGraphError(Exception):
    """A graph takes gradients with the sizes of its own forward alone, and not those of a recomputation."""


@dataclass(frozen=True, slots=True)
class StageMeasurement:
    """Costs of a stage and what it does to gradients."""

    cost: StageCost
    gradients: Gradients

    def with_options(self, more: Iterable[Option]) -> StageMeasurement:
        """The measurement with more options, each of which has a discard peak of its own."""
        options = []
        for option in self.cost.options:
            options.append(replace(option, discard_peak_bytes=self.cost.discard_peak_of(option)))
        options += more
        # The stage's own must stay the largest: it stands for options that have none.
        highest_bytes = max(option.discard_peak_bytes or 0 for option in options)
        return replace(self, cost=replace(self.cost, options=tuple(options), discard_peak_bytes=highest_bytes))


class _SavedTensors:
    """Tensors that autograd saves in a run, and when its backward reads them.

    Attributes:
        count: Tensors that were saved.
        addresses: Of their storages.
        was_read: The backward has read one.
    """

    def __init__(self, stage: str, *, gives_up: bool) -> None:
        self.count = 0
        self.addresses: set[int] = set()
        self.was_read = False
        self._stage = stage
        self._gives_up = gives_up
        # A stage may differentiate in its forward, and read saved tensors there.
        self._is_forward_over = False

    @contextmanager
    def watching(self, recording: Recording) -> Iterator[None]:
        """Context of the forward; also marks in the recording when a tensor is saved, and when the first is read."""

        def pack(tensor: torch.Tensor) -> list[Any]:
            self.count += 1
            self.addresses.add(address_of(tensor))
            recording.mark(f"save {self.count}")
            # Autograd does not compare versions of what a hook has packed.
            return [tensor, version_of(tensor)]

        def unpack(packed: list[Any]) -> torch.Tensor:
            tensor: torch.Tensor
            tensor, version = packed
            if self._is_forward_over:
                # As a checkpoint does with what it has recomputed.
                if self._gives_up:
                    packed.clear()
                if not self.was_read:
                    self.was_read = True
                    recording.mark("unpack")
            if version_of(tensor) != version:
                raise self._changed(tensor)
            return tensor

        with saved_tensors_hooks(pack, unpack):
            yield
        self._is_forward_over = True

    def _changed(self, tensor: torch.Tensor) -> ModelError:
        node = tensor.grad_fn
        changer = "" if node is None else f", changed by {name_of_node(node).removesuffix('Backward0')}"
        return ModelError(
            f"stage {self._stage!r} changes a tensor in place that its backward needs as it was (shape "
            f"{tuple(tensor.shape)}{changer}): plain training fails here, too, but a recomputation "
            "would give wrong gradients. Expected an operation that is not in place"
        )


@dataclass(frozen=True, slots=True)
class StageProfiler:
    """Measures one stage at one boundary.

    Attributes:
        stage: The stage.
        ends: Where it meets the rest of the chain.
        state: What a recomputation must leave alone.
        last: The caller holds its output during the backward.
        recomputable: It may run as a segment.
        generators: Where every run of a stage that may draw starts; None if it draws nothing.
        meter: For bytes and seconds.
        repeats: Timed runs.
        interlude: Called before each timed run.
        ranks: Where they are together, neither times nor sizes may decide what runs.
        accumulating: Also measure the backward where gradients exist.
        boundary: The input.
        layouts: In which later stages leave the gradients that it is given.
        before: What user code can reach, as it is where every run starts.
        shared: Numbers of its parameters that later stages share, see :func:`~.shared_parameters.shared_later`.
        gradients_exist: New gradients are freed at once, as where autograd adds them to others.
        option: The variant that runs; 0 is the stage as it is.
        way: In which it is inverted; None: it is not.
    """

    stage: Stage
    ends: StageEnds
    state: SegmentState
    last: bool
    recomputable: bool
    generators: GeneratorStates | None
    meter: Meter
    repeats: int
    interlude: Callable[[], object]
    ranks: Ranks
    accumulating: bool
    boundary: Boundary = NOTHING
    layouts: Layouts = ()
    before: Snapshot | None = None
    shared: Mapping[int, bool] = field(default_factory=dict)
    gradients_exist: bool = False
    option: int = 0
    way: Way | None = None

    @property
    def is_compiled(self) -> bool:
        """True if the user compiled the stage or a part of it."""
        return any(is_compiled(module) for _, module in self.stage.submodules())

    def measure(self) -> StageMeasurement:
        """Bytes of the stage, when it has run before."""
        measurement = self._measure_bytes()
        keep = measurement.cost.keep
        least_bytes = _NEGLIGIBLE_SHARE * keep.backward_held_peak_bytes
        # Processes that exchange messages must run a stage equally often, and sizes may differ between them.
        is_negligible = keep.parameter_gradient_bytes <= least_bytes and not self.ranks.together
        if self.accumulating and not is_negligible:
            # A whole measurement more, for most stages with parameters. So callers say if no budget will ask for it.
            again = replace(self, gradients_exist=True)._measure_bytes().cost.keep
            keep = replace(keep, accumulating=again.backward_peaks(gradients_exist=False))
        return replace(measurement, cost=replace(measurement.cost, options=(keep,)))

    def _measure_bytes(self) -> StageMeasurement:
        """Bytes, from a run for each case that differs."""
        keep, gradients = self.recorded_run(hold_input=False, hold_output=False)
        # The caller holds the output of the last stage.
        alone = keep
        if self.last:
            alone, _ = self.recorded_run(hold_input=False, hold_output=True)
        # An input that the stage does not save does not matter to its backward, whoever holds it.
        held = alone
        if self.ranks.together or keep.saved_input_bytes:
            held, _ = self.recorded_run(hold_input=True, hold_output=self.last)
        discard_peak_bytes = keep.forward_peak_bytes
        pinned_bytes = 0
        segment_peak_bytes = keep.backward_peak_bytes
        if self.recomputable:
            try:
                discard_peak_bytes, pinned_bytes, recomputed_peak_bytes = self._least_of(
                    self._segment_run, lambda found: found[1] + found[2]
                )
            except _ForeignGraphError:
                # The scan finds nodes of jagged tensors, but not where its draws have left out the layer.
                return replace(self, recomputable=False)._measure_bytes()
            # Peaks of backwards are beyond the saved set, which the simulator counts by itself.
            segment_peak_bytes = max(recomputed_peak_bytes - keep.saved_bytes - keep.saved_output_bytes, 0)
        if not keep.saved_tensors:
            # Nothing is recomputed for such a backward.
            segment_peak_bytes = alone.backward_peak_bytes
        replayed = alone
        # Of a recomputation alone are saved tensors given up once they are read.
        if self.recomputable and keep.saved_tensors:
            replayed, _ = self.recorded_run(hold_input=False, hold_output=self.last, gives_up_saved=True)
        option = replace(
            keep,
            # Pinned bytes count once, for the stage, whatever the option.
            saved_bytes=max(keep.saved_bytes - pinned_bytes, 0),
            unpack_peak_bytes=alone.unpack_peak_bytes,
            unpack_bytes=alone.unpack_bytes,
            backward_peak_bytes=alone.backward_peak_bytes,
            backward_segment_peak_bytes=segment_peak_bytes,
            backward_held_peak_bytes=held.backward_peak_bytes,
            backward_replayed_peak_bytes=min(replayed.backward_peak_bytes, alone.backward_peak_bytes),
        )
        # Seconds are measured by themselves: while a meter records, everything takes longer.
        cost = StageCost(
            name=self.stage.name,
            output_bytes=self.ends.link_bytes,
            discard_peak_bytes=discard_peak_bytes,
            discard_seconds=0.0,
            options=(option,),
            pinned_bytes=pinned_bytes,
            recomputable=self.recomputable,
            takes=self.boundary.tensors,
        )
        return StageMeasurement(cost, gradients)

    def recorded_run(
        self,
        *,
        hold_input: bool,
        hold_output: bool,
        gives_up_saved: bool = False,
    ) -> tuple[Option, Gradients]:
        """A recorded forward and its backward. Who holds the input of an inverted stage wants it rebuilt."""
        run = partial(self._one_run, hold_input=hold_input, hold_output=hold_output, gives_up_saved=gives_up_saved)
        return self._least_of(run, _option_bytes)

    def _least_of(self, run: Callable[[], _T], size_bytes: Callable[[_T], int]) -> _T:
        """The result of a recorded run, the least of several where the processes exchange messages in it.

        A thread of gloo's may be the last one to hold a message, and torch's profiler does not see what it gives back:
        then the bytes seem to stay.
        """
        if not self.ranks.together:
            return run()
        return min((run() for _ in range(_RECORDINGS_TOGETHER)), key=size_bytes)

    def _one_run(self, *, hold_input: bool, hold_output: bool, gives_up_saved: bool) -> tuple[Option, Gradients]:
        saved = _SavedTensors(self.stage.name, gives_up=gives_up_saved)
        saved_skips: set[int] = set()

        def forward(recording: Recording, value: Any, source: Output | None) -> Any:
            with saved.watching(recording):
                output = self.run(value, source)
            leaves = tree_leaves((value, output))
            for leaf, place in zip(leaves, (*self.ends.inputs, *self.ends.outputs), strict=True):
                # By storage: autograd may have saved a view of the skip.
                if place is not None and address_of(leaf) in saved.addresses:
                    saved_skips.add(place)
            return output

        recording, gradients, lasting_bytes = self._recorded(forward, hold_input=hold_input, hold_output=hold_output)
        option = self._option(recording, saved, tuple(sorted(saved_skips)), lasting_bytes, gradients)
        return option, gradients

    def _recorded(
        self,
        forward: Callable[[Recording, Any, Output | None], Any],
        *,
        hold_input: bool = False,
        hold_output: bool = False,
    ) -> tuple[Recording, Gradients, int]:
        """The recording of a forward and its backward, the gradients, and the bytes of skips among the input."""
        # So that each recorded run draws the same numbers and takes the same branches.
        self.rewind()
        # Before the recording begins, so that it is not counted.
        elsewhere = memories_elsewhere(self.layouts)
        with self.meter.recording() as recording:
            value = self.boundary.fresh()
            # Other stages hold skips, too, so they do not die here.
            lasting = self._skips_in(value)
            # A way back to the input that does not hold it: an inverted backward fills it again.
            source = None if self.way is None else Output(self.stage.name)
            recording.mark("forward")
            output = forward(recording, value, source)
            recording.mark("root")
            backward = self.backward_of(value, output, elsewhere)
            recording.mark("drop input")
            # An inverted stage drops its input in any case. Who wants it again holds the source.
            if not hold_input or self.way is not None:
                del value
            if not hold_input:
                del source
            recording.mark("drop output")
            if not hold_output:
                del output
            elif self.ends.unused:
                output = self._used_of(output)
            recording.mark("backward")
            gradients = backward.gradients()
            recording.mark("done")
        return recording, gradients, bytes_in_blocks(lasting, self.meter.block_bytes)

    def _used_of(self, output: Any) -> list[Any]:
        """The leaves of an output that the chain's caller holds on to."""
        return [leaf for place, leaf in enumerate(tree_leaves(output)) if place not in self.ends.unused]

    def _skips_in(self, value: Any) -> list[torch.Tensor]:
        """The tensors of an input that are skips."""
        return [leaf for leaf, place in zip(tree_leaves(value), self.ends.inputs, strict=True) if place is not None]

    def backward_of(self, value: Any, output: Any, elsewhere: Memories) -> StageBackward:
        """The backward of a run with this input and output, with gradients in this profiler's layouts."""
        return StageBackward(
            self.stage,
            self.ends,
            value,
            output,
            meter=self.meter,
            layouts=self.layouts,
            elsewhere=elsewhere,
            shared=self.shared,
            gradients_exist=self.gradients_exist,
        )

    def _option(
        self,
        recording: Recording,
        saved: _SavedTensors,
        saved_skips: tuple[int, ...],
        lasting_bytes: int,
        gradients: Gradients,
    ) -> Option:
        """The bytes of a run, from its recording, in which only this stage's backward counts."""
        start = recording.first("forward").start_bytes
        level = recording.first("backward").start_bytes
        # The copy of the input came first. What of it is not freed when it is dropped, autograd has saved.
        input_bytes = start - lasting_bytes
        saved_input_bytes = max(input_bytes - recording.first("drop input").freed_bytes, 0)
        saved_output_bytes, saved_made_bytes = self._saved_outputs(recording, saved_skips)
        replay_peak_bytes = 0
        if saved.count:
            replay_peak_bytes = recording.peak_between("forward", f"save {saved.count}") - start
        begin_of_reading = "unpack" if saved.was_read else "done"
        unpack_peak_bytes = recording.peak_between("backward", begin_of_reading) - level
        backward_peak_bytes = unpack_peak_bytes
        if saved.was_read:
            backward_peak_bytes = max(recording.peak_between("unpack", "done") - level, 0)
        return Option(
            name="keep",
            saved_bytes=max(level - lasting_bytes - saved_input_bytes - saved_output_bytes - saved_made_bytes, 0),
            saved_input_bytes=saved_input_bytes,
            saved_output_bytes=saved_output_bytes,
            saved_tensors=saved.count,
            forward_peak_bytes=recording.peak_between("forward", "root") - start,
            replay_peak_bytes=replay_peak_bytes,
            unpack_peak_bytes=unpack_peak_bytes,
            unpack_bytes=max(recording.first(begin_of_reading).start_bytes - level, 0),
            backward_peak_bytes=backward_peak_bytes,
            backward_segment_peak_bytes=backward_peak_bytes,
            backward_held_peak_bytes=backward_peak_bytes,
            input_gradient_bytes=gradients.link_bytes,
            parameter_gradient_bytes=sum(gradients.parameters),
            # Of every saved output: nobody can tell by its bytes whether the backward needs each of its bits.
            needs_exact_output=saved_output_bytes > 0,
            forward_seconds=0.0,
            replay_seconds=0.0,
            backward_seconds=0.0,
            saved_skips=saved_skips,
            saved_state_bytes=self._saved_state_bytes(saved.addresses),
        )

    def _saved_outputs(
        self,
        recording: Recording,
        saved_skips: tuple[int, ...],
    ) -> tuple[int, int]:
        """Bytes of the link, and of the skips that the stage has made, that autograd has saved."""
        made_bytes = sum(self.ends.made_bytes)
        saved_made_bytes = sum(self.ends.made_bytes[place] for place in saved_skips)
        # What was not freed when the output was dropped, autograd has saved.
        kept_bytes = self.ends.link_bytes + made_bytes - recording.first("drop output").freed_bytes
        saved_link_bytes = min(max(kept_bytes - saved_made_bytes, 0), self.ends.link_bytes)
        return saved_link_bytes, saved_made_bytes

    def _saved_state_bytes(self, addresses: set[int]) -> int:
        """Bytes of remembered buffers whose storages are at these addresses."""
        saved = [buffer for *_, buffer in buffers_of(self.state.remembered) if address_of(buffer) in addresses]
        return bytes_in_blocks(saved, self.meter.block_bytes)

    def run(self, value: Any, source: Output | None = None) -> Any:
        """The output of one forward under the option, or inverted; ``source`` refers to the input that is dropped."""
        if self.way is not None:
            return run_inverted(self.way, value, source)
        return run_stage(self.stage, value, self.option)

    def rewind(self) -> None:
        """Set generators, and what user code can reach, to where every run starts."""
        if self.generators is not None:
            self.generators.restore()
        if self.before is not None:
            self.before.rewind()

    def _segment_run(self) -> tuple[int, int, int]:
        """Peak of a segment's first pass, what it leaves pinned, and its backward's peak after the recomputation."""
        # Buffers are lent and generators set back around all runs. So a segment needs to put back attributes alone.
        state = SegmentState(attributed=self.state.attributed)

        def forward(recording: Recording, value: Any, _: Output | None) -> Any:
            # The first call is the discarded pass, any later one the recomputation.
            passes = count()

            def function(value: Any) -> Any:
                is_recomputation = next(passes) > 0
                if is_recomputation and self.generators is not None:
                    self.generators.restore()
                try:
                    return self.run(value)
                finally:
                    # A recomputation ends in an exception at its last saved tensor.
                    if is_recomputation:
                        recording.mark("recomputed")

            return recomputed(function, value, draws_random=False, state=state)

        try:
            recording, _, _ = self._recorded(forward)
        except RuntimeError as error:
            # Autograd's own comparison of shapes.
            if "returned an invalid gradient" not in str(error):
                raise
            raise _ForeignGraphError from error
        start = recording.first("forward").start_bytes
        level = recording.first("backward").start_bytes
        # A segment that saves nothing does not hold its input either.
        pinned_bytes = max(level - start + recording.first("drop input").freed_bytes, 0)
        recomputed_peak_bytes = max(recording.peak_between("recomputed", "done") - level, 0)
        return recording.peak_between("forward", "root") - start, pinned_bytes, recomputed_peak_bytes
