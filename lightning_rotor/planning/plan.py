"""A plan: a schedule for one chain and one budget, with its simulated cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group

from lightning_rotor.chain import Chain
from lightning_rotor.planning.bounds import lower_bound_seconds
from lightning_rotor.planning.tables import plan_table, rendered, stage_table
from lightning_rotor.schedule import Schedule, leaves
from lightning_rotor.simulator import Simulation
from lightning_rotor.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lightning_rotor.planning.frontier import Frontier

DEFAULT_SLOTS = 500


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for one chain and one budget. Printed, it is a table.

    Attributes:
        chain: What it was made for.
        schedule: What to keep and what to recompute.
        budget_bytes: What was allowed.
        simulation: Peak and duration, step by step.
        solve_seconds: Time spent on finding it. Plans from one solver share the table; the first one pays for it.
        gradients_exist: For what it was made, see :func:`lightning_rotor.planning.plan`.
        lingering_bytes: For what it was made, see :func:`lightning_rotor.planning.plan`.
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
        """Least duration of any execution within the budget, as far as is proven. Found when first asked for: see :mod:`.bounds`."""
        return lower_bound_seconds(
            self.chain,
            self.budget_bytes,
            gradients_exist=self.gradients_exist,
            lingering_bytes=self.lingering_bytes,
        )

    @property
    def gap(self) -> float:
        """The part of the plan's duration that some other execution might save: at 0.01 none is more than 1 % faster."""
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
        """What every other budget would cost: the curve of memory against time for the same chain.

        A plan does not hold the planner's tables, so this solves the chain once more, for all budgets together.
        """
        from lightning_rotor.planning.frontier import frontier_of
        from lightning_rotor.planning.solver import Solver

        solver = Solver(
            self.chain,
            slots=self.slots,
            gradients_exist=self.gradients_exist,
            lingering_bytes=self.lingering_bytes,
        )
        return frontier_of(solver, budget_bytes=self.budget_bytes)

    def save(self, path: Path | str) -> None:
        """Write it to a file, to be used again where the same model takes the same input; see :func:`lightning_rotor.planning.save_plan`."""
        from lightning_rotor.planning.files import save_plan

        save_plan(self, path)

    @classmethod
    def load(cls, path: Path | str, chain: Chain) -> Plan:
        """Read one for a chain as measured now; see :func:`lightning_rotor.planning.load_plan`.

        Raises:
            PlanError: The file holds no plan, or one for another model, shape, dtype or device.
        """
        from lightning_rotor.planning.files import load_plan

        return load_plan(path, chain)

    def summary(self) -> str:
        """The plan on one line."""
        return (
            f"{len(self.chain)} stages within {format_bytes(self.budget_bytes)}: peak {format_bytes(self.peak_bytes)}, "
            f"{format_seconds(self.seconds)} per step (+{self.overhead:.1%}), {len(self.recomputed)} stages recomputed: {self.schedule}"
        )

    def __rich__(self) -> Group:
        return Group(plan_table(self), stage_table(self))

    def __str__(self) -> str:
        return rendered(plan_table(self), stage_table(self))
