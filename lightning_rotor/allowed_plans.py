"""From costs to a plan, inside what a plan may use at this moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_rotor.allowance import Allowance, AllowanceSource
from lightning_rotor.errors import BudgetError
from lightning_rotor.planning import Plan, menu, minimum_budget, plan
from lightning_rotor.profiling import Profile
from lightning_rotor.schedule import Schedule


class AllowedPlans:
    """Plans chains of one module.

    Args:
        source: Says what a plan may use.
        slots: Resolution of the dynamic program.
        on_infeasible: Called if no schedule fits; then there is the plan that takes least. By default there is an error.
    Attributes:
        slots: As given.
        ceiling_bytes: The most that any plan may take since the device ran out of memory, or None if it never did.
    """

    def __init__(
        self, source: AllowanceSource, *, slots: int, on_infeasible: Callable[[BudgetError], None] | None = None
    ) -> None:
        self._source = source
        self._on_infeasible = on_infeasible
        self.slots = slots
        self.ceiling_bytes: int | None = None

    def allowance(self, profile: Profile) -> Allowance:
        """What a plan may use."""
        return self.allowance_without_ceiling(profile).capped(self.ceiling_bytes)

    def allowance_without_ceiling(self, profile: Profile) -> Allowance:
        """What a plan might use if the device had as much as it seemed to have."""
        allowance = self._source(profile)
        return replace(allowance, lingering_bytes=allowance.lingering_bytes + profile.copied_bytes)

    def allows(self, plan: Plan) -> bool:
        """Whether a plan keeps below the ceiling."""
        return self.ceiling_bytes is None or plan.peak_bytes <= self.ceiling_bytes

    def lower_ceiling(self, plan: Plan, *, to_the_least: bool = False) -> bool:
        """Let all plans from now on take less than one that was too much for the device. Whether that is possible.

        Args:
            plan: That one.
            to_the_least: As little as a plan can do with, rather than halfway to that.
        """
        least = minimum_budget(
            plan.chain, slots=self.slots, gradients_exist=plan.gradients_exist, lingering_bytes=plan.lingering_bytes
        ).peak_bytes
        if plan.peak_bytes <= least:
            return False
        self.ceiling_bytes = least if to_the_least else (plan.peak_bytes + least) // 2
        return True

    def solve(self, profile: Profile, allowance: Allowance) -> Plan | BudgetError:
        """The fastest plan inside an allowance, or why there is none."""

        def solve(budget_bytes: int) -> Plan:
            return plan(
                profile.chain,
                max(budget_bytes, 1),
                slots=self.slots,
                gradients_exist=allowance.gradients_exist,
                lingering_bytes=allowance.lingering_bytes,
            )

        try:
            return solve(allowance.budget_bytes)
        except BudgetError as error:
            if error.minimum_bytes <= allowance.budget_bytes + allowance.guessed_bytes:
                return solve(error.minimum_bytes)
            explained = allowance.explain(error)
            if self._on_infeasible is None:
                return explained
            self._on_infeasible(explained)
            return solve(error.minimum_bytes)

    def menu(self, profile: Profile, allowance: Allowance) -> tuple[Schedule, ...]:
        """Schedules that may do for chains like this one, from fast to small."""
        return menu(
            profile.chain,
            slots=self.slots,
            gradients_exist=allowance.gradients_exist,
            lingering_bytes=allowance.lingering_bytes,
        )
