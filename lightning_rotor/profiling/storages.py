"""Which storages the values of a chain have: who makes and reads each, and which stages they tie together.

Values are followed by storage, not by name: a mask returned as it came, or a view of an earlier activation, takes no
memory of its own, but keeps alive what it shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import torch

from lightning_rotor.chain import Skip
from lightning_rotor.errors import ModelError
from lightning_rotor.execution.options import kept_attributes, lent_buffers, run_stage
from lightning_rotor.private.sharding import gathered, units_in
from lightning_rotor.private.torch_names import version_of
from lightning_rotor.private.values import (
    TreeSpec,
    address_of,
    spelled,
    tensors_in,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from lightning_rotor.stages.sequential import Stage, merge, unpacked, wiring_of
from lightning_rotor.stages.state import GeneratorStates
from lightning_rotor.units import in_blocks

# ----------------------------------------------------------------------------------------------------
# What a stage takes while a chain is measured: tensors in any nesting of tuples, lists and dicts.


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """What a stage takes, without its graph: detached tensors and other objects, in the order of the tree.

    ``whole_storages``: a slice holds what it is cut from, as a stage's output does, unlike the chain's own input.
    """

    leaves: tuple[Any, ...]
    spec: TreeSpec
    requires_grad: tuple[bool, ...]
    whole_storages: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any, *, whole_storages: bool = False) -> Boundary:
        """The boundary that a value makes."""
        leaves, spec = tree_flatten(value)
        detached = tuple(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        requires_grad = tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        return cls(detached, spec, requires_grad, (whole_storages,) * len(leaves))

    @classmethod
    def packed(cls, values: Sequence[Boundary]) -> Boundary:
        """The boundary of several values: the only one as it is, or a tuple of all."""
        if len(values) == 1:
            return values[0]
        _, spec = tree_flatten(tuple(tree_unflatten(value.leaves, value.spec) for value in values))
        fields = zip(*((value.leaves, value.requires_grad, value.whole_storages) for value in values), strict=True)
        leaves, requires_grad, whole = (
            (tuple(chain.from_iterable(field)) for field in fields) if values else ((), (), ())
        )
        return cls(leaves, spec, requires_grad, whole)

    def fresh(self) -> Any:
        """A copy that belongs to the caller alone. It is no leaf of the graph, so it may be changed in place."""
        storages: dict[int, torch.Tensor] = {}
        users = Counter(address_of(leaf) for leaf in self.leaves if isinstance(leaf, torch.Tensor))

        def copy(leaf: Any, requires_grad: bool, whole: bool) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            source = leaf.detach().requires_grad_(requires_grad)
            address, storage = address_of(leaf), leaf.untyped_storage()
            if not whole or (storage.nbytes() <= leaf.nbytes and (users[address] == 1 or not address)):
                return source.clone()
            # A slice keeps alive all that it is cut from, as in training; leaves that share a storage share it here.
            if address not in storages:
                storages[address] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=leaf.device)
            return _Placed.apply(source, storages[address])

        with torch.enable_grad():
            copies = list(map(copy, self.leaves, self.requires_grad, self.whole_storages))
        return tree_unflatten(copies, self.spec)

    def size_bytes(self, block_bytes: int) -> int:
        """Bytes of the tensors' elements in blocks of the allocator, without what they are slices of."""
        return sum(in_blocks(leaf.nbytes, block_bytes) for leaf in self.leaves if isinstance(leaf, torch.Tensor))

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


# ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Storage:
    """Memory under some tensors, made by the stage ``born`` (-1 for the chain's input), read by the stages ``uses``."""

    born: int
    size_bytes: int
    uses: set[int] = field(default_factory=set)
    in_output: bool = False


@dataclass(frozen=True, slots=True)
class UnmeasuredSkip:
    """A :class:`~lightning_rotor.chain.Skip` without gradients, before its readers' backwards have run."""

    born: int
    uses: tuple[int, ...]
    size_bytes: int
    in_output: bool

    def is_needed_after(self, stage: int) -> bool:
        """True if a later stage, or the caller, reads it."""
        return self.in_output or self.uses[-1] > stage

    def measured(self, gradient_bytes: Iterable[int]) -> Skip:
        """The skip, with what each of its readers leaves of its gradient."""
        return Skip(self.born, self.uses, self.size_bytes, tuple(gradient_bytes), self.in_output)


@dataclass(frozen=True, slots=True, eq=False)
class Scouting:
    """What one run of each stage showed: each value's storages by leaf (None if no tensor), and stages to merge."""

    storages: dict[int, tuple[Storage | None, ...]]
    draws_random: tuple[bool, ...]
    changes_input: bool
    groups: tuple[range, ...]

    def skips(self) -> dict[Storage, UnmeasuredSkip]:
        """Storages that outlive a link, as skips in terms of the groups."""
        group_of = {stage: number for number, group in enumerate(self.groups) for stage in group} | {-1: -1}
        found: dict[Storage, UnmeasuredSkip] = {}
        for storage in dict.fromkeys(each for leaves in self.storages.values() for each in leaves if each is not None):
            born = group_of[storage.born]
            uses = tuple(sorted({group_of[use] for use in storage.uses} - {born}))
            if uses and (uses != (born + 1,) or (storage.in_output and storage.size_bytes)):
                size_bytes = storage.size_bytes if born >= 0 else 0
                found[storage] = UnmeasuredSkip(born, uses, size_bytes, storage.in_output)
        return found


def scout(
    stages: Sequence[Stage], inputs: dict[int, Boundary], device: torch.device, *, block_bytes: int = 1
) -> Scouting:
    """Run every stage once and follow the storages, counted in blocks; raises ModelError if one returns no tensor."""
    wiring = wiring_of(stages)
    values = dict(inputs)
    storages = {number: _storages_of(value.leaves, -1, {}, block_bytes) for number, value in inputs.items()}
    draws: list[bool] = []
    # Numbers of the stages before which the chain can be cut.
    cuts = set(range(len(stages) + 1))
    changes_input = False
    open_head = False  # nothing but views of the chain's input so far
    for index, stage in enumerate(stages):
        changed, drew = _run_once(stage, index, values, storages, device, block_bytes)
        draws.append(drew)
        results = [storage for number in stage.writes for storage in storages[number] if storage is not None]
        old = [storage.born < index for storage in results]
        if all(old) or open_head:
            # A view may join either neighbour, but whatever joins an invertible stage takes its inverse away.
            to_next = 0 < index < len(stages) - 1 and stages[index - 1].inverse is not None and not open_head
            cuts.discard(index + 1 if to_next else index)
        open_head = (index == 0 or open_head) and all(storage.born < 0 for storage in results)
        for each in changed:
            changes_input = changes_input or each.born < 0
            cuts -= set(range(each.born + 1, index + 1))
        for number in wiring.dead[index]:
            values.pop(number, None)
    for number in stages[-1].writes:
        for storage in storages[number]:
            if storage is not None:
                storage.in_output = True
    starts = sorted(cuts | {0, len(stages)})
    groups = tuple(range(start, end) for start, end in pairwise(starts))
    return Scouting(storages, tuple(draws), changes_input, groups)


def _run_once(
    stage: Stage,
    index: int,
    values: dict[int, Boundary],
    storages: dict[int, tuple[Storage | None, ...]],
    device: torch.device,
    block_bytes: int,
) -> tuple[list[Storage], bool]:
    """Run a stage and add what it makes; the storages it changes in place, and whether it drew random numbers."""
    taken = [leaf for number in stage.reads for leaf in storages[number]]
    for storage in taken:
        if storage is not None:
            storage.uses.add(index)
    with gathered(units_in(stage.modules)), kept_attributes(stage), lent_buffers(stage):
        value = Boundary.packed([values[number] for number in stage.reads]).fresh()
        leaves = tree_leaves(value)
        versions = [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
        before = GeneratorStates(device)
        output = run_stage(stage, value)
        drew = not before.equals(GeneratorStates(device))
        known = {address_of(leaf): storage for leaf, storage in zip(leaves, taken, strict=True) if storage is not None}
        made = unpacked(output, len(stage.writes))
        if not tensors_in(made):
            raise ModelError(
                f"stage {stage.name!r} returns {type(output).__name__}, which holds no tensor: expected a tensor, or "
                "tensors in tuples, lists or dicts"
            )
        for number, part in zip(stage.writes, made, strict=True):
            values[number] = Boundary.of(part, whole_storages=True)
            storages[number] = _storages_of(tree_leaves(part), index, known, block_bytes)
        changed = [
            storage
            for leaf, storage, version in zip(leaves, taken, versions, strict=True)
            if storage is not None and version_of(leaf) != version
        ]
    return changed, drew


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
    return tuple(
        _storage(leaf, born, known, block_bytes) if isinstance(leaf, torch.Tensor) else None for leaf in leaves
    )


def _storage(leaf: torch.Tensor, born: int, known: dict[int, Storage], block_bytes: int) -> Storage:
    address = address_of(leaf)
    storage = known.get(address) if address else None
    if storage is None:
        storage = Storage(born, in_blocks(leaf.untyped_storage().nbytes(), block_bytes))
        known[address] = storage
    return storage
