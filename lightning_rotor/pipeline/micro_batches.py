"""Micro-batches: a batch cut along dimension 0, results put together again, and BatchNorm's statistics of the whole.

With deferred batch normalization (torchgpipe's), each micro-batch is normalized by its own mean and variance, but
running statistics are updated once for each batch, from the mean and variance of all its values (Chan et al.,
"Updating formulae and a pairwise algorithm for computing sample variances", 1979)::

    N = Σ n_k        mean = Σ n_k mean_k / N        (N - 1) var = Σ (n_k - 1) var_k + n_k (mean_k - mean)²
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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
_Seen: TypeAlias = tuple[float, torch.Tensor, torch.Tensor]
"""Values of a channel in a micro-batch, their mean and variance."""


class BatchStatistics:
    """Collects the statistics of micro-batches, and updates running ones once for each batch."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        layers = (each for each in dict.fromkeys(modules) if isinstance(each, BatchNorm))
        self._layers = [layer for layer in layers if layer.running_mean is not None]
        self._before: dict[BatchNorm, list[torch.Tensor]] = {}
        self._seen: dict[BatchNorm, list[_Seen]] = {}

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Context of the forward of a micro-batch; after the last one, running statistics are updated."""
        active = [layer for layer in self._layers if layer.training]
        momenta = [layer.momentum for layer in active]
        values: dict[nn.Module, float] = {}  # of a channel in the input

        def note(layer: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            values[layer] = given[0].numel() / given[0].shape[1]

        hooks = [layer.register_forward_pre_hook(note) for layer in active]
        for layer in active:
            if layer not in self._before:
                self._before[layer] = [buffer.clone() for buffer in _buffers(layer)]
            # With this momentum the layer leaves the micro-batch's own statistics.
            layer.momentum = 1.0
        try:
            yield
        finally:
            for layer, momentum, hook in zip(active, momenta, hooks, strict=True):
                layer.momentum = momentum
                hook.remove()
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
def _update(layer: BatchNorm, before: Sequence[torch.Tensor], seen: Sequence[_Seen]) -> None:
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
