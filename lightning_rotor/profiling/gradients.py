"""Running the backward of one stage as the chain would: what it is given, and what it leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_rotor.private.torch_names import sparse_parts
from lightning_rotor.private.values import address_of, bytes_in_blocks, tensors_in, tree_flatten
from lightning_rotor.profiling.storages import Scouting, Storage, UnmeasuredSkip
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.units import in_blocks

# ----------------------------------------------------------------------------------------------------
# Where a stage meets the rest of its chain: which storages it takes and leaves behind.


@dataclass(frozen=True, slots=True, eq=False)
class StageEnds:
    """Which storages a stage takes and leaves behind, apart from its link.

    ``inputs`` and ``outputs`` give for each leaf the place of its skip in ``skips``, or None for the link; ``passed``
    says for each leaf of the input whether it is a skip that a later stage reads. Measurements speak of places, so that
    they serve equal stages.
    """

    skips: tuple[int, ...]
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    passed: tuple[bool, ...]
    link_bytes: int
    made_bytes: Mapping[int, int]

    @classmethod
    def of(
        cls, stage: Stage, number: int, seen: Scouting, numbered: Mapping[Storage, tuple[int, UnmeasuredSkip]]
    ) -> StageEnds:
        """The ends of the stage with this number among the merged ones."""
        group = seen.groups[number]
        taken = [storage for read in stage.reads for storage in seen.storages[read]]
        given = [storage for write in stage.writes for storage in seen.storages[write]]
        own = dict.fromkeys(storage for storage in (*taken, *given) if storage is not None and storage in numbered)
        places = {storage: place for place, storage in enumerate(own)}

        def is_read_later(storage: Storage | None) -> bool:
            if storage is None or storage not in numbered:
                return False
            _, skip = numbered[storage]
            return skip.is_needed_after(number)

        made = {storage for storage in given if storage is not None and storage.born in group}
        return cls(
            tuple(numbered[storage][0] for storage in own),
            tuple(None if storage is None else places.get(storage) for storage in taken),
            tuple(None if storage is None else places.get(storage) for storage in given),
            tuple(map(is_read_later, taken)),
            sum(storage.size_bytes for storage in made if storage not in numbered),
            {places[storage]: storage.size_bytes for storage in made if storage in numbered},
        )

    @property
    def signature(self) -> tuple[Any, ...]:
        """A value that is equal for stages with equal ends."""
        return self.inputs, self.outputs, self.passed, self.link_bytes, tuple(sorted(self.made_bytes.items()))

    def lasting(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of an input that are skips, which others hold, too."""
        return [leaf for leaf, place in zip(leaves, self.inputs, strict=True) if place is not None]


# ----------------------------------------------------------------------------------------------------


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

    def counted_bytes(self, block_bytes: int) -> int:
        """Bytes that the allocator counts for its memory; 0 if they are counted elsewhere."""
        return 0 if self.counts_elsewhere else in_blocks(self.storage_bytes, block_bytes)

    def new_memory(self) -> torch.Tensor:
        """New memory for it, of ones: uninitialized memory may hold denormals, whose arithmetic is slow."""
        return torch.ones(self.storage_bytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)

    def ones(self, memories: Memories) -> torch.Tensor:
        """A tensor that lies like this in its memory, which is added to ``memories`` if it is missing."""
        if self.memory not in memories:
            memories[self.memory] = self.new_memory()
        return memories[self.memory].view(self.dtype).as_strided(self.shape, self.stride, self.offset)


LinkLayouts: TypeAlias = tuple[Layout | None, ...]
"""One for each tensor of a link with a gradient; None for one that lies like the tensor, in memory of its own."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """How the gradients lie that a backward is given; what is left out lies like its tensor, in memory of its own."""

    link: LinkLayouts = ()
    skips: tuple[tuple[int, Layout], ...] = ()

    @classmethod
    def of(cls, link: LinkLayouts, link_reader: int, skips: Mapping[int, tuple[int, Layout]]) -> Layouts:
        """The layouts from several readers, given by their numbers; ``skips`` are by place."""
        every = [(link_reader, layout) for layout in link if layout is not None] + [*skips.values()]
        owned = {(reader, layout.memory) for reader, layout in every if not layout.counts_elsewhere}
        shared = {
            memory
            for memory, count in Counter((reader, layout.memory) for reader, layout in every).items()
            if count > 1
        }
        numbers: dict[tuple[int, int], int] = {}

        def among_these(reader: int, layout: Layout) -> Layout:
            memory = reader, layout.memory
            elsewhere = layout.counts_elsewhere and memory not in owned
            return replace(layout, memory=numbers.setdefault(memory, len(numbers)), counts_elsewhere=elsewhere)

        return cls(
            tuple(None if layout is None else among_these(link_reader, layout) for layout in link),
            tuple(
                (place, among_these(reader, layout))
                for place, (reader, layout) in sorted(skips.items())
                if layout.counts_elsewhere or not layout.is_plain or (reader, layout.memory) in shared
            ),
        )

    def memories_elsewhere(self) -> Memories:
        """New memory for gradients that are counted elsewhere, so that it is not counted here."""
        every = (*self.link, *(layout for _, layout in self.skips))
        return {each.memory: each.new_memory() for each in every if each is not None and each.counts_elsewhere}


@dataclass(frozen=True, slots=True)
class SkipGradient:
    """What a reader of a skip leaves of its gradient.

    ``size_bytes`` is what it keeps alive: more than its own if it is a slice, 0 if another skip's gradient counts it.
    ``layout`` is None for several tensors, whose gradients are then taken to have memory of their own.
    """

    size_bytes: int
    layout: Layout | None = None


NO_LAYOUTS = Layouts()


def layouts_of(
    gradients: Sequence[torch.Tensor | None], strides: Sequence[tuple[int, ...]], places: Sequence[int | None]
) -> tuple[Layout | None, ...]:
    """How the gradients of a stage's inputs lie; None for missing ones. ``places`` has None for tensors of the link."""
    addresses = [0 if gradient is None else address_of(gradient) for gradient in gradients]
    # What several share counts for the skip that was made first, whose gradient is needed longest.
    owners: dict[int, int] = {}
    for address, place in zip(addresses, places, strict=True):
        if address and place is not None:
            owners[address] = min(place, owners.get(address, place))

    def layout(
        gradient: torch.Tensor | None, address: int, stride: tuple[int, ...], place: int | None
    ) -> Layout | None:
        if gradient is None:
            return None
        storage_bytes = gradient.untyped_storage().nbytes()
        fills = storage_bytes == gradient.nbytes
        return Layout(
            gradient.shape,
            gradient.stride(),
            int(gradient.storage_offset()),
            storage_bytes,
            gradient.dtype,
            gradient.device,
            addresses.index(address) if address else -1,
            fills and _same_order(gradient.shape, gradient.stride(), stride),
            owners.get(address, place) != place,
        )

    return tuple(map(layout, gradients, addresses, strides, places))


def _same_order(shape: torch.Size, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if the entries of two dense tensors lie in the same order; strides of dimensions of size 1 say nothing."""
    return all(size == 1 or mine == theirs for size, mine, theirs in zip(shape, one, other, strict=True))


@dataclass(frozen=True, slots=True)
class Gradients:
    """What a backward leaves; it ``passes_on`` if its link's gradients lie in memory that it was given.

    ``link_layouts`` is empty if each gradient of its link lies like its tensor in memory of its own.
    """

    link_bytes: int
    link_layouts: LinkLayouts
    of_skips: Mapping[int, SkipGradient]
    parameter_bytes: int
    passes_on: bool = False


class StageBackward:
    """The backward of one run of a stage, without holding the tensors in between."""

    def __init__(
        self,
        root: torch.Tensor | None,
        inputs: list[GradientEdge],
        strides: list[tuple[int, ...]],
        places: list[int | None],
        parameters: list[torch.nn.Parameter],
        *,
        skip_bytes: int,
        given: Set[StorageWeakRef],
        gradients_exist: bool,
        block_bytes: int,
    ) -> None:
        self.skip_bytes = skip_bytes
        self._root = root
        self._block_bytes = block_bytes
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
        gradients_exist: bool,
        layouts: Layouts,
        elsewhere: Memories,
        block_bytes: int,
    ) -> StageBackward:
        """The backward of a stage that has just run.

        With ``gradients_exist``, parameters' gradients are added to existing ones and freed at once. Gradients without
        a layout lie like their tensors; those that are counted elsewhere lie in the memory ``elsewhere``.
        """
        leaves = tree_flatten(value)[0]
        ending = _ending(ends, leaves, output)
        lie = _lying(ending, layouts)
        outputs = [leaf for leaf, _ in ending]
        given: set[StorageWeakRef] = set()
        root = _GradientSource.apply(lie, elsewhere, given, *outputs) if outputs else None
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
            skip_bytes=_skip_bytes(
                ((leaf, layout) for (leaf, place), layout in zip(ending, lie, strict=True) if place is not None),
                block_bytes,
            ),
            given=given,
            gradients_exist=gradients_exist,
            block_bytes=block_bytes,
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
        of_inputs = gradients[: len(self._inputs)]
        layouts = layouts_of(of_inputs, self._strides, self._places)
        sharing = Counter(layout.memory for layout in layouts if layout is not None)
        link_layouts = tuple(
            None
            if layout is None or (layout.is_plain and not layout.counts_elsewhere and sharing[layout.memory] == 1)
            else layout
            for layout, place in zip(layouts, self._places, strict=True)
            if place is None
        )
        link = [
            gradient
            for gradient, layout, place in zip(of_inputs, layouts, self._places, strict=True)
            if place is None and gradient is not None and layout is not None and not layout.counts_elsewhere
        ]
        parameter_bytes = sum(
            # Accumulation copies a gradient that is no dense tensor of its own (an expanded one, say).
            in_blocks(parameter.nbytes, self._block_bytes)
            if gradient.layout == torch.strided
            else bytes_in_blocks(sparse_parts(gradient), self._block_bytes)
            for parameter, gradient in zip(self._parameters, gradients[len(self._inputs) :], strict=True)
            if gradient is not None
        )
        # Addresses would not do: something new may lie where a freed gradient lay.
        passes_on = any(StorageWeakRef(gradient.untyped_storage()) in self._given for gradient in link)
        return Gradients(
            bytes_in_blocks(link, self._block_bytes),
            link_layouts if any(link_layouts) else (),
            _of_skips(zip(self._places, layouts, strict=True), self._block_bytes),
            parameter_bytes,
            passes_on,
        )


def _ending(ends: StageEnds, leaves: Sequence[Any], output: Any) -> list[tuple[torch.Tensor, int | None]]:
    """The tensors whose gradients a stage is given, with the places of those that are skips."""
    # Later readers of a skip have left its gradient; what the stage hands on itself gets it as an output.
    handed_on = {id(tensor) for tensor in tensors_in(output)}
    passed = [
        (leaf, place)
        for leaf, place, later in zip(leaves, ends.inputs, ends.passed, strict=True)
        if later and leaf.requires_grad and id(leaf) not in handed_on
    ]
    made = [
        (leaf, place)
        for leaf, place in zip(tree_flatten(output)[0], ends.outputs, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    return [*made, *passed]


def _lying(ending: Sequence[tuple[torch.Tensor, int | None]], layouts: Layouts) -> list[Layout | None]:
    """How each of these gradients lies; None for those that lie like their tensors."""
    link = iter(_fitting(layouts.link, [leaf for leaf, place in ending if place is None]))
    tensors = Counter(place for _, place in ending)
    skips = {place: layout for place, layout in layouts.skips if tensors[place] == 1}
    found = (next(link) if place is None else skips.get(place) for _, place in ending)
    return [
        layout if layout is not None and layout.shape == leaf.shape else None
        for (leaf, _), layout in zip(ending, found, strict=True)
    ]


def _of_skips(placed: Iterable[tuple[int | None, Layout | None]], block_bytes: int) -> dict[int, SkipGradient]:
    """Gradients of skips by place."""
    by_place: dict[int, list[Layout]] = {}
    for place, layout in placed:
        if place is not None and layout is not None:
            by_place.setdefault(place, []).append(layout)
    return {
        place: SkipGradient(
            sum({each.memory: each.counted_bytes(block_bytes) for each in layouts}.values()),
            layouts[0] if len(layouts) == 1 else None,
        )
        for place, layouts in by_place.items()
    }


def _skip_bytes(given: Iterable[tuple[torch.Tensor, Layout | None]], block_bytes: int) -> int:
    """Bytes of gradients that lie as given, or else like their tensors."""
    plain_bytes, memories = 0, dict[int, int]()
    for leaf, layout in given:
        if layout is None:
            like = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            plain_bytes += in_blocks(like.untyped_storage().nbytes(), block_bytes)
        else:
            memories[layout.memory] = layout.counted_bytes(block_bytes)
    return plain_bytes + sum(memories.values())


def _fitting(layouts: LinkLayouts, leaves: Sequence[torch.Tensor]) -> LinkLayouts:
    """The layouts if they are of gradients of these tensors, otherwise None for each."""
    shapes = [each.shape if each else leaf.shape for each, leaf in zip(layouts, leaves, strict=False)]
    same = len(layouts) == len(leaves) and shapes == [leaf.shape for leaf in leaves]
    return layouts if same else (None,) * len(leaves)


class _GradientSource(torch.autograd.Function):
    """A tensor without elements whose backward allocates the gradient of each output, as later stages' would.

    Gradients counted elsewhere lie in existing memory; all other memories are added to ``given``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layouts: list[Layout | None],
        elsewhere: Memories,
        given: set[StorageWeakRef],
        *outputs: torch.Tensor,
    ) -> torch.Tensor:
        ctx.given = given
        ctx.likes = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in outputs]
        ctx.layouts = layouts
        ctx.elsewhere = elsewhere
        return torch.empty(0, device=outputs[0].device)  # nothing to count

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        memories: Memories = {**ctx.elsewhere}
        gradients = [
            layout.ones(memories)
            if layout is not None
            else torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(1)
            for layout, (shape, stride, dtype, device) in zip(ctx.layouts, ctx.likes, strict=True)
        ]
        old = {address_of(memory) for memory in ctx.elsewhere.values()}
        ctx.given.update(
            StorageWeakRef(gradient.untyped_storage()) for gradient in gradients if address_of(gradient) not in old
        )
        return None, None, None, *gradients


def _instead(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """A tensor like the gradient that takes no memory."""
    return parameter.detach() if gradient.layout == torch.strided else None
