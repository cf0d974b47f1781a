"""Memory that a training process holds on its device beside a chain, and so what is left of its limit.

What it holds, and when::

                        forward          backward            optimizer step
    parameters, buffers ██████████████████████████████████████████████████
    optimizer state     ██████████████████████████████████████████████████   ``optimizer_prediction`` until it exists
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
from torch.optim import Optimizer

from lightning_rotor.devices import kind_of
from lightning_rotor.memory import held
from lightning_rotor.memory.budget import Budget
from lightning_rotor.memory.optimizer_prediction import (
    predict_closure_bytes,
    predict_optimizer_state_bytes,
    predict_optimizer_temporary_bytes,
)
from lightning_rotor.units import format_bytes


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """The memory that a training process holds on a device while a chain runs, in bytes.

    Attributes:
        parameter_bytes: Of the whole model.
        buffer_bytes: Of the whole model.
        optimizer_bytes: As large as it will be after the first step of all optimizers, and while a closure runs.
        outside_gradient_bytes: Gradients of all parameters outside of the planned module.
        chain_gradient_bytes: Gradients of the planned module's parameters.
        batch_bytes: The batch.
        communication_bytes: Messages between processes.
        other_bytes: What else a GPU's allocator has given out when the chain's forward begins: workspaces, for one.
        temporary_bytes: What the optimizers' steps allocate and free again; None if that is not known yet.
        gradients_linger: The loop frees the gradients of one step between the forward and the backward of the next, as
            Lightning's automatic optimization does. Otherwise they may be there throughout (accumulation).
    """

    parameter_bytes: int = 0
    buffer_bytes: int = 0
    optimizer_bytes: int = 0
    outside_gradient_bytes: int = 0
    chain_gradient_bytes: int = 0
    batch_bytes: int = 0
    communication_bytes: int = 0
    other_bytes: int = 0
    temporary_bytes: int | None = 0
    gradients_linger: bool = True

    @classmethod
    def of(
        cls,
        model: nn.Module,
        target: nn.Module,
        optimizers: Iterable[Optimizer],
        batch: Iterable[torch.Tensor],
        device: torch.device,
    ) -> ResidentMemory:
        """Count what is there, and predict what will be."""
        # As many as there will be after a backward: limits must hold for later steps, too, and so for their plans.
        chain_gradient_bytes = held.gradient_bytes(target, device)
        optimizers = list(optimizers)
        state_bytes = sum(predict_optimizer_state_bytes(optimizer, device) for optimizer in optimizers)
        # LBFGS holds directions and gradients of its own while the forward and the backward run inside of its step.
        closure_bytes = sum(predict_closure_bytes(optimizer, device) for optimizer in optimizers)
        return cls(
            parameter_bytes=held.parameter_bytes(model, device),
            buffer_bytes=held.buffer_bytes(model, device),
            optimizer_bytes=state_bytes + closure_bytes,
            outside_gradient_bytes=held.gradient_bytes(model, device) - chain_gradient_bytes,
            chain_gradient_bytes=chain_gradient_bytes,
            batch_bytes=held.storage_bytes(batch, device),
            temporary_bytes=_temporary_bytes(optimizers, device, closure_bytes),
        )

    @property
    def staying_bytes(self) -> int:
        """Bytes that are there when an optimizer steps, all gradients included."""
        return (
            self.parameter_bytes
            + self.buffer_bytes
            + self.optimizer_bytes
            + self.outside_gradient_bytes
            + self.chain_gradient_bytes
            + self.batch_bytes
            + self.communication_bytes
            + self.other_bytes
        )

    def budget(self, limit_bytes: int, *, correction_bytes: int = 0) -> Budget:
        """The rest, for the chain; ``correction_bytes`` were found to be used by something else (the loss, say)."""
        # Gradients that linger are gone when the new ones come, so the chain may take their place.
        staying_gradient_bytes = self.chain_gradient_bytes
        if self.gradients_linger:
            staying_gradient_bytes = 0
        parts = {
            "parameters": self.parameter_bytes + self.buffer_bytes,
            "optimizer state": self.optimizer_bytes,
            "gradients": self.outside_gradient_bytes + staying_gradient_bytes,
            "the batch": self.batch_bytes,
            "messages between processes": self.communication_bytes,
            "workspaces and what the step holds already": self.other_bytes,
            "the rest of the step": correction_bytes,
        }
        reserved_bytes = sum(parts.values())
        # For the error alone, which names what takes something.
        # A negative correction is none of it: a step has taken less than was predicted.
        reserved_for = [f"{name} ({format_bytes(size)})" for name, size in parts.items() if size > 0]
        return Budget(
            available_bytes=limit_bytes - reserved_bytes,
            gradients_exist=not self.gradients_linger,
            lingering_bytes=self.chain_gradient_bytes - staying_gradient_bytes,
            reserved_bytes=reserved_bytes,
            reserved_for=", ".join(reserved_for),
        )


def _temporary_bytes(optimizers: Sequence[Optimizer], device: torch.device, closure_bytes: int) -> int | None:
    """The most that a step of one of the optimizers allocates beyond their state; None if it is unknown for one.

    Optimizers step one after the other, while those with a closure hold what it takes.
    """
    highest_bytes = 0
    for optimizer in optimizers:
        temporary_bytes = predict_optimizer_temporary_bytes(optimizer, device)
        # A sum of what is known would be taken for all of it. Step 2 measures it.
        if temporary_bytes is None:
            return None
        highest_bytes = max(highest_bytes, temporary_bytes)
    # What closures need counts as optimizer state, all the time, since forwards and backwards run inside of them.
    return highest_bytes - closure_bytes


def allocated_bytes(
    model: nn.Module, optimizers: Sequence[Optimizer], batch: Iterable[torch.Tensor], device: torch.device
) -> int:
    """Bytes that training holds on a device: on CUDA all that the allocator gave out, on the CPU what can be named."""
    kind = kind_of(device)
    # It knows of what nobody names: workspaces, tensors in closures, other models on the device.
    if kind.tells_allocated:
        return kind.allocated_bytes(device)
    return named_bytes(model, optimizers, batch, device)


def named_bytes(
    model: nn.Module, optimizers: Sequence[Optimizer], batch: Iterable[torch.Tensor], device: torch.device
) -> int:
    """Bytes of parameters, buffers, gradients, optimizers and the batch at this moment."""
    return (
        held.parameter_bytes(model, device)
        + held.buffer_bytes(model, device)
        + held.existing_gradient_bytes(model, device)
        + sum(held.optimizer_state_bytes(optimizer, device) for optimizer in optimizers)
        + held.storage_bytes(batch, device)
    )
