"""BatchNorm in micro-batches: running statistics of the whole batch, as torchgpipe's deferred batch normalization has them.

Each micro-batch is normalized by its own mean and variance, as without it. But instead of one update of the running statistics for each
micro-batch there is one for the batch, from the mean and variance of all its values. Those follow from what micro-batches leave (Chan et al.,
"Updating formulae and a pairwise algorithm for computing sample variances", 1979)::

    N = Σ n_k        mean = Σ n_k mean_k / N        (N - 1) var = Σ (n_k - 1) var_k + n_k (mean_k - mean)²
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.execution.options import kept_attributes, lent_buffers, undisturbed
from lightning_rotor.stages.sequential import Stage

BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def values_per_row(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int
) -> dict[BatchNorm, float]:
    """For every BatchNorm in a module, how many values of a channel a row has.

    Args:
        module: Runs once, without a trace.
        args: Of a call.
        kwargs: Likewise.
        rows: In that call.
    """
    found: dict[BatchNorm, float] = {}
    layers = [layer for layer in module.modules() if isinstance(layer, BatchNorm) and layer.running_mean is not None]
    if not layers:
        return found

    def note(layer: Any, given: tuple[Any, ...]) -> None:
        found[layer] = found.get(layer, 0.0) + given[0].numel() / given[0].shape[1] / rows

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    device, whole = next(module.parameters()).device, Stage("", (module,))
    try:
        with undisturbed(device), kept_attributes(whole), lent_buffers(whole), torch.no_grad():
            module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@dataclass(slots=True)
class _Layer:
    """One BatchNorm while a batch passes."""

    layer: BatchNorm
    values_per_row: float
    before: list[torch.Tensor] = field(default_factory=list)
    seen: list[tuple[float, torch.Tensor, torch.Tensor]] = field(default_factory=list)


class BatchStatistics:
    """Collects the statistics of micro-batches, and updates running ones once for each batch.

    Args:
        layers: Where, and how many values of a channel a row has.
    """

    def __init__(self, layers: Mapping[BatchNorm, float]) -> None:
        self._layers = [_Layer(layer, count) for layer, count in layers.items()]

    @classmethod
    def of(cls, modules: Iterable[nn.Module], counts: Mapping[BatchNorm, float]) -> BatchStatistics:
        """For the layers among some modules."""
        return cls(
            {
                layer: counts[layer]
                for layer in dict.fromkeys(modules)
                if isinstance(layer, BatchNorm) and layer in counts
            }
        )

    @contextmanager
    def micro_batch(self, rows: int, *, last: bool) -> Iterator[None]:
        """Context of the forward of a micro-batch.

        Args:
            rows: In it.
            last: Behind it, the running statistics are updated.
        """
        active = [each for each in self._layers if each.layer.training]
        momenta = [each.layer.momentum for each in active]
        for each in active:
            mean, variance, count = _buffers(each.layer)
            if not each.before:
                each.before = [mean.clone(), variance.clone(), count.clone()]
            # With this momentum the layer leaves the micro-batch's own statistics.
            each.layer.momentum = 1.0
        try:
            yield
        finally:
            for each, momentum in zip(active, momenta, strict=True):
                each.layer.momentum = momentum
        for each in active:
            mean, variance, _ = _buffers(each.layer)
            each.seen.append((rows * each.values_per_row, mean.clone(), variance.clone()))
            if last:
                self._update(each)

    @staticmethod
    @torch.no_grad()
    def _update(each: _Layer) -> None:
        total = sum(count for count, _, _ in each.seen)
        mean = sum((own * (count / total) for count, own, _ in each.seen), torch.zeros_like(each.before[0]))
        squares = sum(
            ((count - 1) * own_variance + count * (own - mean) ** 2 for count, own, own_variance in each.seen),
            torch.zeros_like(mean),
        )
        batches = each.before[2] + 1
        momentum = 1 / float(batches) if each.layer.momentum is None else each.layer.momentum
        for buffer, old, new in zip(
            _buffers(each.layer), each.before, (mean, squares / max(total - 1, 1)), strict=False
        ):
            # By .data, since micro-batches in flight saved the buffer: autograd would take their backward for impossible.
            buffer.data.copy_(old + momentum * (new - old))
        _buffers(each.layer)[2].copy_(batches)
        each.before, each.seen = [], []


def _buffers(layer: BatchNorm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, variance, count = layer.running_mean, layer.running_var, layer.num_batches_tracked
    assert mean is not None
    assert variance is not None
    assert count is not None
    return mean, variance, count
