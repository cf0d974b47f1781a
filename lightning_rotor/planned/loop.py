"""The training loop around a planned module, as far as plans must know of it, and what one step of it computes."""

from __future__ import annotations

import gc
import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_rotor.errors import BudgetError, ProfilingError, RotorError, RotorWarning, ScheduleError
from lightning_rotor.memory.budget import ResidentMemory, allocated_bytes, named_bytes, resolve_limit, usable_bytes
from lightning_rotor.memory.held import existing_gradient_bytes, gradient_bytes, storage_bytes
from lightning_rotor.planning import Plan
from lightning_rotor.planning.plan import plain_simulation
from lightning_rotor.private.sharding import messages_bytes
from lightning_rotor.private.torch_names import FakeTensorMode, backward_number, packet_of
from lightning_rotor.private.values import tensors_in, tree_leaves
from lightning_rotor.profiling.dry_run import AssumedValues, fake_copy, without_trace
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
    codes = (getattr(getattr(type(each), "forward", None), "__code__", None) for each in module.modules())
    return (
        any(isinstance(each, nn.SyncBatchNorm) for each in module.modules())
        or any(hasattr(parameter, "device_mesh") for parameter in module.parameters())
        or any(code is not None and not _NAMES.isdisjoint(code.co_names) for code in codes)
    )


# ---------------------------------- Where a training step computes: the FLOPs of every submodule, counted in a dry run.

# A loop that waits for a value would never end, since values do not change.
_MOST_READS = 1000
_LONGEST_REASON = 300


class StepCompute(AssumedValues):
    """FLOPs of the forwards in one training step, counted while it runs, by dotted names of submodules."""

    def __init__(self, model: nn.Module) -> None:
        from torch.utils.flop_counter import flop_registry  # it imports triton, which takes a tenth of a second

        super().__init__()
        self._formulas, self.total = flop_registry, 0
        # Inside those that a plan could run: in training mode, with gradients enabled and flowing through the output.
        self.plannable: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()  # of these
        self._running: list[str] = []
        for name, module in model.named_modules():
            # Not a hook: those do not fire when a forward is called by its name.
            module.__dict__["forward"] = partial(self._call, name, module, module.forward)

    def share(self, name: str) -> float:
        """The part of the step's FLOPs that a plan for this submodule would reach, between 0 and 1."""
        return self.plannable[name] / self.total

    def _call(self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        learning = module.training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        recursive, before = name in self._running, self.total
        self._running.append(name)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._running.pop()
        if learning and not recursive and any(tensor.requires_grad for tensor in _outputs_in(output)):
            self.plannable[name] += self.total - before
            self.calls[name] += 1
        return output

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assumed = self.assumed_values
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.assumed_values > _MOST_READS:
            raise ProfilingError(f"it asks for values more than {_MOST_READS} times")
        if self.assumed_values == assumed and backward_number() is None:  # not in a backward
            self.total += _flops(self._formulas.get(packet_of(func)), func, args, kwargs or {}, result)
        return result


def measure_compute(
    model: nn.Module, inputs: Any, step: Callable[[Any, Any], Any], *, replacements: Mapping[int, Any] | None = None
) -> StepCompute:
    """FLOPs of a step on copies without values of the model and ``inputs``; ``ProfilingError`` if it needs values.

    By ``id``, ``replacements`` stand in the copies for objects that a dry run must not touch.
    """
    try:
        found = _count(model, inputs, step, replacements or {})
    except Exception as error:  # whatever a step does that was written for real tensors
        reason = f"its dry run fails with {type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}"
    else:
        reason = "" if found.total else "its dry run computes nothing"
    gc.collect()  # the copies hold each other, and what looks for tensors (a recording does) would still find them
    if reason:
        raise ProfilingError(reason)
    return found


def _count(
    model: nn.Module, inputs: Any, step: Callable[[Any, Any], Any], replacements: Mapping[int, Any]
) -> StepCompute:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with without_trace(device, model.modules()), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        duplicate, inputs = fake_copy((model, inputs), mode, replacements)
        found = StepCompute(duplicate)
        with found:
            step(duplicate, inputs)
    return found


def _outputs_in(value: Any) -> list[torch.Tensor]:
    """Tensors in an output, also in one of the user's own classes."""
    return [*tensors_in(value), *tensors_in([getattr(leaf, "__dict__", leaf) for leaf in tree_leaves(value)])]


def _flops(formula: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    name = packet_of(func).__name__
    if name.startswith("_scaled_dot_product") and "backward" not in name:  # the registry knows the kernels of GPUs only
        query, key, value = args[:3]
        pairs = query.shape[:-1].numel() * key.shape[-2]
        return int(2 * pairs * (query.shape[-1] + value.shape[-1]))
    if name in ("mkldnn_rnn_layer", "_cudnn_rnn"):
        weights = args[1:5] if name == "mkldnn_rnn_layer" else args[1]
        return int(2 * args[0].shape[:2].numel() * sum(weight.numel() for weight in weights))
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if func.is_view:
        return 0
    return sum(tensor.numel() for tensor in tensors_in(result))


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
