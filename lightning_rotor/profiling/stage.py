"""Bytes of one stage: what its forward and backward take, what it is given, and what it leaves.

Every run owns a fresh copy of the stage's input, and a node makes the gradient of the output on the spot. So everything
dies as in training: the gradient after the first operator that reads it, the input with the last saved tensor that
needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from lightning_rotor.chain import Option, StageCost
from lightning_rotor.errors import ModelError
from lightning_rotor.execution.boundary import Output
from lightning_rotor.execution.inversion import Way, run_inverted
from lightning_rotor.execution.lent_tensors import buffers_of
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.execution.segment import recomputed
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.private.torch_names import is_compiled, name_of_node, sparse_parts, version_of
from lightning_rotor.private.values import (
    address_of,
    bytes_in_blocks,
    bytes_of,
    storage_bytes_of,
    tensors_in,
    tree_flatten,
    tree_leaves,
)
from lightning_rotor.profiling.meters import Meter, Recording
from lightning_rotor.profiling.ranks import Ranks
from lightning_rotor.profiling.scan import NOTHING, Boundary, Scan
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.snapshot import Snapshot
from lightning_rotor.units import in_blocks

# -------------------------------- Where a stage meets the rest of its chain: which storages it takes and leaves behind.


@dataclass(frozen=True, slots=True)
class StageEnds:
    """Which storages a stage takes and leaves behind: skips by places, so that equal ends are equal; None its link."""

    skips: tuple[int, ...] = field(compare=False)
    inputs: tuple[int | None, ...]  # of each leaf
    outputs: tuple[int | None, ...]
    passed: tuple[bool, ...]  # for each leaf of the input, True if it is a skip that a later stage reads
    link_bytes: int
    made_bytes: tuple[int, ...]  # of each skip that it makes, 0 for others

    @classmethod
    def of(cls, stage: Stage, number: int, scan: Scan) -> StageEnds:
        """The ends of the stage with this number among the merged ones."""
        taken = [storage for read in stage.reads for storage in scan.storages[read]]
        given = [storage for write in stage.writes for storage in scan.storages[write]]
        own = dict.fromkeys(each for each in (*taken, *given) if each is not None and each in scan.skips)
        places = {storage: place for place, storage in enumerate(own)}
        later = {each for each in own if scan.skips[each].in_output or scan.skips[each].last_use > number}
        made = {each for each in given if each is not None and each.born in scan.groups[number]}
        return cls(
            tuple(map(list(scan.skips).index, own)),
            tuple(None if storage is None else places.get(storage) for storage in taken),
            tuple(None if storage is None else places.get(storage) for storage in given),
            tuple(storage in later for storage in taken),
            sum(storage.size_bytes for storage in made if storage not in own),
            tuple(storage.size_bytes if storage in made else 0 for storage in own),
        )


Memories: TypeAlias = dict[int, torch.Tensor]
"""Storages, as flat tensors, by their numbers in some :class:`Layouts`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of a gradient in its memory, ``memory`` by number: plain, as a slice, expanded or in another order."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int
    dtype: torch.dtype
    device: torch.device
    memory: int = 0
    is_plain: bool = False
    counts_elsewhere: bool = False  # an earlier stage's skip has a gradient in the same memory, and keeps it alive

    @classmethod
    def like(cls, tensor: torch.Tensor, memory: int) -> Layout:
        """The layout of a gradient that lies like its tensor, in memory of its own."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        size = meta.untyped_storage().nbytes()
        return cls(tensor.shape, tensor.stride(), 0, size, tensor.dtype, tensor.device, memory, is_plain=True)

    def new_memory(self) -> torch.Tensor:
        """New memory for it, of ones: uninitialized memory may hold denormals, whose arithmetic is slow."""
        return torch.ones(self.storage_bytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)

    def ones(self, memories: Memories) -> torch.Tensor:
        """A tensor that lies like this in its memory, which is added to ``memories`` if it is missing."""
        if self.memory not in memories:
            memories[self.memory] = self.new_memory()
        return memories[self.memory].view(self.dtype).as_strided(self.shape, self.stride, self.offset)


Layouts: TypeAlias = tuple[tuple[int, Layout], ...]
"""How gradients lie, by key: a skip's place, or ``~n`` for the link's tensor n. Others lie like their tensors."""


def layouts_from(left: Mapping[int, tuple[int, Layout]]) -> Layouts:
    """Layouts of a stage's gradients, by key, from the numbers of the readers that leave them and their layouts."""
    readers = Counter((reader, layout.memory) for reader, layout in left.values())
    owned = {(reader, layout.memory) for reader, layout in left.values() if not layout.counts_elsewhere}
    numbers: dict[tuple[int, int], int] = {}
    found = []
    for key, (reader, layout) in sorted(left.items()):
        memory = reader, layout.memory
        if layout.counts_elsewhere or not layout.is_plain or readers[memory] > 1:
            number = numbers.setdefault(memory, len(numbers))
            elsewhere = layout.counts_elsewhere and memory not in owned
            found.append((key, replace(layout, memory=number, counts_elsewhere=elsewhere)))
    return tuple(found)


def memories_elsewhere(layouts: Layouts) -> Memories:
    """New memory for gradients that are counted elsewhere, so that it is not counted here."""
    return {layout.memory: layout.new_memory() for _, layout in layouts if layout.counts_elsewhere}


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients that a backward leaves."""

    link_bytes: int = 0  # gradients of its link
    skip_bytes: Mapping[int, int] = field(default_factory=dict)  # by place: all of a slice, 0 if another counts it
    layouts: Mapping[int, Layout] = field(default_factory=dict)  # by key, without skips that several tensors show
    parameters: tuple[int, ...] = ()  # bytes of the gradient of each parameter that learns; 0 if there is none
    given_bytes: int = 0  # gradients of skips that it was given, as far as its peaks count them


def layouts_of(gradients: Sequence[tuple[int, tuple[int, ...], torch.Tensor]]) -> list[Layout]:
    """Layouts of the gradients of a stage's inputs, given with the keys and strides of the inputs."""
    # What several share counts for the skip that was made first, whose gradient is needed longest.
    owners: dict[int, int] = {}
    for key, _, gradient in gradients:
        if key >= 0 and (address := address_of(gradient)):
            owners[address] = min(key, owners.get(address, key))
    return [
        Layout(
            gradient.shape,
            gradient.stride(),
            int(gradient.storage_offset()),
            storage_bytes_of(gradient),
            gradient.dtype,
            gradient.device,
            address_of(gradient),
            # Strides of dimensions of size 1 say nothing.
            gradient.untyped_storage().nbytes() == gradient.nbytes
            and all(
                n == 1 or one == two for n, one, two in zip(gradient.shape, gradient.stride(), stride, strict=True)
            ),
            owners.get(address_of(gradient), key) != key,
        )
        for key, stride, gradient in gradients
    ]


def memory_bytes(layouts: Iterable[Layout], block_bytes: int) -> int:
    """Bytes of the distinct memories under some gradients, as far as they do not count elsewhere."""
    sizes = {each.memory: 0 if each.counts_elsewhere else each.storage_bytes for each in layouts}
    return sum(in_blocks(size, block_bytes) for size in sizes.values())


# ------------------------------------------------------------------------- Running a stage while a meter looks on.


# Smaller shares of a backward's peak are not measured again with existing gradients, to save time.
_NEGLIGIBLE = 1 / 256


@dataclass(frozen=True, slots=True)
class StageMeasurement:
    """Costs of a stage and what it does to gradients."""

    cost: StageCost
    gradients: Gradients


class _Saves:
    """Tensors that autograd saves in a run, where a stage may differentiate, and when its backward reads them."""

    recording: Recording

    def __init__(self, stage: str, *, gives_up: bool) -> None:
        self.count = self.read = 0
        self.skips: tuple[int, ...] = ()
        self.addresses: set[int] = set()
        self.is_over = False  # the forward
        self._stage, self._gives_up = stage, gives_up

    def pack(self, tensor: torch.Tensor) -> list[Any]:
        """The saved tensor with its version."""
        self.count += 1
        self.addresses.add(address_of(tensor))
        self.recording.mark(f"save {self.count}")
        return [tensor, version_of(tensor)]

    def unpack(self, packed: list[Any]) -> torch.Tensor:
        """The saved tensor, if it is unchanged."""
        tensor: torch.Tensor
        tensor, version = packed
        if self.is_over and self._gives_up:  # as a checkpoint does with what it has recomputed
            packed.clear()
        self.read += self.is_over
        if self.is_over and self.read == 1:
            self.recording.mark("unpack")
        if version_of(tensor) != version:  # autograd does not compare those of what a hook has packed
            node = tensor.grad_fn
            changer = "" if node is None else f", changed by {name_of_node(node).removesuffix('Backward0')}"
            raise ModelError(
                f"stage {self._stage!r} changes a tensor in place that its backward needs as it was (shape "
                f"{tuple(tensor.shape)}{changer}): plain training fails here, too, but a recomputation "
                "would give wrong gradients. Expected an operation that is not in place"
            )
        return tensor


@dataclass(frozen=True, slots=True)
class StageProfiler:
    """Measures one stage at one boundary."""

    stage: Stage
    ends: StageEnds
    state: SegmentState  # what a recomputation must leave alone
    last: bool  # the caller holds its output during the backward
    recomputable: bool  # it may run as a segment
    generators: GeneratorStates | None  # where every run of a stage that may draw starts
    meter: Meter
    repeats: int  # of timed runs
    interlude: Callable[[], object]  # called before each timed run
    ranks: Ranks  # where they are together, neither times nor sizes may decide what runs
    accumulating: bool  # also measure where gradients exist
    boundary: Boundary = NOTHING
    layouts: Layouts = ()  # how later stages leave the gradients that it is given
    before: Snapshot | None = None  # what user code can reach where every run starts
    shared: Mapping[int, bool] = field(default_factory=dict)  # numbers of parameters of later stages: by one alone?
    gradients_exist: bool = False  # new ones are freed at once, as where autograd adds them to others
    option: int = 0
    way: Way | None = None  # how it is inverted

    @property
    def is_compiled(self) -> bool:
        """True if the user compiled the stage or a part of it."""
        return any(is_compiled(module) for _, module in self.stage.submodules())

    def measure(self) -> StageMeasurement:
        """Bytes of the stage, when it has run before."""
        found = self._bytes()
        keep = found.cost.keep
        matters = self.ranks.together or keep.parameter_gradient_bytes > _NEGLIGIBLE * keep.backward_held_peak_bytes
        if self.accumulating and matters:
            again = replace(self, gradients_exist=True)._bytes().cost.keep
            keep = replace(keep, accumulating=again.backward_peaks(gradients_exist=False))
        return replace(found, cost=replace(found.cost, options=(keep,)))

    def _bytes(self) -> StageMeasurement:
        """Bytes, from a run for each case that differs."""
        keep, gradients = self.recorded_run(hold_input=False, hold_output=False)
        alone = self.recorded_run(hold_input=False, hold_output=True)[0] if self.last else keep
        # An input that the stage does not save does not matter to its backward, whoever holds it.
        matters = self.ranks.together or keep.saved_input_bytes
        held = self.recorded_run(hold_input=True, hold_output=self.last)[0] if matters else alone
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
        replay_peak = recording.peak_between("forward", f"save {saves.count}") - start if saves.count else 0
        buffers = (buffer for *_, buffer in buffers_of(self.state.remembered))
        saved_states = [buffer for buffer in buffers if address_of(buffer) in saves.addresses]
        begun = "unpack" if saves.read else "done"
        unpack_peak = recording.peak_between("backward", begun) - level
        backward_peak = max(recording.peak_between("unpack", "done") - level, 0) if saves.read else unpack_peak
        return Option(
            name="keep",
            saved_bytes=max(level - lasting_bytes - saved_input - saved_output - saved_made, 0),
            saved_input_bytes=saved_input,
            saved_output_bytes=saved_output,
            saved_tensors=saves.count,
            forward_peak_bytes=recording.peak_between("forward", "root") - start,
            replay_peak_bytes=replay_peak,
            unpack_peak_bytes=unpack_peak,
            unpack_bytes=max(recording.first(begun).start_bytes - level, 0),
            backward_peak_bytes=backward_peak,
            backward_segment_peak_bytes=backward_peak,
            backward_held_peak_bytes=backward_peak,
            input_gradient_bytes=gradients.link_bytes,
            parameter_gradient_bytes=sum(gradients.parameters),
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

    def rewind(self) -> None:
        """Set generators, and what user code can reach, to where every run starts."""
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
        recomputed_peak = max(recording.peak_between("recomputed", "done") - level, 0)
        return recording.peak_between("forward", "root") - start, pinned_bytes, recomputed_peak


class StageBackward:
    """The backward of a stage that has just run, given gradients as the profiler's layouts say; holds no tensor."""

    def __init__(self, profiler: StageProfiler, value: Any, output: Any, elsewhere: Memories) -> None:
        ends, self._block_bytes = profiler.ends, profiler.meter.block_bytes
        leaves = tree_leaves(value)
        outputs = ending(ends, leaves, output)
        self._lie, self._elsewhere = lying(outputs, dict(profiler.layouts)), elsewhere
        of_skips = (layout for (_, key), layout in zip(outputs, self._lie, strict=True) if key >= 0)
        self._given_bytes = memory_bytes(of_skips, self._block_bytes)
        self._meter, self._times = profiler.meter, list[Any]()
        inputs = learning(leaves, ends.inputs)
        self._inputs = [get_gradient_edge(leaf) for leaf, _ in inputs]
        self._keys = [(key, leaf.stride()) for leaf, key in inputs]
        self._parameters = profiler.stage.learning()
        shared = {self._parameters[number]: by_one for number, by_one in profiler.shared.items()}
        self._given_up = self._parameters if profiler.gradients_exist else list(shared)
        # To the first gradient, which may be a view, autograd adds the second in a new tensor; to that sum in place.
        self._unsummed = [parameter for parameter, by_one in shared.items() if by_one]
        sources = *(tensor for tensor, _ in outputs), *self._unsummed
        self._root = _GradientSource.apply(self, *sources) if outputs else None

    def given(self) -> list[torch.Tensor]:
        """The gradients of its outputs, made now. Then its time begins: making them is another stage's in training.

        Those that wait for this stage's come first, too, and take no memory here.
        """
        memories = {**self._elsewhere}
        gradients = [layout.ones(memories) for layout in self._lie]
        self._times.append(self._meter.now())
        return [*gradients, *(parameter.detach() for parameter in self._unsummed)]

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
            parameters=tuple(self._parameter_bytes(gradients[len(self._inputs) :])),
            given_bytes=self._given_bytes,
        )

    def _parameter_bytes(self, gradients: Sequence[torch.Tensor | None]) -> Iterator[int]:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                yield 0
            elif gradient.layout == torch.strided:
                # Accumulation copies a gradient that is no dense tensor of its own (an expanded one, say).
                yield in_blocks(bytes_of(parameter), self._block_bytes)
            else:
                yield bytes_in_blocks(sparse_parts(gradient), self._block_bytes)


class _GradientSource(torch.autograd.Function):
    """A tensor without elements whose backward gives what later stages' would, for outputs and shared parameters."""

    @staticmethod
    def forward(ctx: Any, run: StageBackward, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        return torch.empty(0, device=outputs[0].device)  # nothing to count

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.run.given()


def learning(leaves: Sequence[Any], places: Sequence[int | None]) -> list[tuple[torch.Tensor, int]]:
    """The tensors that require gradients, with their keys."""
    numbers = count()
    return [
        (leaf, ~next(numbers) if place is None else place)
        for leaf, place in zip(leaves, places, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def ending(ends: StageEnds, leaves: Sequence[Any], output: Any) -> list[tuple[torch.Tensor, int]]:
    """The tensors whose gradients a stage is given, with their keys."""
    # Later readers of a skip have left its gradient; what the stage hands on itself gets it as an output.
    handed_on = {id(tensor) for tensor in tensors_in(output)}
    passed = [
        (leaf, place)
        for leaf, place, later in zip(leaves, ends.inputs, ends.passed, strict=True)
        if later and place is not None and leaf.requires_grad and id(leaf) not in handed_on
    ]
    return [*learning(tree_flatten(output)[0], ends.outputs), *passed]


def lying(ending: Sequence[tuple[torch.Tensor, int]], layouts: Mapping[int, Layout]) -> list[Layout]:
    """The layout of each of these gradients: as given, or else like its tensor."""
    tensors = Counter(key for _, key in ending)
    found = []
    for number, (leaf, key) in enumerate(ending):
        layout = layouts.get(key) if tensors[key] == 1 else None
        if layout is None or layout.shape != leaf.shape:
            layout = Layout.like(leaf, ~number)
        found.append(layout)
    return found
