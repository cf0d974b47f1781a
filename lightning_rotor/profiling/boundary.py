"""What a stage takes while a chain is measured: tensors in any nesting of tuples, lists and dicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from lightning_rotor.private.pytree import TreeSpec, tree_flatten, tree_unflatten
from lightning_rotor.tensors import address_of, spelled
from lightning_rotor.units import in_blocks


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """What a stage takes, without its graph.

    Attributes:
        leaves: Tensors (detached) and other objects, in the order of the tree.
        spec: How they are nested.
        requires_grad: For each leaf, whether gradients flow through it.
        whole_storages: For each leaf, whether a tensor that is a slice holds what it is cut from, as the output of a stage does. The chain's
            own input is the caller's affair.
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
        """One boundary as it is, several as that of a tuple."""
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
            # A slice keeps all that it is cut from alive, as it does in training; what is one storage there is one here.
            if address not in storages:
                storages[address] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=leaf.device)
            return _Placed.apply(source, storages[address])

        with torch.enable_grad():
            copies = list(map(copy, self.leaves, self.requires_grad, self.whole_storages))
        return tree_unflatten(copies, self.spec)

    def size_bytes(self, block_bytes: int) -> int:
        """Elements of the tensors in blocks of the allocator, counted without what they are slices of."""
        return sum(in_blocks(leaf.nbytes, block_bytes) for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Type and shape of each tensor."""
        return tuple(spelled(leaf.dtype, leaf.shape) for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    @property
    def signature(self) -> tuple[Any, ...]:
        """What the cost of a stage depends on, besides the stage."""
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
        # Not a view for autograd: in training, the stage before made it in one go.
        copy = torch.empty(0, dtype=source.dtype, device=source.device)
        copy.set_(storage.untyped_storage(), source.storage_offset(), source.shape, source.stride())
        return copy.copy_(source)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None
