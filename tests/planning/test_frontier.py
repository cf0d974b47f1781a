"""The curve of memory against time: against the planner, against exhaustive search, and what can be asked of it."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.reference import best_by_budget, judge_all
from lightning_rotor import Checkpointable
from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError, ProfilingError, ScheduleError, UnitError
from lightning_rotor.planning import Frontier, Solver, fine_slots, frontier, frontier_of, plan
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import Simulation, simulate
from tests.grids import examples, few
from tests.strategies import KINDS, Kind, chains, random_chain, with_skips

SAME = 1 + 1e-9
# A table for one budget may find by edits what the curve does not have: less than measured times vary.
NOISE = 1.01


def point(size: int, seconds: float, plain_seconds: float) -> Simulation:
    return Simulation(Schedule.keep_all(1), size, seconds, seconds - plain_seconds, 0, ())


POINT = point(100, 2.0, 1.0)


def curve(*corners: tuple[int, float], budget_bytes: int | None = None) -> Frontier:
    """Points of these bytes and seconds; the last one has no overhead."""
    plain = corners[-1][1]
    return Frontier(tuple(point(size, seconds, plain) for size, seconds in corners), budget_bytes)


# ---------------------------------------------------------------------------------------------------- promises


@settings(max_examples=examples(10, 60))
@given(chains(max_stages=14), st.booleans(), st.integers(0, 50))
def test_points_are_real_rise_in_memory_fall_in_time_and_reach_from_the_least_budget_to_no_recomputation(
    chain: Chain, gradients_exist: bool, lingering_bytes: int
) -> None:
    step = {"gradients_exist": gradients_exist, "lingering_bytes": lingering_bytes}
    solver = Solver(chain, slots=fine_slots(len(chain)), **step)
    found = frontier_of(solver)
    for point in found:
        judged = simulate(chain, point.schedule, **step)
        assert (point.peak_bytes, point.seconds, point.overhead) == (judged.peak_bytes, judged.seconds, judged.overhead)
    assert all(left.peak_bytes < right.peak_bytes and left.seconds > right.seconds for left, right in pairwise(found))
    keep_all = simulate(chain, Schedule.keep_all(len(chain)), **step)
    assert found[0].peak_bytes == solver.minimum().peak_bytes
    assert found[-1].seconds <= SAME * keep_all.seconds
    assert found[-1].overhead <= 1e-9
    assert found[-1].peak_bytes <= keep_all.peak_bytes


@settings(max_examples=examples(8, 40))
@given(chains(max_stages=14), st.randoms(use_true_random=False))
def test_at_any_budget_it_is_as_fast_as_the_plan(chain: Chain, rng: random.Random) -> None:
    solver = Solver(chain, slots=fine_slots(len(chain)))
    found = frontier_of(solver)
    budgets = [point.peak_bytes for point in found]
    budgets += [rng.randint(found[0].peak_bytes, found[-1].peak_bytes + 1) for _ in range(20)]
    for budget_bytes in budgets:
        planned = solver.plan(budget_bytes)
        assert found.at(budget_bytes).peak_bytes <= budget_bytes
        assert found.at(budget_bytes).seconds <= NOISE * planned.seconds
        assert planned.seconds <= SAME * found.at(budget_bytes).seconds, "the plan is never slower than the curve"


@pytest.mark.parametrize("kind", few(KINDS, "heterogeneous", "odd"))
def test_it_is_as_fast_as_the_best_of_all_schedule_trees(kind: Kind) -> None:
    points = equal = 0
    for number in range(examples(6, 12)):
        rng = random.Random(f"{kind} {number}")
        chain = random_chain(rng, rng.randint(3, 6), kind, grain=rng.choice((1, 512)))
        chain = with_skips(rng, chain) if number % 3 == 0 else chain
        found = frontier(chain)
        for budget_bytes, best in best_by_budget(judge_all(chain)).items():
            if budget_bytes >= found[0].peak_bytes:
                points += 1
                equal += found.at(budget_bytes).seconds <= SAME * best.seconds
    assert equal >= 0.9 * points, f"only {equal} of {points} are as fast as the best"


@pytest.mark.parametrize("kind", few(["cnn", "transformer"], "transformer"))
def test_of_a_long_chain_it_has_many_points_and_stays_close_to_the_plan(kind: Kind) -> None:
    chain = random_chain(random.Random(5), examples(45, 90), kind, grain=4099)
    solver = Solver(chain, slots=500)
    found = frontier_of(solver)
    assert len(found) > 50
    for point in found.thinned(12):
        assert point.seconds <= NOISE * solver.plan(point.peak_bytes).seconds


def test_a_plan_has_the_frontier_of_its_own_circumstances() -> None:
    chain = random_chain(random.Random(2), 9, "heterogeneous", grain=512)
    planned = plan(chain, 10**9, gradients_exist=True, lingering_bytes=4096)
    found = planned.frontier()
    assert found.budget_bytes == 10**9
    assert found.points == frontier(chain, gradients_exist=True, lingering_bytes=4096).points
    assert found.points != frontier(chain).points
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_checkpointable_has_one_with_and_without_a_plan() -> None:
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))
    wrapped = Checkpointable(net)
    with pytest.raises(ProfilingError, match=r"nothing has been measured yet: give a sample first"):
        wrapped.frontier()
    wrapped.measure(torch.randn(64, 32))
    found = wrapped.frontier()
    assert found.budget_bytes is None
    wrapped.compute_sequence(found[0].peak_bytes)  # the least limit of the curve is one that works
    assert wrapped.plan is not None
    assert wrapped.plan.peak_bytes <= found[0].peak_bytes
    assert wrapped.frontier().budget_bytes == found[0].peak_bytes
    wrapped(torch.randn(64, 32)).sum().backward()


# ---------------------------------------------------------------------------------------------------- questions

GIB = 2**30
BENT = curve((1 * GIB, 2.0), (2 * GIB, 1.2), (3 * GIB, 1.1), (5 * GIB, 1.0), budget_bytes=int(2.5 * GIB))


def test_at_a_budget_there_is_the_fastest_point_within() -> None:
    assert [BENT.at(size).seconds for size in (GIB, "1.5GiB", "2GiB", 4 * GIB, "1TiB")] == [2.0, 2.0, 1.2, 1.1, 1.0]
    with pytest.raises(
        BudgetError, match=r"budget 1024 MiB \(1,073,741,823 bytes\) is below the first point"
    ) as caught:
        BENT.at(GIB - 1)
    assert caught.value.minimum_bytes == GIB
    with pytest.raises(UnitError, match="cannot be read"):
        BENT.at("much")


def test_the_knee_is_where_the_curve_bends_most() -> None:
    assert BENT.knee == BENT[1]
    straight = curve((1, 3.0), (2, 2.0), (3, 1.0))
    assert straight.knee == straight[0]
    assert Frontier((POINT,)).knee == POINT


def test_gain_says_what_more_memory_buys() -> None:
    gain = BENT.gain("1GiB")
    assert (gain.before, gain.after) == (BENT[1], BENT[2])
    assert gain.seconds == pytest.approx(0.1)
    assert (
        str(gain) == "1.00 GiB more than 2.50 GiB lowers the overhead from 20.0% to 10.0% (9.1% more steps per second)"
    )
    assert BENT.gain(GIB, budget_bytes="1GiB").after == BENT[1]
    assert str(BENT.gain("1MiB")) == "1.00 MiB more than 2.50 GiB buys nothing: the overhead stays at 20.0%"
    assert BENT.gain("1GiB").describe(reserved_bytes=GIB).startswith("1.00 GiB more than 3.50 GiB lowers")
    assert replace(BENT, budget_bytes=None).gain("1GiB").budget_bytes == GIB


def test_thinned_keeps_ends_knee_and_the_plan() -> None:
    many = curve(*((size, 1 + 100 / size) for size in range(1, 400)), budget_bytes=77)
    few = many.thinned(9)
    assert 4 <= len(few) <= 9
    assert {many[0], many.knee, many[-1], many.at(77)} <= set(few)
    assert BENT.thinned(9) is BENT


def test_printed_it_is_a_table() -> None:
    lines = str(BENT).splitlines()
    assert lines[0] == "Budget against overhead"
    assert "1.00 GiB │  100.00% │   2 s" in lines[4]
    assert "least" in lines[4]
    assert "knee, this plan" in lines[5]
    assert "keep all" in lines[7]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("corners", [[], [(2, 1.0), (1, 2.0)], [(1, 1.0), (2, 1.0)], [(1, 2.0), (1, 1.0)]])
def test_points_out_of_order_are_refused(corners: list[tuple[int, float]]) -> None:
    points = tuple(point(size, seconds, seconds) for size, seconds in corners)
    with pytest.raises(ScheduleError, match=r"expected (at least one|memory to rise and time to fall)"):
        Frontier(points)


def test_a_plan_remembers_the_slots_that_its_frontier_is_solved_with() -> None:
    chain = random_chain(random.Random(1), 4, "cnn", grain=1000)
    for slots in (600, 30_000):
        found = Solver(chain, slots=slots).minimum()
        assert found.slots == slots
