"""The input of a stage while a chain is measured: tensors in any nesting of tuples, lists and dicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_rotor.private.values import (
    TreeSpec,
    address_of,
    bytes_of,
    is_made_of_others,
    like,
    spelled,
    tree_flatten,
    tree_structure,
    tree_unflatten,
)
from lightning_rotor.units import in_blocks


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """The input of a stage, without its graph.

    Attributes:
        leaves: Detached tensors and other objects, in the order of the tree.
        spec: The nesting.
        requires_grad: For each leaf, True if it is a tensor that requires gradients.
        whole_storages: For each leaf, True if a copy of a slice holds all that it is cut from, as what a stage has made
            does. The chain's own input does not: the caller holds it.
    """

    leaves: tuple[Any, ...]
    spec: TreeSpec
    requires_grad: tuple[bool, ...]
    whole_storages: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any, *, whole_storages: bool = False) -> Boundary:
        """The boundary that a value makes."""
        leaves, spec = tree_flatten(value)
        detached = []
        requires_grad = []
        for leaf in leaves:
            is_tensor = isinstance(leaf, torch.Tensor)
            # Without its graph, which would hold what the stages before have saved.
            detached.append(like(leaf.detach(), leaf) if is_tensor else leaf)
            requires_grad.append(is_tensor and leaf.requires_grad)
        return cls(tuple(detached), spec, tuple(requires_grad), (whole_storages,) * len(leaves))

    @classmethod
    def packed(cls, values: Sequence[Boundary]) -> Boundary:
        """The boundary of several values: the only one as it is, or a tuple of all."""
        if len(values) == 1:
            return values[0]
        leaves: tuple[Any, ...] = ()
        requires_grad: tuple[bool, ...] = ()
        whole_storages: tuple[bool, ...] = ()
        for value in values:
            leaves += value.leaves
            requires_grad += value.requires_grad
            whole_storages += value.whole_storages
        spec = tree_structure(tuple(tree_unflatten(value.leaves, value.spec) for value in values))
        return cls(leaves, spec, requires_grad, whole_storages)

    def fresh(self) -> Any:
        """A copy that belongs to the caller alone. It is no leaf of the graph, so it may be changed in place."""
        # A slice keeps alive all that it is cut from, as in training; leaves that share a storage share it in the copy.
        copies = _Copies(self.leaves)
        fresh = []
        # Copies are made under gradients, wherever this is asked for: they are no leaves then.
        with torch.enable_grad():
            for leaf, requires_grad, whole in zip(self.leaves, self.requires_grad, self.whole_storages, strict=True):
                if isinstance(leaf, torch.Tensor):
                    fresh.append(copies.of(leaf, requires_grad=requires_grad, whole=whole))
                else:
                    fresh.append(leaf)
        return tree_unflatten(fresh, self.spec)

    def size_bytes(self, block_bytes: int) -> int:
        """Bytes of the tensors' elements in blocks of the allocator, without what they are slices of."""
        return sum(in_blocks(bytes_of(tensor), block_bytes) for tensor in self._tensors())

    @property
    def tensors(self) -> tuple[str, ...]:
        """Type and shape of each tensor."""
        return tuple(spelled(tensor.dtype, tensor.shape) for tensor in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def signature(self) -> tuple[Any, ...]:
        """A key of what a stage's cost depends on, besides the stage."""
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                leaves.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device))
            else:
                # As text, since an object of the user's need have no hash.
                leaves.append(repr(leaf))
        return str(self.spec), self.requires_grad, tuple(leaves)


NOTHING = Boundary.of(())
"""The boundary of no values."""


class _Copies:
    """Copies of leaves that share and fill storages as the leaves do."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._users = Counter(address_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        # By the address of what they are copies of.
        self._storages: dict[int, torch.Tensor] = {}

    def of(self, leaf: torch.Tensor, *, requires_grad: bool, whole: bool) -> torch.Tensor:
        """A copy of a leaf; if ``whole``, within a copy of its storage, which it keeps alive as in training."""
        source = leaf.detach().requires_grad_(requires_grad)
        address = address_of(leaf)
        storage = leaf.untyped_storage()
        # Tensors without memory are all at address 0, and share nothing.
        is_only_user = self._users[address] == 1 or not address
        fills_its_storage = storage.nbytes() <= leaf.nbytes and is_only_user
        if not whole or fills_its_storage or is_made_of_others(leaf):
            return like(source.clone(), leaf)
        if address not in self._storages:
            # In bytes: tensors of several types may share a storage.
            self._storages[address] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=leaf.device)
        return like(_Placed.apply(source, self._storages[address]), leaf)


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
