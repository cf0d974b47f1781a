"""``self.log`` in a training step that runs once for each micro-batch: one value for the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torchmetrics import Metric

from lightning_rotor.execution.recomputation import is_recomputing
from lightning_rotor.private import lightning_names as private


@dataclass(frozen=True, slots=True)
class _OfMicroBatch:
    """A metric that was logged, and what it was for one micro-batch; None if it was only updated."""

    metric: Metric
    value: Any


class MicroBatchLogs:
    """Collects what micro-batches log, and logs their mean (or sum, or extreme, as ``reduce_fx`` says) once.

    A metric of torchmetrics has seen all micro-batches by then, so its value for an epoch is that of whole batches. Its value for a step is the
    mean over the rows.

    Args:
        model: Whose ``log`` to catch.
        sizes: Rows of each micro-batch.
    """

    def __init__(self, model: pl.LightningModule, sizes: Sequence[int]) -> None:
        self._model, self._sizes = model, tuple(sizes)
        self._seen: dict[str, list[tuple[int, Any, dict[str, Any]]]] = {}
        self._number = 0

    def begin(self, number: int) -> None:
        """What is logged from here on belongs to this micro-batch."""
        self._number = number

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Context in which nothing is logged yet."""
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
        for name, entries in self._seen.items():
            entries.sort(key=lambda entry: entry[0])
            options = dict(entries[0][2])
            sizes = [entry[2].get("batch_size") for entry in entries]
            if all(sizes):
                options["batch_size"] = sum(size for size in sizes if size)
            self._model.log(name, self._together(entries, options.get("reduce_fx", "mean")), **options)
        self._seen = {}

    def _note(self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **options: Any) -> None:
        if is_recomputing():
            return
        if isinstance(value, torch.Tensor):
            value = value.detach()
        elif isinstance(value, Metric):
            value = _OfMicroBatch(value, private.last_value(value))
        self._seen.setdefault(name, []).append(
            (self._number, value, {"prog_bar": prog_bar, "logger": logger, **options})
        )

    def _together(self, entries: Sequence[tuple[int, Any, Any]], how: Any) -> Any:
        values = [entry[1] for entry in entries]
        if isinstance(values[0], _OfMicroBatch):
            return self._metric([entry[0] for entry in entries], values)
        if isinstance(values[0], dict):
            return values[0]
        column = _column(values)
        match how:
            case "mean" | "avg":
                return self._mean([entry[0] for entry in entries], column)
            case "sum":
                return column.sum()
            case "max" | "min":
                return getattr(column, how)()
        return how(column)

    def _metric(self, numbers: Sequence[int], values: Sequence[_OfMicroBatch]) -> Any:
        """The metric; what Lightning logs for the step is what its last forward returned, and becomes that of the batch."""
        metric: Any = values[0].metric  # whose cache torchmetrics types as None
        if all(each.value is not None for each in values):
            private.set_last_value(metric, self._mean(numbers, _column([each.value for each in values])))
        return metric

    def _mean(self, numbers: Sequence[int], column: torch.Tensor) -> torch.Tensor:
        """Over rows; of one micro-batch, it to the bit."""
        if len(column) == 1:
            return column[0]
        exact = torch.promote_types(column.dtype, torch.float32)
        weights = torch.tensor([self._sizes[number] for number in numbers], device=column.device, dtype=exact)
        return ((column * weights).sum() / weights.sum()).to(column.dtype)


def _column(values: Sequence[Any]) -> torch.Tensor:
    """As many numbers, of the type that one process would log."""
    tensors = [torch.as_tensor(value) for value in values]
    return torch.stack(
        [(each if each.is_floating_point() else each.to(torch.get_default_dtype())).mean() for each in tensors]
    )
