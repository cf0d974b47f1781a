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
    """

    leaves: tuple[Any, ...]
    spec: TreeSpec
    requires_grad: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any) -> Boundary:
        """The boundary that a value makes."""
        leaves, spec = tree_flatten(value)
        detached = tuple(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(detached, spec, tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves))

    def fresh(self) -> Any:
        """A copy that belongs to the caller alone. It is no leaf of the graph, so it may be changed in place."""

        def copy(leaf: Any, requires_grad: bool) -> Any:
            return leaf.detach().requires_grad_(requires_grad).clone() if isinstance(leaf, torch.Tensor) else leaf

        with torch.enable_grad():
            copies = [copy(leaf, grad) for leaf, grad in zip(self.leaves, self.requires_grad, strict=True)]
        return tree_unflatten(copies, self.spec)

    @property
    def size_bytes(self) -> int:
        """Storage of a :meth:`fresh` copy: a view's own elements, not all that it is a view of."""
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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a nesting of tuples, lists and dicts, in order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages under some tensors."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
