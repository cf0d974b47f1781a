"""The plan of one path: its settled calls, schedules of other sizes, guesses before any measurement."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rotor.planned.around_calls import Around, AroundCalls
from lightning_rotor.planned.joint_paths import Path, kept_bytes
from lightning_rotor.planned.module_plans import Account
from lightning_rotor.planned.path_plans import NoRoomError, PathPlan, PathPlanner
from lightning_rotor.planning import minimum_budget, scheduled
from lightning_rotor.planning.joint_chain import Outside, StepPlan, joined
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from tests.planned.joint_steps import Limit, Module, Source, path

SLOTS = 100


class Paths:
    """A planner, with the limit and the measurements that it asks for."""

    def __init__(self) -> None:
        self.limit = Limit(10**9)
        self.around = AroundCalls(self.limit)
        self.searching = Account()
        self.planner = PathPlanner(Source(), self.limit, self.around, self.searching, slots=SLOTS)
        self.planned: dict[Path, StepPlan] = {}

    def measure(self, planned: Path) -> None:
        """A step has taken nothing around these calls."""
        self.around._measured[planned] = Around([Outside()] * len(planned), kept_bytes(chains_of(planned)))

    def plan(self, planned: Path, settled: Any = None, **options: Any) -> PathPlan:
        found = self.planner.plan(planned, settled or {}, self.planned, **{"tight": False, **options})
        assert found is not None
        self.planned[planned] = found.plan
        return found


def chains_of(planned: Path) -> list[Any]:
    plans: list[Any] = [key.plans for key in planned]
    return [module.chain_of(key.signature) for module, key in zip(plans, planned, strict=True)]


def bounds(planned: Path) -> tuple[int, int]:
    """Peaks of the plan that takes least, and of no recomputation."""
    chain = joined([key.name for key in planned], chains_of(planned))
    return minimum_budget(chain, slots=SLOTS).peak_bytes, simulate(chain, Schedule.keep_all(len(chain))).peak_bytes


def test_before_any_measurement_the_least_plan_runs_unless_half_of_the_limit_is_left() -> None:
    planned = path("left", "right")
    least_bytes, most_bytes = bounds(planned)
    paths = Paths()
    paths.limit.size_bytes = int(1.9 * most_bytes)
    assert paths.plan(planned).plan.peak_bytes <= 1.1 * least_bytes
    paths.limit.size_bytes = 2 * most_bytes
    assert not paths.plan(planned).plan.recomputed


def test_once_it_is_measured_a_path_may_use_its_budget() -> None:
    planned = path("left", "right")
    _, most_bytes = bounds(planned)
    paths = Paths()
    paths.limit.size_bytes = int(1.2 * most_bytes)
    assert paths.plan(planned).plan.recomputed
    other = path(Module("left"), Module("right"))
    assert paths.planner.unmeasured_like(planned) == []
    assert paths.planner.unmeasured_like(other) == []  # of other modules, with equal names
    paths.measure(planned)
    assert not paths.plan(planned).plan.recomputed


def test_a_measured_path_beside_steps_with_bounds_on_costs_alone_runs_under_the_least_plan_once() -> None:
    """What lies around calls with bounds seems less than it is: where it was used, a step was 8 % over its limit."""
    module = Module("net")
    paths = Paths()
    bounded, exact = path(module, rows=4), path(module, rows=8)
    least_bytes, most_bytes = bounds(exact)
    paths.limit.size_bytes = int(1.2 * most_bytes)
    paths.around._measured[bounded] = Around([Outside()], kept_bytes(chains_of(bounded)), is_exact=False)
    assert paths.plan(exact).plan.peak_bytes <= 1.1 * least_bytes
    paths.measure(exact)
    assert not paths.plan(exact).plan.recomputed
    # Further sizes have its measurement.
    assert not paths.plan(path(module, rows=7)).plan.recomputed


def test_paths_that_rest_on_a_guess_are_told_until_they_are_measured() -> None:
    paths, module = Paths(), Module("net")
    guessed, other = path(module, rows=4), path(module, rows=8)
    paths.plan(guessed)
    assert paths.planner.unmeasured_like(other) == [guessed]
    assert paths.planner.unmeasured_like(guessed) == []
    paths.planner.forget_guess(guessed)
    assert paths.planner.unmeasured_like(other) == []


def test_a_settled_call_keeps_its_plan_and_the_rest_is_planned_around_it() -> None:
    planned = path("left", "right")
    least_bytes, _ = bounds(planned)
    first, _ = chains_of(planned)
    keep_all = scheduled(first, Schedule.keep_all(len(first)))
    paths = Paths()
    paths.measure(planned)
    paths.limit.size_bytes = least_bytes + keep_all.simulation.held_bytes
    plan = paths.plan(planned, {planned[0]: keep_all}).plan
    assert plan.calls[0] is keep_all
    assert plan.calls[1].recomputed
    assert plan.peak_bytes <= paths.limit.size_bytes
    assert len(plan.chain) == 2 * len(first) + 2  # all stages of both calls, and the user's code behind each


def test_settled_calls_that_leave_no_room_are_an_error_and_others_run_under_the_least_plan() -> None:
    planned = path("left", "right")
    least_bytes, _ = bounds(planned)
    first, _ = chains_of(planned)
    settled = {planned[0]: scheduled(first, Schedule.keep_all(len(first)))}
    paths = Paths()
    paths.measure(planned)
    paths.limit.size_bytes = least_bytes // 2
    assert paths.plan(planned).plan.peak_bytes == least_bytes
    with pytest.raises(NoRoomError, match=r"^$"):
        paths.plan(planned, settled)
    assert paths.plan(planned, settled, tight=True).plan.calls[0] is settled[planned[0]]


def test_a_call_that_is_kept_whole_is_recomputed_under_no_limit() -> None:
    paths = Paths()
    module = Module("left")
    planned = path(module, "right")
    key = planned[0]
    chain = module.chain_of(key.signature)
    module.use_plan(key.signature, module.costs(key.signature), minimum_budget(chain))
    paths.measure(planned)
    paths.limit.size_bytes = 1
    assert paths.plan(planned).plan.calls[0].recomputed
    paths.planner.keep_whole(key)
    plan = paths.plan(planned, tight=True).plan
    assert not plan.calls[0].recomputed
    assert plan.calls[1].recomputed
    paths.planner.forget(planned)
    assert paths.plan(planned).plan.calls[0].recomputed


def test_the_schedule_of_another_size_is_taken_over_until_a_search_pays() -> None:
    paths, module = Paths(), Module("net", stages=8)
    large, small = path(module, rows=10), path(module, rows=9)
    least_bytes, most_bytes = bounds(large)
    paths.limit.size_bytes = (least_bytes + most_bytes) // 2
    paths.measure(large)
    paths.measure(small)
    paths.searching.price_seconds = 10**9
    by_search = paths.plan(large)
    assert by_search.plan.recomputed
    assert by_search.lost_seconds == 0.0
    taken_over = paths.plan(small)
    assert taken_over.plan.schedule == by_search.plan.schedule
    assert taken_over.lost_seconds > 0.0
    del paths.planned[small]
    searched = paths.plan(small, searches=True)
    assert searched.plan.seconds < taken_over.plan.seconds
    assert searched.lost_seconds == 0.0
    del paths.planned[small]
    paths.searching.price_seconds = 0.0
    assert paths.plan(small).plan.seconds == searched.plan.seconds


def test_a_path_with_a_call_that_is_forgotten_has_no_plan() -> None:
    module = Module("net")
    planned = path(module)
    module.cache.keep_only(lambda _: False)
    assert Paths().planner.plan(planned, {}, {}, tight=False) is None
