"""Micro-batches: a batch cut along dimension 0, results put together again, and BatchNorm's statistics of the whole.

With deferred batch normalization (torchgpipe's), each micro-batch is normalized by its own mean and variance, but
running statistics are updated once for each batch, from the mean and variance of all its values (Chan et al.,
"Updating formulae and a pairwise algorithm for computing sample variances", 1979)::

    N = Σ n_k        mean = Σ n_k mean_k / N        (N - 1) var = Σ (n_k - 1) var_k + n_k (mean_k - mean)²
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.pipeline.schedule import PipelineError
from lightning_rotor.private.values import tensors_in, tree_flatten, tree_unflatten


def rows_in(batch: Any) -> int:
    """Number of samples in a batch: the size of dimension 0 of its tensors."""
    sizes = list(dict.fromkeys(tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()))
    if len(sizes) != 1:
        found = f"no tensor with a dimension ({type(batch).__name__})"
        if sizes:
            found = f"tensors of {', '.join(map(str, sizes))} rows"
        raise PipelineError(
            f"a batch is split along dimension 0, and this one holds {found}: expected tensors that all have one row "
            "for each sample. Give what belongs to no sample as an attribute of the model"
        )
    return sizes[0]


def sizes_of(rows: int, micro_batches: int) -> tuple[int, ...]:
    """Rows of each micro-batch: as equal as can be, larger ones first, and none without a row.

    Example:
        >>> sizes_of(10, 4), sizes_of(3, 4)
        ((3, 3, 2, 2), (1, 1, 1))
    """
    count = max(min(rows, micro_batches), 1)
    return tuple(rows // count + (place < rows % count) for place in range(count))


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Micro-batches of a batch; values without rows go into each."""
    ends = list(accumulate(sizes))

    def parts(value: Any) -> list[Any]:
        has_rows = isinstance(value, torch.Tensor) and value.dim() and len(value) == ends[-1]
        return [value[end - size : end] if has_rows else value for end, size in zip(ends, sizes, strict=True)]

    leaves, spec = tree_flatten(batch)
    columns = list(map(parts, leaves))
    return [tree_unflatten([column[place] for column in columns], spec) for place in range(len(sizes))]


def join(parts: Sequence[Any]) -> Any:
    """Output of the batch from outputs of micro-batches: tensors concatenated, everything else from the first."""
    if len(parts) == 1:
        return parts[0]
    leaves, spec = zip(*(tree_flatten(part) for part in parts), strict=True)
    together = [
        torch.cat(column) if isinstance(column[0], torch.Tensor) and column[0].dim() else column[0]
        for column in zip(*leaves, strict=True)
    ]
    return tree_unflatten(together, spec[0])


BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


@dataclass(slots=True)
class _Layer:
    """One BatchNorm during a batch."""

    layer: BatchNorm
    before: list[torch.Tensor] = field(default_factory=list)
    seen: list[tuple[float, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    values: float = 0.0  # of a channel in the input that it was called with last

    def note(self, _: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        """Hook that counts the values of a channel."""
        self.values = given[0].numel() / given[0].shape[1]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Running mean, running variance and number of batches."""
        layer = self.layer
        return [b for b in (layer.running_mean, layer.running_var, layer.num_batches_tracked) if b is not None]


class BatchStatistics:
    """Collects the statistics of micro-batches, and updates running ones once for each batch."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        layers = (each for each in dict.fromkeys(modules) if isinstance(each, BatchNorm))
        self._layers = [_Layer(layer) for layer in layers if layer.running_mean is not None]

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Context of the forward of a micro-batch; after the last one, running statistics are updated."""
        active = [each for each in self._layers if each.layer.training]
        momenta = [each.layer.momentum for each in active]
        hooks = [each.layer.register_forward_pre_hook(each.note) for each in active]
        for each in active:
            each.before = each.before or [buffer.clone() for buffer in each.buffers]
            # With this momentum the layer leaves the micro-batch's own statistics.
            each.layer.momentum = 1.0
        try:
            yield
        finally:
            for each, momentum, hook in zip(active, momenta, hooks, strict=True):
                each.layer.momentum = momentum
                hook.remove()
        for each in active:
            mean, variance, _ = each.buffers
            each.seen.append((each.values, mean.clone(), variance.clone()))
            if last:
                _update(each)


@torch.no_grad()
def _update(each: _Layer) -> None:
    old_mean, old_variance, batches = each.before
    total = sum(count for count, _, _ in each.seen)
    mean = sum((own * (count / total) for count, own, _ in each.seen), torch.zeros_like(old_mean))
    squares = sum(
        ((count - 1) * own_variance + count * (own - mean) ** 2 for count, own, own_variance in each.seen),
        torch.zeros_like(mean),
    )
    variance = squares / max(total - 1, 1)
    momentum = 1 / float(batches + 1) if each.layer.momentum is None else each.layer.momentum
    for buffer, old, new in zip(each.buffers, (old_mean, old_variance), (mean, variance), strict=False):
        # By .data, since micro-batches in flight saved the buffer: autograd would take their backward for impossible.
        buffer.data.copy_(old + momentum * (new - old))
    each.buffers[2].copy_(batches + 1)
    each.before, each.seen = [], []
