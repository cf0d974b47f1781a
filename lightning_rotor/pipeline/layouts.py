"""Shapes of all that crosses a cut, which every process must know before anything is sent.

A message is received into a tensor that is there already. So its shape and type have to be known, and the receiver
does not compute what it receives. A micro-batch of each size runs once through all stages, and what is seen is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from lightning_rotor.errors import PipelineError
from lightning_rotor.private.values import TreeSpec, tree_flatten, tree_unflatten

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Gradients: TypeAlias = tuple[torch.Tensor | None, ...]
"""Gradients of some tensors; None for those that need none."""

_TENSOR = True
"""Stands for a tensor among the leaves of a layout."""


class TensorMeta(NamedTuple):
    """A tensor at a cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def buffer(self, device: torch.device) -> torch.Tensor:
        """Uninitialized tensor for its values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Layout:
    """Nesting, sizes and tensor metadata of what crosses a cut for one micro-batch.

    Attributes:
        spec: The nesting.
        leaves: By leaf, True for a tensor, None for None, and a tuple of it for a size. Sizes follow from the shapes of
            the micro-batch, so they are not sent.
        metas: Of the tensors, in order.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    metas: tuple[TensorMeta, ...]

    @classmethod
    def of(cls, values: Sequence[Any], where: str, *, sizes: bool = False) -> Layout:
        """Layout of tensors, Nones and, with ``sizes``, sizes; refuses other values."""
        leaves, spec = tree_flatten(list(values))
        # Sizes stay where they are: the receiver's layout has them already.
        can_be_sent: tuple[type, ...] = (torch.Tensor, type(None))
        if sizes:
            can_be_sent += (int,)
        odd_types = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, can_be_sent)]
        if odd_types:
            raise PipelineError(
                f"{where} hands over {', '.join(dict.fromkeys(odd_types))}: expected tensors, or tuples, lists and "
                "dicts of tensors, since nothing else can be sent between devices. Cut elsewhere (balance=[...]), or "
                "keep such values inside a layer"
            )
        metas = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                # Gradients are sent back only for tensors that ask for one, and the receiver must know that, too.
                meta = TensorMeta(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
                metas.append(meta)
        return cls(spec, tuple(map(_place, leaves)), tuple(metas))

    def flat(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Tensors in some values; refuses those that nest otherwise."""
        leaves, spec = tree_flatten(list(values))
        # Sizes are compared as well: they are not sent, so another size would be lost without a word.
        if spec != self.spec or tuple(map(_place, leaves)) != self.leaves:
            raise PipelineError(
                f"what a pipeline stage makes changed from {self.spec} to {spec}: expected outputs that nest alike in "
                "every micro-batch"
            )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def values(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Values that nest as the layout, from their tensors."""
        remaining = iter(tensors)
        leaves: list[Any] = []
        for place in self.leaves:
            if place is _TENSOR:
                leaves.append(next(remaining))
            elif place is None:
                leaves.append(None)
            else:
                (size,) = place
                leaves.append(size)
        values: list[Any] = tree_unflatten(leaves, self.spec)
        return values

    def buffers(self, device: torch.device) -> Tensors:
        """Uninitialized tensors."""
        return tuple(meta.buffer(device) for meta in self.metas)

    def gradient_buffers(self, device: torch.device) -> Gradients:
        """Uninitialized gradients; None where there is none."""
        gradients: list[torch.Tensor | None] = []
        for meta in self.metas:
            # The sender sends none either, and a message that nobody sends is waited for without an end.
            gradients.append(meta.buffer(device) if meta.requires_grad else None)
        return tuple(gradients)


def _place(leaf: Any) -> Any:
    """The entry of ``Layout.leaves`` for a leaf."""
    if isinstance(leaf, torch.Tensor):
        return _TENSOR
    if leaf is None:
        return None
    # A tuple of one, which no number can be taken for: True is a tensor, and True == 1.
    return (leaf,)
