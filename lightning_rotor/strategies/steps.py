"""``training_step`` around a pipeline, once for each micro-batch: one loss and one log for the batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from lightning_rotor.execution.recomputation import is_recomputing
from lightning_rotor.pipeline.micro_batches import join, rows_in
from lightning_rotor.pipeline.schedule import PipelineError
from lightning_rotor.pipeline.stage_runner import ForwardContext
from lightning_rotor.pipeline.step import PipelinedModule, gradients_apart
from lightning_rotor.private import lightning_names as private
from lightning_rotor.private.values import tree_flatten, tree_unflatten


class PipelineSteps:
    """Runs ``training_step`` around a pipeline."""

    def __init__(self, model: pl.LightningModule, pipelined: PipelinedModule, context: ForwardContext) -> None:
        self._model, self.pipelined, self._context = model, pipelined, context
        self._replicas = pipelined.processes.replicas

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for parameter in self._model.parameters() if not parameter.is_meta]

    def _user_step(self, *args: Any) -> Any:
        with self._context():
            return self._model.training_step(*args)

    def run(self, batch: Any, *rest: Any) -> Any:
        """Result of ``training_step`` for a batch, which it sees micro-batch by micro-batch."""
        trainer = self._model.trainer
        epoch = trainer.fit_loop.epoch_loop
        rows, scale = rows_in(batch), 1 / trainer.accumulate_grad_batches
        if not rows:
            raise PipelineError(
                f"batch {epoch.batch_idx} of epoch {trainer.current_epoch} is empty: expected at least one row, since "
                "the loss of a pipeline is a mean over rows. Leave such batches out"
            )
        sizes = self.pipelined.sizes(rows)
        logs = MicroBatchLogs(self._model, sizes)

        # zero_grad comes between this step and the backward that Lightning asks for: the new gradients wait until then.
        anew = epoch.batch_idx % trainer.accumulate_grad_batches == 0
        waits = anew or self._replicas is not None
        apart = gradients_apart(self._parameters, replicas=self._replicas, keep=not anew) if waits else nullcontext()
        with logs.caught(), apart as add:
            results, loss = self.pipelined.train(
                lambda part: self._user_step(part, *rest),
                batch,
                loss_of,
                number=epoch.total_batch_idx,
                scale=scale,
                on_turn=logs.begin,
            )
        with self._context():  # Lightning makes what adds up an epoch in the default dtype
            logs.write()
        return _together(results, sizes, _deferred(loss, scale, add))


def _deferred(loss: torch.Tensor, scale: float, add: Callable[[], None] | None) -> torch.Tensor:
    """A loss whose backward is already done; it hands over the gradients when asked for it."""

    def hand_over(given: torch.Tensor) -> None:
        if abs(float(given) - scale) > 1e-6 * scale:
            raise PipelineError(
                f"the loss was scaled by {float(given):g} behind training_step, but the pipeline has run its backward "
                f"with {scale:g} (accumulate_grad_batches): expected LightningModule.backward to leave the loss alone"
            )
        if add is not None:
            add()

    loss.requires_grad_().register_hook(hand_over)
    return loss


def loss_of(result: Any) -> torch.Tensor:
    """The loss in a result of training_step; a :class:`PipelineError` if there is none."""
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, torch.Tensor):
        raise PipelineError(
            f"training_step returned {type(result).__name__} without a loss: expected a tensor, or a dict with a "
            "tensor under 'loss'"
        )
    return loss


def _together(results: Sequence[Any], sizes: Sequence[int], loss: torch.Tensor) -> Any:
    """Result of training_step for the batch: rows concatenated, numbers as means."""
    if not isinstance(results[0], Mapping):
        return loss
    rest = [tree_flatten({key: value for key, value in result.items() if key != "loss"}) for result in results]
    leaves = []
    for column in zip(*(each[0] for each in rest), strict=True):
        if all(isinstance(value, torch.Tensor) and value.is_floating_point() and not value.dim() for value in column):
            leaves.append(sum(value.detach() * (size / sum(sizes)) for value, size in zip(column, sizes, strict=True)))
        else:
            leaves.append(join([value.detach() if isinstance(value, torch.Tensor) else value for value in column]))
    return {"loss": loss, **tree_unflatten(leaves, rest[0][1])}


# -------------------------------------------------------------------- logs


@dataclass(frozen=True, slots=True)
class _Entry:
    """What one micro-batch has logged under a name."""

    number: int
    value: Any
    metric: Metric | None
    options: dict[str, Any]


class MicroBatchLogs:
    """Collects what micro-batches log, and logs their mean (or sum, or extreme, as ``reduce_fx`` says) once.

    A torchmetrics metric has seen all micro-batches by then: exact for the epoch, for the step a mean over rows.
    """

    def __init__(self, model: pl.LightningModule, sizes: Sequence[int]) -> None:
        self._model, self._sizes = model, tuple(sizes)
        self._seen: dict[str, list[_Entry]] = {}
        self._number = 0

    def begin(self, number: int) -> None:
        """Begin the logs of a micro-batch."""
        self._number = number

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Context that collects logs."""
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
            entries.sort(key=lambda entry: entry.number)
            options = dict(entries[0].options)
            sizes = [entry.options.get("batch_size") for entry in entries]
            if all(sizes):
                options["batch_size"] = sum(size for size in sizes if size)
            self._model.log(name, self._together(entries, options.get("reduce_fx", "mean")), **options)
        self._seen = {}

    def _note(self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **options: Any) -> None:
        if is_recomputing():
            return
        metric = value if isinstance(value, Metric) else None
        if metric is not None:
            value = private.last_value(metric)
        elif isinstance(value, torch.Tensor):
            value = value.detach()
        options = {"prog_bar": prog_bar, "logger": logger, **options}
        self._seen.setdefault(name, []).append(_Entry(self._number, value, metric, options))

    def _together(self, entries: Sequence[_Entry], how: Any) -> Any:
        metric = entries[0].metric
        if metric is not None:
            # Lightning logs for the step what the metric's last forward returned: let that be the batch's.
            if all(each.value is not None for each in entries):
                private.set_last_value(metric, self._mean(entries))
            return metric
        if isinstance(entries[0].value, dict):
            return entries[0].value
        match how:
            case "mean" | "avg":
                return self._mean(entries)
            case "sum" | "max" | "min":
                return getattr(_column(entries), how)()
        return how(_column(entries))

    def _mean(self, entries: Sequence[_Entry]) -> torch.Tensor:
        """Mean over rows; of one micro-batch, its value to the bit."""
        column = _column(entries)
        if len(column) == 1:
            return column[0]
        exact = torch.promote_types(column.dtype, torch.float32)
        weights = torch.tensor([self._sizes[each.number] for each in entries], device=column.device, dtype=exact)
        return ((column * weights).sum() / weights.sum()).to(column.dtype)


def _column(entries: Sequence[_Entry]) -> torch.Tensor:
    """The numbers as a column, in the type that one process would log."""
    tensors = [torch.as_tensor(entry.value) for entry in entries]
    return torch.stack(
        [(each if each.is_floating_point() else each.to(torch.get_default_dtype())).mean() for each in tensors]
    )


# -------------------------------------------------------------------- metrics of torchmetrics


@contextmanager
def metrics_in_common(model: nn.Module, replicas: dist.ProcessGroup | None) -> Iterator[None]:
    """Context in which metrics are synchronized among copies: processes of one pipeline see the same batches."""
    metrics = [module for module in model.modules() if isinstance(module, Metric)]
    before = [(metric.distributed_available_fn, metric.process_group) for metric in metrics]
    for metric in metrics:
        if replicas is None:
            metric.distributed_available_fn = bool  # False: nobody else
        elif metric.process_group is None:
            metric.process_group = replicas
    try:
        yield
    finally:
        for metric, (available, group) in zip(metrics, before, strict=True):
            metric.distributed_available_fn, metric.process_group = available, group
