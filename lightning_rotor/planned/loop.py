"""The training loop around a planned module, as far as plans must know of it."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_rotor.errors import BudgetError, RotorError, RotorWarning, ScheduleError
from lightning_rotor.memory.budget import ResidentMemory, allocated_bytes, named_bytes, resolve_limit, usable_bytes
from lightning_rotor.memory.held import existing_gradient_bytes, gradient_bytes, storage_bytes
from lightning_rotor.planning import Plan
from lightning_rotor.planning.plan import plain_simulation
from lightning_rotor.private.sharding import messages_bytes
from lightning_rotor.profiling.step_compute import StepCompute
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from lightning_rotor.units import MemoryLimit, format_bytes

Told = TypeVar("Told")


class Agreement:
    """What a planned forward asks of other processes, where they measure and plan ``together``; by itself, nothing."""

    together = False

    def any(self, is_so: bool) -> bool:
        """True if it is so in this process or in one that measures and plans together with it."""
        return is_so

    def all_run(self, schedule: Schedule | None) -> bool:
        """True if this process has a schedule for a call, and each that plans together with it has the same."""
        return schedule is not None

    def settle(self, outcome: Plan | BudgetError) -> Plan:
        """The plan to run instead of one's own ``outcome``, or ``BudgetError``."""
        if isinstance(outcome, BudgetError):
            raise outcome
        return outcome


class JointPlans(Agreement):
    """One plan for processes whose planned module communicates: SyncBatchNorm, DTensors, all_reduce.

    They run it in lockstep anyway, and a recomputation communicates again. So at each forward they ask each other
    whether all have the same schedule for it. If not, all plan together, measure first if anyone must, and run the plan
    of the one with least room, ``beyond`` the budget if so told. Where a module computes by itself (DDP), each process
    plans for itself. Their ``group`` takes tensors on the CPU, so that no device is waited for.
    """

    together = True

    def __init__(self, group: Any, *, beyond: bool = False) -> None:
        self._group, self._beyond = group, beyond

    def any(self, is_so: bool) -> bool:
        """True if it is so in any process: one number goes round."""
        found = torch.tensor(int(is_so))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def all_run(self, schedule: Schedule | None) -> bool:
        """True if all processes have the same schedule: a number that names it goes round, and its negative."""
        number = 0 if schedule is None else int.from_bytes(hashlib.sha256(str(schedule).encode()).digest()[:7], "big")
        found = torch.tensor((number, -number))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return number > 0 and found.tolist() == [number, -number]

    def settle(self, outcome: Plan | BudgetError) -> Plan:
        """The plan of the process whose batch leaves the least room; ``RotorError`` if it does not fit all."""
        told: Any = outcome
        if isinstance(outcome, Plan):  # bytes missing for one that recomputes nothing, and the schedule
            told = plain_simulation(outcome).peak_bytes - outcome.budget_bytes, str(outcome.schedule)
        outcomes = told_by_all(told, self._group)
        if failures := [told for told in outcomes if isinstance(told, BudgetError)]:
            raise max(failures, key=lambda error: error.minimum_bytes - error.budget_bytes)
        assert isinstance(outcome, Plan)
        if len({schedule for _, schedule in outcomes}) == 1:
            return outcome
        settled = _under(outcome, max(outcomes)[1])
        # All judge, and all come to the same conclusion: one that ended alone would leave the others waiting.
        excess_bytes = math.inf if settled is None else settled.peak_bytes - settled.budget_bytes
        most_bytes = max(told_by_all(excess_bytes, self._group))
        if settled is None or most_bytes == math.inf or (most_bytes > 0 and not self._beyond):
            raise RotorError(
                f"no plan fits all processes, of which this one has a chain of {len(outcome.chain)} stages and a "
                f"budget of {format_bytes(outcome.budget_bytes)}: expected batches of about the same shape on all of "
                "them, since the planned module communicates"
            )
        return replace(settled, budget_bytes=max(settled.budget_bytes, settled.peak_bytes))


def told_by_all(told: Told, group: Any = None) -> list[Told]:
    """What each process of a group, by default of all, says; in their order. Each waits for the others."""
    heard = [told] * dist.get_world_size(group)
    dist.all_gather_object(heard, told, group=group)
    return heard


def meet(model: nn.Module, *, beyond: bool) -> Agreement:
    """How processes agree on plans for a model. Each waits for all."""
    return JointPlans(dist.new_group(backend="gloo"), beyond=beyond) if communicates(model) else Agreement()


def _under(plan: Plan, schedule: str) -> Plan | None:
    """The same plan with another process' schedule, or None if that is not for such a chain."""
    try:
        parsed = Schedule.parse(schedule)
        return replace(plan, schedule=parsed, simulation=simulate(plan.chain, parsed, **plan.conditions))
    except ScheduleError:
        return None


_NAMES = {
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single"),
    *("broadcast", "reduce_scatter_tensor"),
}


def communicates(module: nn.Module) -> bool:
    """True if a module's forward waits for other processes, as its layers, parameters and code tell."""
    codes = (getattr(type(each).forward, "__code__", None) for each in module.modules())
    return (
        any(isinstance(each, nn.SyncBatchNorm) for each in module.modules())
        or any(hasattr(parameter, "device_mesh") for parameter in module.parameters())
        or any(code is not None and not _NAMES.isdisjoint(code.co_names) for code in codes)
    )


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
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def told_by_all(self, told: Told) -> list[Told]:
        """What each process says, in the order of ranks. Each waits for all others."""
        return [told] if self.processes == 1 else told_by_all(told)

    def warn(self, message: str) -> None:
        """Tell the user, once for all processes."""
        if self.is_lead:
            warnings.warn(message, RotorWarning, stacklevel=2)

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
