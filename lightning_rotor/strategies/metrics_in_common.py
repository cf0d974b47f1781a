"""Metrics of torchmetrics in a pipeline, whose processes all see the same batches, and the first of them once more before training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from lightning_rotor.private.pytree import tree_map_only


class MetricsInCommon:
    """Synchronizes metrics between copies of a pipeline alone, until :meth:`release`.

    By default a metric adds up the states of all processes. Those of one pipeline hold the same, which would count as many times.

    Args:
        model: Has the metrics.
        replicas: Processes with the same stages, and other batches; None if there is one copy of the pipeline.
    """

    def __init__(self, model: nn.Module, replicas: dist.ProcessGroup | None) -> None:
        self._before = [
            (metric, metric.distributed_available_fn, metric.process_group) for metric in _metrics_of(model)
        ]
        for metric, _, _ in self._before:
            if replicas is None:
                metric.distributed_available_fn = _nobody_else
            elif metric.process_group is None:
                metric.process_group = replicas

    def release(self) -> None:
        """Leave the metrics as they were."""
        for metric, available, group in self._before:
            metric.distributed_available_fn, metric.process_group = available, group
        self._before = []


@contextmanager
def kept_metrics(model: nn.Module) -> Iterator[None]:
    """Context after which the metrics know as much as before."""
    before = [
        (metric, dict(metric.__dict__), tree_map_only(torch.Tensor, _copied, metric.metric_state))
        for metric in _metrics_of(model)
    ]
    try:
        yield
    finally:
        for metric, attributes, state in before:
            metric.__dict__.update(attributes | state)


def _metrics_of(model: nn.Module) -> list[Metric]:
    return [module for module in model.modules() if isinstance(module, Metric)]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()  # most metrics add to their state in place


def _nobody_else() -> bool:
    return False
