"""Planning: which stages to keep and which to recompute, so that a step fits a memory budget and takes the least time.

In: a chain and a budget. Out: a plan, or the least budget that works; the curve of all budgets; a lower bound::

    requirements      chain → what each decision needs and takes, in slots of memory
    dynamic_program   the recurrences, the table of them for every budget, and schedules from it
    solver            tables → schedules, judged in bytes by the simulator; edits of them → plans and frontiers
    plan              the results, also as JSON and as tables
    bounds            a lower bound for whatever else an execution could do
"""

from lightning_rotor.planning.bounds import lower_bound_seconds
from lightning_rotor.planning.plan import Frontier, Gain, Plan, plan_for, scheduled
from lightning_rotor.planning.solver import Solver, fine_slots, frontier, frontier_of, minimum_budget, plan

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
