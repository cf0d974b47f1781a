"""With what the user's code calls the module that is to be cut: found out by the first batch, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torchmetrics import Metric

from lightning_rotor.callbacks.dry_step import Silence, best_by_compute
from lightning_rotor.execution.options import kept_attributes, lent_buffers
from lightning_rotor.pipeline.micro_batches import rows_in
from lightning_rotor.pipeline.paused_step import SuspendedCall, suspended_call
from lightning_rotor.pipeline.schedule import PipelineError
from lightning_rotor.pipeline.surroundings import Surroundings
from lightning_rotor.planned.forward import attached
from lightning_rotor.planned.target import Target, TargetSearch, named_target
from lightning_rotor.private.lightning_names import take_loader
from lightning_rotor.private.values import tree_map_only
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.strategies.micro_batch_logs import MicroBatchLogs

# ----------------------------------------------------------------------------------------------------
# Metrics of torchmetrics in a pipeline, whose processes all see the same batches, and the first of them once more
# before training.


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


# ----------------------------------------------------------------------------------------------------


Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def first_batch(trainer: pl.Trainer) -> Any:
    """The first batch of what the Trainer was asked to do, as its loader gives it; None if there is none."""
    fn = trainer.state.fn
    if fn == TrainerFn.FITTING:
        trainer.fit_loop.setup_data()
        # The loop asks for another one itself, and draws the same random numbers then.
        loader = take_loader(trainer.fit_loop)
        batches = None if loader is None else iter(CombinedLoader(loader.iterables, "max_size_cycle"))
    else:
        loop: Any = {
            TrainerFn.VALIDATING: trainer.validate_loop,
            TrainerFn.TESTING: trainer.test_loop,
            TrainerFn.PREDICTING: trainer.predict_loop,
        }[fn]  # type: ignore[index]
        loop.setup_data()
        loader = take_loader(loop)
        batches = None if loader is None else iter(CombinedLoader(loader.iterables, "sequential"))
    found = None if batches is None else next(batches, None)
    return None if found is None else found[0]


def find_target(trainer: pl.Trainer, model: pl.LightningModule, name: str | None, batch: Any) -> Target:
    """The module to cut.

    Args:
        trainer: Its Trainer.
        model: The whole.
        name: As the user gave it.
        batch: To see where ``training_step`` computes; None goes by the number of parameters.
    Raises:
        PipelineError: There is none.
        ModelError: It is named, and cannot be a chain.
    """
    if name is not None:
        return named_target(model, name)
    search = TargetSearch(model, may_be_whole=False)
    if batch is None:
        search.do_without("nothing is trained")
        found = search.best()
    else:
        found = best_by_compute(search, trainer, model, batch, 0)
    if found is None:
        raise PipelineError(
            f"{type(model).__name__} holds no submodule with several layers that its training_step calls: expected one to cut into pipeline stages"
        )
    return found


def first_call(
    trainer: pl.Trainer, module: nn.Module, part: Any, *, optimizers: int, device: torch.device
) -> tuple[Call, Surroundings]:
    """Arguments with which the user's step calls a module, and the settings around that call.

    Args:
        trainer: Says which step; its model stays as it is.
        module: Part of the model.
        part: A micro-batch.
        optimizers: How many the model has.
        device: Where it computes.
    Raises:
        PipelineError: The step never calls it.
    """
    model = trainer.lightning_module
    name = _STEPS[trainer.state.fn]  # type: ignore[index]
    run = getattr(model, name)
    arguments = [part]
    for number, other in enumerate(("batch_idx", "dataloader_idx"), 2):
        if is_param_in_hook_signature(run, other, min_args=number):
            arguments.append(0)
    step = SuspendedCall(lambda: run(*arguments), seed=0, device=device, what=name)
    logs = MicroBatchLogs(model, [rows_in(part)])
    with _untouched(model, optimizers), kept_metrics(model), attached(module, _Stop()), logs.caught():
        try:
            return step.start(), step.surroundings
        finally:
            step.abandon()


@contextmanager
def _untouched(model: pl.LightningModule, optimizers: int) -> Iterator[None]:
    """Attributes, buffers and what learns are put back; optimizers do not exist yet, and take everything in silence."""
    learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    silence: Callable[..., Any] = Silence()
    names = ("lr_schedulers", "manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")
    stand_ins = dict.fromkeys(names, silence)
    stand_ins["optimizers"] = lambda *_, **__: silence if optimizers == 1 else [silence] * optimizers
    whole = Stage("", (model,))
    with kept_attributes(whole), lent_buffers(whole):
        if not model.automatic_optimization:
            model.__dict__.update(stand_ins)
        yield
    for parameter, learns in learning:
        parameter.requires_grad_(learns)


class _Stop:
    """In the place of a module: whoever calls it waits, and never goes on."""

    active = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        waiting = suspended_call()
        assert waiting is not None
        return waiting.call(args, kwargs)
