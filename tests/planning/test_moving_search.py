"""Plans that may move what stages hold: they fit, are never slower than others, and close to the best."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.offload import cases_of, llama_layers
from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.link import Link
from lightning_rotor.planning import Solver, frontier, minimum_budget, plan
from lightning_rotor.planning.edits import divisions
from lightning_rotor.planning.moving_search import MovingSearch
from lightning_rotor.planning.placing import placed
from lightning_rotor.planning.schedule_search import ScheduleSearch
from lightning_rotor.schedule import Move, Schedule
from lightning_rotor.simulator import Conditions, movable, simulate
from tests.grids import examples, few
from tests.strategies import KINDS, random_chain, random_link, random_schedule, with_skips


def random_case(rng: random.Random) -> tuple[Chain, Conditions]:
    chain = random_chain(rng, rng.randint(2, 6), rng.choice(KINDS))
    if len(chain) > 2 and rng.random() < 0.3:
        chain = with_skips(rng, chain)
    step: Conditions = {"gradients_exist": rng.random() < 0.5, "lingering_bytes": rng.choice((0, 0, 50))}
    return chain, {**step, "link": random_link(rng, chain)}


@settings(max_examples=examples(10, 25))
@given(st.randoms(use_true_random=False))
def test_plans_fit_and_are_never_slower_than_those_that_move_nothing(rng: random.Random) -> None:
    chain, step = random_case(rng)
    without: Conditions = {**step, "link": None}
    most = simulate(chain, Schedule.keep_all(len(chain)), **step).peak_bytes
    solver, today = Solver(chain, slots=100, **step), Solver(chain, slots=100, **without)
    least, least_today = solver.minimum().peak_bytes, today.minimum().peak_bytes
    assert least <= least_today
    for budget in (least, *(rng.randint(least, max(most, least)) for _ in range(2))):
        found = solver.plan(budget)
        assert found.peak_bytes <= budget
        assert simulate(chain, found.schedule, **step) == found.simulation
        if budget >= least_today:
            assert found.seconds <= today.plan(budget).seconds * (1 + 1e-9)
    with pytest.raises(BudgetError, match="is below this chain's minimum"):
        solver.plan(least - 1)


@pytest.mark.parametrize("seed", few([37, 38], 38))
def test_no_plan_fits_below_the_least_budget(seed: int) -> None:
    """Of these chains other candidates than those of the tables lead to the least peak."""
    chain, step = random_case(random.Random(seed))
    solver = Solver(chain, slots=100, **step)
    least = solver.minimum().peak_bytes
    assert solver.plan(least).peak_bytes == least
    with pytest.raises(BudgetError, match="is below this chain's minimum"):
        solver.plan(least - 1)


@settings(max_examples=examples(16, 40))
@given(st.randoms(use_true_random=False))
def test_placed_moves_fit_the_budget_and_the_other_memory(rng: random.Random) -> None:
    chain, step = random_case(rng)
    schedule = random_schedule(rng, chain)
    able = movable(chain, schedule.items)
    whole = tuple(Move.whole(number, len(schedule.items)) for number in able)
    longest = simulate(chain, Schedule(schedule.items, whole), **step)
    stays = simulate(chain, schedule, **step)
    budget = rng.randint(longest.peak_bytes, stays.peak_bytes)
    found = placed(chain, schedule, able, budget, step)
    assert found is not None
    assert found.peak_bytes <= budget
    assert found.seconds <= longest.seconds * (1 + 1e-9)
    assert placed(chain, schedule, able, longest.peak_bytes - 1, step) is None
    link = step["link"]
    assert link is not None
    room = rng.randint(0, longest.host_bytes)
    found = placed(chain, schedule, able, stays.peak_bytes, {**step, "link": replace(link, room_bytes=room)})
    assert found is not None
    assert found.host_bytes <= room


def test_what_the_budget_does_not_ask_for_stays() -> None:
    chain = random_chain(random.Random(1), 6, "transformer")
    schedule = Schedule.keep_all(6)
    peak = simulate(chain, schedule).peak_bytes
    found = placed(chain, schedule, movable(chain, schedule.items), peak, {"link": Link(1.0, 1.0)})
    assert found is not None
    assert found.schedule == schedule


def test_without_a_link_plans_are_those_of_before() -> None:
    for seed in range(10):
        chain = random_chain(random.Random(seed), 6, "options")
        budget = minimum_budget(chain).peak_bytes * 5 // 4
        found = plan(chain, budget, link=None)
        assert not found.moved
        assert found.schedule == plan(chain, budget).schedule
        assert found.to_plain() == plan(chain, budget).to_plain()


def test_plans_are_close_to_the_best_of_all_trees_and_moves() -> None:
    """benchmarks/results/offload.md has a thousand chains."""
    cases = [case for seed in range(20, 28) for case in cases_of(seed)]
    assert statistics.mean(case.plan - 1 for case in cases) < 0.01
    assert all(case.bound <= 1 + 1e-9 for case in cases)


def test_divisions_of_segments_stand_side_by_side_and_in_order() -> None:
    def divided(text: str) -> list[str]:
        return [str(schedule) for schedule in divisions(Schedule.parse(text))]

    assert divided("0 (1-3) 4") == ["0 (1) (2-3) 4", "0 (1-2) (3) 4"]
    assert divided("((0-1) 2-3) 4") == ["(0-1) (2-3) 4", "((0-1) 2) (3) 4"]
    # A segment ends in a stage, so none ends behind the inner one.
    assert divided("(0 (1) 2) 3") == ["(0) ((1) 2) 3"]
    assert divided("0-2") == divided("(0) 1") == []


@pytest.mark.parametrize("seed", few([644, 815], 815))
def test_segments_are_divided_where_their_inputs_can_move(seed: int) -> None:
    """The best of these have a segment for each stage that no candidate has, as without moves it takes more memory."""
    assert all(case.plan <= 1 + 1e-9 for case in cases_of(seed))


def test_language_models_gain_what_the_link_carries() -> None:
    chain = llama_layers(4096, layers=12)
    peak = simulate(chain, Schedule.keep_all(12), gradients_exist=True).peak_bytes
    today, pcie, nvlink = (
        Solver(chain, gradients_exist=True, link=link).plan(int(0.4 * peak))
        for link in (None, Link(50e9, 50e9), Link(170e9, 410e9))
    )
    assert nvlink.overhead < 0.05 < pcie.overhead < today.overhead
    assert pcie.moved
    assert 0 <= pcie.gap < 0.1


def test_room_at_the_other_end_is_a_budget_of_its_own() -> None:
    chain = llama_layers(4096, layers=12)
    peak = simulate(chain, Schedule.keep_all(12), gradients_exist=True).peak_bytes
    without, little, much = (
        Solver(chain, gradients_exist=True, link=Link(50e9, 50e9, room_bytes=room)).plan(int(0.5 * peak))
        for room in (0, peak // 10, peak)
    )
    assert not without.moved
    assert little.host_bytes <= peak // 10
    assert much.seconds < little.seconds < without.seconds


@pytest.mark.wide
def test_the_curve_with_a_link_is_below_the_one_without() -> None:
    chain = llama_layers(4096, layers=5)
    peak = simulate(chain, Schedule.keep_all(5)).peak_bytes
    today, moving = frontier(chain), frontier(chain, link=Link(50e9, 50e9))
    assert moving[0].peak_bytes <= today[0].peak_bytes
    assert moving[0].seconds < 0.8 * today[0].seconds  # nested segments vanish
    for share in (0.4, 0.6, 0.8):
        assert moving.at(int(share * peak)).seconds <= today.at(int(share * peak)).seconds * (1 + 1e-9)


def test_a_search_without_a_link_is_that_of_schedules() -> None:
    """And with one, what it finds for a budget is the same whatever was asked before."""
    chain = random_chain(random.Random(5), 5, KINDS[0])
    alone, search = MovingSearch(chain, slots=60), ScheduleSearch(chain, slots=60)
    assert alone.smallest == search.smallest
    assert alone.candidates() == search.candidates()

    link = random_link(random.Random(5), chain)
    first, second = (MovingSearch(chain, slots=60, link=link) for _ in range(2))
    budgets = sorted({point.peak_bytes for point in search.candidates()})[:3]
    found = [first.fastest(budget) for budget in budgets]
    assert [second.fastest(budget) for budget in reversed(budgets)] == found[::-1]
    assert first.smallest.peak_bytes <= search.smallest.peak_bytes
    assert first.fastest(first.smallest.peak_bytes - 1) is None
