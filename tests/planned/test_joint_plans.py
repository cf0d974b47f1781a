"""Plans for calls that are alive together: which call runs under which, and what a step that is over changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_rotor.planned.joint_plans import JointPlans
from lightning_rotor.planned.prepared import Prepared
from lightning_rotor.planned.running_step import Call, CallKey
from lightning_rotor.planning import minimum_budget
from lightning_rotor.planning.joint_chain import joined
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from tests.planned.joint_steps import Limit, Module, Recording, Source, path, phases_of, run, step_of

SLOTS = 100


@pytest.fixture
def limit() -> Limit:
    return Limit(10**9)


@pytest.fixture
def joint(limit: Limit) -> JointPlans:
    return JointPlans(Source(), limit, slots=SLOTS)


def entry(key: CallKey) -> Prepared:
    prepared = key.entry()
    assert isinstance(prepared, Prepared)
    return prepared


def path_key(module: Module, rows: int, turn: tuple[str, ...] = ()) -> CallKey:
    plans: Any = module
    return CallKey(plans, module.signature(rows), turn)


def bounds(planned: tuple[CallKey, ...]) -> tuple[int, int]:
    """Peaks of the plan that takes least, and of no recomputation."""
    plans: list[Any] = [key.plans for key in planned]
    chains = [module.chain_of(key.signature) for module, key in zip(plans, planned, strict=True)]
    chain = joined([key.name for key in planned], chains)
    return minimum_budget(chain, slots=SLOTS).peak_bytes, simulate(chain, Schedule.keep_all(len(chain))).peak_bytes


def over(joint: JointPlans, calls: list[Call], *, peak_bytes: int = 0, exceeds: bool = False) -> None:
    """A step with these calls is over, which has taken nothing around them."""
    joint.follow(step_of(calls), phases_of(calls, lambda _: peak_bytes), exceeds=exceeds)


def beside(joint: JointPlans, module: Module, rows: int, *waiting: Call, recording: Recording | None = None) -> Any:
    return joint.beside(module, module.signature(rows, recording), None, waiting)  # type: ignore[arg-type]


def test_the_least_plan_runs_until_a_step_has_shown_what_is_around_its_calls(joint: JointPlans, limit: Limit) -> None:
    planned = path("left", "right")
    _, most_bytes = bounds(planned)
    limit.size_bytes = int(1.2 * most_bytes)
    joint.plan(planned)
    assert all(entry(key).plan.recomputed for key in planned)
    first = [run(key) for key in planned]
    over(joint, first)
    assert not any(entry(key).plan.recomputed for key in planned)
    plan = joint.largest(step_of(first))
    assert plan is not None
    assert plan.peak_bytes == most_bytes
    assert not joint.takes_less(first)
    second = [run(key) for key in planned]
    before = [call.prepared for call in second]
    over(joint, second)
    assert [entry(key) for key in planned] == before  # it has shown nothing new


def test_each_plan_knows_the_room_that_it_leaves(joint: JointPlans, limit: Limit) -> None:
    planned = path("left", "right")
    limit.size_bytes = 10 * bounds(planned)[1]
    joint.plan(planned)
    left, right = map(entry, planned)
    assert left.room_bytes is not None
    assert right.room_bytes == left.room_bytes + left.held_bytes
    plan = joint.largest(step_of([run(key) for key in planned]))
    assert plan is not None
    assert left.room_bytes == plan.budget_bytes - plan.peak_bytes > 0


def test_a_call_of_two_paths_has_one_plan(joint: JointPlans, limit: Limit) -> None:
    shared, large = Module("shared"), Module("large", stages=8)
    one, other = path(shared, large), path(shared, "small")
    assert one[0] == other[0]
    limit.size_bytes = sum(bounds(one)) // 2
    joint.plan(other)
    joint.plan(one)
    for planned in (one, other):
        plan = joint.largest(step_of([run(key) for key in planned]))
        assert plan is not None
        assert plan.calls[0] is entry(one[0]).plan


def test_a_step_beyond_the_limit_leads_to_plans_that_take_less(joint: JointPlans, limit: Limit) -> None:
    module = Module("net")
    large, small = path(module, module, rows=8), path(module, module, rows=7)
    limit.size_bytes = int(1.5 * bounds(large)[1])
    for planned in (large, small):
        joint.plan(planned)
        over(joint, [run(key) for key in planned])
    calls = [run(key) for key in large]
    assert not any(call.plan.recomputed for call in calls)
    assert isinstance(small[0].entry(), Prepared)
    over(joint, calls, peak_bytes=2 * limit.size_bytes, exceeds=True)
    assert joint.takes_less(calls)
    assert all(call.has_another_plan for call in calls)
    # Plans of other sizes were made without what this step has shown.
    assert not isinstance(small[0].entry(), Prepared)


# ---------------------------------------------------------------- calls that begin


def test_a_smaller_call_runs_under_the_plan_of_a_larger_one(joint: JointPlans) -> None:
    module = Module("net")
    joint.plan(path(module, module, rows=16))
    newest = joint.newest
    prepared = beside(joint, module, 12)
    assert prepared is entry(path_key(module, 16))
    assert joint.newest is newest
    assert module.measured == []


def test_a_call_of_another_recording_gets_a_plan_of_its_own_whatever_its_names(joint: JointPlans) -> None:
    module, changed = Module("net"), Recording(4)
    joint.plan(path(module, module, rows=16))
    for rows in (12, 16, 20):
        prepared = beside(joint, module, rows, recording=changed)
        assert prepared.signature.cut is changed
        assert prepared.signature.shapes == ((rows,),)


def test_a_call_without_room_for_those_before_it_is_planned_with_them(joint: JointPlans, limit: Limit) -> None:
    module, head = Module("net"), Module("head")
    planned = path(module, head, rows=16)
    limit.size_bytes = sum(bounds(planned)) // 2
    joint.plan(planned)
    over(joint, [run(key) for key in planned])
    waiting = [run(key) for key in planned]
    newest = joint.newest
    assert beside(joint, head, 16, waiting[0]) is entry(planned[1])
    assert joint.newest is newest
    twice = beside(joint, head, 16, *waiting)  # in this step it is called once more
    assert joint.newest is not newest
    assert joint.newest is not None
    assert joint.newest.names == ("net", "head", "head")
    assert joint.newest.calls[:2] == (waiting[0].plan, waiting[1].plan)  # whose forwards are over
    assert twice.turn == ("net", "head")


def test_a_loss_of_seconds_leads_to_a_search_once_it_has_paid(joint: JointPlans, limit: Limit) -> None:
    module = Module("net")
    (key,) = path(module)
    limit.size_bytes = bounds((key,))[1]
    joint.plan((key,))
    over(joint, [run(key)])
    slow = replace(entry(key), lost_seconds=2.0)
    module.cache.put(key.signature, slow)
    joint._searching.price_seconds = 3.0
    assert beside(joint, module, 8) is slow
    newest = joint.newest
    assert beside(joint, module, 8) is not slow
    assert joint.newest is not newest
    assert entry(key).lost_seconds == 0.0


def test_a_call_is_planned_by_itself_where_the_user_has_chosen_or_nothing_is_known(joint: JointPlans) -> None:
    module = Module("net")
    assert beside(joint, module, 8) is None
    assert module.measured == []
    (key,) = path(module)
    joint.plan((key,))
    module.cache.put(key.signature, replace(entry(key), is_chosen=True))
    assert beside(joint, module, 8) is None
    module.cache.put(key.signature, replace(entry(key), is_chosen=False, room_bytes=None))
    assert beside(joint, module, 8) is None


def test_paths_planned_longest_ago_are_forgotten(joint: JointPlans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rotor.planned.joint_plans.MOST_PATHS", 2)
    module = Module("net")
    paths = [path(module, rows=rows) for rows in (4, 5, 6)]
    for planned in paths:
        joint.plan(planned)
    assert list(joint._plans) == paths[1:]
