"""From a Trainer's model to a pipeline: the module to cut, its call, and the memory that is left for it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_rotor.callbacks.trainer_loop import TrainerLoop, first_call
from lightning_rotor.errors import PipelineError
from lightning_rotor.execution.isolated import kept_attributes
from lightning_rotor.execution.settings import Settings
from lightning_rotor.memory.held import storage_bytes
from lightning_rotor.memory.optimizer_prediction import predict_optimizer_state_bytes
from lightning_rotor.pipeline.micro_batches import Call, largest_part
from lightning_rotor.pipeline.paused_call import never_called
from lightning_rotor.pipeline.pipelined import pipelined
from lightning_rotor.pipeline.pipelined_module import PipelinedModule
from lightning_rotor.pipeline.placement import bytes_around, kept_bytes
from lightning_rotor.pipeline.processes import PipelineProcesses
from lightning_rotor.planned.target_search import Target
from lightning_rotor.private import lightning_names as private
from lightning_rotor.private import lightning_packages as packages
from lightning_rotor.private.values import call_with
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.strategies.pipeline_settings import PipelineSettings

if TYPE_CHECKING:
    import lightning.pytorch as pl

_move_data_to_device = packages.function("strategies.strategy.move_data_to_device")
# The Trainer's name of a task, where the module's method has another.
_STEPS = {"fit": "training", "validate": "validation"}


class PipelineBuilder:
    """Cuts a Trainer's model on all processes of a pipeline at once."""

    def __init__(self, settings: PipelineSettings, trainer: pl.Trainer, processes: PipelineProcesses) -> None:
        self._settings, self._trainer, self._processes = settings, trainer, processes
        self._device = processes.device
        self._model = trainer.lightning_module
        self._precision = trainer.precision_plugin
        self._loop = TrainerLoop(trainer, self._model)
        self._task: str = trainer.state.fn.value  # type: ignore[union-attr]
        self._fits = self._task == "fit"

    def build(self, last: Target | None) -> tuple[Target, PipelinedModule] | None:
        """Cut the module; None where no batch shows what it is called with.

        Evaluation outside of a fit is cut for time alone, since it keeps no activations. It cuts the module of the fit
        before, which is ``last``.
        """
        settings = self._settings
        needs_no_batch = settings.sample is not None and settings.module is not None
        batch = None
        if not needs_no_batch:
            batch = self._first_batch()
            if batch is None:
                return None
        target = self._target(batch, last)
        # Evaluation keeps no state, and is not limited.
        optimizer_scale = 0.0
        if self._fits:
            optimizer_scale = self._optimizer_scale()
        # The user's step runs up to the module's call, under autocast as in training.
        with self._precision.train_step_context():
            call, context = self._call_of(target, batch)
        memory_bytes = None
        if self._fits:
            given = settings.sample if batch is None else batch
            around_bytes = bytes_around(self._model, target.module, given, optimizer_scale)
            limit_bytes = self._loop.limit_bytes(settings.limit, ())
            memory_bytes = limit_bytes - around_bytes

        # Recordings hold for calls under the same autocast, so the module is cut under the settings of its call.
        with context.restored():
            cut = pipelined(
                self._model,
                target.module,
                call,
                options=settings.options(self._processes.size),
                memory_bytes=memory_bytes,
                kept=partial(kept_bytes, optimizer_scale=optimizer_scale),
                processes=self._processes,
            )
        return target, cut

    def _first_batch(self) -> Any:
        """The first batch of the Trainer's task, as a step sees it; None if there is none."""
        # Loaders shuffle by the user's generators, and training must begin where it would without this look.
        states = GeneratorStates()
        loop = getattr(self._trainer, f"{self._task}_loop")
        # The user's hooks run in here, and in training they run for this batch again.
        with kept_attributes(Stage("", (self._model,))):
            loop.setup_data()
            # The loop asks for another loader itself, and draws the same random numbers then.
            loader = private.take_loader(loop)
            if loader is None:
                return None
            fetched = next(iter(loader), None)
            if fetched is None:
                return None
            batch, *_ = fetched
            # What Lightning's loops do with a batch before a step sees it.
            converted = self._precision.convert_input(batch)
            batch = private.before_batch_transfer(self._model, converted)
            batch = self._trainer.strategy.batch_to_device(batch, self._device)
        states.restore()
        if self._fits:
            self._settings.check_rows(batch, "the first batch")
        return batch

    def _target(self, batch: Any, last: Target | None) -> Target:
        """The module that the user names, outside of a fit the last one, or that with most compute in a step."""
        name = self._settings.module
        if name is None and last is not None and not self._fits:
            name = last.name
        # Compute is counted in a training step, which evaluation has none of.
        training_batch = batch if self._fits else None
        target = self._loop.target(name, training_batch, may_be_whole=False)
        if target is None:
            raise PipelineError(
                f"{type(self._model).__name__} holds no submodule with several layers that its training_step calls: "
                "expected one to cut into pipeline stages"
            )
        return target

    def _optimizer_scale(self) -> float:
        """Bytes of state for each byte that learns, asked of optimizers that are made for it."""
        # configure_optimizers may draw random numbers, and the Trainer calls it again.
        states = GeneratorStates()
        optimizers = private.optimizers_of(self._model)
        states.restore()
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise PipelineError(
                "LBFGS evaluates the loss several times in a step and needs all parameters in one place: expected an "
                "optimizer that takes one step for each gradient, such as AdamW or SGD"
            )
        learning = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        state_bytes = 0
        for optimizer in optimizers:
            state_bytes += predict_optimizer_state_bytes(optimizer, self._device)
        # Of frozen models, nothing is divided by nothing.
        return state_bytes / max(storage_bytes(learning), 1)

    def _call_of(self, target: Target, batch: Any) -> tuple[Call, Settings]:
        """Arguments of the module for the largest micro-batch, and the settings around the call."""
        settings = self._settings
        if settings.sample is not None:
            moved = _move_data_to_device(call_with(settings.sample), self._device)
            sample = self._precision.convert_input(moved)
            settings.check_rows(sample, "sample")
            return largest_part(sample, settings.micro_batches), Settings()
        step = f"{_STEPS.get(self._task, self._task)}_step"
        micro_batch = largest_part(batch, settings.micro_batches)
        call_and_settings = first_call(self._model, target.module, micro_batch, step=step)
        if call_and_settings is None:
            raise never_called(step)
        return call_and_settings
