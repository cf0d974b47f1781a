"""Running the backward of one stage as the chain would: what it is given, and what it leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeAlias

import torch

from lightning_rotor.private.values import address_of, tensors_in, tree_flatten
from lightning_rotor.profiling.scan import Scan
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.units import in_blocks

# -------------------------------- Where a stage meets the rest of its chain: which storages it takes and leaves behind.


@dataclass(frozen=True, slots=True)
class StageEnds:
    """Which storages a stage takes and leaves behind, apart from its link.

    ``inputs`` and ``outputs`` give for each leaf the place of its skip in ``skips``, or None for the link; ``passed``
    says for each leaf of the input whether it is a skip that a later stage reads; ``made_bytes`` are those of each skip
    that it makes, 0 for others. Measurements speak of places, so that they serve all stages with equal ends.
    """

    skips: tuple[int, ...] = field(compare=False)
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    passed: tuple[bool, ...]
    link_bytes: int
    made_bytes: tuple[int, ...]

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
    """How a gradient lies in its memory, ``memory`` by number: plainly, as a slice, expanded or in another order.

    It ``counts_elsewhere`` if an earlier stage's skip has a gradient in the same memory, which keeps it alive.
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
    """How the gradients of a stage lie, by key, from the numbers of the readers that leave them and their layouts."""
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
    """What a backward leaves.

    A skip's gradient takes what keeps it alive: more than its own size if it is a slice, 0 if another skip's counts it.
    """

    link_bytes: int = 0  # gradients of its link
    skip_bytes: Mapping[int, int] = field(default_factory=dict)  # by place
    layouts: Mapping[int, Layout] = field(default_factory=dict)  # by key, without skips that several tensors show
    parameter_bytes: int = 0  # gradients of parameters
    given_bytes: int = 0  # gradients of skips that it was given, as far as its peaks count them


def layouts_of(gradients: Sequence[tuple[int, tuple[int, ...], torch.Tensor]]) -> list[Layout]:
    """How gradients of a stage's inputs lie, given with the keys and strides of the inputs."""
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
            gradient.untyped_storage().nbytes(),
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
    """How each of these gradients lies: as given, or else like its tensor."""
    tensors = Counter(key for _, key in ending)
    found = []
    for number, (leaf, key) in enumerate(ending):
        layout = layouts.get(key) if tensors[key] == 1 else None
        if layout is None or layout.shape != leaf.shape:
            layout = Layout.like(leaf, ~number)
        found.append(layout)
    return found
