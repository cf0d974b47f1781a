"""One plan for the calls of a path, from the schedules of other sizes or by a search.

Calls of a path that have a plan already (they run, or another path needed more) are settled: they are a single stage
of the path's chain, and the rest is planned around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.around_calls import AroundCalls, with_link_of
from lightning_rotor.planned.budget_source import BudgetSource
from lightning_rotor.planned.joint_paths import Path, are_alike, copied_bytes, kept_bytes
from lightning_rotor.planned.module_plans import Account
from lightning_rotor.planned.other_sizes import SLIGHT, lost_by
from lightning_rotor.planned.prepared import Costs, Prepared, costs_of, leaves_much_room
from lightning_rotor.planned.running_step import CallKey
from lightning_rotor.planning import Plan, minimum_budget
from lightning_rotor.planning.joint_chain import Outside, StepPlan, concatenated, joined, split
from lightning_rotor.planning.plan import scheduled
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate

# Under another plan, the code around calls takes a little more than was measured. So much of what is held stays free.
_SPARED = 0.01
# Paths whose schedules are tried for another one: each takes a simulation.
_MOST_TRIED = 4
# Peaks of the user's code that nobody has measured, as shares of the least plan's peak; the largest one that fits.
_GUESSES = (1.0, 0.5, 0.25, 0.0)


class NoRoomError(Exception):
    """A path has no plan beside the settled plans of other paths."""


@dataclass(frozen=True, slots=True)
class PathPlan:
    """A plan for a path, with the seconds that each step loses at most as its schedule is another path's."""

    plan: StepPlan
    lost_seconds: float = 0.0


class _TakenOver(NamedTuple):
    """A plan with a schedule that was not searched for, and the seconds that each step loses by it at most."""

    plan: Plan
    lost_seconds: float


@dataclass(frozen=True, slots=True)
class _Calls:
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

    @property
    def kept_bytes(self) -> int:
        """Bytes that they keep if nothing is recomputed."""
        return kept_bytes(self.chains)


class PathPlanner:
    """Plans for single paths.

    Args:
        source: Knows the processes that agree on plans.
        budget: Says what a chain may use that copies so many bytes.
        around: Bytes around the calls of paths.
        searching: Seconds that steps have lost for want of a search, and the price of one.
        slots: Resolution of the planner.
    """

    def __init__(
        self,
        source: BudgetSource,
        budget: Callable[[Chain, int], Budget],
        around: AroundCalls,
        searching: Account,
        *,
        slots: int,
    ) -> None:
        self._source = source
        self._budget = budget
        self._around = around
        self._searching = searching
        self._slots = slots
        self._kept_whole: set[CallKey] = set()
        # Paths that were planned before any step has shown what lies around their calls.
        self._unmeasured: set[Path] = set()

    def keep_whole(self, call: CallKey) -> None:
        """Recompute nothing of a call from now on."""
        self._kept_whole.add(call)

    def forget(self, path: Path) -> None:
        """Drop what is known of a path and its calls."""
        self._unmeasured.discard(path)
        # A path that is still known tells again of calls that it keeps whole.
        self._kept_whole.difference_update(path)

    def forget_guess(self, path: Path) -> None:
        """A path has a measurement now, or no plan any more."""
        self._unmeasured.discard(path)

    def unmeasured_like(self, path: Path) -> list[Path]:
        """Further paths of the same calls that were planned before anything was measured around them."""
        others = []
        for other in self._unmeasured:
            if other != path and are_alike(path, other):
                others.append(other)
        return others

    # ---------------------------------------------------------------- the plan of a path

    def plan(
        self,
        path: Path,
        settled: Mapping[CallKey, Plan],
        planned: Mapping[Path, StepPlan],
        *,
        tight: bool,
        searches: bool = False,
    ) -> PathPlan | None:
        """A plan for a path; None if one of its calls is not known any more.

        Args:
            path: The calls.
            settled: Plans of those that have theirs.
            planned: Plans of other paths, whose schedules are taken over where no better ones are to be expected.
            tight: Plan it as small as can be, for it excludes others.
            searches: Take no schedule over.
        Raises:
            NoRoomError: There is no plan beside the settled ones.
        """
        entries = []
        for key in path:
            entry = key.entry()
            if entry is None:
                return None
            entries.append(entry)
        settled = {**self._whole_plans(path, entries), **settled}
        calls = _calls_of(path, entries, settled)
        is_exact = not any(costs_of(entry).estimated for entry in entries)
        measured = self._around.of(path, calls.chains, is_exact=is_exact)
        is_measured = measured is not None
        # What is not measured yet is small beside so much room.
        is_known = is_measured or self._has_much_room(calls)
        if measured is not None:
            self._unmeasured.discard(path)
            outside = measured.outside
        else:
            self._unmeasured.add(path)
            outside = [Outside()] * len(path) if is_known else self._guessed_outside(calls)
        chain = joined(calls.names, calls.parts, outside)
        budget = self._budget(chain, calls.copied_bytes)
        if tight or not is_known:
            # Nothing fits in nothing, so that the plan is the one that takes least.
            budget = budget.reduced_to(0, "other calls, and what is not measured yet")
        else:
            budget = _sparing(budget, chain)
        taken_over: _TakenOver | None = None
        if is_known and not tight:
            alike = self._nearest_paths(path, calls, planned)
            taken_over = self._without_a_search(calls, alike, chain, budget, searches=searches)
        if taken_over is not None:
            # Another process may have to search, and they agree once.
            solved = self._source.ranks.settle(taken_over.plan)
        else:
            # Alone, a path that does not fit runs under the least plan. Beside settled calls there is another way:
            # all of them can be planned as small as can be.
            shares_settled_calls = not settled.keys().isdisjoint(path)
            try:
                solved = self._solved(chain, budget, must_fit=is_measured and not tight and shares_settled_calls)
            except BudgetError:
                raise NoRoomError from None
        plan = _told_apart(solved, calls, outside)
        call_plans = []
        for key, call in zip(path, plan.calls, strict=True):
            call_plans.append(settled.get(key, call))
        lost_seconds = 0.0 if taken_over is None else taken_over.lost_seconds
        return PathPlan(replace(plan, calls=tuple(call_plans)), lost_seconds)

    def _whole_plans(self, path: Path, entries: Sequence[Costs | Prepared]) -> dict[CallKey, Plan]:
        """Plans without recomputation for the calls of a path that are kept whole."""
        plans: dict[CallKey, Plan] = {}
        for key, entry in zip(path, entries, strict=True):
            if key in self._kept_whole and isinstance(entry, Prepared):
                chain = entry.profile.chain
                keep_all = Schedule.keep_all(len(chain))
                plans[key] = scheduled(chain, keep_all, **entry.plan.conditions)
        return plans

    # ---------------------------------------------------------------- before any measurement

    def _has_much_room(self, calls: _Calls) -> bool:
        """True if calls leave at least half of what they may use when nothing is recomputed."""
        chain = joined(calls.names, calls.parts)
        return leaves_much_room(chain, self._budget(chain, calls.copied_bytes))

    def _guessed_outside(self, calls: _Calls) -> list[Outside]:
        """Peaks behind calls, the higher the less calls keep, as high as the least plan allows, whatever the limit."""
        chain = joined(calls.names, calls.parts)
        budget = self._budget(chain, calls.copied_bytes)
        least = minimum_budget(chain, slots=self._slots, **budget.conditions)
        for share in _GUESSES:
            after_bytes = int(share * (least.peak_bytes - budget.lingering_bytes))
            guess = [Outside(after_bytes=after_bytes)] * len(calls.parts)
            with_guess = joined(calls.names, calls.parts, guess)
            simulation = simulate(with_guess, least.schedule, **budget.conditions)
            if simulation.peak_bytes <= least.peak_bytes:
                break
        return guess

    # ---------------------------------------------------------------- schedules of other sizes

    def _nearest_paths(self, path: Path, calls: _Calls, planned: Mapping[Path, StepPlan]) -> list[StepPlan]:
        """Plans of paths that differ from one in sizes alone, of the nearest sizes."""
        names = [chain.names for chain in calls.chains]
        alike: list[StepPlan] = []
        for other, plan in planned.items():
            # A plan that rests on a guess is the least one, whatever the limit.
            if other == path or other in self._unmeasured or not are_alike(path, other):
                continue
            # A module that was cut anew has other stages, and schedules are lists of their numbers.
            if [call.chain.names for call in plan.calls] == names:
                alike.append(plan)

        def distance(plan: StepPlan) -> int:
            return abs(_kept_by(plan) - calls.kept_bytes)

        return sorted(alike, key=distance)[:_MOST_TRIED]

    def _without_a_search(
        self,
        calls: _Calls,
        alike: Sequence[StepPlan],
        chain: Chain,
        budget: Budget,
        *,
        searches: bool,
    ) -> _TakenOver | None:
        """The fastest plan of no recomputation and of the schedules of paths that differ in sizes.

        None if no such plan fits, or a search pays.
        """
        limit_bytes = max(budget.available_bytes, 1)
        tried = [Schedule.keep_all(len(chain))]
        if not searches:
            for other in alike:
                tried.append(_schedule_for(calls, other))
        best: Plan | None = None
        for schedule in tried:
            plan = scheduled(chain, schedule, limit_bytes, slots=self._slots, **budget.conditions)
            if plan.peak_bytes > limit_bytes:
                continue
            if best is None or plan.seconds < best.seconds:
                best = plan
                # It is tried first, and nothing is faster.
                if not plan.recomputed:
                    return _TakenOver(plan, lost_seconds=0.0)
        if best is None:
            return None
        # A larger size needs no less recomputation than a smaller one.
        least_overhead = 0.0
        for other in alike:
            if _kept_by(other) <= calls.kept_bytes:
                least_overhead = max(least_overhead, other.overhead)
        if best.overhead <= least_overhead + SLIGHT:
            return _TakenOver(best, lost_seconds=0.0)
        lost_seconds = lost_by(best, least_overhead)
        if self._searching.charge(lost_seconds):
            return None
        return _TakenOver(best, lost_seconds)

    # ---------------------------------------------------------------- a search

    def _solved(self, chain: Chain, budget: Budget, *, must_fit: bool) -> Plan:
        """Plan calls, as all processes agree. Where nothing fits, a step under the least plan shows what it is."""
        outcome: Plan | BudgetError
        exceeds = False
        try:
            outcome = budget.plan(chain, slots=self._slots)
        except BudgetError as error:
            outcome = error
            if not must_fit:
                outcome = budget.least_plan(chain, error, slots=self._slots)
                exceeds = True
        # An error is told, too, since others may wait for it.
        return self._source.ranks.settle(outcome, exceeds=exceeds)


def _calls_of(path: Path, entries: Sequence[Costs | Prepared], settled: Mapping[CallKey, Plan]) -> _Calls:
    """The calls of a path, some of which are settled."""
    names: list[str] = []
    chains: list[Chain] = []
    parts: list[Chain | Plan] = []
    for key, entry in zip(path, entries, strict=True):
        chain = entry.profile.chain
        names.append(key.name)
        chains.append(chain)
        parts.append(settled.get(key, chain))
    return _Calls(names, chains, parts, copied_bytes(entry.profile for entry in entries))


def _schedule_for(calls: _Calls, other: StepPlan) -> Schedule:
    """The schedule of another path for the parts of this one."""
    schedules = []
    for part, call in zip(calls.parts, other.calls, strict=True):
        if isinstance(part, Plan):
            # A settled call is one stage.
            schedules.append(Schedule.keep_all(1))
        else:
            # Without moves, as there is no link for several calls.
            schedules.append(Schedule(call.schedule.items))
    return concatenated(schedules)


def _kept_by(plan: StepPlan) -> int:
    """Bytes that the calls of a plan keep if nothing is recomputed."""
    return kept_bytes(call.chain for call in plan.calls)


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


def _told_apart(solved: Plan, calls: _Calls, outside: Sequence[Outside]) -> StepPlan:
    """A plan for joined calls, some of which were settled, as one for all of their stages."""
    # A settled call was one stage, and is all of its stages in the plan.
    lengths = []
    settled = []
    for part in calls.parts:
        lengths.append(1 if isinstance(part, Plan) else len(part))
        if isinstance(part, Plan):
            settled.append(part)
    schedules = []
    for part, schedule in zip(calls.parts, split(solved.schedule, lengths), strict=True):
        schedules.append(part.schedule if isinstance(part, Plan) else schedule)
    chain = joined(calls.names, calls.chains, outside)
    schedule = concatenated(schedules)
    conditions = with_link_of(settled, solved.conditions)
    simulation = simulate(chain, schedule, **conditions)
    whole = replace(
        solved,
        chain=chain,
        schedule=schedule,
        simulation=simulation,
        link=conditions.get("link"),
    )
    return StepPlan.of(whole, calls.names, calls.chains)
