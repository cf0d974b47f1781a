"""Logs of micro-batches, which become one log of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torchmetrics import Metric

from lightning_rotor.execution.passes import is_recomputing
from lightning_rotor.pipeline.micro_batches import mean_by_rows
from lightning_rotor.pipeline.paused_call import current
from lightning_rotor.private import lightning_names as private

if TYPE_CHECKING:
    import lightning.pytorch as pl


class _Log(NamedTuple):
    """A call of ``self.log``: the micro-batch's number, and its arguments. A metric's value is its last forward's."""

    number: int
    metric: Metric | None
    value: Any
    options: dict[str, Any]


class MicroBatchLogs:
    """Collects what micro-batches log, and logs their mean (or sum, or extreme, as ``reduce_fx`` says) once.

    A torchmetrics metric has seen all micro-batches by then: exact for the epoch, for the step a mean over rows.
    """

    def __init__(self, model: pl.LightningModule, sizes: Sequence[int]) -> None:
        self._model, self._sizes = model, tuple(sizes)
        self._logs_by_name: dict[str, list[_Log]] = {}

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Context that collects logs."""
        # Into the instance, so that log_dict, and whatever else calls self.log, comes here as well.
        before = self._model.__dict__.get("log")
        self._model.__dict__["log"] = self._note
        try:
            yield
        finally:
            del self._model.__dict__["log"]
            if before is not None:
                self._model.__dict__["log"] = before

    def write(self) -> None:
        """Log what was collected, outside of the context."""
        for name, logs in self._logs_by_name.items():
            # Micro-batches run in the order of the schedule.
            ordered = sorted(logs, key=lambda log: log.number)
            options = ordered[0].options
            # Where one is missing, Lightning finds the rows of the whole batch itself.
            batch_sizes = [log.options.get("batch_size") for log in ordered]
            if all(batch_sizes):
                options["batch_size"] = sum(batch_sizes)
            sizes = [self._sizes[log.number] for log in ordered]
            values = [log.value for log in ordered]
            value = _value_of_batch(ordered[0].metric, values, sizes, options.get("reduce_fx", "mean"))
            self._model.log(name, value, **options)

    def _note(self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **options: Any) -> None:
        # The layer has logged when it ran first.
        if is_recomputing():
            return
        metric = None
        if isinstance(value, Metric):
            metric = value
            # Now, as the next micro-batch's forward puts its own in the place.
            value = private.last_value(metric)
        elif isinstance(value, torch.Tensor):
            value = value.detach()
        # A layer of the pipeline runs in no paused call.
        paused = current.get()
        number = 0 if paused is None else paused.place
        log = _Log(number, metric, value, {"prog_bar": prog_bar, "logger": logger, **options})
        self._logs_by_name.setdefault(name, []).append(log)


def _value_of_batch(metric: Metric | None, values: Sequence[Any], sizes: Sequence[int], reduce_fx: Any) -> Any:
    """The value to log for the batch, from those of micro-batches: a number, or the metric itself.

    A metric's values are what its forwards returned, None without a forward.
    """
    if isinstance(values[0], dict):
        # Lightning refuses it, in its own words.
        return values[0]
    if metric is not None and any(value is None for value in values):
        return metric
    numbers = []
    for value in values:
        tensor = torch.as_tensor(value)
        # In the type that one process would log.
        if not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        numbers.append(tensor.mean())
    if metric is not None:
        # Lightning logs for the step what the metric's last forward returned: let that be the batch's.
        private.set_last_value(metric, mean_by_rows(numbers, sizes))
        return metric
    if reduce_fx in ("mean", "avg"):
        return mean_by_rows(numbers, sizes)
    column = torch.stack(numbers)
    if isinstance(reduce_fx, str):
        return getattr(column, reduce_fx)()
    return reduce_fx(column)
