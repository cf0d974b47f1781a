"""A plan: a schedule for one chain and one budget, with its simulated cost."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_rotor.chain import Chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import Simulation
from lightning_rotor.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for one chain and one budget.

    Attributes:
        chain: What it was made for.
        schedule: What to keep and what to recompute.
        budget_bytes: What was allowed.
        simulation: Peak and duration, step by step.
        solve_seconds: Time spent on finding it. Plans from one solver share the table; the first one pays for it.
    """

    chain: Chain
    schedule: Schedule
    budget_bytes: int
    simulation: Simulation
    solve_seconds: float

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
    def recomputed(self) -> tuple[int, ...]:
        """Numbers of the stages whose forward runs more than once."""
        return self.schedule.recomputed

    def __str__(self) -> str:
        return (
            f"{len(self.chain)} stages within {format_bytes(self.budget_bytes)}: peak {format_bytes(self.peak_bytes)}, "
            f"{format_seconds(self.seconds)} per step (+{self.overhead:.1%}), {len(self.recomputed)} stages recomputed: {self.schedule}"
        )
