"""The training loop around a planned module, as far as plans must know of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_rotor.errors import ProfilingError
from lightning_rotor.memory.budget import ResidentMemory, allocated_bytes, named_bytes, process_limit_bytes
from lightning_rotor.memory.held import existing_gradient_bytes, gradient_bytes, storage_bytes
from lightning_rotor.planned.ranks import Agreement
from lightning_rotor.planned.target import StepCompute
from lightning_rotor.private.sharding import messages_bytes
from lightning_rotor.private.torch_names import has_rebuilt_buckets
from lightning_rotor.units import MemoryLimit

Told = TypeVar("Told")


class TrainingLoop(Protocol):
    """Trains a model. Adapters of frameworks say how."""

    model: nn.Module
    may_be_whole: bool
    is_compiled: bool
    is_lead: bool
    profiler_is_taken: bool

    @property
    def is_trial(self) -> bool:
        """True while a tuner tries a batch size, and wants to hear of a lack of memory."""

    @property
    def processes(self) -> int:
        """Number of processes that train together."""

    @property
    def device(self) -> torch.device:
        """Where the model trains."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """All optimizers."""

    @property
    def wrapped(self) -> nn.Module | None:
        """The model as the strategy has wrapped it."""

    @property
    def gradients_linger(self) -> bool:
        """True if gradients of one step are there until after the next forward, and no longer."""

    @property
    def has_stepped(self) -> bool:
        """True once an optimizer has taken a step."""

    @property
    def batches_done(self) -> int:
        """Batches since training began."""

    def sharing(self, device: torch.device) -> int:
        """Number of processes of this training that take memory from this device."""

    def compute(self, batch: Any, batch_idx: int) -> StepCompute:
        """FLOPs of the next step; ``ProfilingError`` if that cannot be told before it."""
        raise ProfilingError("a plain loop has no step that could run dry")

    def warn(self, message: str) -> None:
        """Tell the user, once for all processes."""

    def untoggled(self) -> AbstractContextManager[None]:
        """Context in which parameters require gradients as over a whole step, whichever optimizer's turn it is."""

    # ---------------------------------------------------------------- other processes

    def told_by_all(self, told: Told) -> list[Told]:
        """What each process says, in the order of ranks. Each waits for all others."""

    def meet(self, *, beyond: bool) -> Agreement:
        """How processes will agree on plans. Each waits for all. ``beyond`` runs the least plan where none fits."""

    # ---------------------------------------------------------------- memory

    def limit_bytes(self, limit: MemoryLimit | None, batch: Sequence[torch.Tensor]) -> int:
        """A user's limit as this process sees it."""
        device = self.device
        return process_limit_bytes(limit, self.model, self.optimizers, batch, device, sharing=self.sharing(device))

    def resident(self, target: nn.Module, batch: Sequence[torch.Tensor], device: torch.device) -> ResidentMemory:
        """What the process holds besides the activations of a module: what is there, and what will be."""
        with self.untoggled():
            resident = ResidentMemory.of(self.model, target, self.optimizers, batch, device)
        communication_bytes, other_bytes = self.communication_bytes(), 0
        if device.type == "cuda":
            named = named_bytes(self.model, self.optimizers, batch, device) + communication_bytes
            other_bytes = max(0, torch.cuda.memory_allocated(device) - named)
        return replace(
            resident,
            communication_bytes=communication_bytes,
            other_bytes=other_bytes,
            gradients_linger=self.gradients_linger,
        )

    def allocated_bytes(self, batch: Sequence[torch.Tensor]) -> int:
        """What training holds at this moment."""
        base_bytes = allocated_bytes(self.model, self.optimizers, batch, self.device)
        return base_bytes if self.device.type == "cuda" else base_bytes + self._unnamed_bytes()

    def communication_bytes(self) -> int:
        """Bytes for messages: DDP's buckets; FSDP's gradients on their way and shards that the model hides."""
        wrapped = self.wrapped
        if isinstance(wrapped, DistributedDataParallel):
            ignored: set[str] = wrapped.parameters_to_ignore
            learning = (p for name, p in wrapped.module.named_parameters() if p.requires_grad and name not in ignored)
            return sum(parameter.numel() * parameter.element_size() for parameter in learning)
        if not self._shards():
            return 0
        return self._hidden_bytes() + gradient_bytes(self.model) + messages_bytes(self.model)

    def _unnamed_bytes(self) -> int:
        """Bytes held now that neither parameters nor gradients of the model show."""
        wrapped: Any = self.wrapped
        if not isinstance(wrapped, DistributedDataParallel):
            return self._hidden_bytes()
        shown = existing_gradient_bytes(self.model) if wrapped.gradient_as_bucket_view else 0
        return max(0, self.communication_bytes() - shown)

    def may_take_new_buckets(self) -> bool:
        """True if DDP could exchange its buckets in the next step, to put them into the order of the first backward."""
        wrapped = self.wrapped
        if not isinstance(wrapped, DistributedDataParallel) or self.batches_done < 1:
            return False
        if wrapped.find_unused_parameters and not wrapped.static_graph:
            return False
        return not has_rebuilt_buckets(wrapped)

    def _shards(self) -> list[torch.Tensor]:
        """Parts of the spread parameters that optimizers hold."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"] if hasattr(parameter, "device_mesh")]

    def _hidden_bytes(self) -> int:
        """Bytes of shards that the model does not show, as it has the gathered parameters in their places."""
        shown = set(map(id, self.model.parameters()))
        return storage_bytes(shard for shard in self._shards() if id(shard) not in shown)
