"""What files and checkpoints say of a plan: what was decided and for what, without the chain that it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import Self

from lightning_rotor.chain import Chain
from lightning_rotor.planning.plan import DEFAULT_SLOTS, Plan
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A plan without its chain. Attributes are those of :class:`~lightning_rotor.planning.Plan`."""

    schedule: Schedule
    budget_bytes: int
    gradients_exist: bool
    lingering_bytes: int
    slots: int

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The record of a plan."""
        return cls(plan.schedule, plan.budget_bytes, plan.gradients_exist, plan.lingering_bytes, plan.slots)

    @classmethod
    def from_plain(cls, record: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_plain` wrote; other entries are left alone.

        Raises:
            ScheduleError: The text of the schedule is none.
            KeyError: An entry is missing.
            TypeError: An entry is of another type.
            ValueError: Likewise.
        """
        return cls(
            Schedule.parse(record["schedule"]),
            int(record["budget_bytes"]),
            bool(record["gradients_exist"]),
            int(record["lingering_bytes"]),
            int(record["slots"]),
        )

    def to_plain(self) -> dict[str, Any]:
        """Strings, numbers and flags by name."""
        return {field: getattr(self, field) for field in self.__slots__} | {"schedule": str(self.schedule)}

    def plan(self, chain: Chain, *, solve_seconds: float = 0.0) -> Plan:
        """The plan, simulated anew.

        Args:
            chain: What it was made for, as measured now.
            solve_seconds: What finding it took.
        Raises:
            ScheduleError: It does not belong to the chain.
        """
        simulation = simulate(
            chain, self.schedule, gradients_exist=self.gradients_exist, lingering_bytes=self.lingering_bytes
        )
        return Plan(
            chain,
            self.schedule,
            self.budget_bytes,
            simulation,
            solve_seconds,
            gradients_exist=self.gradients_exist,
            lingering_bytes=self.lingering_bytes,
            slots=self.slots,
        )


def scheduled(
    chain: Chain,
    schedule: Schedule,
    *,
    gradients_exist: bool = False,
    lingering_bytes: int = 0,
    slots: int = DEFAULT_SLOTS,
) -> Plan:
    """A schedule that was found elsewhere as a plan, whose budget is what it takes.

    Arguments as for :func:`lightning_rotor.planning.plan`.

    Raises:
        ScheduleError: It does not belong to the chain.
    """
    plan = PlanRecord(schedule, 0, gradients_exist, lingering_bytes, slots).plan(chain)
    return replace(plan, budget_bytes=plan.peak_bytes)
