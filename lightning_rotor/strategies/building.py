"""From a Trainer, its model and the user's settings to a module that runs as a pipeline.

First batch ──► checked ──► what the module is called with ──► memory that is left ──► ``pipelined``

What a pipeline cannot train is refused before training, on every process: each ``check_…`` raises a
:class:`PipelineError` that says what would work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_rotor.callbacks.trainer_loop import Silence, compute_of_training_step
from lightning_rotor.errors import ProfilingError
from lightning_rotor.execution.options import kept_attributes, lent_buffers
from lightning_rotor.memory.budget import process_limit_bytes
from lightning_rotor.memory.held import block_bytes, predict_optimizer_state_bytes, storage_bytes
from lightning_rotor.pipeline.micro_batches import rows_in, sizes_of, split
from lightning_rotor.pipeline.partition import PipelineDevice
from lightning_rotor.pipeline.pipelined import pipelined
from lightning_rotor.pipeline.placement import PipelineProcesses, gathered, outside, tensors_of
from lightning_rotor.pipeline.run_context import Call, PausedCall, RunContext
from lightning_rotor.pipeline.schedule import PipelineError, check_numbers
from lightning_rotor.pipeline.step import PipelinedModule, PipelineOptions
from lightning_rotor.planned.forward import attached
from lightning_rotor.planned.target import Target, TargetSearch, named_target
from lightning_rotor.private.lightning_names import before_batch_transfer, optimizers_of, take_loader
from lightning_rotor.private.values import tensors_in
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.state import GeneratorStates
from lightning_rotor.strategies.steps import MicroBatchLogs


@dataclass(frozen=True, slots=True, eq=False)
class PipelineSettings(PipelineOptions):
    """Arguments of :class:`~lightning_rotor.strategies.RotorPipelineStrategy`; the limit is parsed."""

    module: str | None = None
    limit: Any = None
    pipeline_stages: int | None = None
    sample: Any = None

    def __post_init__(self) -> None:
        PipelineOptions.__post_init__(self)
        check_numbers("gpipe", self.pipeline_stages or 1, self.micro_batches, 1)

    def options(self, devices: int) -> PipelineOptions:
        """Options of a pipeline over some devices."""
        if self.schedule != "interleaved":
            return self
        by_hand = not isinstance(self.balance, str)
        return replace(self, stages_per_device=max(len(self.balance) // devices, 1) if by_hand else 2)

    def check_devices(self, world: int, stages: int) -> None:
        """Refuse numbers of devices that make no pipelines of so many stages."""
        if world % stages:
            raise PipelineError(
                f"pipeline_stages is {stages}, but there are {world} devices: expected a number of devices that is a "
                f"multiple, such as devices={stages * max(world // stages, 1)}"
            )
        if self.schedule == "1f1b" and self.micro_batches < stages:
            raise PipelineError(
                f"micro_batches is {self.micro_batches} for {stages} devices: expected at least as many micro-batches "
                f'as devices under schedule "1f1b". Use micro_batches={stages}, or schedule="gpipe"'
            )

    def check_fit(self, model: pl.LightningModule, precision: Precision, callbacks: Sequence[pl.Callback]) -> None:
        """Refuse scaled losses, manual optimization except under GPipe, and callbacks that average weights."""
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            raise PipelineError(
                'precision "16-mixed" scales the loss by what the gradients of all stages allow, which a pipeline '
                'cannot know in time: expected "bf16-mixed", or "32-true"'
            )
        if not model.automatic_optimization and self.schedule != "gpipe":
            raise PipelineError(
                "manual optimization asks for the backward when the output of the whole batch is there, but schedule "
                f'{self.schedule!r} begins with backwards before: expected schedule="gpipe", or automatic optimization'
            )
        for callback in callbacks:
            if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
                raise PipelineError(
                    f"{type(callback).__name__} averages the weights of the whole model, of which each process of a "
                    "pipeline has a part: expected no such callback. Average the weights of checkpoints after training"
                )

    def check_rows(self, rows: int, what: str) -> None:
        """Refuse fewer rows than micro-batches."""
        if not rows:
            raise PipelineError(
                f"{what} is empty: expected at least one row for each of {self.micro_batches} micro-batches"
            )
        if rows < self.micro_batches:
            raise PipelineError(
                f"{what} has {rows} rows for {self.micro_batches} micro-batches: expected at least one row for each. "
                f"Use a larger batch, or micro_batches={rows}"
            )


def check_calls(trainer: pl.Trainer, name: str, part: Any) -> None:
    """Refuse a ``training_step`` that calls the module more than once, or without gradients, in a dry run."""
    calls: list[bool] = []

    def watch(copy: pl.LightningModule) -> None:
        copy.get_submodule(name).register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))

    try:
        compute_of_training_step(trainer, trainer.lightning_module, part, 0, prepare=watch)
    except ProfilingError:
        return  # a step that cannot run dry: training finds out
    if len(calls) > 1 or calls == [False]:
        how = "under no_grad" if calls == [False] else f"{len(calls)} times"
        raise PipelineError(
            f"training_step called the module that is cut into pipeline stages {how} ({name!r}): expected one call of "
            "it with gradients. Let one call take both inputs, or let module=... name a part that is called once"
        )


def _trained_bytes(tensors: Sequence[torch.Tensor]) -> int:
    trained = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.requires_grad]
    return sum(tensor.numel() * tensor.element_size() for tensor in trained)


class PipelineBuilder:
    """Cuts a Trainer's model on all processes of a pipeline at once."""

    def __init__(self, settings: PipelineSettings, trainer: pl.Trainer, processes: PipelineProcesses) -> None:
        self._settings, self._trainer, self._model = settings, trainer, trainer.lightning_module
        self._fits = trainer.state.fn == TrainerFn.FITTING
        self._precision, self._processes, self._device = trainer.precision_plugin, processes, processes.device

    def build(self, last: Target | None) -> tuple[Target, PipelinedModule] | None:
        """Cut the module. Evaluation outside of a fit is cut for time alone, since it keeps no activations."""
        settings, model, fits = self._settings, self._model, self._fits
        by_sample = settings.sample is not None and settings.module is not None
        batch = None if by_sample else self._first_batch()
        if batch is None and not by_sample and not fits:
            return None
        if fits or last is None or settings.module is not None:
            target = self._target(batch if fits else None)
        else:
            target = named_target(model, last.name)
        optimizers = self._trial_optimizers() if fits else []
        optimizer_bytes = sum(predict_optimizer_state_bytes(each, self._device) for each in optimizers)
        factor = optimizer_bytes / max(_trained_bytes(list(model.parameters())), 1)
        with self._precision.train_step_context():
            call, context = self._call_of(target, batch, len(optimizers))
        limit_bytes = None
        if fits:
            around = outside(model, target.module)
            given_bytes = storage_bytes(tensors_in(settings.sample if batch is None else batch))
            outside_bytes = storage_bytes(around) + round((1 + factor) * _trained_bytes(around))
            limit_bytes = self._limit_bytes() - outside_bytes - given_bytes
        devices = self._devices(limit_bytes)
        with context.restored():
            made = pipelined(
                model,
                target.module,
                call,
                options=settings.options(len(devices)),
                devices=devices,
                state_bytes=lambda stages: [self._stage_bytes(stage, factor) for stage in stages],
                processes=self._processes,
            )
        return target, made

    def _stage_bytes(self, stage: Stage, factor: float) -> int:
        """Bytes of weights, buffers and optimizer state of a stage."""
        tensors = tensors_of(stage)
        weights = sum(block_bytes(tensor.numel() * tensor.element_size(), self._device) for tensor in tensors)
        return weights + round(factor * _trained_bytes(tensors))

    def _first_batch(self) -> Any:
        """The first batch of the Trainer's task, as a step sees it; None if there is none."""
        states, loop = GeneratorStates(), getattr(self._trainer, _TASKS[self._trainer.state.fn][0])
        with kept_attributes(Stage("", (self._model,))):
            loop.setup_data()
            # The loop asks for another loader itself, and draws the same random numbers then.
            loader = take_loader(loop)
            mode: Any = "max_size_cycle" if self._fits else "sequential"
            found = None if loader is None else next(iter(CombinedLoader(loader.iterables, mode)), None)
            if found is None:
                return None
            # What Lightning's loops do with a batch before a step sees it.
            batch = before_batch_transfer(self._model, self._precision.convert_input(found[0]))
            batch = self._trainer.strategy.batch_to_device(batch, self._device)
        states.restore()
        if self._fits:
            self._settings.check_rows(rows_in(batch), "the first batch")
        return batch

    def _target(self, batch: Any) -> Target:
        """The module that the user names, or the one with most compute in a step with the batch."""
        model = self._model
        if self._settings.module is not None:
            return named_target(model, self._settings.module)
        search = TargetSearch(model, may_be_whole=False)
        if batch is None:
            search.do_without("nothing is trained")
            found = search.best()
        else:
            found = search.best_by_compute(lambda: compute_of_training_step(self._trainer, model, batch, 0))
        if found is None:
            raise PipelineError(
                f"{type(model).__name__} holds no submodule with several layers that its training_step calls: expected "
                "one to cut into pipeline stages"
            )
        return found

    def _trial_optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers made to ask them what they keep; refused if one takes several backwards for a step."""
        states = GeneratorStates()
        made = optimizers_of(self._model)
        states.restore()
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in made):
            raise PipelineError(
                "LBFGS evaluates the loss several times in a step and needs all parameters in one place: expected an "
                "optimizer that takes one step for each gradient, such as AdamW or SGD"
            )
        return made

    def _call_of(self, target: Target, batch: Any, optimizers: int) -> tuple[Call, RunContext]:
        """Arguments of the module for the largest micro-batch, and the settings around the call."""
        micro_batches = self._settings.micro_batches
        if self._settings.sample is not None:
            given = self._settings.sample
            call = ((), given) if isinstance(given, dict) else (given if isinstance(given, tuple) else (given,), {})
            sample = self._precision.convert_input(move_data_to_device(call, self._device))
            rows = rows_in(sample)
            self._settings.check_rows(rows, "sample")
            found: Call = split(sample, sizes_of(rows, micro_batches))[0]
            return found, RunContext()
        part = split(batch, sizes_of(rows_in(batch), micro_batches))[0]
        if self._fits and self._model.automatic_optimization:
            check_calls(self._trainer, target.name, part)
        return first_call(self._trainer, target.module, part, optimizers=optimizers, device=self._device)

    def _limit_bytes(self) -> int:
        """Memory limit of this process's device."""
        limit_bytes = process_limit_bytes(self._settings.limit, self._model, (), (), self._device)
        shared = self._settings.limit is None and self._device.type == "cpu"
        strategy: Any = self._trainer.strategy
        return limit_bytes // strategy.num_processes if shared else limit_bytes

    def _devices(self, memory_bytes: int | None) -> list[PipelineDevice]:
        """Devices in the order of the pipeline; of replicas, the one with least memory."""
        if memory_bytes is not None and self._processes.replicas is not None:
            memory_bytes = min(gathered(memory_bytes, self._processes.replicas))
        found = gathered(None if memory_bytes is None else max(memory_bytes, 0), self._processes.group)
        return [PipelineDevice(each) for each in found]


_TASKS: dict[Any, tuple[str, str]] = {
    TrainerFn.FITTING: ("fit_loop", "training_step"),
    TrainerFn.VALIDATING: ("validate_loop", "validation_step"),
    TrainerFn.TESTING: ("test_loop", "test_step"),
    TrainerFn.PREDICTING: ("predict_loop", "predict_step"),
}
"""The Trainer's loop and the user's step of each task."""


def first_call(
    trainer: pl.Trainer, module: nn.Module, part: Any, *, optimizers: int, device: torch.device
) -> tuple[Call, RunContext]:
    """Arguments of the user's step's first call of a module, and the settings around that call."""
    model = trainer.lightning_module
    _, name = _TASKS[trainer.state.fn]
    run = getattr(model, name)
    arguments = [part]
    for number, other in enumerate(("batch_idx", "dataloader_idx"), 2):
        if is_param_in_hook_signature(run, other, min_args=number):
            arguments.append(0)
    step = PausedCall(lambda: run(*arguments), seed=0, device=device, what=name)
    logs = MicroBatchLogs(model, [rows_in(part)])
    with _untouched(model, optimizers), attached(module, step), logs.caught():
        try:
            return step.start(), step.context
        finally:
            step.abandon()


@contextmanager
def _untouched(model: pl.LightningModule, optimizers: int) -> Iterator[None]:
    """Context that restores attributes, buffers and what learns; optimizers do not exist yet, and accept everything."""
    learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    silence: Any = Silence()
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
