"""What cannot be trained in a pipeline, found on every process before training starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from lightning_rotor.callbacks.dry_step import compute_of_training_step
from lightning_rotor.errors import ProfilingError
from lightning_rotor.pipeline.partition.problem import RECOMPUTE_MODES
from lightning_rotor.pipeline.schedule import PipelineError, PipelineScheduleName, check_numbers


def check_arguments(
    *, schedule: PipelineScheduleName, stages: int | None, micro_batches: int, recompute: str, balance: Any
) -> None:
    """Check what can be checked without devices.

    Raises:
        PipelineError: An argument makes no sense.
    """
    check_numbers(schedule, stages or 1, 1 if schedule == "interleaved" else micro_batches, 1)
    check_numbers("gpipe", 1, micro_batches, 1)
    if recompute not in RECOMPUTE_MODES:
        raise PipelineError(f"recompute is {recompute!r}: expected one of {', '.join(map(repr, RECOMPUTE_MODES))}")
    if isinstance(balance, str) and balance != "auto":
        raise PipelineError(f'balance is {balance!r}: expected "auto" or numbers such as [3, 4, 2]')


def check_devices(*, stages: int, world: int, schedule: PipelineScheduleName, micro_batches: int) -> None:
    """Check the number of devices.

    Raises:
        PipelineError: It does not fit.
    """
    if world % stages:
        raise PipelineError(
            f"pipeline_stages is {stages}, but there are {world} devices: expected a number of devices that is a multiple, such as "
            f"devices={stages * max(world // stages, 1)}"
        )
    if schedule == "1f1b" and micro_batches < stages:
        raise PipelineError(
            f"micro_batches is {micro_batches} for {stages} devices: expected at least as many micro-batches as devices under "
            f'schedule "1f1b". Use micro_batches={stages}, or schedule="gpipe"'
        )


def check_precision(precision: Precision) -> None:
    """Check that the loss is not scaled by what gradients allow.

    Raises:
        PipelineError: It is.
    """
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        raise PipelineError(
            'precision "16-mixed" scales the loss by what the gradients of all stages allow, which a pipeline cannot know in time: expected '
            '"bf16-mixed", or "32-true"'
        )


def check_optimization(model: pl.LightningModule, schedule: PipelineScheduleName) -> None:
    """Check that user code that asks for the backward itself can have it.

    Raises:
        PipelineError: The schedule begins with backwards before it is asked.
    """
    if not model.automatic_optimization and schedule != "gpipe":
        raise PipelineError(
            f"manual optimization asks for the backward when the output of the whole batch is there, but schedule {schedule!r} begins with "
            'backwards before: expected schedule="gpipe", or automatic optimization'
        )


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Check that each step of an optimizer is one backward.

    Raises:
        PipelineError: One of them is LBFGS.
    """
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise PipelineError(
            "LBFGS evaluates the loss several times in a step and needs all parameters in one place: expected an optimizer that takes "
            "one step for each gradient, such as AdamW or SGD"
        )


def check_callbacks(callbacks: Sequence[pl.Callback]) -> None:
    """Check that none of them needs all weights in one place while training goes on.

    Raises:
        PipelineError: One averages weights.
    """
    for callback in callbacks:
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise PipelineError(
                f"{type(callback).__name__} averages the weights of the whole model, of which each process of a pipeline has a part: expected no "
                "such callback. Average the weights of checkpoints after training"
            )


def check_rows(rows: int, micro_batches: int, what: str) -> None:
    """Check that there is a row for each micro-batch.

    Raises:
        PipelineError: There are fewer.
    """
    if not rows:
        raise PipelineError(f"{what} is empty: expected at least one row for each of {micro_batches} micro-batches")
    if rows < micro_batches:
        raise PipelineError(
            f"{what} has {rows} rows for {micro_batches} micro-batches: expected at least one row for each. Use a larger batch, "
            f"or micro_batches={rows}"
        )


def check_calls(trainer: pl.Trainer, model: pl.LightningModule, name: str, part: Any) -> None:
    """Check, in a dry run of ``training_step``, that it calls a module once.

    Args:
        trainer: Its Trainer.
        model: Stays as it is.
        name: Of the module.
        part: A micro-batch.
    Raises:
        PipelineError: It calls the module several times, or without gradients.
    """
    calls: list[bool] = []

    def watch(copy: pl.LightningModule) -> None:
        copy.get_submodule(name).register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))

    try:
        compute_of_training_step(trainer, model, part, 0, prepare=watch)
    except ProfilingError:
        return  # a step that cannot run dry: training finds out
    if len(calls) > 1:
        raise PipelineError(
            f"training_step called the module that is cut into pipeline stages {len(calls)} times ({name!r}): expected one call of it. "
            "Let one call take both inputs, or let module=... name a part that is called once"
        )
    if calls == [False]:
        raise PipelineError(
            f"training_step called the module that is cut into pipeline stages under no_grad ({name!r}): expected one call with gradients"
        )
