"""The training loop around a planned module, as far as plans must know of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_rotor.errors import RotorWarning
from lightning_rotor.memory.budget import ResidentMemory, allocated_bytes, named_bytes, resolve_limit, usable_bytes
from lightning_rotor.memory.held import existing_gradient_bytes, gradient_bytes, storage_bytes
from lightning_rotor.planned.agreement import told_by_all
from lightning_rotor.private.messages import processes
from lightning_rotor.private.sharding import messages_bytes
from lightning_rotor.profiling.step_compute import StepCompute
from lightning_rotor.units import MemoryLimit

Told = TypeVar("Told")


# -------------------------------------------------------------------- The loop.


class TrainingLoop(Protocol):
    """Trains a model. Adapters of frameworks say how."""

    model: nn.Module
    may_be_whole: bool  # the model's own forward may be planned
    is_compiled: bool  # the model was compiled as a whole
    is_lead: bool  # this process speaks for all
    profiler_is_taken: bool  # the user wants torch's one profiler
    local_processes: int  # of this training, on this machine
    is_trial: Callable[[], bool]  # True while a tuner tries a batch size, and wants to hear of a lack of memory
    device: Callable[[], torch.device]
    optimizers: Callable[[], Sequence[torch.optim.Optimizer]]
    wrapped: Callable[[], nn.Module | None]  # the model as the strategy has wrapped it
    gradients_linger: Callable[[], bool]  # those of one step are there until after the next forward, and no longer
    steps: Callable[[], int]  # of all optimizers so far
    warned_of: set[str]  # topics of warnings that come once

    def has_hooks_at_end(self) -> bool:
        """True if the user's code runs between a backward and the end of a step, whose memory nobody knows before."""

    def compute(self, batch: Any, batch_idx: int) -> StepCompute:
        """FLOPs of the next step; ``ProfilingError`` if that cannot be told before it."""

    def untoggled(self) -> AbstractContextManager[None]:
        """Context in which parameters require gradients as over a whole step, whichever optimizer's turn it is."""

    # ---------------------------------------------------------------- other processes

    @property
    def processes(self) -> int:
        """Number of processes that train together."""
        return processes()

    def told_by_all(self, told: Told) -> list[Told]:
        """What each process says, in the order of ranks. Each waits for all others."""
        return [told] if self.processes == 1 else told_by_all(told)

    def warn(self, message: str) -> None:
        """Tell the user, once for all processes."""
        if self.is_lead:
            warnings.warn(message, RotorWarning, stacklevel=2)

    def warn_once(self, topic: str, message: str) -> None:
        """Tell the user, unless this training has warned of the topic before."""
        if topic not in self.warned_of:
            self.warned_of.add(topic)
            self.warn(message)

    # ---------------------------------------------------------------- memory

    def limit_bytes(self, limit: MemoryLimit | None, batch: Sequence[torch.Tensor]) -> int:
        """A user's limit, on a GPU no more than for None: what this process has, and its share of what is usable."""
        device = self.device()
        limit_bytes = None if limit is None else resolve_limit(limit, device)
        if limit_bytes is not None and device.type != "cuda":
            return limit_bytes
        usable = usable_bytes(device) // (self.local_processes if device.type == "cpu" else 1)
        available_bytes = usable + allocated_bytes(self.model, self.optimizers(), batch, device)
        return available_bytes if limit_bytes is None else min(limit_bytes, available_bytes)

    def resident(self, target: nn.Module, batch: Sequence[torch.Tensor], device: torch.device) -> ResidentMemory:
        """What the process holds besides the activations of a module: what is there, and what will be."""
        with self.untoggled():
            resident = ResidentMemory.of(self.model, target, self.optimizers(), batch, device)
        communication_bytes, other_bytes = self.communication_bytes(), 0
        if device.type == "cuda":
            named = named_bytes(self.model, self.optimizers(), batch, device) + communication_bytes
            other_bytes = max(0, torch.cuda.memory_allocated(device) - named)
        return replace(
            resident,
            communication_bytes=communication_bytes,
            other_bytes=other_bytes,
            # The messages of FSDP are gone when its optimizer steps.
            temporary_bytes=None if self._shards() else resident.temporary_bytes,
            gradients_linger=self.gradients_linger(),
        )

    def allocated_bytes(self, batch: Sequence[torch.Tensor]) -> int:
        """What training holds at this moment, on the CPU also what parameters and gradients do not show."""
        base_bytes = allocated_bytes(self.model, self.optimizers(), batch, self.device())
        wrapped: Any = self.wrapped()
        if self.device().type == "cuda":
            return base_bytes
        if not isinstance(wrapped, DistributedDataParallel):
            return base_bytes + self._hidden_bytes()
        shown = existing_gradient_bytes(self.model) if wrapped.gradient_as_bucket_view else 0
        return base_bytes + max(0, self.communication_bytes() - shown)

    def communication_bytes(self) -> int:
        """Bytes for messages: DDP's buckets; FSDP's gradients on their way and shards that the model hides."""
        wrapped = self.wrapped()
        if isinstance(wrapped, DistributedDataParallel):
            ignored: set[str] = wrapped.parameters_to_ignore
            learning = (p for name, p in wrapped.module.named_parameters() if p.requires_grad and name not in ignored)
            return sum(parameter.numel() * parameter.element_size() for parameter in learning)
        if not self._shards():
            return 0
        return self._hidden_bytes() + gradient_bytes(self.model) + messages_bytes(self.model)

    def may_take_new_buckets(self) -> bool:
        """True if DDP could exchange its buckets in the next step, to put them into the order of the first backward."""
        return isinstance(self.wrapped(), DistributedDataParallel) and 0 < self.steps() <= len(self.optimizers())

    def _shards(self) -> list[torch.Tensor]:
        """Parts of the spread parameters that optimizers hold."""
        groups = (group for optimizer in self.optimizers() for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"] if hasattr(parameter, "device_mesh")]

    def _hidden_bytes(self) -> int:
        """Bytes of shards that the model does not show, as it has the gathered parameters in their places."""
        shown = set(map(id, self.model.parameters()))
        return storage_bytes(shard for shard in self._shards() if id(shard) not in shown)
