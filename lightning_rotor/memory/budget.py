"""The part of a training process' limit that a plan may use, and the error where nothing fits it.

The user's limit covers all that the process holds. A budget is the part of it that is left for one chain
(:mod:`lightning_rotor.memory.resident_memory` says what takes the rest). So a chain that does not fit is refused in
terms of the limit, which is what the user can change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.link import Link
from lightning_rotor.planning import Plan, plan
from lightning_rotor.planning.effort import DEFAULT_SLOTS
from lightning_rotor.planning.solver import cause_and_remedy, plan_of_tables
from lightning_rotor.simulator import Conditions
from lightning_rotor.units import format_bytes, hint_of_units

# Plans that are foreseen to exceed, before one has to show it. Each is solved for.
_MOST_FORESEEN = 3


def limit_error(
    limit_bytes: int,
    minimum_bytes: int,
    *,
    needs: str,
    stage: str,
    remedy: str,
    gradient_bytes: int = 0,
    error: type[BudgetError] = BudgetError,
) -> BudgetError:
    """The error for a limit that training cannot keep, in whichever way that has shown.

    ``needs`` says what takes the minimum and ends with what sets it, ``stage`` is the name of that.
    """
    return error(
        f"mem_limit {format_bytes(limit_bytes)} is below the minimum {format_bytes(minimum_bytes)} "
        f"({minimum_bytes:,} bytes) for this model and batch: {needs}. {remedy[0].upper()}{remedy[1:]}"
        f"{hint_of_units(limit_bytes)}",
        budget_bytes=limit_bytes,
        minimum_bytes=minimum_bytes,
        stage=stage,
        gradient_bytes=gradient_bytes,
    )


class StepForesight(Protocol):
    """The peaks and plans of steps to come, under other plans for a measured step's chain or for another size of it."""

    def __call__(self, plan: Plan, /) -> int:
        """Peak of the whole process until the backward is over; 0 if it cannot tell."""

    def plan_within(self, limit_bytes: int, like: Plan) -> Plan | None:
        """The plan that keeps a limit, or takes least, as ``planning/outside`` has it; None if it cannot tell."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of a device that a plan may use.

    Attributes:
        available_bytes: Most that the chain may allocate in one step, beyond what is allocated when its forward begins.
        reserved_bytes: The part of the user's limit that is not for the chain; only error messages need it.
        guessed_bytes: What of it is a guess, and not worth an error.
        is_provisional: It is small on purpose, since other calls share the step. That nothing fits is no error: the
            plan that takes least runs, until a plan for all calls follows.
        foresight: Peak of the process in steps under a plan for this chain, as a measured step foretells it; None if
            none was measured.
        is_new_size: The foresight is that of a step of another size, as none of this size was measured.
        link: Over which a plan may move what stages hold; None if it moves nothing.
    """

    available_bytes: int
    gradients_exist: bool = False
    lingering_bytes: int = 0
    reserved_bytes: int = 0
    reserved_for: str = ""
    guessed_bytes: int = 0
    is_provisional: bool = False
    foresight: StepForesight | None = None
    is_new_size: bool = False
    error: type[BudgetError] = BudgetError
    link: Link | None = None

    @property
    def limit_bytes(self) -> int:
        """The user's limit."""
        return self.available_bytes + self.reserved_bytes

    @property
    def conditions(self) -> Conditions:
        """The step around the chain, for the planner."""
        conditions: Conditions = {"gradients_exist": self.gradients_exist, "lingering_bytes": self.lingering_bytes}
        return conditions if self.link is None else {**conditions, "link": self.link}

    def plan(self, chain: Chain, *, slots: int = DEFAULT_SLOTS) -> Plan:
        """The fastest plan within the budget; ``BudgetError`` in terms of the user's limit if there is none."""
        try:
            fastest = self._plan(chain, self.available_bytes, slots)
        except BudgetError as error:
            # Within what is a guess, a refusal might be wrong, and a measured step will tell.
            if error.minimum_bytes <= self.available_bytes + self.guessed_bytes:
                return self._plan(chain, error.minimum_bytes, slots)
            if not self.reserved_bytes:
                # The budget is the whole limit, so the planner's own sentence has the right numbers.
                raise error from None
            raise self.minimum_error(error.minimum_bytes, error) from None
        return self._as_foreseen(fastest, slots)

    def plan_of_tables(self, chain: Chain, *, slots: int = DEFAULT_SLOTS) -> Plan | None:
        """The fastest plan within the budget, or None: for bounds of costs, which are measured if they leave none."""
        fastest = plan_of_tables(chain, max(self.available_bytes, 1), slots=slots, **self.conditions)
        return None if fastest is None else self._as_foreseen(fastest, slots)

    def _as_foreseen(self, fastest: Plan, slots: int) -> Plan:
        """The plan, or a smaller one if the step is foreseen to exceed the limit under it.

        What was measured around a chain is one number for the whole of it, from the moment at which the plan of then
        was at its peak. Another plan peaks at another moment.
        """
        if self.foresight is None:
            return fastest
        excess_bytes = self.foresight(fastest) - self.limit_bytes
        if excess_bytes <= 0:
            return fastest
        whole = self.foresight.plan_within(self.limit_bytes, fastest)
        # Its own peak may be higher than this budget, of which a part was taken off for another moment's sake.
        if whole is not None and whole.peak_bytes <= self.available_bytes:
            return replace(whole, budget_bytes=fastest.budget_bytes)
        chosen = fastest
        for _ in range(_MOST_FORESEEN):
            try:
                # From its own peak, and not from its budget, which it may be far below: then the same plan came again.
                chosen = self._plan(chosen.chain, chosen.peak_bytes - excess_bytes, slots)
            except BudgetError as error:
                # A measured step says whether the limit can be kept. The first one of a size keeps it more likely under
                # the plan that takes least; later ones are planned by what it has shown.
                if self.is_new_size:
                    chosen = self._plan(chosen.chain, error.minimum_bytes, slots)
                break
            excess_bytes = self.foresight(chosen) - self.limit_bytes
            if excess_bytes <= 0:
                break
        return chosen

    def keeps(self, plan: Plan) -> bool:
        """True if a step keeps the limit under a plan that was made for another budget, as far as is known."""
        return plan.peak_bytes <= self.available_bytes and not self.foresees_excess(plan)

    def foresees_excess(self, plan: Plan) -> bool:
        """True if a step is foreseen to exceed the limit under a plan that fits."""
        # What lies around a call is small beside half of the budget, and looking takes a simulation.
        if self.foresight is None or 2 * plan.peak_bytes <= self.available_bytes:
            return False
        return self.foresight(plan) > self.limit_bytes

    def least_plan(self, chain: Chain, error: BudgetError, *, slots: int) -> Plan:
        """The plan that takes least, after :meth:`plan` has said that none fits."""
        # The error counts what is reserved, too.
        chain_bytes = error.minimum_bytes - self.reserved_bytes
        return self._plan(chain, chain_bytes, slots)

    def _plan(self, chain: Chain, size_bytes: int, slots: int) -> Plan:
        # Nothing may be left of a limit. Then no plan fits, as the planner says of 1 byte; it wants a positive number.
        return plan(chain, max(size_bytes, 1), slots=slots, **self.conditions)

    def capped(self, ceiling_bytes: int | None) -> Budget:
        """This budget with at most ``ceiling_bytes``, because the device turned out to have no more."""
        if ceiling_bytes is None or self.available_bytes <= ceiling_bytes:
            return self
        return self.reduced_to(ceiling_bytes, "memory that the device did not have")

    def reduced_to(self, available_bytes: int, reason: str) -> Budget:
        """This budget with less for the chain, and the rest kept for something else."""
        missing_bytes = self.available_bytes - available_bytes
        reserved_for = f"{reason} ({format_bytes(missing_bytes)})"
        if self.reserved_for:
            reserved_for = f"{self.reserved_for}, {reserved_for}"
        # The limit is the user's, and stays: what the chain loses is reserved.
        return replace(
            self,
            available_bytes=available_bytes,
            reserved_bytes=self.reserved_bytes + missing_bytes,
            reserved_for=reserved_for,
        )

    def fits(self, plan: Plan) -> bool:
        """True if a plan was made for exactly this budget. One for less would have room, and is not meant."""
        # As _plan hands it over, where nothing is left.
        is_of_this_size = plan.budget_bytes == max(self.available_bytes, 1)
        return is_of_this_size and plan.conditions == self.conditions

    def minimum_error(self, least_bytes: int, error: BudgetError, *, stage: str | None = None) -> BudgetError:
        """The error, in terms of the limit that the user set, if no plan for the chain takes less than so much.

        ``stage`` is what sets the minimum, if that is not what the error says.
        """
        stage = stage or error.stage
        cause, remedy = cause_and_remedy(self.available_bytes, least_bytes, stage, error.gradient_bytes)
        needs = (
            f"{format_bytes(self.reserved_bytes)} for {self.reserved_for}, and at least "
            f"{format_bytes(least_bytes)} for activations and new gradients ({cause})"
        )
        return limit_error(
            self.limit_bytes,
            least_bytes + self.reserved_bytes,
            needs=needs,
            stage=stage,
            remedy=remedy,
            gradient_bytes=error.gradient_bytes,
            error=self.error,
        )
