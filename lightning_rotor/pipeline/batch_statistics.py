"""Deferred batch normalization, as torchgpipe has it: running statistics are those of batches, not of micro-batches.

Each micro-batch is normalized by its own mean and variance, but running statistics are updated once for each batch,
from the mean and variance of all its values (Chan et al., "Updating formulae and a pairwise algorithm for computing
sample variances", 1979)::

    N = Σ n_k        mean = Σ n_k mean_k / N        (N - 1) var = Σ (n_k - 1) var_k + n_k (mean_k - mean)²
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


class _Statistics(NamedTuple):
    """Statistics of one micro-batch: how many values a channel has, their mean and their variance."""

    values: float
    mean: torch.Tensor
    variance: torch.Tensor


class BatchStatistics:
    """Collects the statistics of micro-batches, and updates running ones once for each batch."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._layers: list[BatchNorm] = []
        for module in dict.fromkeys(modules):
            if isinstance(module, BatchNorm) and module.running_mean is not None:
                self._layers.append(module)
        # Buffers from before the batch.
        self._before: dict[BatchNorm, list[torch.Tensor]] = {}
        # By layer, the statistics of each micro-batch so far.
        self._seen: dict[BatchNorm, list[_Statistics]] = {}

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Context of the forward of a micro-batch; after the last one, running statistics are updated."""
        active = [layer for layer in self._layers if layer.training]
        # By layer, the values of a channel in its input.
        counts: dict[nn.Module, float] = {}

        def note_count(layer: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            (values, *_) = given
            # By channel, dimension 1: all samples and places of an image.
            counts[layer] = values.numel() / values.shape[1]

        with ExitStack() as undo:
            for layer in active:
                if layer not in self._before:
                    self._before[layer] = [buffer.clone() for buffer in _buffers(layer)]
                hook = layer.register_forward_pre_hook(note_count)
                undo.callback(hook.remove)
                undo.callback(setattr, layer, "momentum", layer.momentum)
                # With this momentum the layer leaves the micro-batch's own statistics.
                layer.momentum = 1.0
            yield
        # Behind the context, so that a forward which raises leaves no statistics.
        for layer in active:
            mean, variance, _ = _buffers(layer)
            count = counts.get(layer, 0.0)
            statistics = _Statistics(count, mean.clone(), variance.clone())
            self._seen.setdefault(layer, []).append(statistics)
            if last:
                _update(layer, self._before.pop(layer), self._seen.pop(layer))


def _buffers(layer: BatchNorm) -> list[torch.Tensor]:
    """Running mean, running variance and number of batches."""
    buffers = layer.running_mean, layer.running_var, layer.num_batches_tracked
    return [buffer for buffer in buffers if buffer is not None]


@torch.no_grad()
def _update(layer: BatchNorm, before: Sequence[torch.Tensor], seen: Sequence[_Statistics]) -> None:
    """Set running statistics from those before the batch and those of its micro-batches."""
    old_mean, old_variance, batches = before
    total = sum(count for count, _, _ in seen)
    mean = torch.zeros_like(old_mean)
    for count, own_mean, _ in seen:
        mean = mean + own_mean * (count / total)
    squares = torch.zeros_like(mean)
    for count, own_mean, own_variance in seen:
        squares = squares + ((count - 1) * own_variance + count * (own_mean - mean) ** 2)
    variance = squares / max(total - 1, 1)

    momentum = layer.momentum
    if momentum is None:
        # Then torch keeps the mean of all batches.
        momentum = 1 / float(batches + 1)
    mean_buffer, variance_buffer, count_buffer = _buffers(layer)
    changes = (mean_buffer, old_mean, mean), (variance_buffer, old_variance, variance)
    for buffer, old, new in changes:
        # By .data, since micro-batches in flight saved the buffer: autograd would take their backward for impossible.
        buffer.data.copy_(old + momentum * (new - old))
    count_buffer.copy_(batches + 1)
