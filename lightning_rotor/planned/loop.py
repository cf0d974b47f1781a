"""The training loop around a planned module, as far as plans must know of it.

Adapters of frameworks answer the questions of :class:`TrainingLoop`; what follows from the answers (bytes of messages,
of shards, of the whole process) is said here, once for all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_rotor.devices import kind_of
from lightning_rotor.errors import RotorWarning
from lightning_rotor.memory.device_memory import resolve_limit, usable_bytes
from lightning_rotor.memory.held import existing_gradient_bytes, gradient_bytes, storage_bytes
from lightning_rotor.memory.resident_memory import ResidentMemory, allocated_bytes, named_bytes
from lightning_rotor.planned.agreement import answers_of_all
from lightning_rotor.private.process_groups import processes
from lightning_rotor.private.sharding import is_dtensor, messages_bytes, units_in
from lightning_rotor.profiling.step_compute import StepCompute
from lightning_rotor.units import MemoryLimit

Told = TypeVar("Told")


class TrainingLoop(Protocol):
    """Trains a model.

    Attributes:
        model: The model.
        may_be_whole: The model's own forward may be planned.
        is_compiled: The model was compiled as a whole.
        may_run_as_compiled: What was compiled as a whole may run without a plan until a step needs one. Not where a
            tuner tries batch sizes, and asks for the limit in a forward.
        is_lead: This process speaks for all.
        profiler_is_taken: The user wants torch's one profiler.
        local_processes: Number of processes of this training on this machine.
        is_trial: True while a tuner tries a batch size, and wants to hear of a lack of memory.
        device: Where it trains.
        optimizers: Of the training.
        wrapped: The model as the strategy has wrapped it.
        gradients_linger: Gradients of one step are there until after the next forward, and no longer. False: they add
            up over steps, or the user's loop frees them.
        steps: Number of steps of all optimizers so far.
        steps_before: Of these, before this training: one that goes on from a checkpoint does not begin with step 0.
        warned_of: Topics of warnings that come once.
    """

    model: nn.Module
    may_be_whole: bool
    is_compiled: bool
    may_run_as_compiled: bool
    is_lead: bool
    profiler_is_taken: bool
    local_processes: int
    is_trial: Callable[[], bool]
    device: Callable[[], torch.device]
    optimizers: Callable[[], Sequence[torch.optim.Optimizer]]
    wrapped: Callable[[], nn.Module | None]
    gradients_linger: Callable[[], bool]
    steps: Callable[[], int]
    steps_before: int = 0
    warned_of: set[str]

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

    def answers_of_all(self, told: Told) -> list[Told]:
        """The answers of all processes, in the order of ranks. Each waits for all others."""
        return [told] if self.processes == 1 else answers_of_all(told)

    def warn(self, message: str) -> None:
        """Tell the user, once for all processes."""
        # All of them come to the same conclusions where they plan together, and would say each sentence many times.
        if self.is_lead:
            warnings.warn(message, RotorWarning, stacklevel=2)

    def warn_once(self, message: str, *, topic: str) -> None:
        """Tell the user, unless this training has warned of the topic before."""
        if topic not in self.warned_of:
            self.warned_of.add(topic)
            self.warn(message)

    # ---------------------------------------------------------------- memory

    def limit_bytes(self, limit: MemoryLimit | None, batch: Sequence[torch.Tensor]) -> int:
        """A user's limit, or for None all that the process has and can still take; on a GPU never more than that.

        To know what a GPU can still give, its allocator's unused blocks are given back, and the user hears of a limit
        that is above it.
        """
        device = self.device()
        limit_bytes = None
        if limit is not None:
            limit_bytes = resolve_limit(limit, device)
        if limit_bytes is not None and not kind_of(device).has_own_memory:
            # A host's limit is taken at its word: what is free there changes with other programs.
            return limit_bytes
        free_bytes = usable_bytes(device)
        if device.type == "cpu":
            # Processes on one machine share its memory. GPUs are not shared.
            free_bytes //= self.local_processes
        # What training holds already is inside the limit, and is not free any more.
        held_bytes = allocated_bytes(self.model, self.optimizers(), batch, device)
        available_bytes = free_bytes + held_bytes
        if limit_bytes is None:
            return available_bytes
        return min(limit_bytes, available_bytes)

    def resident(
        self,
        target: nn.Module,
        batch: Sequence[torch.Tensor],
        device: torch.device,
    ) -> ResidentMemory:
        """Memory of the process besides the activations of a module: what is there, and what will be."""
        optimizers = self.optimizers()
        with self.untoggled():
            resident = ResidentMemory.of(self.model, target, optimizers, batch, device)
        communication_bytes = self.communication_bytes()
        other_bytes = 0
        kind = kind_of(device)
        if kind.tells_allocated:
            # What training holds under no name that is known here, such as a metric's state.
            known_bytes = named_bytes(self.model, optimizers, batch, device)
            known_bytes += communication_bytes
            other_bytes = max(0, kind.allocated_bytes(device) - known_bytes)
        temporary_bytes = resident.temporary_bytes
        if self._in_units():
            # The messages of FSDP are gone when its optimizer steps, so the peak of that is not known before.
            temporary_bytes = None
        return replace(
            resident,
            communication_bytes=communication_bytes,
            other_bytes=other_bytes,
            temporary_bytes=temporary_bytes,
            gradients_linger=self.gradients_linger(),
        )

    def allocated_bytes(self, batch: Sequence[torch.Tensor]) -> int:
        """Bytes that training holds at this moment, on the CPU also those that parameters and gradients do not show."""
        base_bytes = allocated_bytes(self.model, self.optimizers(), batch, self.device())
        wrapped: Any = self.wrapped()
        if kind_of(self.device()).tells_allocated:
            return base_bytes
        if not isinstance(wrapped, DistributedDataParallel):
            return base_bytes + self._hidden_bytes()
        bucket_bytes = self.communication_bytes()
        if wrapped.gradient_as_bucket_view:
            # Gradients are views of the buckets, and are counted already.
            bucket_bytes -= existing_gradient_bytes(self.model)
        return base_bytes + max(0, bucket_bytes)

    def communication_bytes(self) -> int:
        """Bytes for messages: DDP's buckets; FSDP's gradients on their way and shards that the model hides."""
        wrapped = self.wrapped()
        if isinstance(wrapped, DistributedDataParallel):
            # Its buckets are as large as all gradients together, and stay.
            ignored: set[str] = wrapped.parameters_to_ignore
            size_bytes = 0
            for name, parameter in wrapped.module.named_parameters():
                if parameter.requires_grad and name not in ignored:
                    size_bytes += parameter.numel() * parameter.element_size()
            return size_bytes
        if not self._in_units():
            # Tensor parallelism spreads parameters, too, and never gathers them.
            return 0
        # Whole gradients exist until they are reduced to shards, beside those that optimizers hold.
        return self._hidden_bytes() + gradient_bytes(self.model) + messages_bytes(self.model)

    def may_take_new_buckets(self) -> bool:
        """True if DDP could exchange its buckets in the next step, to put them into the order of the first backward."""
        if not isinstance(self.wrapped(), DistributedDataParallel):
            return False
        # Once, behind the first step: torch's reducer rebuilds its buckets in the order in which gradients came.
        return 0 < self.steps() - self.steps_before <= len(self.optimizers())

    def _in_units(self) -> bool:
        """True if FSDP2 gathers parameters, and spreads their gradients."""
        return bool(units_in((self.model,)))

    def _shards(self) -> list[torch.Tensor]:
        """Parts of the spread parameters that optimizers hold."""
        shards = []
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if is_dtensor(parameter):
                        shards.append(parameter)
        return shards

    def _hidden_bytes(self) -> int:
        """Bytes of shards that the model does not show, as it has the gathered parameters in their places."""
        shown = set(map(id, self.model.parameters()))
        return storage_bytes(shard for shard in self._shards() if id(shard) not in shown)
