"""Plans for calls that are alive together, path by path. A call that is on several paths has one plan.

A path is a list of calls that wait for their backward at the same time, in the order of their forwards. Paths that
share calls are planned in the order of what they need: the plan of a shared call is made for the path that needs most,
and is settled for the others.

A call that begins goes from cheap to dear::

    its own plan ──► another call's plan that has room ──► the rest of the step is planned now
                     (plans_with_room)                      (later_calls, path_plans)

The rest of a step is planned where no plan has room, or where steps have lost more than a search costs. A step that is
over tells what lies around its calls (around_calls), and its paths are planned anew if that was not known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_rotor.chain import Chain
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.around_calls import MOST_PATHS, AroundCalls, with_link_of
from lightning_rotor.planned.budget_source import BudgetSource
from lightning_rotor.planned.joint_paths import Path, are_alike, demand_bytes, has_room, path_of
from lightning_rotor.planned.later_calls import CallOrder, later_calls
from lightning_rotor.planned.module_plans import Account, ModulePlans
from lightning_rotor.planned.path_plans import NoRoomError, PathPlan, PathPlanner
from lightning_rotor.planned.plans_with_room import PlansWithRoom
from lightning_rotor.planned.prepared import Costs, Prepared, costs_of
from lightning_rotor.planned.running_step import Call, CallKey, Step
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planning import Plan
from lightning_rotor.planning.joint_chain import StepPlan, concatenated
from lightning_rotor.planning.step_phases import StepPhase
from lightning_rotor.simulator import simulate


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
        self._searching = Account()
        self._around = AroundCalls(budget)
        self._planner = PathPlanner(source, budget, self._around, self._searching, slots=slots)
        self._order = CallOrder()
        self._lent = PlansWithRoom(self._order)
        # The path that was planned last is the last entry. Steps that never repeat would make ever more of them.
        self._plans: dict[Path, StepPlan] = {}
        self.newest: StepPlan | None = None

    def keep_whole(self, call: CallKey) -> None:
        """Recompute nothing of a call whose backward is differentiated: its graph would hold what was recomputed."""
        self._planner.keep_whole(call)

    def largest(self, step: Step) -> StepPlan | None:
        """Of the plans for the paths of a step, the one with the highest peak."""
        largest: StepPlan | None = None
        for calls in step.paths:
            plan = self._plans.get(path_of(calls))
            if plan is not None and (largest is None or plan.peak_bytes > largest.peak_bytes):
                largest = plan
        return largest

    def takes_less(self, calls: Sequence[Call]) -> bool:
        """True if the plan for calls is to take less than the plans that they have run under, or is not known.

        Asked behind a step that has exceeded the limit: where no plan takes less, training ends.
        """
        # The next plan may take more, as where calls are kept whole from now on (``keep_whole``).
        plan = self._plans.get(path_of(calls))
        if plan is None:
            return True
        # On the chain of now, with what the last step has shown: the peak that the running plans were made for is of
        # an older one.
        as_run = concatenated([call.plan.schedule for call in calls])
        conditions = with_link_of([call.plan for call in calls], plan.conditions)
        return plan.peak_bytes < simulate(plan.chain, as_run, **conditions).peak_bytes

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
        in_class = signature
        entry = plans.cache.use(signature, turn)
        if not isinstance(entry, Prepared):
            # Sizes that differ a little share a plan, or nearly every call would be planned.
            in_class = plans.classes.of(signature)
            entry = plans.cache.use(in_class, turn)
        if not isinstance(entry, Prepared):
            shared = self._lent.serving(plans, in_class, turn, held_bytes)
            if shared is not None and not self._charge_search(shared.lost_seconds):
                return shared.prepared
            return self._planned_now(plans, signature, value, waiting, searches=False)
        if entry.is_chosen or entry.room_bytes is None:
            return None
        # In this step, the calls before it hold more than in those that it was planned for.
        if held_bytes > entry.room_bytes:
            return self._planned_now(plans, signature, value, waiting, searches=False)
        if self._charge_search(entry.lost_seconds):
            return self._planned_now(plans, signature, value, waiting, searches=True)
        return entry

    def _charge_search(self, lost_seconds: float) -> bool:
        """Add a loss to the account of searches. True if calls have lost more than a search takes, which may follow."""
        return lost_seconds > 0 and self._searching.charge(lost_seconds)

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
        planned_signature, costs = plans.costs_beside(signature, value, turn)
        # Measuring the call is no part of the price of a search.
        began = time.perf_counter()
        key = CallKey(plans, planned_signature, turn)
        if not isinstance(key.entry(), Prepared):
            plans.cache.put(planned_signature, costs)
        before = path_of(waiting)
        path = (*before, key, *later_calls(key, self._plans, self._order))
        # Their forwards are over, whatever would be better for the rest.
        settled = {call.key: call.plan for call in waiting}
        try:
            found = self._planner.plan(path, settled, self._plans, tight=False, searches=searches)
        except NoRoomError:
            # Whatever the limit: the step shows if it is kept, and the limit ends training if it is not.
            found = self._planner.plan(path, settled, self._plans, tight=True)
        if found is None:
            return None
        self.newest = self._put_rest_to_use(path, found, start=len(before))
        self._keep_as_newest(path, self.newest)
        self._forget_oldest()
        seconds = time.perf_counter() - began
        self._searching.price_seconds = max(self._searching.price_seconds, seconds)
        entry = key.entry()
        return entry if isinstance(entry, Prepared) else None

    # ---------------------------------------------------------------- a step that is over

    def follow(self, step: Step, phases: Sequence[StepPhase], *, exceeds: bool) -> None:
        """Plan the paths of a step that is over, where calls had no room, or its phases have shown more of them."""
        stale = []
        for calls in step.paths:
            path = path_of(calls)
            if any(key.entry() is None for key in path):
                continue  # dropped, as there are more shapes than plans are kept
            self._order.note([key.name for key in path])
            is_new = not has_room(calls)
            is_first_measurement = self._around.learn(path, calls, step, phases, exceeds=exceeds)
            if is_first_measurement:
                self._plan_unmeasured_anew(path)
            recomputes = any(call.plan.recomputed for call in calls)
            # All processes plan, or none: one that planned alone would wait for the others.
            if self._source.ranks.any(is_new or exceeds or (is_first_measurement and recomputes)):
                stale.append(path)
        # All of the step is learned first: the paths of one step share calls.
        for path in stale:
            if exceeds:
                self._forget_like(path)
            self.plan(path)

    def _plan_unmeasured_anew(self, path: Path) -> None:
        """Drop plans that were made when nothing was known of a step, as one is measured now."""
        for other in self._planner.unmeasured_like(path):
            self._drop_plans(other)
        self._planner.forget_guess(path)

    def _forget_like(self, path: Path) -> None:
        """Drop the plans of other sizes, which were made without what a step beyond the limit has shown."""
        alike = [other for other in self._plans if other != path and are_alike(path, other)]
        for other in alike:
            self._drop_plans(other)
        self._around.learn_excess(path, alike)

    def _drop_plans(self, path: Path) -> None:
        """Let the calls of a path be planned anew when they come again."""
        self._plans.pop(path, None)
        self._planner.forget_guess(path)
        for key in path:
            entry = key.entry()
            if isinstance(entry, Prepared) and not entry.is_chosen:
                key.plans.cache.put(key.signature, entry.costs)

    # ---------------------------------------------------------------- planning

    def plan(self, path: Path) -> None:
        """Plan a path anew, and those that share calls with it; where they exclude each other, as small as can be."""
        self._plans.pop(path, None)
        related = []
        for other in self._plans:
            if not set(other).isdisjoint(path):
                related.append(other)
        # What needs most first: the others have room beside the plans that it leaves to shared calls, and it might
        # have none beside theirs.
        order = sorted([path, *related], key=demand_bytes, reverse=True)
        try:
            plans = self._in_order(order, tight=False)
        except NoRoomError:
            plans = self._in_order(order, tight=True)
        renewed: set[CallKey] = set()
        for planned, found in plans.items():
            self._keep_as_newest(planned, self._put_to_use(planned, found, renewed))
        self._forget_oldest()

    def _in_order(self, order: Sequence[Path], *, tight: bool) -> dict[Path, PathPlan]:
        """Plans for paths, the calls of earlier ones settled. ``NoRoomError`` if that is why there is none."""
        plans: dict[Path, PathPlan] = {}
        settled: dict[CallKey, Plan] = {}
        for path in order:
            found = self._planner.plan(path, settled, self._plans, tight=tight)
            if found is not None:
                plans[path] = found
                settled.update(zip(path, found.plan.calls, strict=True))
        return plans

    def _keep_as_newest(self, path: Path, plan: StepPlan) -> None:
        """Keep a plan as the newest one of all."""
        self._plans.pop(path, None)
        self._plans[path] = plan

    def _forget_oldest(self) -> None:
        for oldest in list(self._plans)[:-MOST_PATHS]:
            del self._plans[oldest]
            self._around.forget(oldest)
            self._planner.forget(oldest)

    # ---------------------------------------------------------------- plans in use

    def _put_to_use(self, path: Path, found: PathPlan, renewed: set[CallKey]) -> StepPlan:
        """Let the calls of a path run under a plan.

        Args:
            path: The calls.
            found: Their plan.
            renewed: Calls whose room was told anew, by plans of other paths. What is known of the room of others does
                not hold any more.
        """
        unused_bytes = _unused_bytes(found.plan)
        lost_seconds = found.lost_seconds
        calls = []
        for key, call, held_bytes in zip(path, found.plan.calls, _held_before(found.plan), strict=True):
            entry = key.entry()
            if entry is None:
                calls.append(call)
                continue
            # A call of several paths has a plan with each of them, and so the larger room of those.
            known_bytes = _known_room(entry) if key in renewed else 0
            renewed.add(key)
            calls.append(_run_under(call, key, entry, held_bytes + unused_bytes, known_bytes, lost_seconds))
            # The first call stands for all of them, so that the loss counts once a step.
            lost_seconds = 0.0
        return replace(found.plan, calls=tuple(calls))

    def _put_rest_to_use(self, path: Path, found: PathPlan, *, start: int) -> StepPlan:
        """Let calls run under a plan for their path, of which the first ``start`` ones run already."""
        unused_bytes = _unused_bytes(found.plan)
        held_before = _held_before(found.plan)
        lost_seconds = found.lost_seconds
        calls = []
        for place, (key, call) in enumerate(zip(path, found.plan.calls, strict=True)):
            entry = key.entry()
            if place < start or entry is None:
                calls.append(call)
                continue
            known_bytes = _known_room(entry)
            held_bytes = held_before[place]
            if place > start and isinstance(entry, Prepared) and known_bytes >= held_bytes:
                # It is only expected, and its plan has room: another one would replace it for steps that do come.
                calls.append(entry.plan)
            else:
                calls.append(_run_under(call, key, entry, held_bytes + unused_bytes, known_bytes, lost_seconds))
            lost_seconds = 0.0
        return replace(found.plan, calls=tuple(calls))


def _held_before(plan: StepPlan) -> list[int]:
    """Bytes that the earlier calls of a step hold when each call begins."""
    held_bytes = 0
    held_before = []
    for call in plan.calls:
        held_before.append(held_bytes)
        held_bytes += call.simulation.held_bytes
    return held_before


def _unused_bytes(plan: StepPlan) -> int:
    """Bytes that no call of a step uses. Each of its calls leaves them to others."""
    # A least plan may be beyond its budget, for training that goes on beyond the limit.
    return max(plan.budget_bytes - plan.peak_bytes, 0)


def _known_room(entry: Costs | Prepared) -> int:
    """Bytes that a call's plan leaves to those before it; 0 if nobody has looked."""
    if isinstance(entry, Prepared) and entry.room_bytes is not None:
        return entry.room_bytes
    return 0


def _run_under(
    plan: Plan,
    key: CallKey,
    entry: Costs | Prepared,
    room_bytes: int,
    known_bytes: int,
    lost_seconds: float,
) -> Plan:
    """Let a call run under a plan from now on, and return that; the one that it has if its schedule is the same.

    Args:
        plan: The new one.
        key: The call.
        entry: As it was before.
        room_bytes: That the new plan leaves to calls before this one.
        known_bytes: That its plan was known to leave, if it still does.
        lost_seconds: In each call, by the new plan.
    """
    if isinstance(entry, Prepared) and entry.schedule == plan.schedule:
        # The executor stays, with the seconds that it has counted.
        _note_room(key, entry, max(room_bytes, known_bytes), lost_seconds)
        return entry.plan
    prepared = key.plans.use_plan(key.signature, costs_of(entry), plan)
    _note_room(key, prepared, room_bytes, lost_seconds)
    return plan


def _note_room(key: CallKey, prepared: Prepared, room_bytes: int, lost_seconds: float) -> None:
    """Remember what a call's plan leaves to those before it."""
    # Each entry that is put ends the steady state of its module, so an equal one is not put.
    if prepared.room_bytes != room_bytes or prepared.lost_seconds != lost_seconds:
        noted = replace(prepared, room_bytes=room_bytes, lost_seconds=lost_seconds)
        key.plans.cache.put(key.signature, noted)
