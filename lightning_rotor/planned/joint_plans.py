"""Plans for calls that are alive together, path by path. A call that is on several paths has one plan.

A path is a list of calls that wait for their backward at the same time, in the order of their forwards. Paths that
share calls are planned in the order of what they need: the plan of a shared call is made for the path that needs most,
and is settled for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.budget_source import BudgetSource
from lightning_rotor.planned.prepared import Costs, Prepared, costs_of
from lightning_rotor.planned.running_step import Call, CallKey, Step
from lightning_rotor.planning import Plan, minimum_budget
from lightning_rotor.planning.joint_chain import (
    Outside,
    StepPlan,
    concatenated,
    joined,
    split,
)
from lightning_rotor.planning.outside import measured_outside
from lightning_rotor.planning.plan import scheduled
from lightning_rotor.planning.step_phases import Mark, PhaseKind, StepPhase
from lightning_rotor.profiling import Profile
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate

Path: TypeAlias = tuple[CallKey, ...]
"""Calls that wait for their backward together, in the order of their forwards."""

_MOST_PATHS = 64
# Under another plan, the code around calls takes a little more than was measured. So much of what is held stays free.
_SPARED = 0.01
# Peaks of the user's code that nobody has measured, as shares of the least plan's peak; the largest one that fits.
_GUESSES = (1.0, 0.5, 0.25, 0.0)


class _NoRoomError(Exception):
    """A path has no plan beside the settled plans of other paths."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """The calls of a path, for one plan.

    Attributes:
        names: Of the modules.
        chains: Of the calls.
        parts: The same, but a plan for a call whose plan is settled.
        copied_bytes: That the forwards of the calls copy.
    """

    names: list[str]
    chains: list[Chain]
    parts: list[Chain | Plan]
    copied_bytes: int


class JointPlans:
    """Plans for calls that are alive together: the least ones until a step has shown what lies around its calls.

    Args:
        source: Knows the processes that agree on plans, and hears of plans.
        budget: Says what a chain may use that copies so many bytes.
        slots: Resolution of the planner.
    """

    def __init__(
        self,
        source: BudgetSource,
        budget: Callable[[Chain, int], Budget],
        *,
        slots: int,
    ) -> None:
        self._source = source
        self._budget = budget
        self._slots = slots
        self._plans: dict[Path, StepPlan] = {}
        # As measured; a path that is not there was never seen whole.
        self._outside: dict[Path, list[Outside]] = {}
        self._kept_whole: set[CallKey] = set()
        self._seen_in_part: set[Path] = set()

    def keep_whole(self, call: CallKey) -> None:
        """Recompute nothing of a call whose backward is differentiated: its graph would hold what was recomputed."""
        self._kept_whole.add(call)

    def largest(self, step: Step) -> StepPlan | None:
        """Of the plans for the paths of a step, the one with the highest peak."""
        plans = [self._plans.get(_path(calls)) for calls in step.paths]
        return max(
            filter(None, plans),
            key=lambda plan: plan.peak_bytes,
            default=None,
        )

    def running(self, calls: Sequence[Call]) -> StepPlan | None:
        """The plan that calls have run under, or None if each had one of its own."""
        plan = self._plans.get(_path(calls))
        if plan is None:
            return None
        for call, part in zip(calls, plan.calls, strict=True):
            if call.plan is not part:
                return None
        return plan

    def takes_less(self, calls: Sequence[Call]) -> bool:
        """True if the plan for calls is to take less than the plans that they have run under, or is not known.

        A plan that keeps calls whole takes more: it answers no excess.
        """
        plan = self._plans.get(_path(calls))
        if plan is None:
            return True
        as_run = concatenated([call.plan.schedule for call in calls])
        return plan.peak_bytes < simulate(plan.chain, as_run, **plan.conditions).peak_bytes

    # ---------------------------------------------------------------- a step that is over

    def follow(self, step: Step, phases: Sequence[StepPhase], *, exceeds: bool) -> None:
        """Plan the paths of a step that is over, where they have no plan, or its phases have shown more of them."""
        stale = []
        for calls in step.paths:
            path = _path(calls)
            if any(key.entry() is None for key in path):
                continue  # dropped, as there are more shapes than plans are kept
            is_new = self.running(calls) is None
            is_first_measurement = self._learn(path, calls, step, phases, exceeds=exceeds)
            # All processes plan, or none: one that planned alone would wait for the others.
            if self._source.ranks.any(is_new or is_first_measurement or exceeds):
                stale.append(path)
        for path in stale:
            self.plan(path)

    def _learn(
        self,
        path: Path,
        calls: Sequence[Call],
        step: Step,
        phases: Sequence[StepPhase],
        *,
        exceeds: bool,
    ) -> bool:
        """Keep what the step has taken around some calls. True if nothing was known of it."""
        if not phases:
            return False
        if not _sees_all_backwards(step, calls, phases) and path not in self._seen_in_part:
            # The next step may show all of it. If it does not, this is all there is: a call without a gradient.
            self._seen_in_part.add(path)
            return False
        outside = self._measured(path, calls, step, phases)
        if outside is None:
            return False
        before = self._outside.get(path)
        if before is not None and exceeds:  # what was known was too little
            outside = [known.at_least(seen) for known, seen in zip(before, outside, strict=True)]
        self._outside[path] = outside
        return before is None

    def _measured(
        self,
        path: Path,
        calls: Sequence[Call],
        step: Step,
        phases: Sequence[StepPhase],
    ) -> list[Outside] | None:
        """Bytes that a step has taken around some calls; None if the meter did not see all of them."""
        chains = [call.plan.chain for call in calls]
        chain = joined([key.name for key in path], chains)
        schedule = concatenated([call.plan.schedule for call in calls])
        copied_bytes = _copied_bytes(call.prepared.profile for call in calls)
        budget = self._budget(chain, copied_bytes)
        beyond = []
        for phase in phases:
            if not phase.is_final:
                # What is kept free for the rest of the step is in the budget already.
                beyond.append(phase.raised(-budget.reserved_bytes))
        return measured_outside(
            simulate(chain, schedule, **budget.conditions),
            [len(each) for each in chains],
            [step.numbers[call] for call in calls],
            beyond,
            lingering_bytes=budget.lingering_bytes,
        )

    # ---------------------------------------------------------------- planning

    def plan(self, path: Path) -> None:
        """Plan a path anew, and those that share calls with it; where they exclude each other, as small as can be."""
        related = []
        for other in self._plans:
            if other != path and not set(other).isdisjoint(path):
                related.append(other)
        order = sorted([path, *related], key=_demand, reverse=True)
        try:
            plans = self._in_order(order, tight=False)
        except _NoRoomError:
            plans = self._in_order(order, tight=True)
        self._plans.pop(path, None)
        for planned, plan in plans.items():
            self._plans.pop(planned, None)  # so that it is now the newest
            self._plans[planned] = self._put_to_use(planned, plan)
        for oldest in list(self._plans)[:-_MOST_PATHS]:
            self._forget(oldest)

    def _forget(self, path: Path) -> None:
        """Drop a path that is not among those planned last."""
        del self._plans[path]
        self._outside.pop(path, None)
        self._seen_in_part.discard(path)
        # A path that is still known tells again of calls that it keeps whole.
        self._kept_whole.difference_update(path)

    def _put_to_use(self, path: Path, plan: StepPlan) -> StepPlan:
        """Let calls run under a plan. One that runs the same schedule goes on under the plan that it has."""
        calls = []
        for key, call in zip(path, plan.calls, strict=True):
            entry = key.entry()
            if isinstance(entry, Prepared) and entry.schedule == call.schedule:
                calls.append(entry.plan)
                continue
            if entry is not None:
                key.plans.use_plan(key.signature, costs_of(entry), call)
            calls.append(call)
        return replace(plan, calls=tuple(calls))

    def _in_order(self, order: Sequence[Path], *, tight: bool) -> dict[Path, StepPlan]:
        """Plans for paths, the calls of earlier ones settled. ``_NoRoomError`` if that is why there is none."""
        plans: dict[Path, StepPlan] = {}
        settled: dict[CallKey, Plan] = {}
        for path in order:
            plan = self._beside(path, settled, tight=tight)
            if plan is not None:
                plans[path] = plan
                settled.update(zip(path, plan.calls, strict=True))
        return plans

    def _beside(
        self,
        path: Path,
        settled: Mapping[CallKey, Plan],
        *,
        tight: bool,
    ) -> StepPlan | None:
        """A plan for a path, some of whose calls have theirs; None if one of its calls is not known any more."""
        entries = [key.entry() for key in path]
        known = [entry for entry in entries if entry is not None]
        if len(known) < len(entries):
            return None
        settled = {**self._whole_plans(path, known), **settled}
        chains = [entry.profile.chain for entry in known]
        parts = _Parts(
            names=[key.name for key in path],
            chains=chains,
            parts=[settled.get(key, chain) for key, chain in zip(path, chains, strict=True)],
            copied_bytes=_copied_bytes(entry.profile for entry in known),
        )
        is_measured = path in self._outside
        outside = self._outside[path] if is_measured else self._guessed_outside(parts)
        chain = joined(parts.names, parts.parts, outside)
        budget = self._budget(chain, parts.copied_bytes)
        if tight or not is_measured:
            budget = budget.reduced_to(0, "other calls, and what is not measured yet")
        else:
            budget = _sparing(budget, chain)
        shares_settled_calls = not settled.keys().isdisjoint(path)
        must_fit = is_measured and not tight and shares_settled_calls
        try:
            solved = self._solved(chain, budget, must_fit=must_fit)
        except BudgetError:
            raise _NoRoomError from None
        plan = _told_apart(solved, parts, outside)
        calls = []
        for key, call in zip(path, plan.calls, strict=True):
            calls.append(settled.get(key, call))
        return replace(plan, calls=tuple(calls))

    def _whole_plans(
        self,
        path: Path,
        entries: Sequence[Costs | Prepared],
    ) -> dict[CallKey, Plan]:
        """Plans without recomputation for the calls of a path that are kept whole."""
        plans: dict[CallKey, Plan] = {}
        for key, entry in zip(path, entries, strict=True):
            if key in self._kept_whole and isinstance(entry, Prepared):
                chain = entry.profile.chain
                keep_all = Schedule.keep_all(len(chain))
                plans[key] = scheduled(chain, keep_all, **entry.plan.conditions)
        return plans

    def _guessed_outside(self, parts: _Parts) -> list[Outside]:
        """Peaks behind calls, the higher the less calls keep, as high as the least plan allows, whatever the limit."""
        chain = joined(parts.names, parts.parts)
        budget = self._budget(chain, parts.copied_bytes)
        least = minimum_budget(chain, slots=self._slots, **budget.conditions)
        for share in _GUESSES:
            after_bytes = int(share * (least.peak_bytes - budget.lingering_bytes))
            guess = [Outside(after_bytes=after_bytes)] * len(parts.parts)
            with_guess = joined(parts.names, parts.parts, guess)
            simulation = simulate(with_guess, least.schedule, **budget.conditions)
            if simulation.peak_bytes <= least.peak_bytes:
                break
        return guess

    def _solved(self, chain: Chain, budget: Budget, *, must_fit: bool) -> Plan:
        """Plan calls, as all processes agree. Where nothing fits, a step under the least plan shows what it is."""
        outcome: Plan | BudgetError
        try:
            outcome = budget.plan(chain, slots=self._slots)
        except BudgetError as error:
            outcome = error
            if not must_fit:
                outcome = budget.least_plan(chain, error, slots=self._slots)
        # An error is told, too, since others may wait for it.
        return self._source.ranks.settle(outcome)


def _told_apart(solved: Plan, parts: _Parts, outside: Sequence[Outside]) -> StepPlan:
    """A plan for joined calls, some of which were settled, as one for all of their stages."""
    # A settled call was one stage, and is all of its stages in the plan.
    lengths = [1 if isinstance(part, Plan) else len(part) for part in parts.parts]
    schedules = []
    for part, schedule in zip(parts.parts, split(solved.schedule, lengths), strict=True):
        schedules.append(part.schedule if isinstance(part, Plan) else schedule)
    chain = joined(parts.names, parts.chains, outside)
    schedule = concatenated(schedules)
    simulation = simulate(chain, schedule, **solved.conditions)
    whole = replace(solved, chain=chain, schedule=schedule, simulation=simulation)
    return StepPlan.of(whole, parts.names, parts.chains)


def _sees_all_backwards(step: Step, calls: Sequence[Call], phases: Sequence[StepPhase]) -> bool:
    """True if the meter has seen the backward of all of these calls."""
    marks = {phase.mark for phase in phases}
    return all(Mark(PhaseKind.BACKWARD, step.numbers[call]) in marks for call in calls)


def _sparing(budget: Budget, chain: Chain) -> Budget:
    """A budget with a little less for a chain, in proportion to what the process holds.

    The least plan may take it after all, as it is only guessed to be needed.
    """
    plain = simulate(chain, Schedule.keep_all(len(chain)), **budget.conditions)
    # Where all fits with ease, that is less than the limit: 1 % of a limit of 1 TiB would stand in every table.
    held_bytes = min(budget.limit_bytes, budget.reserved_bytes + plain.peak_bytes)
    spared_bytes = int(held_bytes * _SPARED)
    return replace(
        budget,
        available_bytes=budget.available_bytes - spared_bytes,
        guessed_bytes=spared_bytes,
    )


def _path(calls: Sequence[Call]) -> Path:
    """The calls as they return in every step."""
    return tuple(call.key for call in calls)


def _copied_bytes(profiles: Iterable[Profile]) -> int:
    """Bytes that the forwards of some calls copy."""
    return sum(profile.copied_bytes for profile in profiles)


def _demand(path: Path) -> int:
    """Bytes that a path holds if nothing is recomputed."""
    demand_bytes = 0
    for key in path:
        entry = key.entry()
        if entry is not None:
            demand_bytes += max(entry.profile.chain.kept_bytes, 1)
    return demand_bytes
