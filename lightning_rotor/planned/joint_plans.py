"""Plans for calls that are alive together, path by path. A call that is on several paths has one plan.

A path is a list of calls that wait for their backward at the same time, in the order of their forwards. Paths that
share calls are planned in the order of what they need: the plan of a shared call is made for the path that needs most,
and is settled for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import TypeAlias

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.budget_source import BudgetSource
from lightning_rotor.planned.prepared import Prepared
from lightning_rotor.planned.running_step import Call, CallKey, Step
from lightning_rotor.planning import Plan, minimum_budget
from lightning_rotor.planning.joint_chain import Outside, StepPlan, concatenated, joined, split
from lightning_rotor.planning.outside import measured_outside
from lightning_rotor.planning.plan import scheduled
from lightning_rotor.planning.step_phases import Mark, PhaseKind, StepPhase
from lightning_rotor.profiling import Profile
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate

_MOST_PATHS = 64
_SPARED = 0.01  # of what is taken: under another plan, the code around calls takes a little more
Path: TypeAlias = tuple[CallKey, ...]
"""Calls that wait for their backward together, in the order of their forwards."""


class _NoRoomError(Exception):
    """A path has no plan beside the settled plans of other paths."""


class JointPlans:
    """Plans for calls that are alive together: the least ones until a step has shown what lies around its calls.

    Args:
        source: Knows the processes that agree on plans, and hears of plans.
        budget: Says what a chain may use that copies so many bytes.
        slots: Resolution of the planner.
    """

    def __init__(self, source: BudgetSource, budget: Callable[[Chain, int], Budget], *, slots: int) -> None:
        self._source, self._budget, self._slots = source, budget, slots
        self._plans: dict[Path, StepPlan] = {}
        self._outside: dict[Path, list[Outside]] = {}  # as measured
        self._kept_whole: set[CallKey] = set()
        self._seen_in_part: set[Path] = set()

    def keep_whole(self, call: CallKey) -> None:
        """Recompute nothing of a call whose backward is differentiated: its graph would hold what was recomputed."""
        self._kept_whole.add(call)

    def largest(self, step: Step) -> StepPlan | None:
        """Of the plans for the paths of a step, the one with the highest peak."""
        plans = [self._plans.get(_path(calls)) for calls in step.paths]
        return max(filter(None, plans), key=lambda plan: plan.peak_bytes, default=None)

    def running(self, calls: Sequence[Call]) -> StepPlan | None:
        """The plan that calls have run under, or None if each had one of its own."""
        plan = self._plans.get(_path(calls))
        if plan is None or any(call.plan is not part for call, part in zip(calls, plan.calls, strict=True)):
            return None
        return plan

    # ---------------------------------------------------------------- a step that is over

    def follow(self, step: Step, phases: Sequence[StepPhase], *, exceeds: bool) -> None:
        """Plan the paths of a step that is over, where they have no plan, or its phases have shown more of them."""
        stale = []
        for calls in step.paths:
            path = _path(calls)
            if any(key.entry() is None for key in path):  # dropped, as there are more shapes than plans are kept
                continue
            is_new = self.running(calls) is None
            is_first_measurement = self._learn(path, calls, step, phases, exceeds=exceeds)
            if self._source.ranks.any(is_new or is_first_measurement or exceeds):  # whoever planned alone would wait
                stale.append(path)
        for path in stale:
            self.plan(path)

    def _learn(
        self, path: Path, calls: Sequence[Call], step: Step, phases: Sequence[StepPhase], *, exceeds: bool
    ) -> bool:
        """Keep what the step has taken around some calls. True if nothing was known of it."""
        if not phases:
            return False
        marks = {phase.mark for phase in phases}
        sees_all_backwards = all(Mark(PhaseKind.BACKWARD, step.numbers[call]) in marks for call in calls)
        if not sees_all_backwards and path not in self._seen_in_part:
            self._seen_in_part.add(path)  # the next step may show all of it; if not, this is all there is
            return False
        names, chains = [key.name for key in path], [call.plan.chain for call in calls]
        chain = joined(names, chains)
        schedule = concatenated([call.plan.schedule for call in calls])
        budget = self._budget(chain, _copied_bytes(call.prepared.profile for call in calls))
        # What is kept free for the rest of the step is in the budget already.
        beyond = [phase.raised(-budget.reserved_bytes) for phase in phases if not phase.is_final]
        outside = measured_outside(
            simulate(chain, schedule, **budget.conditions),
            [len(each) for each in chains],
            [step.numbers[call] for call in calls],
            beyond,
            lingering_bytes=budget.lingering_bytes,
        )
        if outside is None:
            return False
        before = self._outside.get(path)
        if before is not None and exceeds:  # what was known was too little
            outside = [
                Outside(*map(max, astuple(known), astuple(seen))) for known, seen in zip(before, outside, strict=True)
            ]
        self._outside[path] = outside
        return before is None

    # ---------------------------------------------------------------- planning

    def plan(self, path: Path) -> None:
        """Plan a path anew, and those that share calls with it; where they exclude each other, as small as can be."""
        related = [other for other in self._plans if other != path and not set(other).isdisjoint(path)]
        order = sorted([path, *related], key=_demand, reverse=True)
        try:
            plans = self._in_order(order, tight=False)
        except _NoRoomError:
            plans = self._in_order(order, tight=True)
        self._plans.pop(path, None)
        for planned, plan in plans.items():
            self._plans.pop(planned, None)
            self._plans[planned] = self._put_to_use(planned, plan)
        for oldest in list(self._plans)[:-_MOST_PATHS]:
            del self._plans[oldest]
            self._outside.pop(oldest, None)
            self._seen_in_part.discard(oldest)
            self._kept_whole.difference_update(oldest)  # a path that is still known tells again

    def _put_to_use(self, path: Path, plan: StepPlan) -> StepPlan:
        """Let calls run under a plan. One that runs the same schedule goes on under the plan that it has."""
        parts = []
        for key, part in zip(path, plan.calls, strict=True):
            entry = key.entry()
            if isinstance(entry, Prepared) and entry.schedule == part.schedule:
                part = entry.plan
            elif isinstance(entry, Prepared):
                key.plans.use_plan(key.signature, entry.costs, part)
            elif entry is not None:
                key.plans.use_plan(key.signature, entry, part)
            parts.append(part)
        return replace(plan, calls=tuple(parts))

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

    def _beside(self, path: Path, settled: Mapping[CallKey, Plan], *, tight: bool) -> StepPlan | None:
        """A plan for a path, some of whose calls have theirs; None if one of its calls is not known any more."""
        entries = [entry for key in path if (entry := key.entry()) is not None]
        if len(entries) < len(path):
            return None
        names = [key.name for key in path]
        chains = [entry.profile.chain for entry in entries]
        kept_whole: dict[CallKey, Plan] = {}
        for key, entry in zip(path, entries, strict=True):
            if key in self._kept_whole and isinstance(entry, Prepared):
                chain = entry.profile.chain
                kept_whole[key] = scheduled(chain, Schedule.keep_all(len(chain)), **entry.plan.conditions)
        settled = {**kept_whole, **settled}
        parts = [settled.get(key, chain) for key, chain in zip(path, chains, strict=True)]
        is_measured = path in self._outside
        outside: Sequence[Outside] = self._outside.get(path, ())
        chain = joined(names, parts, outside)
        budget = self._budget(chain, _copied_bytes(entry.profile for entry in entries))
        if not is_measured:
            outside = self._guessed_outside(names, parts, budget)
            chain = joined(names, parts, outside)
        if not is_measured or tight:
            budget = budget.reduced_to(0, "other calls, and what is not measured yet")
        else:
            budget = _sparing(budget, chain)
        must_fit = is_measured and not tight and not settled.keys().isdisjoint(path)
        try:
            solved = self._solved(chain, budget, must_fit=must_fit)
        except BudgetError:
            raise _NoRoomError from None
        # A settled call was one stage, and is all of its stages in the plan.
        lengths = [1 if isinstance(part, Plan) else len(part) for part in parts]
        schedules = [
            part.schedule if isinstance(part, Plan) else schedule
            for part, schedule in zip(parts, split(solved.schedule, lengths), strict=True)
        ]
        chain, schedule = joined(names, chains, outside), concatenated(schedules)
        simulation = simulate(chain, schedule, **solved.conditions)
        plan = StepPlan.of(replace(solved, chain=chain, schedule=schedule, simulation=simulation), names, chains)
        return replace(plan, calls=tuple(settled.get(key, part) for key, part in zip(path, plan.calls, strict=True)))

    def _guessed_outside(self, names: Sequence[str], parts: Sequence[Chain | Plan], budget: Budget) -> list[Outside]:
        """Peaks behind calls, the higher the less calls keep, as high as the least plan allows, whatever the limit."""
        least = minimum_budget(joined(names, parts), slots=self._slots, **budget.conditions)
        for share in (1.0, 0.5, 0.25, 0.0):
            after_bytes = int(share * (least.peak_bytes - budget.lingering_bytes))
            guess = [Outside(after_bytes=after_bytes)] * len(parts)
            guessed = simulate(joined(names, parts, guess), least.schedule, **budget.conditions)
            if guessed.peak_bytes <= least.peak_bytes:
                break
        return guess

    def _solved(self, chain: Chain, budget: Budget, *, must_fit: bool) -> Plan:
        """Plan calls, as all processes agree. Where nothing fits, a step under the least plan shows what it is."""
        outcome: Plan | BudgetError
        try:
            outcome = budget.plan(chain, slots=self._slots)
        except BudgetError as error:
            outcome = error if must_fit else budget.least_plan(chain, error, slots=self._slots)
        return self._source.ranks.settle(outcome)  # an error, too, since others may wait for it


def _sparing(budget: Budget, chain: Chain) -> Budget:
    """A budget with a little less for a chain, in proportion to what the process holds."""
    plain = simulate(chain, Schedule.keep_all(len(chain)), **budget.conditions)
    held_bytes = min(budget.limit_bytes, budget.reserved_bytes + plain.peak_bytes)  # less where all fits with ease
    spared_bytes = int(held_bytes * _SPARED)
    return replace(budget, available_bytes=budget.available_bytes - spared_bytes, guessed_bytes=spared_bytes)


def _path(calls: Sequence[Call]) -> Path:
    """The same calls in every step."""
    return tuple(call.key for call in calls)


def _copied_bytes(profiles: Iterable[Profile]) -> int:
    """Bytes that the forwards of some calls copy."""
    return sum(profile.copied_bytes for profile in profiles)


def _demand(path: Path) -> int:
    """Bytes that a path holds if nothing is recomputed."""
    entries = [key.entry() for key in path]
    return sum(max(entry.profile.chain.kept_bytes, 1) for entry in entries if entry is not None)
