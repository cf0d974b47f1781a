"""A look at a chain before it is measured: what its stages do, and which storages its values have.

Values are followed by storage, not by name: a mask returned as it came, or a view of an earlier activation, takes no
memory of its own, but keeps alive what it shows. A stage whose output is a view of its input, or that changes its input
in place, is merged with its neighbour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lightning_rotor.capture.sequentialize import NO_CHECKPOINTS
from lightning_rotor.chain import Skip
from lightning_rotor.errors import ModelError
from lightning_rotor.execution.isolated import draws_seen, kept_attributes, kept_parameters, lent_buffers
from lightning_rotor.execution.nested_backward import graph_behind
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.private.messages import NOT_ARRIVED, is_on_its_way
from lightning_rotor.private.sharding import gathered, units_in
from lightning_rotor.private.torch_names import is_compiled, name_of_node, noticed_checkpoints, version_of
from lightning_rotor.private.values import (
    TreeSpec,
    address_of,
    bytes_of,
    is_fake,
    is_made_of_others,
    like,
    other_layout,
    same_bits,
    spelled,
    storage_bytes_of,
    tensors_in,
    tree_flatten,
    tree_leaves,
    tree_structure,
    tree_unflatten,
    watch_containers,
)
from lightning_rotor.profiling.ranks import ALONE, Ranks
from lightning_rotor.stages.draws import drawn_since
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.known_layers import DRAWING, is_plain_stock
from lightning_rotor.stages.sequential import Stage, merge, wiring_of
from lightning_rotor.stages.wiring import unpacked
from lightning_rotor.units import in_blocks

# --------------------- What a stage takes while a chain is measured: tensors in any nesting of tuples, lists and dicts.


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """The input of a stage, without its graph: detached tensors and other objects, in the order of the tree."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    requires_grad: tuple[bool, ...]
    whole_storages: tuple[bool, ...]  # a slice holds what it is cut from, unlike the chain's own input

    @classmethod
    def of(cls, value: Any, *, whole_storages: bool = False) -> Boundary:
        """The boundary that a value makes."""
        leaves, spec = tree_flatten(value)
        detached = tuple(like(leaf.detach(), leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        requires_grad = tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        return cls(detached, spec, requires_grad, (whole_storages,) * len(leaves))

    @classmethod
    def packed(cls, values: Sequence[Boundary]) -> Boundary:
        """The boundary of several values: the only one as it is, or a tuple of all."""
        if len(values) == 1:
            return values[0]
        leaves = tuple(leaf for value in values for leaf in value.leaves)
        spec = tree_structure(tuple(tree_unflatten(value.leaves, value.spec) for value in values))
        requires_grad = tuple(learns for value in values for learns in value.requires_grad)
        return cls(leaves, spec, requires_grad, tuple(whole for value in values for whole in value.whole_storages))

    def fresh(self) -> Any:
        """A copy that belongs to the caller alone. It is no leaf of the graph, so it may be changed in place."""
        storages: dict[int, torch.Tensor] = {}
        users = Counter(address_of(leaf) for leaf in self.leaves if isinstance(leaf, torch.Tensor))

        def copy(leaf: Any, requires_grad: bool, whole: bool) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            source = leaf.detach().requires_grad_(requires_grad)
            address, storage = address_of(leaf), leaf.untyped_storage()
            is_whole = storage.nbytes() <= leaf.nbytes and (users[address] == 1 or not address)
            if not whole or is_whole or is_made_of_others(leaf):
                return like(source.clone(), leaf)
            # A slice keeps alive all that it is cut from, as in training; leaves that share a storage share it here.
            if address not in storages:
                storages[address] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=leaf.device)
            return like(_Placed.apply(source, storages[address]), leaf)

        with torch.enable_grad():
            copies = list(map(copy, self.leaves, self.requires_grad, self.whole_storages))
        return tree_unflatten(copies, self.spec)

    def size_bytes(self, block_bytes: int) -> int:
        """Bytes of the tensors' elements in blocks of the allocator, without what they are slices of."""
        return sum(in_blocks(bytes_of(leaf), block_bytes) for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Type and shape of each tensor."""
        return tuple(spelled(leaf.dtype, leaf.shape) for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    @property
    def signature(self) -> tuple[Any, ...]:
        """A key of what a stage's cost depends on, besides the stage."""
        return (
            str(self.spec),
            self.requires_grad,
            tuple(
                (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device)
                if isinstance(leaf, torch.Tensor)
                else repr(leaf)
                for leaf in self.leaves
            ),
        )


NOTHING = Boundary.of(())


class _Placed(torch.autograd.Function):
    """A copy of a tensor at its place within a larger storage."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
        # No view for autograd: in training, the stage before made it in one go.
        copy = torch.empty(0, dtype=source.dtype, device=source.device)
        copy.set_(storage.untyped_storage(), source.storage_offset(), source.shape, source.stride())
        return copy.copy_(source)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


@dataclass(slots=True, eq=False)
class Storage:
    """Memory under some tensors, made by the stage ``born`` (-1 for the chain's input), read by the stages ``uses``."""

    born: int
    size_bytes: int
    uses: set[int] = field(default_factory=set)
    in_output: bool = False


class Behaviour(NamedTuple):
    """Findings of the runs of a stage, or of several in a row."""

    draws_random: bool  # random numbers were drawn, or could be in some step
    repeatable: bool  # a recomputation gives the same bits
    leaves_traces: bool  # something that user code can reach was changed
    calls_checkpoint: bool  # torch's
    updating: tuple[nn.Module, ...]  # modules that changed buffers
    written: tuple[nn.Parameter, ...]  # parameters that were changed
    drawn: tuple[str, ...] = ()  # kinds of generators that it draws from
    starts: tuple[GeneratorStates, ...] = ()  # where these stood before each stage that draws, if threads may draw, too

    @classmethod
    def of_all(cls, each: Sequence[Behaviour]) -> Behaviour:
        """That of stages in a row."""
        draws, repeatable, traces, checkpoints, *rest = zip(*each, strict=True)
        return cls(any(draws), all(repeatable), any(traces), any(checkpoints), *(sum(each, ()) for each in rest))


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """Findings of one run of each stage."""

    storages: Mapping[int, tuple[Storage | None, ...]]  # of each value by leaf; None if it is no tensor
    behaviours: tuple[Behaviour, ...]  # of each stage
    groups: tuple[range, ...]  # stages to merge
    skips: Mapping[Storage, Skip]  # storages that outlive a link between the groups, without gradients
    unused: frozenset[int] = (
        frozenset()
    )  # leaves of the chain's output that its caller lets go of, and learns nothing from


def _skips(storages: Mapping[int, tuple[Storage | None, ...]], groups: Sequence[range]) -> dict[Storage, Skip]:
    group_of = {stage: number for number, group in enumerate(groups) for stage in group} | {-1: -1}
    found: dict[Storage, Skip] = {}
    for storage in dict.fromkeys(each for leaves in storages.values() for each in leaves if each is not None):
        born = group_of[storage.born]
        uses = tuple(sorted({group_of[use] for use in storage.uses} - {born}))
        if uses and (uses != (born + 1,) or (storage.in_output and storage.size_bytes)):
            size_bytes = storage.size_bytes if born >= 0 else 0
            found[storage] = Skip(born, uses, size_bytes, (0,) * len(uses), storage.in_output)
    return found


def scan(
    stages: Sequence[Stage],
    inputs: dict[int, Boundary],
    device: torch.device,
    *,
    block_bytes: int = 1,
    ranks: Ranks = ALONE,
    unused: Collection[int] = (),
) -> Scan:
    """Run every stage, look at what it does and follow the storages, counted in blocks; ModelError if it has none."""
    wiring = wiring_of(stages)
    values = dict(inputs)
    storages = {number: _storages_of(value.leaves, -1, {}, block_bytes) for number, value in inputs.items()}
    behaviours: list[Behaviour] = []
    # Numbers of the stages before which the chain can be cut.
    cuts = set(range(len(stages) + 1))
    for index, stage in enumerate(stages):
        boundary = Boundary.packed([values[number] for number in stage.reads])
        taken = [leaf for number in stage.reads for leaf in storages[number]]
        for storage in taken:
            if storage is not None:
                storage.uses.add(index)
        is_first = not inputs.keys().isdisjoint(stage.reads)
        outputs, made, changed, behaviour = _look(
            stage, index, boundary, taken, device, block_bytes, is_first=is_first, ranks=ranks
        )
        behaviours.append(behaviour)
        values.update(zip(stage.writes, outputs, strict=True))
        storages.update(zip(stage.writes, made, strict=True))
        results = [storage for leaves in made for storage in leaves if storage is not None]
        if all(storage.born < index for storage in results):
            # A view may join either neighbour, but nothing comes before one of the chain's input, and whatever joins
            # an invertible stage takes its inverse away.
            of_input = all(storage.born < 0 for storage in results)
            to_next = index < len(stages) - 1 and (of_input or stages[index - 1].invertible is not None)
            cuts.discard(index + 1 if to_next else index)
        for each in changed:
            cuts -= set(range(each.born + 1, index + 1))
        for number in wiring.dead[index]:
            values.pop(number, None)
    given = [storage for number in stages[-1].writes for storage in storages[number]]
    unused_leaves = _places_of_tensors(given, unused)
    for place, storage in enumerate(given):
        if storage is not None and place not in unused_leaves:
            storage.in_output = True
    starts = sorted({*ranks.common(cuts), 0, len(stages)})
    groups = tuple(range(start, end) for start, end in pairwise(starts))
    return Scan(storages, tuple(behaviours), groups, _skips(storages, groups), unused_leaves)


def _places_of_tensors(leaves: Sequence[Storage | None], numbers: Collection[int]) -> frozenset[int]:
    """Places among all leaves of the tensors with these numbers."""
    tensors = [place for place, storage in enumerate(leaves) if storage is not None]
    return frozenset(tensors[number] for number in numbers if number < len(tensors))


def _look(
    stage: Stage,
    index: int,
    boundary: Boundary,
    taken: Sequence[Storage | None],
    device: torch.device,
    block_bytes: int,
    *,
    is_first: bool,
    ranks: Ranks,
) -> tuple[tuple[Boundary, ...], list[tuple[Storage | None, ...]], list[Storage], Behaviour]:
    """The result of a stage, the storages of that, those that it changes in place, and what it does."""
    states = GeneratorStates(device)
    with (
        gathered(units_in(stage.modules)),
        noticed_checkpoints() as noticed,
        kept_attributes(stage, keep_parameters=False) as before,
        lent_buffers(stage) as originals,
        kept_parameters(stage) as written,
        draws_seen(stage) as certain,
    ):
        value = boundary.fresh()
        leaves, containers_changed = tree_leaves(value), watch_containers(value)
        versions = [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
        # Compiled code changes nothing in place by a message, and would not be compiled when it is watched.
        with nullcontext() if any(map(is_compiled, stage.called_modules())) else ranks.watching():
            output = run_stage(stage, value)
        if not tensors_in(output):
            raise ModelError(
                f"stage {stage.name!r} returns {type(output).__name__}, which holds no tensor: expected a tensor, or "
                "tensors in tuples, lists or dicts"
            )
        if is_first and containers_changed():
            raise ModelError(
                f"stage {stage.name!r} changes a container that the module is called with: let it return a new one"
            )
        outputs = _boundaries(stage, output)
        known = {address_of(leaf): storage for leaf, storage in zip(leaves, taken, strict=True) if storage is not None}
        made = [_storages_of(part.leaves, index, known, block_bytes) for part in outputs]
        changed = [
            storage
            for leaf, storage, version in zip(leaves, taken, versions, strict=True)
            if storage is not None and version_of(leaf) != version
        ]
        updating, leaves_traces = _updating(originals), bool(before.changed())
        lost = before.gone() or any(isinstance(each, np.ndarray) for each in before.changed_large())
        repeatable = not (lost or _saves_noise_early(tensors_in(output)))
    del value, leaves, output
    if True in noticed:
        raise ModelError(f"stage {stage.name!r} cannot be measured. {NO_CHECKPOINTS}")
    # TorchScript changes the exceptions that pass through it, and a recomputation ends in one.
    scripted = any(isinstance(module, torch.jit.ScriptModule) for _, module in stage.submodules())
    changes_input = any(storage.born < 0 for storage in changed)  # the chain's
    repeatable = repeatable and not (written or scripted or changes_input)
    drawn = drawn_since(states, partial(outputs_of, stage, boundary), certain=certain)
    if ranks.any(not repeatable):
        repeatable = False
    elif not _is_stock(stage):
        states.restore(drawn)
        repeatable = not ranks.any(not _same(outputs, outputs_of(stage, boundary)))
    draws_random = bool(drawn) or _may_draw(stage)
    behaviour = Behaviour(
        draws_random, repeatable, leaves_traces, bool(noticed), updating, tuple(written), tuple(drawn),
        starts=(states,) if drawn and states.shared else (),
    )  # fmt: skip
    return outputs, made, changed, behaviour


def _saves_noise_early(outputs: Iterable[torch.Tensor]) -> bool:
    """True if an RReLU made these outputs: it saves its noise, where a recomputation may end, before it draws it."""
    nodes = graph_behind(output.grad_fn for output in outputs if output.grad_fn is not None)
    return any(name_of_node(node).startswith("Rrelu") for node in nodes)


def outputs_of(stage: Stage, boundary: Boundary) -> tuple[Boundary, ...]:
    """The result of a stage for its input, value by value, in a run that leaves everything else as it was."""
    with gathered(units_in(stage.modules)), kept_attributes(stage), lent_buffers(stage):
        return _boundaries(stage, run_stage(stage, boundary.fresh()))


def _boundaries(stage: Stage, output: Any) -> tuple[Boundary, ...]:
    if any(map(is_on_its_way, tensors_in(output))):
        raise ModelError(f"stage {stage.name!r} cannot be planned: {NOT_ARRIVED}")
    layout = other_layout(tensors_in(output))
    if layout:
        raise ModelError(
            f"stage {stage.name!r} returns a tensor of layout {layout}: expected dense ones between stages, as the "
            "memory of others cannot be followed. Make it and use it within one module"
        )
    return tuple(Boundary.of(part, whole_storages=True) for part in unpacked(output, len(stage.writes)))


def _same(outputs: Sequence[Boundary], others: Sequence[Boundary]) -> bool:
    """True if the tensors are the same in each bit."""
    mine, theirs = ([leaf for each in some for leaf in tensors_in(each.leaves)] for some in (outputs, others))
    return len(mine) == len(theirs) and all(map(same_bits, mine, theirs))


def walk(stages: Sequence[Stage], inputs: Mapping[int, Boundary]) -> Iterator[tuple[int, Boundary]]:
    """The numbers of stages with their inputs. A stage runs when the next one's turn comes, so few values are held."""
    dead = wiring_of(stages).dead
    values = dict(inputs)
    for number, stage in enumerate(stages):
        boundary = Boundary.packed([values[read] for read in stage.reads])
        yield number, boundary
        if number < len(stages) - 1:
            values.update(zip(stage.writes, outputs_of(stage, boundary), strict=True))
            for value in dead[number]:
                del values[value]


def _updating(originals: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> tuple[nn.Module, ...]:
    """Modules whose lent buffers differ from the originals. Kernels (BatchNorm's) may write without a new version."""
    return tuple(
        module
        for module, name, original in originals
        if (current := module._buffers[name]) is None
        or not same_bits(current, original)
        or (is_fake(current) and version_of(current) > 0)  # a copy that was lent begins at 0
    )


def _may_draw(stage: Stage) -> bool:
    """True if a stage could draw random numbers in some step: a probability may be raised, user code do anything."""
    return not _is_stock(stage) or any(isinstance(module, DRAWING) for _, module in stage.submodules())


def _is_stock(stage: Stage) -> bool:
    """True if a stage is made of torch's own layers alone."""
    return all(is_plain_stock(module) for _, module in stage.submodules())


def merged(stages: Sequence[Stage], groups: Sequence[range]) -> tuple[Stage, ...]:
    """The stages, with each group made one."""
    needed = set(stages[-1].writes)
    found: list[Stage] = []
    for group in reversed(groups):
        together = [stages[index] for index in group]
        found.append(merge(together, frozenset(needed)))
        needed.update(number for stage in together for number in stage.reads)
    return tuple(reversed(found))


def _storages_of(
    leaves: Iterable[Any], born: int, known: dict[int, Storage], block_bytes: int
) -> tuple[Storage | None, ...]:
    """The storage of each leaf, new ones added to those ``known`` by address; None if it is no tensor."""

    def storage(leaf: torch.Tensor) -> Storage:
        address = address_of(leaf)
        if not address or address not in known:
            known[address] = Storage(born, in_blocks(storage_bytes_of(leaf), block_bytes))
        return known[address]

    return tuple(storage(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
