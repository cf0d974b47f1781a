"""From a Trainer, its model and the user's settings to a module that runs as a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_rotor.execution.options import kept_attributes
from lightning_rotor.memory.budget import process_limit_bytes
from lightning_rotor.memory.held import block_bytes, storage_bytes
from lightning_rotor.memory.optimizer import predict_optimizer_state_bytes
from lightning_rotor.pipeline.micro_batches import rows_in, sizes_of, split
from lightning_rotor.pipeline.partition import PipelineDevice, RecomputeMode
from lightning_rotor.pipeline.pipelined import PipelinedModule, PipelineOptions, pipelined
from lightning_rotor.pipeline.placement import gathered
from lightning_rotor.pipeline.schedule import PipelineScheduleName
from lightning_rotor.pipeline.surroundings import Surroundings
from lightning_rotor.planned.target import Target, named_target
from lightning_rotor.private.lightning_names import before_batch_transfer, optimizers_of
from lightning_rotor.private.values import tensors_in
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.state import GeneratorStates
from lightning_rotor.strategies import checks
from lightning_rotor.strategies.first_call import Call, find_target, first_batch, first_call

# ----------------------------------------------------------------------------------------------------
# What training keeps on a device of a pipeline besides activations.


def outside(model: nn.Module, module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers that are not the module's."""
    inside = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in inside]


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """How many bytes weights, gradients and optimizer state take.

    Attributes:
        factor: Bytes of optimizer state for each byte of trained parameters.
        device: Where.
    """

    factor: float
    device: torch.device

    @classmethod
    def in_evaluation(cls, device: torch.device) -> KeptMemory:
        """Without an optimizer."""
        return cls(0.0, device)

    @classmethod
    def under(cls, optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, device: torch.device) -> KeptMemory:
        """With some optimizers, which are asked in a dry step."""
        trained = _trained_bytes(list(model.parameters()))
        state_bytes = sum(predict_optimizer_state_bytes(each, device) for each in optimizers)
        return cls(state_bytes / max(trained, 1), device)

    def outside_bytes(self, model: nn.Module, module: nn.Module) -> int:
        """Of what is not in the module, gradients included: it is on every device."""
        tensors = outside(model, module)
        return storage_bytes(tensors) + round((1 + self.factor) * _trained_bytes(tensors))

    def of_stages(self, stages: Sequence[Stage]) -> list[int]:
        """By stage of a chain, weights, buffers and optimizer state."""
        return [self._of_stage(stage) for stage in stages]

    def _of_stage(self, stage: Stage) -> int:
        parameters = list(stage.parameters())
        buffers = {id(b): b for _, m in stage.submodules() for b in m._buffers.values() if b is not None}
        weights = sum(block_bytes(t.numel() * t.element_size(), self.device) for t in (*parameters, *buffers.values()))
        return weights + round(self.factor * _trained_bytes(parameters))


def _trained_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
    )


# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PipelineSettings:
    """Arguments of :class:`~lightning_rotor.strategies.RotorPipelineStrategy`, which describes them; the limit is parsed."""

    module: str | None
    balance: Literal["auto"] | list[int]
    micro_batches: int
    schedule: PipelineScheduleName
    recompute: RecomputeMode
    limit: Any
    pipeline_stages: int | None
    deferred_batch_norm: bool
    sample: Any

    def __post_init__(self) -> None:
        checks.check_arguments(
            schedule=self.schedule,
            stages=self.pipeline_stages,
            micro_batches=self.micro_batches,
            recompute=self.recompute,
            balance=self.balance,
        )

    @property
    def sample_call(self) -> Call:
        """The sample as arguments."""
        if isinstance(self.sample, dict):
            return (), self.sample
        return self.sample if isinstance(self.sample, tuple) else (self.sample,), {}

    def options(self, devices: int) -> PipelineOptions:
        """Those of a pipeline over some devices."""
        stages_per_device = 1
        if self.schedule == "interleaved":
            by_hand = not isinstance(self.balance, str)
            stages_per_device = max(len(self.balance) // devices, 1) if by_hand else 2
        return PipelineOptions(
            self.micro_batches, self.schedule, self.recompute, self.balance, stages_per_device, self.deferred_batch_norm
        )


class PipelineBuilder:
    """Cuts a model on all processes of a pipeline at once.

    Args:
        settings: Of the user.
        precision: Of the Trainer.
        device: Where this process computes.
        group: Processes of the pipeline.
        replicas: Processes with the same stages, and other batches.
        neighbours: How many processes share this host's memory.
        to_device: Moves a batch, the same one on all processes of the pipeline.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        *,
        precision: Precision,
        device: torch.device,
        group: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
        neighbours: int,
        to_device: Callable[[Any], Any],
    ) -> None:
        self._settings, self._precision, self._device, self._group = settings, precision, device, group
        self._replicas, self._neighbours, self._to_device = replicas, neighbours, to_device

    def build(self, trainer: pl.Trainer, last: Target | None) -> tuple[Target, PipelinedModule] | None:
        """Cut the module. Evaluation outside of a fit is cut for time alone, since it keeps no activations.

        Args:
            trainer: About to train or to evaluate.
            last: What was cut before.
        Returns:
            What was cut, and how; None if there is nothing to run.
        """
        settings, model = self._settings, trainer.lightning_module
        fits = trainer.state.fn == TrainerFn.FITTING
        by_sample = settings.sample is not None and settings.module is not None
        batch = None if by_sample else self._first_batch(trainer, fits=fits)
        if batch is None and not by_sample and not fits:
            return None
        if fits or last is None or settings.module is not None:
            target = find_target(trainer, model, settings.module, batch if fits else None)
        else:
            target = named_target(model, last.name)
        optimizers = _trial_optimizers(model) if fits else []
        memory = KeptMemory.under(optimizers, model, self._device) if fits else KeptMemory.in_evaluation(self._device)
        with self._precision.train_step_context():
            call, around = self._call_of(trainer, target, batch, len(optimizers))
        limit_bytes = None
        if fits:
            given_bytes = storage_bytes(tensors_in(settings.sample if batch is None else batch))
            limit_bytes = self._limit_bytes(model) - memory.outside_bytes(model, target.module) - given_bytes
        devices = self._devices(limit_bytes)
        with around.restored():
            made = pipelined(
                model,
                target.module,
                call,
                options=settings.options(len(devices)),
                devices=devices,
                state_bytes=memory.of_stages,
                device=self._device,
                group=self._group,
                replicas=self._replicas,
            )
        return target, made

    def _first_batch(self, trainer: pl.Trainer, *, fits: bool) -> Any:
        model = trainer.lightning_module
        states = GeneratorStates()
        with kept_attributes(Stage("", (model,))):
            batch = first_batch(trainer)
            if batch is None:
                return None
            # What Lightning's loops do with a batch before a step sees it.
            batch = self._precision.convert_input(batch)
            batch = self._to_device(before_batch_transfer(model, batch))
        states.restore()
        if fits:
            checks.check_rows(rows_in(batch), self._settings.micro_batches, "the first batch")
        return batch

    def _call_of(self, trainer: pl.Trainer, target: Target, batch: Any, optimizers: int) -> tuple[Call, Surroundings]:
        """Arguments of the module for the largest micro-batch, and the settings around the call."""
        micro_batches = self._settings.micro_batches
        if self._settings.sample is not None:
            sample = self._precision.convert_input(move_data_to_device(self._settings.sample_call, self._device))
            rows = rows_in(sample)
            checks.check_rows(rows, micro_batches, "sample")
            found: Call = split(sample, sizes_of(rows, micro_batches))[0]
            return found, Surroundings()
        part = split(batch, sizes_of(rows_in(batch), micro_batches))[0]
        if trainer.state.fn == TrainerFn.FITTING and trainer.lightning_module.automatic_optimization:
            checks.check_calls(trainer, trainer.lightning_module, target.name, part)
        return first_call(trainer, target.module, part, optimizers=optimizers, device=self._device)

    def _limit_bytes(self, model: pl.LightningModule) -> int:
        """Of this process's device."""
        limit_bytes = process_limit_bytes(self._settings.limit, model, (), (), self._device)
        shared = self._settings.limit is None and self._device.type == "cpu"
        return limit_bytes // self._neighbours if shared else limit_bytes

    def _devices(self, memory_bytes: int | None) -> list[PipelineDevice]:
        """In the order of the pipeline; of replicas, the one with least memory."""
        if memory_bytes is not None and self._replicas is not None:
            memory_bytes = min(gathered(memory_bytes, self._replicas))
        found = gathered(None if memory_bytes is None else max(memory_bytes, 0), self._group)
        return [PipelineDevice(each) for each in found]


def _trial_optimizers(model: pl.LightningModule) -> list[torch.optim.Optimizer]:
    """To ask them what they keep."""
    states = GeneratorStates()
    made = optimizers_of(model)
    states.restore()
    checks.check_optimizers(made)
    return made
