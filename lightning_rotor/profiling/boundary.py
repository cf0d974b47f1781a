"""The value between two stages while a chain is measured: tensors in any nesting of tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """What one stage hands to the next, without its graph.

    Attributes:
        leaves: Tensors (detached) and other objects, in the order of the tree.
        spec: How they are nested.
        requires_grad: For each leaf, whether gradients flow through it.
        whole_storages: Tensors that are slices hold what they are cut from, as the output of a stage does. The chain's own input is the
            caller's affair.
    """

    leaves: tuple[Any, ...]
    spec: TreeSpec
    requires_grad: tuple[bool, ...]
    whole_storages: bool = False

    @classmethod
    def of(cls, value: Any, *, whole_storages: bool = False) -> Boundary:
        """The boundary that a value makes."""
        leaves, spec = tree_flatten(value)
        detached = tuple(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        requires_grad = tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        return cls(detached, spec, requires_grad, whole_storages)

    def fresh(self) -> Any:
        """A copy that belongs to the caller alone. It is no leaf of the graph, so it may be changed in place."""
        storages: dict[int, torch.Tensor] = {}

        def copy(leaf: Any, requires_grad: bool) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            source = leaf.detach().requires_grad_(requires_grad)
            if not self.whole_storages or leaf.untyped_storage().nbytes() <= leaf.nbytes:
                return source.clone()
            # A slice keeps all that it is cut from alive, as it does in training.
            address = leaf.untyped_storage().data_ptr()
            if address not in storages:
                size = leaf.untyped_storage().nbytes() // leaf.itemsize
                storages[address] = torch.empty(size, dtype=leaf.dtype, device=leaf.device)
            return _Placed.apply(source, storages[address])

        with torch.enable_grad():
            copies = [copy(leaf, grad) for leaf, grad in zip(self.leaves, self.requires_grad, strict=True)]
        return tree_unflatten(copies, self.spec)

    @property
    def size_bytes(self) -> int:
        """Elements of the tensors, counted without what they are slices of."""
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, torch.Tensor))

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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a nesting of tuples, lists and dicts, in order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages under some tensors."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
