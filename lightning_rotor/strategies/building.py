"""From a Trainer, its model and the user's settings to a module that runs as a pipeline.

First batch ──► checked ──► what the module is called with ──► memory that is left ──► ``pipelined``

What a pipeline cannot train is refused before training, on every process: each ``check_…`` raises a
:class:`PipelineError` that says what would work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn

from lightning_rotor.callbacks.trainer_loop import TrainerLoop, first_call
from lightning_rotor.errors import ProfilingError
from lightning_rotor.execution.options import kept_attributes
from lightning_rotor.memory.held import predict_optimizer_state_bytes, storage_bytes
from lightning_rotor.pipeline.micro_batches import rows_in, sizes_of, split
from lightning_rotor.pipeline.pipelined import pipelined
from lightning_rotor.pipeline.placement import PipelineProcesses, bytes_around, kept_bytes, tensors_of
from lightning_rotor.pipeline.run_context import Call, RunContext, call_with, never_called
from lightning_rotor.pipeline.schedule import PipelineError, check_numbers
from lightning_rotor.pipeline.step import PipelinedModule, PipelineOptions
from lightning_rotor.planned.modules import Target
from lightning_rotor.private.lightning_names import before_batch_transfer, optimizers_of, take_loader
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.state import GeneratorStates


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


def check_calls(loop: TrainerLoop, name: str, part: Any) -> None:
    """Refuse a ``training_step`` that calls the module more than once, or without gradients, in a dry run."""
    calls: list[bool] = []

    def watch(copy: pl.LightningModule) -> None:
        copy.get_submodule(name).register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))

    try:
        loop.compute(part, 0, prepare=watch)
    except ProfilingError:
        return  # a step that cannot run dry: training finds out
    if len(calls) > 1 or calls == [False]:
        how = "under no_grad" if calls == [False] else f"{len(calls)} times"
        raise PipelineError(
            f"training_step called the module that is cut into pipeline stages {how} ({name!r}): expected one call of "
            "it with gradients. Let one call take both inputs, or let module=... name a part that is called once"
        )


class PipelineBuilder:
    """Cuts a Trainer's model on all processes of a pipeline at once."""

    def __init__(self, settings: PipelineSettings, trainer: pl.Trainer, processes: PipelineProcesses) -> None:
        self._settings, self._trainer, self._model = settings, trainer, trainer.lightning_module
        self._loop, self._fits = TrainerLoop(trainer, self._model), trainer.state.fn == TrainerFn.FITTING
        self._precision, self._processes, self._device = trainer.precision_plugin, processes, processes.device

    def build(self, last: Target | None) -> tuple[Target, PipelinedModule] | None:
        """Cut the module. Evaluation outside of a fit is cut for time alone, since it keeps no activations."""
        settings, model, fits = self._settings, self._model, self._fits
        by_sample = settings.sample is not None and settings.module is not None
        batch = None if by_sample else self._first_batch()
        if batch is None and not by_sample and not fits:
            return None
        target = self._target(batch, last)
        optimizers = self._trial_optimizers() if fits else []
        optimizer_bytes = sum(predict_optimizer_state_bytes(each, self._device) for each in optimizers)
        factor = optimizer_bytes / max(storage_bytes(each for each in model.parameters() if each.requires_grad), 1)
        with self._precision.train_step_context():
            call, context = self._call_of(target, batch, len(optimizers))
        limit_bytes = None
        if fits:
            given = settings.sample if batch is None else batch
            limit_bytes = self._loop.limit_bytes(settings.limit, ()) - bytes_around(model, target.module, given, factor)
        with context.restored():
            made = pipelined(
                model,
                target.module,
                call,
                options=settings.options(self._processes.size),
                memory_bytes=limit_bytes,
                state_bytes=lambda stages: [kept_bytes(tensors_of(stage), factor) for stage in stages],
                processes=self._processes,
            )
        return target, made

    def _first_batch(self) -> Any:
        """The first batch of the Trainer's task, as a step sees it; None if there is none."""
        states, loop = GeneratorStates(), getattr(self._trainer, _TASKS[self._trainer.state.fn][0])
        with kept_attributes(Stage("", (self._model,))):
            loop.setup_data()
            # The loop asks for another loader itself, and draws the same random numbers then.
            loader = take_loader(loop)
            if loader is None:
                return None
            loader.limits = None
            found = next(iter(loader), None)
            if found is None:
                return None
            # What Lightning's loops do with a batch before a step sees it.
            batch = before_batch_transfer(self._model, self._precision.convert_input(found[0]))
            batch = self._trainer.strategy.batch_to_device(batch, self._device)
        states.restore()
        if self._fits:
            self._settings.check_rows(rows_in(batch), "the first batch")
        return batch

    def _target(self, batch: Any, last: Target | None) -> Target:
        """The module that the user names, outside of a fit the last one, or that with most compute in a step."""
        name = self._settings.module
        if name is None and last is not None and not self._fits:
            name = last.name
        found = self._loop.target(name, batch if self._fits else None, may_be_whole=False)
        if found is None:
            raise PipelineError(
                f"{type(self._model).__name__} holds no submodule with several layers that its training_step calls: "
                "expected one to cut into pipeline stages"
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
            call = call_with(self._settings.sample)
            sample = self._precision.convert_input(move_data_to_device(call, self._device))
            rows = rows_in(sample)
            self._settings.check_rows(rows, "sample")
            found: Call = split(sample, sizes_of(rows, micro_batches))[0]
            return found, RunContext()
        part = split(batch, sizes_of(rows_in(batch), micro_batches))[0]
        if self._fits and self._model.automatic_optimization:
            check_calls(self._loop, target.name, part)
        step = _TASKS[self._trainer.state.fn][1]
        called = first_call(self._model, target.module, part, step=step, optimizers=optimizers)
        if called is None:
            raise never_called(step)
        return called


_TASKS: dict[Any, tuple[str, str]] = {
    TrainerFn.FITTING: ("fit_loop", "training_step"),
    TrainerFn.VALIDATING: ("validate_loop", "validation_step"),
    TrainerFn.TESTING: ("test_loop", "test_step"),
    TrainerFn.PREDICTING: ("predict_loop", "predict_step"),
}
"""The Trainer's loop and the user's step of each task."""
