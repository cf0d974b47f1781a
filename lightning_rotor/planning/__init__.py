"""Planning: which stages to keep and which to recompute, so that a step fits a memory budget and takes the least time.

In: a chain and a budget. Out: a plan, or the least budget that works; the curve of all budgets; a lower bound::

    requirements      chain → what each decision needs and takes, in slots of memory
    dynamic_program   the recurrences, and the table of them for every budget, filled by kernel
    candidates        table → schedules, judged in bytes by the simulator; edits of them
    solver            the tables of one chain → plans and frontiers
    plan, frontier    the results, also as JSON and as tables
    bounds            a lower bound for whatever else an execution could do
"""

from functools import lru_cache

from typing_extensions import Unpack

from lightning_rotor.chain import Chain
from lightning_rotor.planning.bounds import lower_bound_seconds
from lightning_rotor.planning.frontier import Frontier, Gain
from lightning_rotor.planning.plan import DEFAULT_SLOTS, Plan, plan_for, scheduled
from lightning_rotor.planning.solver import Solver, fine_slots, frontier_of
from lightning_rotor.simulator import Conditions

__all__ = [
    "Frontier",
    "Gain",
    "Plan",
    "Solver",
    "fine_slots",
    "frontier",
    "frontier_of",
    "lower_bound_seconds",
    "minimum_budget",
    "plan",
    "plan_for",
    "scheduled",
]


def plan(chain: Chain, budget_bytes: int, *, slots: int = DEFAULT_SLOTS, **step: Unpack[Conditions]) -> Plan:
    """Plan the fastest schedule that fits a memory budget.

    Takes O(n³ · slots) for ``n`` stages. Optimal among schedule trees up to the rounding to slots and the
    approximations named in :mod:`lightning_rotor.planning.dynamic_program`; never above the budget. More budget never
    gives a slower plan.

    Args:
        chain: Costs of ``n`` stages, measured on one device.
        budget_bytes: Activation memory beyond what is allocated when the step begins; parameters are not included.
        slots: Memory levels that the program tells apart, at least. Short chains get more for the same time.
        step: ``gradients_exist``, if parameters already have gradients, so that the backward adds none, and
            ``lingering_bytes``, held during the forward: see :func:`lightning_rotor.simulator.simulate`.
    Returns:
        A plan whose simulated peak is at most ``budget_bytes``.
    Raises:
        BudgetError: No schedule fits (says the least budget and the stage that sets it), or no positive integer.
    Example:
        >>> plan(chain, parse_bytes("2 GiB"))
    Source:
        Beaumont et al., "Optimal checkpointing for heterogeneous chains", hal-02352969.
    """
    return _solver(chain, slots, **step).plan(budget_bytes)


def minimum_budget(chain: Chain, *, slots: int = DEFAULT_SLOTS, **step: Unpack[Conditions]) -> Plan:
    """Plan with the least simulated peak, which is its ``budget_bytes``; arguments as for :func:`plan`."""
    return _solver(chain, slots, **step).minimum()


def frontier(chain: Chain, *, slots: int = DEFAULT_SLOTS, **step: Unpack[Conditions]) -> Frontier:
    """Every useful budget and what it costs in time, from one solve; arguments as for :func:`plan`."""
    return frontier_of(_solver(chain, slots, **step))


# A chain is often planned again at once: for another budget, its curve, its minimum. Tables take tens of megabytes.
@lru_cache(maxsize=1)
def _solver(chain: Chain, slots: int, **step: Unpack[Conditions]) -> Solver:
    return Solver(chain, slots=fine_slots(len(chain), slots), **step)
