"""Layouts of gradients in memory, which decide how much of them is alive, and for how long.

A stage's gradient may be a slice of a larger tensor (behind ``torch.cat``), expanded from one element (behind ``sum``),
in another order than its tensor, or in one memory with the gradient of a skip. A slice keeps alive all that it is cut
from. Counting each gradient by its own size made peaks up to 10 % too low where only a concatenation reads a skip, and
up to 4 % too high in MLP-Mixer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from lightning_rotor.private.values import address_of, storage_bytes_of
from lightning_rotor.units import in_blocks

Memories: TypeAlias = dict[int, torch.Tensor]
"""Storages, as flat tensors, by their numbers in some :class:`Layouts`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of a gradient in its memory.

    Attributes:
        shape: Of the gradient.
        stride: In elements.
        offset: In elements, from the start of the memory.
        storage_bytes: Size of the whole memory.
        dtype: Of the gradient.
        device: Of the gradient.
        memory: Number of the memory; gradients in the same one have the same number.
        is_plain: The gradient lies like its tensor, and fills its memory.
        counts_elsewhere: The gradient of an earlier stage's skip lies in the same memory, and keeps it alive.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int
    dtype: torch.dtype
    device: torch.device
    memory: int = 0
    is_plain: bool = False
    counts_elsewhere: bool = False

    @classmethod
    def like(cls, tensor: torch.Tensor, memory: int) -> Layout:
        """The layout of a gradient that lies like its tensor, in memory of its own."""
        # Only torch knows how far the strides of a tensor reach; on meta it computes that without memory.
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return cls(
            tensor.shape,
            tensor.stride(),
            offset=0,
            storage_bytes=meta.untyped_storage().nbytes(),
            dtype=tensor.dtype,
            device=tensor.device,
            memory=memory,
            is_plain=True,
        )

    def new_memory(self) -> torch.Tensor:
        """New memory for it, of ones."""
        # Uninitialized memory may hold denormals, whose arithmetic is slow.
        return torch.ones(self.storage_bytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)

    def ones(self, memories: Memories) -> torch.Tensor:
        """A tensor that lies like this in its memory, which is added to ``memories`` if it is missing."""
        if self.memory not in memories:
            memories[self.memory] = self.new_memory()
        return memories[self.memory].view(self.dtype).as_strided(self.shape, self.stride, self.offset)


Layouts: TypeAlias = tuple[tuple[int, Layout], ...]
"""Layouts of gradients by key: a skip's place, or ``~n`` for the link's tensor n. Others lie like their tensors."""


def layouts_from(left: Mapping[int, tuple[int, Layout]]) -> Layouts:
    """Layouts of a stage's gradients, by key, from the numbers of the readers that leave them and their layouts."""
    # A reader numbers memories for itself, so a memory is known by both.
    # A memory that several gradients lie in is no plain one for any of them: they keep each other alive.
    uses: Counter[tuple[int, int]] = Counter()
    counted_here = set()
    for reader, layout in left.values():
        memory = reader, layout.memory
        uses[memory] += 1
        if not layout.counts_elsewhere:
            counted_here.add(memory)
    numbers: dict[tuple[int, int], int] = {}
    layouts = []
    # Sorted, since layouts are part of the key by which equal stages share a measurement.
    for key, (reader, layout) in sorted(left.items()):
        memory = reader, layout.memory
        # Left out, so that a stage whose gradients are all plain is not measured again.
        if layout.is_plain and not layout.counts_elsewhere and uses[memory] == 1:
            continue
        # Numbers from 0 on, not addresses, so that equal layouts are equal.
        number = numbers.setdefault(memory, len(numbers))
        counts_elsewhere = layout.counts_elsewhere and memory not in counted_here
        layouts.append((key, replace(layout, memory=number, counts_elsewhere=counts_elsewhere)))
    return tuple(layouts)


def memories_elsewhere(layouts: Layouts) -> Memories:
    """New memory for gradients that are counted elsewhere, so that it is not counted here."""
    return {layout.memory: layout.new_memory() for _, layout in layouts if layout.counts_elsewhere}


def memory_bytes(layouts: Iterable[Layout], block_bytes: int) -> int:
    """Bytes of the distinct memories under some gradients, as far as they do not count elsewhere."""
    sizes: dict[int, int] = {}
    for layout in layouts:
        # By memory: several gradients in one keep it alive once.
        sizes[layout.memory] = 0 if layout.counts_elsewhere else layout.storage_bytes
    return sum(in_blocks(size_bytes, block_bytes) for size_bytes in sizes.values())


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients that a backward leaves.

    Attributes:
        link_bytes: Gradients of the stage's link.
        skip_bytes: By place, gradients of the skips that it reads: all of a slice's memory, 0 if another counts it.
        layouts: By key, without skips that several tensors show.
        parameters: Bytes of the gradient of each parameter that learns, 0 if there is none; empty without a backward.
        given_bytes: Gradients of skips that the backward was given, as far as its peaks count them.
    """

    link_bytes: int = 0
    skip_bytes: Mapping[int, int] = field(default_factory=dict)
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    parameters: tuple[int, ...] = ()
    given_bytes: int = 0


def layouts_of(gradients: Sequence[tuple[int, tuple[int, ...], torch.Tensor]]) -> list[Layout]:
    """Layouts of the gradients of a stage's inputs, given with the keys and strides of the inputs."""
    owners = _owners(gradients)
    layouts = []
    for key, input_stride, gradient in gradients:
        address = address_of(gradient)
        layout = Layout(
            gradient.shape,
            gradient.stride(),
            offset=int(gradient.storage_offset()),
            storage_bytes=storage_bytes_of(gradient),
            dtype=gradient.dtype,
            device=gradient.device,
            memory=address,
            is_plain=_fills_its_memory(gradient) and _has_stride(gradient, input_stride),
            counts_elsewhere=owners.get(address, key) != key,
        )
        layouts.append(layout)
    return layouts


def _owners(gradients: Sequence[tuple[int, tuple[int, ...], torch.Tensor]]) -> dict[int, int]:
    """By address of a memory, the key of the skip that it counts for: the first, whose gradient is needed longest."""
    owners: dict[int, int] = {}
    for key, _, gradient in gradients:
        address = address_of(gradient)
        # Address 0 is that of all tensors without memory.
        if key >= 0 and address:
            owners[address] = min(key, owners.get(address, key))
    return owners


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _has_stride(tensor: torch.Tensor, stride: Sequence[int]) -> bool:
    """True if a tensor has this stride. Strides of dimensions of size 1 say nothing."""
    for size, own, other in zip(tensor.shape, tensor.stride(), stride, strict=True):
        if size != 1 and own != other:
            return False
    return True
