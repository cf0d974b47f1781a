"""Plans for calls that are alive together, path by path. A call that is on several paths has one plan.

A path is a list of calls that wait for their backward at the same time, in the order of their forwards. Paths that
share calls are planned in the order of what they need: the plan of a shared call is made for the path that needs most,
and is settled for the others.

Steps rarely repeat where sizes change, or where some calls come in some steps only. So a plan knows how much room it
leaves: the bytes that earlier calls may hold when its call begins. A call of a new size, or behind other calls, runs
under the nearest plan for no smaller sizes that has room for what the earlier calls of the step hold by then, and
nothing is searched for::

                 planned           ┌── room of 3 ──┐
    path    1 ──► 2 ──► 3          │ held by 1, 2  │  and what of the limit no call of the path uses
    step    1 ───────► 3           │ held by 1  │     so 3 runs under the same plan

Where no plan has room, or steps have lost more than a search costs, the rest of the step is planned when the call
begins, with later calls as they came in the path before that is most like it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.budget_source import BudgetSource
from lightning_rotor.planned.module_plans import Account, ModulePlans
from lightning_rotor.planned.other_sizes import SLIGHT, lost_by
from lightning_rotor.planned.prepared import Costs, Prepared, Turn, costs_of, leaves_much_room
from lightning_rotor.planned.running_step import Call, CallKey, Step
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planned.size_classes import moved
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
from lightning_rotor.planning.size_bounds import is_within
from lightning_rotor.planning.step_phases import Mark, PhaseKind, StepPhase
from lightning_rotor.profiling import Profile
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import Conditions, simulate

Path: TypeAlias = tuple[CallKey, ...]
"""Calls that wait for their backward together, in the order of their forwards."""

_MOST_PATHS = 64
# Under another plan, the code around calls takes a little more than was measured. So much of what is held stays free.
_SPARED = 0.01
# Calls whose plan was found among those for larger sizes, or behind other calls.
_MOST_SHARED = 4096
# Paths whose schedules are tried for another one: each takes a simulation.
_MOST_TRIED = 4
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


@dataclass(frozen=True, slots=True)
class _Shared:
    """A plan of another call that has room for this one, with the seconds that each call loses by it at most."""

    prepared: Prepared
    lost_seconds: float


@dataclass(frozen=True, slots=True)
class _Measured:
    """Bytes around the calls of a path, one entry a call, and those that the calls keep if nothing is recomputed."""

    outside: list[Outside]
    kept_bytes: int

    def at_least(self, other: _Measured) -> _Measured:
        """The larger of each of two measurements."""
        both = zip(self.outside, other.outside, strict=True)
        return replace(self, outside=[one.at_least(another) for one, another in both])

    def for_size(self, kept_bytes: int) -> _Measured:
        """Bytes around larger calls, in proportion; around smaller ones, no less."""
        factor = kept_bytes / max(self.kept_bytes, 1)
        if factor <= 1:
            return self
        return _Measured([each.scaled(factor) for each in self.outside], kept_bytes)


class _Order:
    """The modules that steps have called together, and those that steps with others have left out."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._left_out: set[tuple[str, str]] = set()
        self._behind: set[tuple[str, str]] = set()

    def note(self, names: Sequence[str]) -> None:
        """Calls of these modules have waited together."""
        self._known.update(names)
        absent = self._known.difference(names)
        for place, name in enumerate(names):
            self._left_out.update((other, name) for other in absent)
            self._behind.update((other, name) for other in names[place + 1 :])

    def is_left_out(self, name: str, other: str) -> bool:
        """True if a step that has called another module may be expected not to call this one behind it."""
        return (name, other) in self._left_out and (name, other) not in self._behind


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan for a path, with the seconds that each step loses at most as its schedule is another path's."""

    plan: StepPlan
    lost_seconds: float = 0.0


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
        self._outside: dict[Path, _Measured] = {}
        self._kept_whole: set[CallKey] = set()
        self._shared: dict[tuple[str, Signature, Turn], _Shared] = {}
        self._searching = Account()
        # Paths that were planned before any step has shown what lies around their calls.
        self._unmeasured: set[Path] = set()
        self._order = _Order()
        self.newest: StepPlan | None = None
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

    # ---------------------------------------------------------------- a call that begins

    def beside(
        self,
        plans: ModulePlans,
        signature: Signature,
        value: Any,
        waiting: Sequence[Call],
    ) -> Prepared | None:
        """The plan of a call that begins while others of its step wait; None if it is to be planned by itself.

        Args:
            plans: Of the module.
            signature: Of the call.
            value: Its input, to measure it if it must be.
            waiting: The calls whose backward is still to come.
        """
        plans.classes.note(signature)
        turn = tuple(call.key.name for call in waiting)
        held_bytes = sum(call.prepared.held_bytes for call in waiting)
        entry = plans.cache.use(signature, turn)
        if not isinstance(entry, Prepared):
            in_class = plans.classes.of(signature)
            entry = plans.cache.use(in_class, turn)
        if isinstance(entry, Prepared):
            if entry.is_chosen or entry.room_bytes is None:
                return None
            if held_bytes <= entry.room_bytes:
                if not entry.lost_seconds or not self._searching.pays(entry.lost_seconds):
                    return entry
                return self._planned_now(plans, signature, value, waiting, searches=True)
        else:
            shared = self._shared_by(plans, in_class, turn, held_bytes)
            if shared is not None:
                if not shared.lost_seconds or not self._searching.pays(shared.lost_seconds):
                    return shared.prepared
        return self._planned_now(plans, signature, value, waiting, searches=False)

    def _shared_by(self, plans: ModulePlans, signature: Signature, turn: Turn, held_bytes: int) -> _Shared | None:
        """The plan of a call of no smaller sizes that has room for one behind calls which hold so much."""
        place = plans.name, signature, turn
        shared = self._shared.pop(place, None)
        if shared is not None:
            prepared = shared.prepared
            is_in_use = plans.cache.use(prepared.signature, prepared.turn) is prepared
            if not is_in_use or prepared.room_bytes is None or held_bytes > prepared.room_bytes:
                shared = None
        if shared is None:
            shared = self._nearest(plans, signature, turn, held_bytes)
        if shared is not None:
            self._shared[place] = shared
            if len(self._shared) > _MOST_SHARED:
                del self._shared[next(iter(self._shared))]
        return shared

    def _nearest(self, plans: ModulePlans, signature: Signature, turn: Turn, held_bytes: int) -> _Shared | None:
        """The plan for the nearest sizes that are no smaller, with room for so much; by choice, of the same turn."""
        number = turn.count(plans.name)
        least_overhead = 0.0
        best: tuple[tuple[bool, int], Prepared] | None = None
        for known, prepared in plans.cache.planned():
            # The plan runs the stages of its own cut, and another recording does something else, for all its names.
            if prepared.room_bytes is None or prepared.is_chosen or not known.differs_in_sizes(signature):
                continue
            is_same_turn = prepared.turn == turn
            if is_same_turn and is_within(known.shapes, signature.shapes) and not prepared.lost_seconds:
                least_overhead = max(least_overhead, prepared.plan.overhead)
            # A call that is the second of its module finds other gradients than the first.
            if held_bytes > prepared.room_bytes or prepared.turn.count(plans.name) != number:
                continue
            if not is_same_turn and self._may_still_come(plans.name, turn, prepared.turn):
                continue
            rank = not is_same_turn, known.size
            if is_within(signature.shapes, known.shapes) and (best is None or rank < best[0]):
                best = rank, prepared
        if best is None:
            return None
        (is_other_turn, size), prepared = best
        lost_seconds = 0.0
        if not is_other_turn and prepared.plan.recomputed:
            lost_seconds = lost_by(prepared.plan, least_overhead) * signature.size / max(size, 1)
        return _Shared(prepared, lost_seconds)

    def _planned_now(
        self,
        plans: ModulePlans,
        signature: Signature,
        value: Any,
        waiting: Sequence[Call],
        *,
        searches: bool,
    ) -> Prepared | None:
        """A plan for the rest of a step, from a call on that begins; None if nothing is known of such steps."""
        if not self._plans:
            return None
        turn = tuple(call.key.name for call in waiting)
        known, costs = plans.costs_beside(signature, value, turn)
        began = time.perf_counter()
        key = CallKey(plans, known, turn)
        if not isinstance(key.entry(), Prepared):
            plans.cache.put(known, costs)
        before = [call.key for call in waiting]
        path = (*before, key, *self._later(key))
        settled = {call.key: call.plan for call in waiting}
        try:
            found = self._beside(path, settled, tight=False, searches=searches)
        except _NoRoomError:
            found = self._beside(path, settled, tight=True)
        if found is None:
            return None
        self._plans.pop(path, None)
        self._plans[path] = self.newest = self._put_to_use(path, found, start=len(before))
        self._forget_oldest()
        self._searching.price_seconds = max(self._searching.price_seconds, time.perf_counter() - began)
        entry = key.entry()
        return entry if isinstance(entry, Prepared) else None

    def _later(self, key: CallKey) -> list[CallKey]:
        """Calls that will come behind one, as in the path before that is most like this step."""
        like, place = self._most_like(key)
        if like is None:
            return []
        sizes_before = like[place].signature if place >= 0 and like[place].plans is key.plans else key.signature
        turn = (*key.turn, key.name)
        later = []
        names_before = [other.name for other in like[: max(place, 0)]]
        missing = [like[number] for number in self._may_still_come(key.name, key.turn, names_before)]
        for other in (*like[place + 1 :], *missing):
            signature = other.plans.classes.of(moved(other.signature, sizes_before, key.signature))
            costs = other.plans.class_costs(signature, turn)
            if costs is None:
                break
            follower = CallKey(other.plans, signature, turn)
            if not isinstance(follower.entry(), Prepared):
                other.plans.cache.put(signature, costs)
            later.append(follower)
            turn = (*turn, other.name)
        return later

    def _may_still_come(self, name: str, turn: Turn, before: Sequence[str]) -> list[int]:
        """Places of calls that come before one in other steps, did not in this one, and may come behind it instead."""
        here = list(turn)
        missing = []
        for place, other in enumerate(before):
            if other in here:
                here.remove(other)
            elif not self._order.is_left_out(other, name):
                missing.append(place)
        return missing

    def _most_like(self, key: CallKey) -> tuple[Path | None, int]:
        """The path that is most like a step from a call on, and the place of the call in it.

        Of equally good ones it is the one that needs most. A module that no path has called comes behind the calls that
        wait already.
        """
        family = key.signature.family
        number = key.turn.count(key.name)
        best: tuple[tuple[bool, bool, int], Path, int] | None = None
        for path, plan in self._plans.items():
            place, is_there, is_same_turn = -1, False, False
            for other_place, other in enumerate(path):
                if key.turn and other.name == key.turn[-1] and not is_there:
                    place = other_place
                if other.plans is not key.plans or other.turn.count(key.name) != number:
                    continue
                if other.signature.family == family:
                    place, is_there, is_same_turn = other_place, True, other.turn == key.turn
                    break
            rank = is_same_turn, is_there, plan.chain.kept_bytes
            if best is None or rank > best[0]:
                best = rank, path, place
        return (None, -1) if best is None else best[1:]

    def takes_less(self, calls: Sequence[Call]) -> bool:
        """True if the plan for calls is to take less than the plans that they have run under, or is not known.

        A plan that keeps calls whole takes more: it answers no excess.
        """
        plan = self._plans.get(_path(calls))
        if plan is None:
            return True
        as_run = concatenated([call.plan.schedule for call in calls])
        step = _with_link_of([call.plan for call in calls], plan.conditions)
        return plan.peak_bytes < simulate(plan.chain, as_run, **step).peak_bytes

    # ---------------------------------------------------------------- a step that is over

    def follow(self, step: Step, phases: Sequence[StepPhase], *, exceeds: bool) -> None:
        """Plan the paths of a step that is over, where calls had no room, or its phases have shown more of them."""
        stale = []
        for calls in step.paths:
            path = _path(calls)
            if any(key.entry() is None for key in path):
                continue  # dropped, as there are more shapes than plans are kept
            self._order.note([key.name for key in path])
            is_new = not has_room(calls)
            is_first_measurement = self._learn(path, calls, step, phases, exceeds=exceeds)
            recomputes = any(call.plan.recomputed for call in calls)
            # All processes plan, or none: one that planned alone would wait for the others.
            if self._source.ranks.any(is_new or exceeds or (is_first_measurement and recomputes)):
                stale.append(path)
        for path in stale:
            if exceeds:
                self._forget_like(path)
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
        measured = self._measured(path, calls, step, phases)
        if measured is None:
            return False
        before = self._outside.get(path)
        if before is not None and exceeds:  # what was known was too little
            measured = measured.at_least(before)
        is_of_these_sizes = all(call.signature == call.key.signature for call in calls)
        if before is None or exceeds or is_of_these_sizes:
            self._outside.pop(path, None)
            self._outside[path] = measured
            for oldest in list(self._outside)[:-_MOST_PATHS]:
                del self._outside[oldest]
        if before is None:
            self._plan_unmeasured_anew(path)
        return before is None

    def _plan_unmeasured_anew(self, path: Path) -> None:
        """Drop plans that were made when nothing was known of a step, as one is measured now."""
        for other in self._unmeasured - {path}:
            if _are_alike(path, other):
                self._drop_plans(other)
        self._unmeasured.discard(path)

    def _forget_like(self, path: Path) -> None:
        """Drop the plans of other sizes, which were made without what a step beyond the limit has shown."""
        exceeded = self._outside.get(path)
        for other in [*self._plans]:
            if other == path or not _are_alike(path, other):
                continue
            self._drop_plans(other)
            known = self._outside.get(other)
            if exceeded is not None and known is not None:
                self._outside[other] = known.at_least(exceeded.for_size(known.kept_bytes))

    def _drop_plans(self, path: Path) -> None:
        """Let the calls of a path be planned anew when they come again."""
        self._plans.pop(path, None)
        self._unmeasured.discard(path)
        for key in path:
            entry = key.entry()
            if isinstance(entry, Prepared) and not entry.is_chosen:
                key.plans.cache.put(key.signature, entry.costs)

    def _measured(
        self,
        path: Path,
        calls: Sequence[Call],
        step: Step,
        phases: Sequence[StepPhase],
    ) -> _Measured | None:
        """Bytes that a step has taken around some calls; None if the meter did not see all of them."""
        # Of the sizes that have come, which may be smaller than those that the plans are for.
        chains = [_chain_of(call) for call in calls]
        chain = joined([key.name for key in path], chains)
        schedule = concatenated([call.plan.schedule for call in calls])
        copied_bytes = _copied_bytes(call.prepared.profile for call in calls)
        budget = self._budget(chain, copied_bytes)
        beyond = []
        for phase in phases:
            if not phase.is_final:
                # What is kept free for the rest of the step is in the budget already.
                beyond.append(phase.raised(-budget.reserved_bytes))
        outside = measured_outside(
            simulate(chain, schedule, **_with_link_of([call.plan for call in calls], budget.conditions)),
            [len(each) for each in chains],
            [step.numbers[call] for call in calls],
            beyond,
            lingering_bytes=budget.lingering_bytes,
        )
        if outside is None:
            return None
        measured = _Measured(outside, sum(each.kept_bytes for each in chains))
        return measured.for_size(sum(call.plan.chain.kept_bytes for call in calls))

    # ---------------------------------------------------------------- planning

    def plan(self, path: Path) -> None:
        """Plan a path anew, and those that share calls with it; where they exclude each other, as small as can be."""
        self._plans.pop(path, None)
        related = []
        for other in self._plans:
            if not set(other).isdisjoint(path):
                related.append(other)
        order = sorted([path, *related], key=_demand, reverse=True)
        try:
            plans = self._in_order(order, tight=False)
        except _NoRoomError:
            plans = self._in_order(order, tight=True)
        renewed: set[CallKey] = set()
        for planned, found in plans.items():
            self._plans.pop(planned, None)  # so that it is now the newest
            self._plans[planned] = self._put_to_use(planned, found, renewed=renewed)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        for oldest in list(self._plans)[:-_MOST_PATHS]:
            self._forget(oldest)

    def _forget(self, path: Path) -> None:
        """Drop a path that is not among those planned last."""
        del self._plans[path]
        self._outside.pop(path, None)
        self._seen_in_part.discard(path)
        self._unmeasured.discard(path)
        # A path that is still known tells again of calls that it keeps whole.
        self._kept_whole.difference_update(path)

    def _put_to_use(
        self,
        path: Path,
        found: _Found,
        *,
        start: int = 0,
        renewed: set[CallKey] | None = None,
    ) -> StepPlan:
        """Let calls run under a plan. One that runs the same schedule goes on under the plan that it has.

        Args:
            path: The calls.
            found: Their plan.
            start: Number of the first call that is not running already. Behind it, calls stay as they are that have
                room for those before them.
            renewed: Calls whose room was told anew. What is known of the room of others does not hold any more. None
                if all of that holds.
        """
        plan = found.plan
        unused_bytes = max(plan.budget_bytes - plan.peak_bytes, 0)
        lost_seconds = found.lost_seconds
        held_bytes = 0
        calls = []
        for place, (key, call) in enumerate(zip(path, plan.calls, strict=True)):
            entry = key.entry()
            room_bytes = held_bytes + unused_bytes
            held_bytes += call.simulation.held_bytes
            if place < start or entry is None:
                calls.append(call)
                continue
            known_bytes = None
            if isinstance(entry, Prepared) and (renewed is None or key in renewed):
                known_bytes = entry.room_bytes
            if renewed is not None:
                renewed.add(key)
            if isinstance(entry, Prepared):
                is_settled = renewed is None and place > start and (known_bytes or 0) >= room_bytes - unused_bytes
                if is_settled or entry.schedule == call.schedule:
                    if not is_settled:
                        self._note_room(key, entry, max(room_bytes, known_bytes or 0), lost_seconds)
                    calls.append(entry.plan)
                    lost_seconds = 0.0
                    continue
            prepared = key.plans.use_plan(key.signature, costs_of(entry), call)
            self._note_room(key, prepared, room_bytes, lost_seconds)
            lost_seconds = 0.0
            calls.append(call)
        return replace(plan, calls=tuple(calls))

    def _note_room(self, key: CallKey, prepared: Prepared, room_bytes: int, lost_seconds: float) -> None:
        """Remember what a call's plan leaves to those before it."""
        if prepared.room_bytes != room_bytes or prepared.lost_seconds != lost_seconds:
            noted = replace(prepared, room_bytes=room_bytes, lost_seconds=lost_seconds)
            key.plans.cache.put(key.signature, noted)

    def _in_order(self, order: Sequence[Path], *, tight: bool) -> dict[Path, _Found]:
        """Plans for paths, the calls of earlier ones settled. ``_NoRoomError`` if that is why there is none."""
        plans: dict[Path, _Found] = {}
        settled: dict[CallKey, Plan] = {}
        for path in order:
            found = self._beside(path, settled, tight=tight)
            if found is not None:
                plans[path] = found
                settled.update(zip(path, found.plan.calls, strict=True))
        return plans

    def _beside(
        self,
        path: Path,
        settled: Mapping[CallKey, Plan],
        *,
        tight: bool,
        searches: bool = False,
    ) -> _Found | None:
        """A plan for a path, some of whose calls have theirs; None if one of its calls is not known any more.

        Known schedules are taken over where no better ones are to be expected, unless ``searches``.
        """
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
        measured = self._outside_of(path, chains)
        is_measured = measured is not None
        # What is not measured yet is small beside so much room.
        is_known = is_measured or self._has_much_room(parts)
        if measured is not None:
            self._unmeasured.discard(path)
            outside = measured.outside
        else:
            self._unmeasured.add(path)
            outside = [Outside()] * len(path) if is_known else self._guessed_outside(parts)
        chain = joined(parts.names, parts.parts, outside)
        budget = self._budget(chain, parts.copied_bytes)
        if tight or not is_known:
            budget = budget.reduced_to(0, "other calls, and what is not measured yet")
        else:
            budget = _sparing(budget, chain)
        shares_settled_calls = not settled.keys().isdisjoint(path)
        must_fit = is_measured and not tight and shares_settled_calls
        lost_seconds = 0.0
        solved = None
        if is_known and not tight:
            solved, lost_seconds = self._without_a_search(path, parts, chain, budget, searches=searches)
        if solved is not None:
            # Another process may have to search, and they agree once.
            solved = self._source.ranks.settle(solved)
        else:
            try:
                solved = self._solved(chain, budget, must_fit=must_fit)
            except BudgetError:
                raise _NoRoomError from None
        plan = _told_apart(solved, parts, outside)
        calls = []
        for key, call in zip(path, plan.calls, strict=True):
            calls.append(settled.get(key, call))
        return _Found(replace(plan, calls=tuple(calls)), lost_seconds)

    def _without_a_search(
        self,
        path: Path,
        parts: _Parts,
        chain: Chain,
        budget: Budget,
        *,
        searches: bool,
    ) -> tuple[Plan | None, float]:
        """The fastest plan of no recomputation and of the schedules of paths that differ in sizes, and what it loses.

        None if no such plan fits, or a search pays. Lost are at most so many seconds in each step.
        """
        limit_bytes = max(budget.available_bytes, 1)
        alike = self._nearest_paths(path, parts)
        tried = [Schedule.keep_all(len(chain))]
        if not searches:
            for other in alike:
                schedules = []
                for part, call in zip(parts.parts, other.calls, strict=True):
                    # Without moves, as there is no link for several calls.
                    schedules.append(Schedule.keep_all(1) if isinstance(part, Plan) else Schedule(call.schedule.items))
                tried.append(concatenated(schedules))
        best: Plan | None = None
        for schedule in tried:
            plan = scheduled(chain, schedule, limit_bytes, slots=self._slots, **budget.conditions)
            if plan.peak_bytes <= limit_bytes and (best is None or plan.seconds < best.seconds):
                best = plan
                if not plan.recomputed:
                    return plan, 0.0
        if best is None:
            return None, 0.0
        kept_bytes = _kept_bytes(parts.chains)
        smaller = [other.overhead for other in alike if _kept_bytes([call.chain for call in other.calls]) <= kept_bytes]
        # A larger size needs no less recomputation than a smaller one.
        least_overhead = max(smaller, default=0.0)
        if best.overhead <= least_overhead + SLIGHT:
            return best, 0.0
        lost_seconds = lost_by(best, least_overhead)
        if self._searching.pays(lost_seconds):
            return None, 0.0
        return best, lost_seconds

    def _nearest_paths(self, path: Path, parts: _Parts) -> list[StepPlan]:
        """Plans of paths that differ from one in sizes alone, of the nearest sizes."""
        kept_bytes = _kept_bytes(parts.chains)
        names = [chain.names for chain in parts.chains]
        alike: list[tuple[int, int, StepPlan]] = []
        for other, plan in self._plans.items():
            if other == path or other in self._unmeasured or not _are_alike(path, other):
                continue
            if [call.chain.names for call in plan.calls] == names:
                other_bytes = _kept_bytes([call.chain for call in plan.calls])
                alike.append((abs(other_bytes - kept_bytes), len(alike), plan))
        return [plan for _, _, plan in sorted(alike)[:_MOST_TRIED]]

    def _outside_of(self, path: Path, chains: Sequence[Chain]) -> _Measured | None:
        """Bytes around the calls of a path, as measured or as follows from another path; None before any measurement.

        That is the one of most calls in common. What is not measured takes as much as the most around any call.
        """
        own = self._outside.get(path)
        if own is not None:
            return own
        kept_bytes = _kept_bytes(chains)
        best: tuple[tuple[int, bool, int], Path, _Measured] | None = None
        for other, measured in self._outside.items():
            in_common = len({key.name for key in path} & {key.name for key in other})
            rank = in_common, _are_alike(path, other), -abs(measured.kept_bytes - kept_bytes)
            if best is None or rank > best[0]:
                best = rank, other, measured
        if best is None:
            return None
        _, other, measured = best
        if _are_alike(path, other):
            return measured.for_size(kept_bytes)
        by_name: dict[str, Outside] = {}
        most = Outside()
        for key, each in zip(other, measured.outside, strict=True):
            by_name[key.name] = each.at_least(by_name.get(key.name, each))
            most = most.at_least(each)
        outside = [by_name.get(key.name, most) for key in path]
        # Behind the last call comes the loss, whichever call that is.
        outside[-1] = outside[-1].at_least(measured.outside[-1])
        return _Measured(outside, measured.kept_bytes).for_size(kept_bytes)

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

    def _has_much_room(self, parts: _Parts) -> bool:
        """True if calls leave at least half of what they may use when nothing is recomputed."""
        chain = joined(parts.names, parts.parts)
        budget = self._budget(chain, parts.copied_bytes)
        return leaves_much_room(chain, budget)

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
    step = _with_link_of([part for part in parts.parts if isinstance(part, Plan)], solved.conditions)
    simulation = simulate(chain, schedule, **step)
    whole = replace(solved, chain=chain, schedule=schedule, simulation=simulation, link=step.get("link"))
    return StepPlan.of(whole, parts.names, parts.chains)


def _with_link_of(plans: Iterable[Plan], step: Conditions) -> Conditions:
    """A step in which calls may run that move something, though plans for several calls do not."""
    links = [plan.link for plan in plans if plan.schedule.moves]
    return {**step, "link": links[0]} if links else step


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


def has_room(calls: Sequence[Call]) -> bool:
    """True if the plan of each call that waits was made for no less than what the earlier ones hold."""
    held_bytes = 0
    for call in calls:
        room_bytes = call.prepared.room_bytes
        if room_bytes is None or held_bytes > room_bytes:
            return False
        held_bytes += call.prepared.held_bytes
    return True


def _are_alike(path: Path, other: Path) -> bool:
    """True if two paths are of the same calls, of any sizes."""
    return [key.plans for key in path] == [key.plans for key in other]


def _chain_of(call: Call) -> Chain:
    """Costs of a call as it came; of the sizes that its plan is for if it has none."""
    if call.signature is None or call.signature == call.key.signature:
        return call.plan.chain
    costs = call.key.plans.class_costs(call.signature, call.key.turn)
    return call.plan.chain if costs is None else costs.profile.chain


def _kept_bytes(chains: Iterable[Chain]) -> int:
    """Bytes that calls keep if nothing is recomputed."""
    return sum(chain.kept_bytes for chain in chains)


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
