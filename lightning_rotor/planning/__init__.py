"""Planning: which stages to keep and which to recompute, so that a step fits a memory budget and takes the least time.

In: a chain and a budget. Out: a plan, or the least budget that works; the curve of all budgets; a lower bound::

    effort                       what planning may cost
    requirements                 chain → what each decision needs and takes, in slots of memory
      retained_skips             its rule for skips
    dynamic_program              the recurrences, and the table of them for every budget
      kernels, compilation       its loops, and the same in machine code
      backtracking               table → schedules
    candidates, edits            schedules near a budget, judged in bytes by the simulator, and changes of them
    schedule_search              tables of a chain → the fastest schedule for a budget, and the smallest
    placing                      where what moves is given back and taken again
    move_program                 a second program, over memory and what a link has still to carry
      bodies                     what its segments recompute
    moving_search                both together: the fastest schedule where something may move
    frontier                     the curve of all budgets
    plan, plan_file              the result as data, and as JSON
    solver                       budget → plan, or the error that says what would do
    bounds, least_costs          a lower bound for whatever else an execution could do

Plans of steps, where the chain is not all that takes memory::

    joint_chain                  several calls that wait for their backward at the same time, as one chain
    step_phases, outside         a measured step, and what it took around its calls
    budget_search                the budget of a chain whose measured steps take more or less than predicted
    step_draws                   steps whose size is a draw
    size_bounds, combined_chain  costs of input sizes that were never measured
"""

from lightning_rotor.planning.bounds import lower_bound_seconds
from lightning_rotor.planning.frontier import Frontier, Gain, frontier_of
from lightning_rotor.planning.plan import Plan, plan_for, scheduled
from lightning_rotor.planning.schedule_search import fine_slots
from lightning_rotor.planning.solver import Solver, frontier, minimum_budget, plan

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
