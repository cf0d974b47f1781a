"""The limit of a whole training process, turned into what a plan for its chain may use.

What the process holds on the device besides the chain, and when::

                        forward          backward            optimizer step
    parameters, buffers ██████████████████████████████████████████████████
    optimizer state     ██████████████████████████████████████████████████   predicted before it exists
    batch               ██████████████████████████████████████████████████
    messages            ██████████████████████████████████████████████████   buckets of gradients under DDP
    gradients           ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒      ▁▂▃▄▅▆▇████████████████████   ▒: of the step before, if it lingers
    chain                      ▁▂▃▄▅▆▇███▇▆▅▄▃▂▁
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_rotor.allowance import Allowance
from lightning_rotor.devices import resolve_limit, usable_bytes
from lightning_rotor.optimizer_prediction import predict_optimizer_state_bytes
from lightning_rotor.training_state import (
    buffer_bytes,
    existing_gradient_bytes,
    gradient_bytes,
    optimizer_state_bytes,
    parameter_bytes,
    storage_bytes,
)
from lightning_rotor.units import MemoryLimit, format_bytes


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """What a training process holds on a device while a chain runs, in bytes.

    Attributes:
        parameter_bytes: Parameters of the whole model.
        buffer_bytes: Buffers of the whole model.
        optimizer_bytes: State of all optimizers, as large as it will be after their first step.
        gradient_bytes: Gradients of all parameters.
        chain_gradient_bytes: The part of them that belongs to the planned module.
        batch_bytes: The batch.
        communication_bytes: What a strategy keeps for messages between processes.
        other_bytes: What else the allocator of a GPU has given out when the chain's forward begins: workspaces of libraries, what the step
            holds already.
    """

    parameter_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    chain_gradient_bytes: int
    batch_bytes: int
    communication_bytes: int = 0
    other_bytes: int = 0

    @classmethod
    def of(
        cls,
        model: nn.Module,
        target: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        batch: Iterable[torch.Tensor],
        device: torch.device,
    ) -> ResidentMemory:
        """Count what is there, and predict what will be."""
        return cls(
            parameter_bytes=parameter_bytes(model, device),
            buffer_bytes=buffer_bytes(model, device),
            optimizer_bytes=sum(predict_optimizer_state_bytes(optimizer, device).bytes for optimizer in optimizers),
            gradient_bytes=gradient_bytes(model, device),
            chain_gradient_bytes=gradient_bytes(target, device),
            batch_bytes=storage_bytes(batch, device),
        )

    @property
    def steady_bytes(self) -> int:
        """Held from one step to the next, gradients not counted."""
        return (
            self.parameter_bytes
            + self.buffer_bytes
            + self.optimizer_bytes
            + self.batch_bytes
            + self.communication_bytes
            + self.other_bytes
        )

    def allowance(self, limit_bytes: int, *, gradients_linger: bool, correction_bytes: int = 0) -> Allowance:
        """What remains for the chain.

        Args:
            limit_bytes: For the whole process.
            gradients_linger: The loop frees the gradients of one step between the forward and the backward of the next, as Lightning's
                automatic optimization does. Otherwise they may be there throughout (accumulation, manual optimization).
            correction_bytes: Found to be used by something else, the loss for one.
        """
        outside_bytes = self.gradient_bytes - self.chain_gradient_bytes
        chain_gradients = 0 if gradients_linger else self.chain_gradient_bytes
        reserved = self.steady_bytes + outside_bytes + chain_gradients + correction_bytes
        parts = [
            ("parameters", self.parameter_bytes + self.buffer_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("gradients", outside_bytes + chain_gradients),
            ("the batch", self.batch_bytes),
            ("messages between processes", self.communication_bytes),
            ("workspaces and what the step holds already", self.other_bytes),
            ("the rest of the step", correction_bytes),
        ]
        return Allowance(
            budget_bytes=limit_bytes - reserved,
            gradients_exist=not gradients_linger,
            lingering_bytes=self.chain_gradient_bytes if gradients_linger else 0,
            reserved_bytes=reserved,
            reserved_for=", ".join(f"{name} ({format_bytes(size)})" for name, size in parts if size),
        )


def allocated_bytes(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Iterable[torch.Tensor],
    device: torch.device,
) -> int:
    """What training holds on a device at this moment: on CUDA all that the allocator gave out, on the CPU what can be named."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return named_bytes(model, optimizers, batch, device)


def named_bytes(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Iterable[torch.Tensor],
    device: torch.device,
) -> int:
    """What parameters, buffers, gradients, optimizers and the batch take at this moment."""
    return (
        parameter_bytes(model, device)
        + buffer_bytes(model, device)
        + existing_gradient_bytes(model, device)
        + sum(optimizer_state_bytes(optimizer, device) for optimizer in optimizers)
        + storage_bytes(batch, device)
    )


def process_limit_bytes(
    limit: MemoryLimit | None,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Iterable[torch.Tensor],
    device: torch.device,
    *,
    sharing: int = 1,
) -> int:
    """A user's limit for the whole process; None is what is usable, and what training has taken already. On a GPU no limit is more.

    Args:
        limit: As the user gave it.
        model: Everything that trains; its memory is not free, but is part of what the process may use.
        optimizers: Likewise.
        batch: Likewise.
        device: Where they are.
        sharing: Number of processes that divide what is free.
    """
    limit_bytes = None if limit is None else resolve_limit(limit, device)
    if limit_bytes is not None and device.type != "cuda":
        return limit_bytes
    available_bytes = usable_bytes(device) // sharing + allocated_bytes(model, optimizers, batch, device)
    return available_bytes if limit_bytes is None else min(limit_bytes, available_bytes)


def take_workspaces(device: torch.device) -> None:
    """Let cuBLAS take the workspaces that it keeps for each thread: the forward's, and autograd's for a GPU."""
    if device.type == "cuda":
        with torch.enable_grad():
            matrix = torch.ones(8, 8, device=device, requires_grad=True)
            torch.autograd.grad((matrix @ matrix).sum(), matrix)
