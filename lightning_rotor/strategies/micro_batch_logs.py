"""``self.log`` in a training step that runs once for each micro-batch: one value for the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torchmetrics import Metric


class MicroBatchLogs:
    """Collects what micro-batches log, and logs their mean (or sum, or extreme, as ``reduce_fx`` says) once.

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
        if isinstance(value, torch.Tensor):
            value = value.detach()
        self._seen.setdefault(name, []).append(
            (self._number, value, {"prog_bar": prog_bar, "logger": logger, **options})
        )

    def _together(self, entries: Sequence[tuple[int, Any, Any]], how: Any) -> Any:
        values = [entry[1] for entry in entries]
        if isinstance(values[0], (Metric, dict)):
            return values[0]
        column = torch.stack([torch.as_tensor(value, dtype=torch.float32).mean() for value in values])
        match how:
            case "mean" | "avg":
                weights = torch.tensor([float(self._sizes[entry[0]]) for entry in entries], device=column.device)
                return (column * weights).sum() / weights.sum()
            case "sum":
                return column.sum()
            case "max" | "min":
                return getattr(column, how)()
        return how(column)
