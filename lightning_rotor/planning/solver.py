"""Plans for a budget, from the search for schedules, or the error that says which budget would do."""

from __future__ import annotations

import time
from functools import lru_cache

from typing_extensions import Unpack

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError, ModelError
from lightning_rotor.planning.effort import DEFAULT_SLOTS
from lightning_rotor.planning.frontier import Frontier, frontier_of
from lightning_rotor.planning.moving_search import MovingSearch
from lightning_rotor.planning.plan import Plan
from lightning_rotor.planning.schedule_search import fine_slots
from lightning_rotor.simulator import Conditions, Simulation
from lightning_rotor.units import (
    format_bytes,
    formatted_apart,
    hint_of_units,
    is_positive_integer,
    require_positive_integer,
)


def plan(chain: Chain, budget_bytes: int, *, slots: int = DEFAULT_SLOTS, **conditions: Unpack[Conditions]) -> Plan:
    """Plan the fastest schedule that fits a memory budget.

    Takes O(n³ · slots) for ``n`` stages. Optimal among schedule trees up to the rounding to slots and the
    approximations named in :mod:`lightning_rotor.planning.dynamic_program`; never above the budget. More budget never
    gives a slower plan.

    Args:
        chain: Costs of ``n`` stages, measured on one device.
        budget_bytes: Activation memory beyond what is allocated when the step begins; parameters are not included.
        slots: Memory levels that the program tells apart, at least. Short chains get more for the same time.
        conditions: ``gradients_exist``, if parameters already have gradients, so that the backward adds none, and
            ``lingering_bytes``, held during the forward: see :func:`lightning_rotor.simulator.simulate`. With a
            ``link`` the plan may move what stages hold as well.
    Returns:
        A plan whose simulated peak is at most ``budget_bytes``.
    Raises:
        BudgetError: No schedule fits (says the least budget and the stage that sets it), or no positive integer.
    Example:
        >>> plan(chain, parse_bytes("2 GiB"))
    Source:
        Beaumont et al., "Optimal checkpointing for heterogeneous chains", hal-02352969.
    """
    return _solver_of(chain, slots, **conditions).plan(budget_bytes)


def plan_of_tables(
    chain: Chain, budget_bytes: int, *, slots: int = DEFAULT_SLOTS, **conditions: Unpack[Conditions]
) -> Plan | None:
    """The fastest plan that fits, or None; arguments as for :func:`plan`.

    None does not say that nothing fits: the schedule of least peak is not looked for, which would take several times as
    long. For costs that are bounds, which are measured if they leave no plan.
    """
    return _solver_of(chain, slots, **conditions).plan_of_tables(budget_bytes)


def minimum_budget(chain: Chain, *, slots: int = DEFAULT_SLOTS, **conditions: Unpack[Conditions]) -> Plan:
    """Plan with the least simulated peak, which is its ``budget_bytes``; arguments as for :func:`plan`."""
    return _solver_of(chain, slots, **conditions).minimum()


def frontier(chain: Chain, *, slots: int = DEFAULT_SLOTS, **conditions: Unpack[Conditions]) -> Frontier:
    """Every useful budget and what it costs in time, from one solve; arguments as for :func:`plan`."""
    return frontier_of(_solver_of(chain, slots, **conditions))


def _solver_of(chain: Chain, slots: int, **conditions: Unpack[Conditions]) -> Solver:
    """The solver of a chain; ``ModelError`` if it is none."""
    if not isinstance(chain, Chain):
        raise ModelError(
            f"the chain is a {type(chain).__name__}: expected a Chain of costs, such as profile_chain(stages, x).chain"
        )
    require_positive_integer("slots", slots, DEFAULT_SLOTS)
    return _solver(chain, slots, **conditions)


# A chain is often planned again at once: for another budget, its curve, its minimum. Tables take tens of megabytes.
@lru_cache(maxsize=1)
def _solver(chain: Chain, slots: int, **conditions: Unpack[Conditions]) -> Solver:
    return Solver(chain, slots=fine_slots(len(chain), slots), **conditions)


class Solver(MovingSearch):
    """Plans one chain for any number of budgets, from a table made for the first; arguments as for :func:`plan`.

    A chain of more than about 60 stages gets fewer slots than it has boundaries. Its least budget may then be two
    percent too high; plans at larger budgets are hardly slower (0.1 percent of a step).
    """

    def plan(self, budget_bytes: int) -> Plan:
        """The fastest plan that fits; a BudgetError if none does, or the budget is no positive integer."""
        start = time.perf_counter()
        simulation = None
        # Anything else is refused below, as a budget that is too small is: with the number that would do.
        if is_positive_integer(budget_bytes):
            simulation = self.fastest(budget_bytes)
        if simulation is None:
            # With the least budget whatever was asked for, as users have to know it in either case.
            raise self._minimum_error(budget_bytes)
        return self._plan(simulation, budget_bytes, time.perf_counter() - start)

    def plan_of_tables(self, budget_bytes: int) -> Plan | None:
        """The fastest plan that fits, but for the one of least peak; None if there is none."""
        start = time.perf_counter()
        simulation = self.fastest(budget_bytes, with_least=False)
        return None if simulation is None else self._plan(simulation, budget_bytes, time.perf_counter() - start)

    def minimum(self) -> Plan:
        """The plan with the least simulated peak, which is also its budget."""
        start = time.perf_counter()
        least = self.smallest
        return self._plan(least, least.peak_bytes, time.perf_counter() - start)

    def _plan(self, simulation: Simulation, budget_bytes: int, seconds: float) -> Plan:
        return Plan(
            self.chain,
            simulation.schedule,
            budget_bytes,
            simulation,
            seconds,
            slots=self.slots,
            **self.conditions,
        )

    def _minimum_error(self, budget_bytes: object) -> BudgetError:
        """The error that names the least budget and the stage that sets it."""
        least = self.smallest
        stage = self.chain.stages[least.peak_stage].name
        allowed_bytes = budget_bytes if isinstance(budget_bytes, int) else 0
        gradient_bytes = 0
        # Gradients that exist are a part of what the process holds, and of no chain's minimum.
        if not self.conditions.get("gradients_exist"):
            gradient_bytes = _gradient_bytes_at_peak(self.chain, least)
        # Apart: two sizes that round to the same digits would make a message that contradicts itself.
        budget, minimum = formatted_apart(allowed_bytes, least.peak_bytes)
        cause, remedy = cause_and_remedy(allowed_bytes, least.peak_bytes, stage, gradient_bytes)
        reason = f"this chain's minimum {minimum} ({cause})"
        message = f"budget {budget} is below {reason}: {remedy}{hint_of_units(allowed_bytes)}"
        if not is_positive_integer(budget_bytes):
            message = f"budget is {budget_bytes!r}: expected a positive integer of bytes, and at least {reason}"
        return BudgetError(
            message,
            budget_bytes=allowed_bytes,
            minimum_bytes=least.peak_bytes,
            stage=stage,
            gradient_bytes=gradient_bytes,
        )


def _gradient_bytes_at_peak(chain: Chain, simulation: Simulation) -> int:
    """Bytes of the parameter gradients that the step has made by its peak."""
    gradient_bytes = 0
    at_peak_bytes = 0
    peak_bytes = 0
    for event in simulation.events:
        if event.phase == "backward":
            gradient_bytes += chain.stages[event.stage].keep.parameter_gradient_bytes
        # The first of equal peaks: the gradients that were there then cannot be blamed on what came later.
        if event.peak_bytes > peak_bytes:
            peak_bytes = event.peak_bytes
            at_peak_bytes = gradient_bytes
    return at_peak_bytes


def cause_and_remedy(budget_bytes: int, minimum_bytes: int, stage: str, gradient_bytes: int) -> tuple[str, str]:
    """For the message of a BudgetError, what sets the minimum of a chain, and what the user can do."""
    cause = f"set by {stage!r}"
    remedy = "raise mem_limit or lower the batch size"
    # Where gradients are most of the minimum, the stage alone would send users to look for its activations.
    if 2 * gradient_bytes >= minimum_bytes:
        cause += f", with {format_bytes(gradient_bytes)} of new parameter gradients"
        # Gradients are as large as their parameters, whatever the batch.
        if gradient_bytes >= budget_bytes:
            remedy = "raise mem_limit, for a smaller batch does not make the gradients smaller"
    return cause, remedy
