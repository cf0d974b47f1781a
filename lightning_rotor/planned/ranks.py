"""One plan for processes whose planned module communicates: SyncBatchNorm, DTensors, all_reduce.

They run it in lockstep anyway, and a recomputation communicates again. So at each forward they ask each other whether
all have the same schedule for it. If not, all plan together, measure first if anyone must, and run the plan of the one
with least room. Where a module computes by itself (DDP), each process plans for itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_rotor.errors import BudgetError, RotorError, ScheduleError
from lightning_rotor.planned.loop import Agreement
from lightning_rotor.planning import Plan
from lightning_rotor.planning.plan import plain_simulation
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from lightning_rotor.units import format_bytes


class JointPlans(Agreement):
    """One plan for processes that run a module in lockstep; ``beyond`` lets it exceed a budget.

    Their ``group`` takes tensors on the CPU, so that no device is waited for.
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
        outcomes = self._told_by_all(told)
        failures = [told for told in outcomes if isinstance(told, BudgetError)]
        if failures:
            raise max(failures, key=lambda error: error.minimum_bytes - error.budget_bytes)
        assert isinstance(outcome, Plan)
        if len({schedule for _, schedule in outcomes}) == 1:
            return outcome
        _, schedule = max(outcomes)
        # All judge, and all come to the same conclusion: one that ended alone would leave the others waiting.
        excess = self._told_by_all(_excess_bytes(outcome, schedule))
        if None in excess or (max(excess) > 0 and not self._beyond):
            raise RotorError(
                f"no plan fits all processes, of which this one has a chain of {len(outcome.chain)} stages and a "
                f"budget of {format_bytes(outcome.budget_bytes)}: expected batches of about the same shape on all of "
                "them, since the planned module communicates"
            )
        settled = _under(outcome, schedule)
        return replace(settled, budget_bytes=max(settled.budget_bytes, settled.peak_bytes))

    def _told_by_all(self, told: Any) -> list[Any]:
        heard: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(heard, told, group=self._group)
        return heard


def meet(model: nn.Module, *, beyond: bool) -> Agreement:
    """How processes agree on plans for a model. Each waits for all."""
    return JointPlans(dist.new_group(backend="gloo"), beyond=beyond) if communicates(model) else Agreement()


def _under(plan: Plan, schedule: str) -> Plan:
    """The same plan with another schedule; a ``ScheduleError`` if that does not belong to its chain."""
    parsed = Schedule.parse(schedule)
    return replace(plan, schedule=parsed, simulation=simulate(plan.chain, parsed, **plan.conditions))


def _excess_bytes(plan: Plan, schedule: str) -> int | None:
    """Bytes by which another process' schedule exceeds this plan's budget, or None if it is not for such a chain."""
    try:
        return max(_under(plan, schedule).peak_bytes - plan.budget_bytes, 0)
    except ScheduleError:
        return None


# -------------------------------------------------------------- Modules that wait for other processes in their forward.


_NAMES = {
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single"),
    *("broadcast", "reduce_scatter_tensor"),
}


def communicates(module: nn.Module) -> bool:
    """True if a module's forward waits for other processes, as its layers, parameters and code tell."""
    return any(map(_is_collective, module.modules())) or any(
        hasattr(parameter, "device_mesh") for parameter in module.parameters()
    )


def _is_collective(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return isinstance(module, nn.SyncBatchNorm) or (code is not None and not _NAMES.isdisjoint(code.co_names))
