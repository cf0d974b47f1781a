"""Micro-batches: a batch cut along dimension 0, and what code finds around it for each: seeds, settings, statistics.

In one process, dropout draws from one generator in turn. The stages of a pipeline run at the same time on several
devices, each with a generator of its own. So each stage of the chain that may draw gets numbers from three integers::

    the step's seed  ──┐      made of ``seed_everything``'s seed and the step's number: a resumed run goes on alike
    micro-batch k    ──┼──►  seed of the generator while stage i works on micro-batch k
    chain stage i    ──┘      -1 for what runs outside of the chain

Micro-batch ``k`` begins with the generator seeded by the first two. A stage reads that seed off the generator itself,
so recomputation, which restores the generator, finds the same. Seeds draw nothing from the user's generators.

With deferred batch normalization (torchgpipe's), each micro-batch is normalized by its own mean and variance, but
running statistics are updated once for each batch, from the mean and variance of all its values (Chan et al.,
"Updating formulae and a pairwise algorithm for computing sample variances", 1979)::

    N = Σ n_k        mean = Σ n_k mean_k / N        (N - 1) var = Σ (n_k - 1) var_k + n_k (mean_k - mean)²
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.chain import Chain
from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.partition.search import even_balance
from lightning_rotor.private.values import tensors_in, tree_flatten, tree_unflatten
from lightning_rotor.stages.generators import seeded
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.wiring import Wiring

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call."""


def rows_in(batch: Any) -> int:
    """Number of samples in a batch: the size of dimension 0 of its tensors."""
    sizes = list(dict.fromkeys(tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()))
    if len(sizes) != 1 or not sizes[0]:
        rows = f"tensors of {', '.join(map(str, sizes))} rows"
        found = rows if sizes else f"no tensor with a dimension ({type(batch).__name__})"
        raise PipelineError(
            f"a batch is split along dimension 0, and this one holds {found}: expected tensors that all have one row "
            "for each sample, and a sample at least. Give what belongs to no sample as an attribute of the model, and "
            "leave empty batches out"
        )
    return sizes[0]


def sizes_of(rows: int, micro_batches: int) -> tuple[int, ...]:
    """Rows of each micro-batch: as equal as can be, larger ones first, and none without a row.

    Example:
        >>> sizes_of(10, 4), sizes_of(3, 4)
        ((3, 3, 2, 2), (1, 1, 1))
    """
    return tuple(even_balance(rows, micro_batches))


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Micro-batches of a batch; values without rows go into each."""
    ends = list(accumulate(sizes))

    def parts(value: Any) -> list[Any]:
        has_rows = isinstance(value, torch.Tensor) and value.dim() and len(value) == ends[-1]
        return [value[end - size : end] if has_rows else value for end, size in zip(ends, sizes, strict=True)]

    leaves, spec = tree_flatten(batch)
    columns = list(map(parts, leaves))
    return [tree_unflatten([column[place] for column in columns], spec) for place in range(len(sizes))]


def largest_part(batch: Any, micro_batches: int) -> Any:
    """The first micro-batch."""
    return split(batch, sizes_of(rows_in(batch), micro_batches))[0]


def join(parts: Sequence[Any], sizes: Sequence[int] = ()) -> Any:
    """Output of the batch from those of micro-batches; with ``sizes``, scalars become their mean by rows."""
    if len(parts) == 1:
        return parts[0]
    leaves, spec = zip(*(tree_flatten(part) for part in parts), strict=True)

    def together(column: tuple[Any, ...]) -> Any:
        one = column[0]
        if not isinstance(one, torch.Tensor):
            return one
        if one.dim():
            return torch.cat(column)
        return mean_by_rows(column, sizes) if sizes and one.is_floating_point() else one

    return tree_unflatten([together(column) for column in zip(*leaves, strict=True)], spec[0])


def mean_by_rows(numbers: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Mean of a number of each micro-batch; of one, its value to the bit."""
    if len(numbers) == 1:
        return numbers[0]
    column = torch.stack(list(numbers))
    exact = column.to(torch.promote_types(column.dtype, torch.float32))
    weights = exact.new_tensor(sizes)
    return ((exact * weights).sum() / weights.sum()).to(column.dtype)


# -------------------------------------------------------------------- random numbers


OUTSIDE = -1
"""The place of what runs outside of the chain."""


def mixed(seed: int, place: int) -> int:
    """Seed made of a seed and a number (the finalizer of SplitMix64, so that neighbours have nothing in common)."""
    value = (seed + (place + 2) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) & ((1 << 63) - 1)


class _SeededStage(torch.nn.Module):
    """A stage that runs with random numbers of its own."""

    def __init__(self, way: Any, place: int) -> None:
        super().__init__()
        # Not a submodule: it is the user's, and stays where it is.
        self.__dict__["_way"] = way
        self._place = place

    def forward(self, value: Any) -> Any:
        with seeded(mixed(torch.initial_seed(), self._place), host=False):
            return self.__dict__["_way"](value)


def with_seeds(stages: Sequence[Stage], chain: Chain) -> tuple[Stage, ...]:
    """Stages of a chain; those that may draw random numbers get numbers of their own."""
    return tuple(
        replace(
            stage,
            modules=(_SeededStage(replace(stage, variants=()), place),),
            wiring=Wiring.of([stage.wiring.wire], stage.writes),
            variants=tuple(_SeededStage(variant, place) for variant in stage.variants),
        )
        if cost.draws_random
        else stage
        for place, (stage, cost) in enumerate(zip(stages, chain, strict=True))
    )


# -------------------------------------------------------------------- deferred batch normalization


BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


class BatchStatistics:
    """Collects the statistics of micro-batches, and updates running ones once for each batch."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        layers = (each for each in dict.fromkeys(modules) if isinstance(each, BatchNorm))
        self._layers = [layer for layer in layers if layer.running_mean is not None]
        self._before: dict[BatchNorm, list[torch.Tensor]] = {}
        # By micro-batch, the number of values of a channel, their mean and variance.
        self._seen: dict[BatchNorm, list[tuple[float, torch.Tensor, torch.Tensor]]] = {}

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Context of the forward of a micro-batch; after the last one, running statistics are updated."""
        active = [layer for layer in self._layers if layer.training]
        values: dict[nn.Module, float] = {}  # of a channel in the input

        def note(layer: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            values[layer] = given[0].numel() / given[0].shape[1]

        with ExitStack() as undo:
            for layer in active:
                if layer not in self._before:
                    self._before[layer] = [buffer.clone() for buffer in _buffers(layer)]
                undo.callback(layer.register_forward_pre_hook(note).remove)
                undo.callback(setattr, layer, "momentum", layer.momentum)
                # With this momentum the layer leaves the micro-batch's own statistics.
                layer.momentum = 1.0
            yield
        for layer in active:
            mean, variance, _ = _buffers(layer)
            self._seen.setdefault(layer, []).append((values.get(layer, 0.0), mean.clone(), variance.clone()))
            if last:
                _update(layer, self._before.pop(layer), self._seen.pop(layer))


def _buffers(layer: BatchNorm) -> list[torch.Tensor]:
    """Running mean, running variance and number of batches."""
    buffers = layer.running_mean, layer.running_var, layer.num_batches_tracked
    return [buffer for buffer in buffers if buffer is not None]


@torch.no_grad()
def _update(layer: BatchNorm, before: Sequence[torch.Tensor], seen: Sequence[Any]) -> None:
    """Set running statistics from those before the batch and those of its micro-batches."""
    old_mean, old_variance, batches = before
    total = sum(count for count, _, _ in seen)
    mean = sum((own * (count / total) for count, own, _ in seen), torch.zeros_like(old_mean))
    squares = sum(
        ((count - 1) * own_variance + count * (own - mean) ** 2 for count, own, own_variance in seen),
        torch.zeros_like(mean),
    )
    variance = squares / max(total - 1, 1)
    momentum = 1 / float(batches + 1) if layer.momentum is None else layer.momentum
    for buffer, old, new in zip(_buffers(layer), (old_mean, old_variance), (mean, variance), strict=False):
        # By .data, since micro-batches in flight saved the buffer: autograd would take their backward for impossible.
        buffer.data.copy_(old + momentum * (new - old))
    _buffers(layer)[2].copy_(batches + 1)
