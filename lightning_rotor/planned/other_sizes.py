"""A plan for a new size from the plans of others, without a search.

A larger size needs no less recomputation than a smaller one. So the overhead of a smaller size's plan is a bound on
what any plan for the new one takes, and a schedule that comes close to it need not be improved. And a schedule that
keeps the limit for a larger size keeps it for the new one, so that few schedules serve all sizes::

    schedules   ──a──┐ ─────b─────┐ ────────c────────┐
    sizes     ──┴────●──x─────────●──────────────────●──►   x runs under b until a better one has paid for its search

The plan of a larger size may run as it is, without a look at what the new size takes (:func:`covering`), or schedules
are judged with bounds on the new size's own costs (:func:`best_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_rotor.chain import Chain
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.prepared import Prepared
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planning import Plan, scheduled
from lightning_rotor.planning.size_bounds import is_within
from lightning_rotor.schedule import Schedule

SLIGHT = 0.01
"""Share of a step by which an overhead is next to the least possible one."""

# Schedules of larger and of smaller sizes that are tried for a new one: judging each takes as long as a step of a small
# model. Those of larger sizes fit; of smaller ones, the nearest may.
_NEAREST_LARGER = 2
_NEAREST_SMALLER = 2


@dataclass(frozen=True, slots=True)
class SizesAround:
    """Plans of one recording for sizes that are comparable with a call's in every dimension.

    Attributes:
        larger: Of sizes no smaller than the call's. The peak of each is an upper bound for the call.
        smaller: Of smaller sizes. What the best plan of each recomputes is a lower bound for the call.
    """

    larger: list[Prepared]
    smaller: list[Prepared]


def sizes_around(signature: Signature, known: Iterable[tuple[Signature, Prepared]]) -> SizesAround:
    """The plans, of those known, for larger and for smaller sizes of the recording that a call runs.

    Every call that runs under the plan of another size as it is, alone or beside others, has found it here.
    """
    larger = []
    smaller = []
    for other, prepared in known:
        # A plan runs the stages of its own recording. Another one may have equal names and sizes, and do something
        # else: an attribute or a global has changed in between. Where only names were compared, 26 of 5,185 random
        # programs trained to other weights.
        if not other.differs_in_sizes(signature):
            continue
        if is_within(signature.shapes, other.shapes):
            larger.append(prepared)
        elif is_within(other.shapes, signature.shapes):
            smaller.append(prepared)
    return SizesAround(larger, smaller)


def covering(signature: Signature, known: Iterable[tuple[Signature, Prepared]]) -> tuple[Prepared, float] | None:
    """The fastest plan of a size that is at least as large in every dimension, and the seconds that it may lose.

    Its peak is an upper bound for the new size. It loses what its overhead is above that of smaller sizes, which need
    no more recomputation; nothing if that is slight.

    Args:
        signature: Of the new size.
        known: Calls with their plans. Those of another recording are passed over.
    Returns:
        None if all are smaller.
    """
    around = sizes_around(signature, known)
    best: Prepared | None = None
    for prepared in around.larger:
        plan = prepared.plan
        # Where nothing fits, the plan that takes least runs beyond its budget. It proves nothing for other sizes.
        is_kept = plan.peak_bytes <= plan.budget_bytes
        if is_kept and (best is None or plan.overhead < best.plan.overhead):
            best = prepared
    if best is None:
        return None
    least_overhead = 0.0
    for prepared in around.smaller:
        # A plan bounds others from below only if it is the best for its size. One that was taken over may recompute
        # more than it needs.
        if prepared.is_best_known:
            least_overhead = max(least_overhead, prepared.plan.overhead)
    if best.plan.overhead <= least_overhead + SLIGHT:
        # Nothing is lost by definition: a search would take longer than steps could gain.
        return best, 0.0
    return best, lost_by(best.plan, least_overhead)


def _for_equal_costs(plans: Iterable[Plan], chain: Chain, budget: Budget) -> Plan | None:
    """The fastest plan for this budget and a chain that differs in the first stage's shapes alone.

    Costs are equal where they are bounds that follow from the same measured sizes. A plan may be beyond its budget, for
    training that goes on beyond the limit; such a one is not taken over.
    """
    alike = []
    for plan in plans:
        is_for_budget = plan.budget_bytes == budget.available_bytes
        is_for_budget &= plan.conditions == budget.conditions
        is_within = plan.peak_bytes <= plan.budget_bytes
        if is_for_budget and is_within and _costs_the_same(plan.chain, chain):
            alike.append(replace(plan, chain=chain))
    return min(alike, key=lambda plan: plan.seconds, default=None)


def _costs_the_same(one: Chain, other: Chain) -> bool:
    """True if two chains differ in the first stage's shapes alone, which say for what they are."""
    if one.stages[1:] != other.stages[1:]:
        return False
    return replace(one.stages[0], takes=()) == replace(other.stages[0], takes=())


def best_of(
    chain: Chain,
    alike: Sequence[tuple[int, Prepared]],
    size: int,
    budget: Budget,
    least_overhead: float,
    *,
    slots: int,
) -> Plan | None:
    """The fastest plan that fits of no recomputation and of a few other sizes' schedules; None if none does.

    Args:
        chain: Costs of the new size.
        alike: Sizes and plans of other calls, the nearest size first.
        size: The new one.
        budget: For it.
        least_overhead: That any plan has. Schedules behind one that is next to it are not tried.
        slots: Resolution of the planner.
    """
    plans = [prepared.plan for _, prepared in alike]
    for_equal_costs = _for_equal_costs(plans, chain, budget)
    if for_equal_costs is not None:
        return for_equal_costs
    limit_bytes = max(budget.available_bytes, 1)
    # A schedule of a larger size fits, as bytes rise with sizes. One of a smaller size recomputes less, and fits if
    # its budget left room. So both sides are tried.
    larger = _unlike(prepared.plan.schedule for other, prepared in alike if other >= size)
    smaller = _unlike(prepared.plan.schedule for other, prepared in alike if other < size)
    nearest = [*larger[:_NEAREST_LARGER], *smaller[:_NEAREST_SMALLER]]
    best = None
    for schedule in _unlike([Schedule.keep_all(len(chain)), *nearest]):
        if schedule.moves and budget.link is None:
            continue
        # The simulator judges it with the new size's own costs, as it judges any plan. So it does not matter where a
        # schedule comes from.
        plan = scheduled(chain, schedule, limit_bytes, slots=slots, **budget.conditions)
        if plan.peak_bytes > limit_bytes or (budget.link is not None and not budget.link.holds(plan.host_bytes)):
            continue
        if (best is None or plan.seconds < best.seconds) and not budget.foresees_excess(plan):
            best = plan
            if plan.overhead <= least_overhead + SLIGHT:
                break
    return best


def _unlike(schedules: Iterable[Schedule]) -> list[Schedule]:
    """The schedules, each once, in their order."""
    return list({id(schedule): schedule for schedule in schedules}.values())


def least_overhead_of(
    alike: Iterable[tuple[int, Prepared]],
    size: int,
    chain: Chain,
    budget: Budget,
) -> float:
    """Overhead that a plan for a size has at least, by plans of others: the larger one needs no less recomputation.

    Sizes with the same costs need the same.
    """
    least_overhead = 0.0
    for other_size, prepared in alike:
        plan = prepared.plan
        if not prepared.is_best_known:
            continue
        has_no_less = plan.budget_bytes >= budget.available_bytes
        # Bounds give several sizes one chain, and what that needs does not depend on which of them asks.
        needs_the_same = has_no_less and _costs_the_same(plan.chain, chain)
        if other_size <= size or needs_the_same:
            least_overhead = max(least_overhead, plan.overhead)
    return least_overhead


def lost_by(plan: Plan, least_overhead: float) -> float:
    """The most seconds that a better plan would save in each step."""
    # Overheads are shares of the plain step, which is what the division leaves of the plan's seconds.
    return max(plan.overhead - least_overhead, 0.0) * plan.seconds / (1 + plan.overhead)
