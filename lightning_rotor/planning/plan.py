"""A plan: a schedule for one chain and one budget, with its simulated cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from rich.console import Group
from rich.table import Table

from lightning_rotor.chain import Chain
from lightning_rotor.errors import PlanError
from lightning_rotor.planning.bounds import lower_bound_seconds
from lightning_rotor.planning.files import PlanRecord, load_record, made_for_another, save_record
from lightning_rotor.planning.frontier import Frontier
from lightning_rotor.schedule import Schedule, leaves
from lightning_rotor.simulator import Simulation
from lightning_rotor.units import format_bytes, format_seconds, rendered

DEFAULT_SLOTS = 500


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for one chain and one budget. Printed, it is a table.

    Attributes:
        budget_bytes: Memory that was allowed.
        simulation: Peak and duration, step by step.
        solve_seconds: Time spent on finding it. Plans from one solver share the table; the first one pays for it.
        gradients_exist: See :func:`lightning_rotor.planning.plan`.
        lingering_bytes: See :func:`lightning_rotor.planning.plan`.
        slots: Memory levels that the program told apart.
    """

    chain: Chain
    schedule: Schedule
    budget_bytes: int
    simulation: Simulation
    solve_seconds: float
    gradients_exist: bool = False
    lingering_bytes: int = 0
    slots: int = DEFAULT_SLOTS

    # Set by the modules that solve and print plans, since they import this one.
    solved_frontier: ClassVar[Callable[[Plan], Frontier]]
    tables: ClassVar[Callable[[Plan], tuple[Table, ...]]]

    @classmethod
    def of(cls, record: PlanRecord, chain: Chain, *, solve_seconds: float = 0.0) -> Plan:
        """A recorded plan, simulated anew on its chain as measured now; a ScheduleError if it does not belong to it."""
        return cls(
            chain,
            record.schedule,
            record.budget_bytes,
            record.simulate(chain),
            solve_seconds,
            gradients_exist=record.gradients_exist,
            lingering_bytes=record.lingering_bytes,
            slots=record.slots,
        )

    @property
    def record(self) -> PlanRecord:
        """The plan without its chain."""
        return PlanRecord(self.schedule, self.budget_bytes, self.gradients_exist, self.lingering_bytes, self.slots)

    @property
    def peak_bytes(self) -> int:
        """Simulated peak, at most ``budget_bytes``."""
        return self.simulation.peak_bytes

    @property
    def seconds(self) -> float:
        """Simulated duration of forward, recomputation and backward."""
        return self.simulation.seconds

    @property
    def overhead(self) -> float:
        """Time beyond plain training as a fraction of it: 0.25 is 25 % slower."""
        return self.simulation.overhead

    @property
    def lower_bound_seconds(self) -> float:
        """Least duration of any execution within the budget, as far as is proven: see :mod:`.bounds`."""
        return lower_bound_seconds(
            self.chain,
            self.budget_bytes,
            gradients_exist=self.gradients_exist,
            lingering_bytes=self.lingering_bytes,
        )

    @property
    def gap(self) -> float:
        """Part of the duration that another execution might save: at 0.01 none is more than 1 % faster."""
        return 1 - self.lower_bound_seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Numbers of the stages whose forward runs more than once."""
        return self.schedule.recomputed

    @property
    def inverted(self) -> tuple[int, ...]:
        """Numbers of the stages that drop their input and rebuild it from their output."""
        every = (leaf for item in self.schedule.items for leaf in leaves(item))
        return tuple(leaf.stage for leaf in every if self.chain.stages[leaf.stage].options[leaf.option].inverts)

    def frontier(self) -> Frontier:
        """The curve of memory against time for the plan's chain, which is solved once more: a plan holds no tables."""
        return Plan.solved_frontier(self)

    def save(self, path: Path | str) -> None:
        """Write the plan to a file, for the same model and input; see :func:`lightning_rotor.planning.save_plan`."""
        save_plan(self, path)

    @classmethod
    def load(cls, path: Path | str, chain: Chain) -> Plan:
        """Read a plan for a chain as measured now; raises as :func:`lightning_rotor.planning.load_plan`."""
        return load_plan(path, chain)

    def summary(self) -> str:
        """The plan on one line."""
        return (
            f"{len(self.chain)} stages within {format_bytes(self.budget_bytes)}: peak {format_bytes(self.peak_bytes)}, "
            f"{format_seconds(self.seconds)} per step (+{self.overhead:.1%}), "
            f"{len(self.recomputed)} stages recomputed: {self.schedule}"
        )

    def __rich__(self) -> Group:
        return Group(*Plan.tables(self))

    def __str__(self) -> str:
        return rendered(*Plan.tables(self))


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write a plan to a file, which is replaced if it exists."""
    save_record(plan.record, plan.chain, path)


def load_plan(path: Path | str, chain: Chain) -> Plan:
    """Read a plan for the chain that it was made for.

    Args:
        path: What :func:`save_plan` has written.
        chain: Of the model that is to run under the plan, as measured now: it gives the plan's costs on this machine.
    Returns:
        The plan, simulated anew.
    Raises:
        PlanError: The file holds no plan; the plan was made for another model, shape, dtype or device (says what
            differs first); or it takes more than its budget on this machine.
    """
    return _fitting(path, Plan.of(load_record(path, chain), chain))


def plan_for(plan: Plan, chain: Chain) -> Plan:
    """The plan with the costs of a chain that differs only in timings and in what kernels take.

    Args:
        plan: For the same model and input.
        chain: Of the model that is to run under it, as measured now.
    Raises:
        PlanError: As for :func:`load_plan`.
    """
    if plan.chain == chain:
        return plan
    if plan.chain.fingerprint != chain.fingerprint:
        raise made_for_another("the plan", plan.chain.identity, plan.chain.device, chain)
    return _fitting("the plan", Plan.of(plan.record, chain, solve_seconds=plan.solve_seconds))


def _fitting(what: object, plan: Plan) -> Plan:
    if plan.peak_bytes > plan.budget_bytes:
        raise PlanError(
            f"{what} takes {format_bytes(plan.peak_bytes)} on this machine, which is more than its budget of "
            f"{format_bytes(plan.budget_bytes)}: plan anew"
        )
    return plan


def scheduled(
    chain: Chain,
    schedule: Schedule,
    *,
    gradients_exist: bool = False,
    lingering_bytes: int = 0,
    slots: int = DEFAULT_SLOTS,
) -> Plan:
    """A schedule from elsewhere as a plan whose budget is its peak; a ScheduleError if it does not belong to the chain.

    Arguments as for :func:`lightning_rotor.planning.plan`.
    """
    plan = Plan.of(PlanRecord(schedule, 0, gradients_exist, lingering_bytes, slots), chain)
    return replace(plan, budget_bytes=plan.peak_bytes)
