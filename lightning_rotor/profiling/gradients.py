"""Running the backward of one stage as the chain would: what it is given, and what it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

from lightning_rotor.profiling.ends import StageEnds
from lightning_rotor.sequential import Stage
from lightning_rotor.tensors import address_of, requested_bytes, tensors_in


@dataclass(frozen=True, slots=True)
class SkipGradient:
    """What a reader of a skip leaves of its gradient.

    Attributes:
        size_bytes: Memory that it keeps alive, which may be more than its own: a slice of a larger gradient.
        is_dense: It has its memory for itself, so that earlier readers can add to it in place.
    """

    size_bytes: int
    is_dense: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """How a gradient lies in its memory, where it lies otherwise than its tensor in memory of its own.

    It may be a slice of something larger, an expanded tensor, or have its entries in another order, as from convolutions that Inductor compiled.

    Attributes:
        memory: Number of the memory; gradients of the same link with the same number share it.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int
    memory: int = 0

    def ones(self, dtype: torch.dtype, device: torch.device, memories: dict[Any, torch.Tensor]) -> torch.Tensor:
        """A tensor that lies like this, in one of the memories or in a new one."""
        key = self.memory, dtype
        if key not in memories:
            memories[key] = torch.ones(self.storage_bytes // dtype.itemsize, dtype=dtype, device=device)
        return memories[key].as_strided(self.shape, self.stride, self.offset)


Layouts: TypeAlias = tuple[Layout | None, ...]
"""One for each tensor of a link that gets a gradient; None for a gradient that lies like the tensor, in memory of its own."""


def layouts_of(gradients: Sequence[torch.Tensor | None], strides: Sequence[tuple[int, ...]]) -> Layouts:
    """How the gradients of a link lie; empty if each of them has memory of its own, and lies there like its tensor, whose strides are given."""
    addresses = [0 if gradient is None else address_of(gradient) for gradient in gradients]

    def layout(gradient: torch.Tensor | None, address: int, stride: tuple[int, ...]) -> Layout | None:
        if gradient is None:
            return None
        storage_bytes = gradient.untyped_storage().nbytes()
        is_alone = storage_bytes == gradient.nbytes and (not address or addresses.count(address) == 1)
        if is_alone and _same_order(gradient.shape, gradient.stride(), stride):
            return None
        offset, memory = int(gradient.storage_offset()), addresses.index(address)
        return Layout(gradient.shape, gradient.stride(), offset, storage_bytes, memory)

    found = tuple(map(layout, gradients, addresses, strides))
    return found if any(found) else ()


def _same_order(shape: torch.Size, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether the entries of two dense tensors of a shape lie in the same order; what a dimension of size 1 has for a stride says nothing."""
    return all(size == 1 or mine == theirs for size, mine, theirs in zip(shape, one, other, strict=True))


@dataclass(frozen=True, slots=True)
class Gradients:
    """What a backward leaves.

    Attributes:
        link_bytes: For its link.
        link_layouts: How the gradients of its link lie, if not each of them lies like its tensor in memory of its own.
        of_skips: For skips by place.
        parameter_bytes: For parameters, once they are accumulated.
        passes_on: Memory that it was given is under what it leaves for its link.
    """

    link_bytes: int
    link_layouts: Layouts
    of_skips: Mapping[int, SkipGradient]
    parameter_bytes: int
    passes_on: bool = False


class StageBackward:
    """The backward of one run of a stage: where it starts and what it computes, without holding the tensors in between."""

    def __init__(
        self,
        root: torch.Tensor | None,
        inputs: list[GradientEdge],
        strides: list[tuple[int, ...]],
        places: list[int | None],
        parameters: list[torch.nn.Parameter],
        *,
        given: Set[StorageWeakRef],
        gradients_exist: bool,
    ) -> None:
        self._root = root
        self._given = given
        self._inputs = inputs
        self._strides = strides
        self._places = places
        self._parameters = parameters
        self._given_up = parameters if gradients_exist else []

    @classmethod
    def of(
        cls,
        stage: Stage,
        ends: StageEnds,
        value: Any,
        output: Any,
        *,
        apart: bool,
        gradients_exist: bool = False,
        layouts: Layouts = (),
    ) -> StageBackward:
        """Prepare the backward of a stage that has just run.

        Args:
            stage: The stage.
            ends: Storages that it takes and leaves behind.
            value: Its input.
            output: Its output.
            apart: Gradients that later readers of its skips leave are slices.
            gradients_exist: Each parameter's gradient is added to one that is there and freed at once, rather than staying.
            layouts: How the gradients of its link lie; by default like the link itself, each in memory of its own.
        """
        leaves = tree_flatten(value)[0]
        # Later readers of a skip have left its gradient; what the stage hands on itself gets it as an output.
        handed_on = {id(tensor) for tensor in tensors_in(output)}
        passed = [
            leaf
            for leaf, later in zip(leaves, ends.passed, strict=True)
            if later and leaf.requires_grad and id(leaf) not in handed_on
        ]
        made = [
            (leaf, place)
            for leaf, place in zip(tree_flatten(output)[0], ends.outputs, strict=True)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        outputs = [*(leaf for leaf, _ in made), *passed]
        link = iter(_fitting(layouts, [leaf for leaf, place in made if place is None]))
        lying = [next(link) if place is None else None for _, place in made]
        given: set[StorageWeakRef] = set()
        root = _GradientSource.apply(lying, len(passed) if apart else 0, given, *outputs) if outputs else None
        learning = [
            (leaf, place)
            for leaf, place in zip(leaves, ends.inputs, strict=True)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        inputs = [get_gradient_edge(leaf) for leaf, _ in learning]
        parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        return cls(
            root,
            inputs,
            [leaf.stride() for leaf, _ in learning],
            [place for _, place in learning],
            parameters,
            given=given,
            gradients_exist=gradients_exist,
        )

    def gradients(self) -> Gradients:
        """Run the backward once."""
        root, self._root = self._root, None
        if root is None or not (self._inputs or self._parameters):
            return Gradients(0, (), {}, 0)
        # Not backward(): .grad and the hooks of gradient accumulation are the user's.
        ends: Any = [*self._inputs, *self._parameters]
        hooks = [parameter.register_hook(partial(_instead, parameter)) for parameter in self._given_up]
        try:
            gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(
                root, ends, torch.empty_like(root), allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        by_storage: dict[int, int] = {}
        of_skips: dict[int, SkipGradient] = {}
        # What several share counts for the skip that was made first, whose gradient is needed longest.
        pairs = [
            (place, gradient) for place, gradient in zip(self._places, gradients, strict=False) if gradient is not None
        ]
        for place, gradient in sorted(
            ((place, gradient) for place, gradient in pairs if place is not None), key=lambda pair: pair[0]
        ):
            size = gradient.untyped_storage().nbytes()
            is_new = by_storage.setdefault(address_of(gradient), place) == place
            of_skips[place] = SkipGradient(size if is_new else 0, size == gradient.nbytes)
        link = [
            None if gradient is None or address_of(gradient) in by_storage else gradient
            for place, gradient in zip(self._places, gradients, strict=False)
            if place is None
        ]
        strides = [stride for place, stride in zip(self._places, self._strides, strict=True) if place is None]
        parameter_bytes = sum(
            # Accumulation copies a gradient that is no dense tensor of its own (an expanded one, say).
            parameter.nbytes
            if gradient.layout == torch.strided
            else requested_bytes([gradient._indices(), gradient._values()])
            for parameter, gradient in zip(self._parameters, gradients[len(self._inputs) :], strict=True)
            if gradient is not None
        )
        # Addresses would not do: that of what was given and then freed may be something new's.
        passes_on = any(
            StorageWeakRef(gradient.untyped_storage()) in self._given for gradient in link if gradient is not None
        )
        return Gradients(
            requested_bytes(each for each in link if each is not None),
            layouts_of(link, strides),
            of_skips,
            parameter_bytes,
            passes_on,
        )


def _fitting(layouts: Layouts, leaves: Sequence[torch.Tensor]) -> Layouts:
    """The layouts if they are those of gradients of these tensors, and otherwise none."""
    shapes = [each.shape if each else leaf.shape for each, leaf in zip(layouts, leaves, strict=False)]
    same = len(layouts) == len(leaves) and shapes == [leaf.shape for leaf in leaves]
    return layouts if same else (None,) * len(leaves)


class _GradientSource(torch.autograd.Function):
    """An empty tensor whose backward allocates the gradient of each input, as the backward of the stage behind would.

    The first ones lie as ``layouts`` say, or else like the outputs; the last ``apart`` are slices of something larger. Their memories are
    added to ``given``.
    """

    @staticmethod
    def forward(
        ctx: Any, layouts: list[Layout | None], apart: int, given: set[StorageWeakRef], *outputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.given = given
        ctx.likes = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in outputs]
        ctx.layouts = [*layouts, *[None] * (len(outputs) - len(layouts))]
        ctx.apart = apart
        return torch.empty(0, device=outputs[0].device)  # nothing to count

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        # Ones, not empty: uninitialized memory may hold denormals, whose arithmetic is slow.
        whole = len(ctx.likes) - ctx.apart
        memories: dict[Any, torch.Tensor] = {}
        dense = [
            layout.ones(dtype, device, memories)
            if layout is not None
            else torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(1)
            for layout, (shape, stride, dtype, device) in zip(ctx.layouts, ctx.likes[:whole], strict=False)
        ]
        slices = [_slice_like(shape, dtype, device) for shape, _, dtype, device in ctx.likes[whole:]]
        ctx.given.update(StorageWeakRef(gradient.untyped_storage()) for gradient in dense)
        return None, None, None, *dense, *slices


def _slice_like(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Ones that do not lie densely in their memory, though it is hardly larger."""
    if not shape:
        return torch.ones((), dtype=dtype, device=device)
    rows = torch.ones(shape[0], shape[1:].numel() + 1, dtype=dtype, device=device)
    return rows[:, :-1].unflatten(1, shape[1:]) if len(shape) > 1 else rows[:, 0]


def _instead(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """Something that looks like the gradient and takes no memory."""
    return parameter.detach() if gradient.layout == torch.strided else None
