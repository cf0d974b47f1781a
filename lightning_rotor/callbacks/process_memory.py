"""What a Trainer's process holds besides the planned module's activations, under the user's limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_rotor.allowance import Allowance
from lightning_rotor.callbacks.ranks import communication_bytes, processes_sharing
from lightning_rotor.private.lightning_names import toggled_parameters
from lightning_rotor.training_memory import ResidentMemory, named_bytes, process_limit_bytes
from lightning_rotor.units import MemoryLimit


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """A training process and its limit.

    Attributes:
        limit_bytes: For all of it.
        resident: What it holds.
        gradients_linger: Those of one step are there until after the next forward, and no longer.
    """

    limit_bytes: int
    resident: ResidentMemory
    gradients_linger: bool

    @classmethod
    def of(
        cls,
        limit: MemoryLimit | None,
        trainer: pl.Trainer,
        model: pl.LightningModule,
        *,
        target: nn.Module,
        batch: Sequence[torch.Tensor],
        device: torch.device,
        agreed_bytes: int | None = None,
    ) -> ProcessMemory:
        """Count what is there, and predict what will be.

        Args:
            limit: As the user gave it.
            trainer: Whose process.
            model: What it trains.
            target: The planned module.
            batch: Tensors of one batch.
            device: Where.
            agreed_bytes: The limit that all processes have agreed on, if they have.
        """
        with _untoggled(model):
            resident = ResidentMemory.of(model, target, trainer.optimizers, batch, device)
        resident = replace(resident, communication_bytes=communication_bytes(trainer, model))
        if device.type == "cuda":
            named = named_bytes(model, trainer.optimizers, batch, device) + resident.communication_bytes
            resident = replace(resident, other_bytes=max(0, torch.cuda.memory_allocated(device) - named))
        return cls(
            agreed_bytes or own_limit_bytes(limit, trainer, model, batch, device),
            resident,
            # zero_grad runs between forward and backward, so gradients of the step before linger through the forward. Not so when
            # several backwards add up, or when the user decides.
            gradients_linger=model.automatic_optimization and trainer.accumulate_grad_batches == 1,
        )

    def allowance(self, *, batch_bytes: int | None = None, correction_bytes: int = 0) -> Allowance:
        """What remains for the planned module.

        Args:
            batch_bytes: Of another batch than the one that was counted.
            correction_bytes: Found to be used by something else.
        """
        resident = self.resident if batch_bytes is None else replace(self.resident, batch_bytes=batch_bytes)
        return resident.allowance(
            self.limit_bytes, gradients_linger=self.gradients_linger, correction_bytes=correction_bytes
        )


def own_limit_bytes(
    limit: MemoryLimit | None,
    trainer: pl.Trainer,
    model: pl.LightningModule,
    batch: Sequence[torch.Tensor],
    device: torch.device,
) -> int:
    """A limit as this process sees it."""
    sharing = processes_sharing(trainer, device)
    return process_limit_bytes(limit, model, trainer.optimizers, batch, device, sharing=sharing)


@contextmanager
def _untoggled(model: pl.LightningModule) -> Iterator[None]:
    """Let every parameter require a gradient as it will once ``toggle_optimizer`` is undone: the others train later in the same step."""
    toggled = toggled_parameters(model)
    now = {parameter: parameter.requires_grad for parameter in toggled}
    try:
        for parameter, state in toggled.items():
            parameter.requires_grad = state
        yield
    finally:
        for parameter, state in now.items():
            parameter.requires_grad = state
