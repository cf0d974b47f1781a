"""What a plan may use of a device's memory, and how an error says so in terms of the user's limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from lightning_rotor.errors import BudgetError
from lightning_rotor.planning import Plan
from lightning_rotor.profiling import Profile
from lightning_rotor.units import format_bytes


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a plan may use.

    Attributes:
        budget_bytes: Most that the chain may allocate in one step, beyond what is allocated when its forward begins.
        gradients_exist: As in :func:`~lightning_rotor.simulator.simulate`.
        lingering_bytes: As in :func:`~lightning_rotor.simulator.simulate`.
        reserved_bytes: The part of the user's limit that is not for the chain; only error messages need it.
        reserved_for: What that part is for.
        guessed_bytes: What of it is a guess, and not worth an error.
        error: What to raise where the limit is too low.
    """

    budget_bytes: int
    gradients_exist: bool = False
    lingering_bytes: int = 0
    reserved_bytes: int = 0
    reserved_for: str = ""
    guessed_bytes: int = 0
    error: type[BudgetError] = BudgetError

    @property
    def limit_bytes(self) -> int:
        """The user's limit."""
        return self.budget_bytes + self.reserved_bytes

    def capped(self, ceiling_bytes: int | None) -> Allowance:
        """The same with a budget of at most ``ceiling_bytes``, because the device turned out to have no more."""
        if ceiling_bytes is None or self.budget_bytes <= ceiling_bytes:
            return self
        missing_bytes = self.budget_bytes - ceiling_bytes
        missing = f"memory that the device did not have ({format_bytes(missing_bytes)})"
        return replace(
            self,
            budget_bytes=ceiling_bytes,
            reserved_bytes=self.reserved_bytes + missing_bytes,
            reserved_for=f"{self.reserved_for}, {missing}" if self.reserved_for else missing,
        )

    def fits(self, plan: Plan) -> bool:
        """Whether a plan is what would be planned with this allowance."""
        return (plan.budget_bytes, plan.gradients_exist, plan.lingering_bytes) == (
            max(self.budget_bytes, 1),
            self.gradients_exist,
            self.lingering_bytes,
        )

    def explain(self, error: BudgetError) -> BudgetError:
        """The planner's error in terms of the limit that the user set."""
        if not self.reserved_bytes:
            return error
        limit_bytes, minimum_bytes = self.limit_bytes, error.minimum_bytes + self.reserved_bytes
        return self.error(
            f"mem_limit {format_bytes(limit_bytes)} is below the minimum {format_bytes(minimum_bytes)} ({minimum_bytes:,} bytes) for this model "
            "and batch: "
            f"{format_bytes(self.reserved_bytes)} for {self.reserved_for}, and at least {format_bytes(error.minimum_bytes)} for activations "
            f"and new gradients (set by {error.stage!r}). Raise mem_limit or lower the batch size",
            budget_bytes=limit_bytes,
            minimum_bytes=minimum_bytes,
            stage=error.stage,
        )


class AllowanceSource(Protocol):
    """Says what a plan may use, once the chain has been measured."""

    def __call__(self, profile: Profile) -> Allowance:
        """Called before each plan."""
