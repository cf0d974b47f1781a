"""The lower bound: never above what an execution takes, and close to it."""

from __future__ import annotations

import math
import pickle
import random
import statistics
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.optimum import Optimum
from benchmarks.reference import best_by_budget, judge_all
from lightning_rotor.chain import Chain
from lightning_rotor.link import Link
from lightning_rotor.planning import Solver, bounds, effort, fine_slots, lower_bound_seconds, minimum_budget, plan
from lightning_rotor.planning.effort import Effort
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from tests.grids import examples
from tests.strategies import KINDS, chains, random_chain, random_link, random_moves, random_schedule, with_skips

# Bounds and plans are sums of the same durations in another order.
SAME = 1 + 1e-9


@settings(max_examples=examples(15, 100))
@given(st.randoms(use_true_random=False), chains(max_stages=7), st.booleans(), st.sampled_from((0, 0, 30, 100)))
def test_bound_is_at_most_the_optimum(rng: random.Random, chain: Chain, gradients_exist: bool, lingering: int) -> None:
    step = {"gradients_exist": gradients_exist, "lingering_bytes": lingering}
    optimum = Optimum(chain, **step)
    most = simulate(chain, Schedule.keep_all(len(chain)), **step).peak_bytes
    for budget in (rng.randint(most // 4, most) for _ in range(4)):
        assert lower_bound_seconds(chain, budget, **step) <= optimum.seconds(budget)


@pytest.mark.parametrize(
    ("skips", "kind"),
    [
        pytest.param(skips, kind, marks=[] if skips == (number % 2 == 0) else pytest.mark.wide)
        for skips in (False, True)
        for number, kind in enumerate(KINDS)
    ],
)
def test_bound_best_tree_and_plan_are_in_order_at_every_budget_level(kind: str, skips: bool) -> None:
    for seed in range(6):
        rng = random.Random(f"{kind} {seed}")
        grain = rng.choice((1, 512))
        chain = random_chain(rng, rng.randint(3, 5), kind, grain=grain)
        chain = with_skips(rng, chain) if skips else chain
        step = {"gradients_exist": rng.random() < 0.3, "lingering_bytes": grain * rng.choice((0, 0, 30, 100))}
        solver = Solver(chain, slots=2000, **step)
        for budget, best in best_by_budget(judge_all(chain, **step)).items():
            bound = lower_bound_seconds(chain, budget, **step)
            assert bound <= best.seconds, f"{budget} bytes, {best}, {chain}"
            assert best.seconds <= solver.plan(budget).seconds * SAME


def test_bound_is_close_to_the_optimum_between_the_least_budget_and_the_largest() -> None:
    ratios = []
    for seed in range(60):
        rng = random.Random(seed)
        chain = replace(random_chain(rng, rng.randint(4, 7), KINDS[seed % len(KINDS)]), segment_seconds=0.0)
        least, most = minimum_budget(chain).peak_bytes, simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
        budget = least + int(rng.random() * (most - least))
        ratios.append(lower_bound_seconds(chain, budget) / Optimum(chain).seconds(budget))
    assert statistics.mean(ratios) > 0.98
    assert min(ratios) > 0.8


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        pytest.param(
            kind,
            stages,
            marks=pytest.mark.wide if stages == 70 or (stages == 24 and kind not in ("transformer", "odd")) else [],
        )
        for kind, stages in product(KINDS, [1, 2, 3, 24, 70])
    ],
)
def test_bound_of_any_length_is_at_most_the_plan_and_says_more_than_the_plain_step(kind: str, stages: int) -> None:
    chain = random_chain(random.Random(f"{kind} {stages}"), stages, kind, grain=4099)
    solver = Solver(chain, slots=min(fine_slots(stages), 700))
    least, most = solver.minimum().peak_bytes, simulate(chain, Schedule.keep_all(stages)).peak_bytes
    for fraction in (0, 0.1, 0.5, 1):
        found = solver.plan(least + int(fraction * (most - least)))
        assert found.lower_bound_seconds <= found.seconds
        if found.overhead > 0.01:
            assert found.lower_bound_seconds > chain.step_seconds
        if fraction == 0.5:
            assert found.gap < 0.02


def test_fewer_sums_give_a_bound_that_still_holds_and_is_no_higher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps that are cut and sizes that are rounded down to fewer slots."""
    cases = []
    for seed in range(20):
        rng = random.Random(seed)
        chain = random_chain(rng, rng.randint(5, 7), KINDS[seed % len(KINDS)], grain=512)
        budget = rng.randint(
            minimum_budget(chain).peak_bytes, simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
        )
        cases.append((chain, budget, lower_bound_seconds(chain, budget)))
    monkeypatch.setattr(effort, "current", Effort(bound_sums=1e3, bound_least_slots=40))
    bounds.lower_bound_seconds.cache_clear()
    coarse = [lower_bound_seconds(chain, budget) for chain, budget, _ in cases]
    bounds.lower_bound_seconds.cache_clear()
    assert all(less <= more * SAME for less, (_, _, more) in zip(coarse, cases, strict=True))
    assert any(less < more / SAME for less, (_, _, more) in zip(coarse, cases, strict=True))
    assert all(less >= chain.step_seconds * 0.5 for less, (chain, _, _) in zip(coarse, cases, strict=True))


def test_bound_is_infinite_if_a_single_backward_does_not_fit() -> None:
    chain = random_chain(random.Random(1), 6, "heterogeneous")
    assert lower_bound_seconds(chain, 1) == math.inf
    assert lower_bound_seconds(chain, minimum_budget(chain).peak_bytes) < math.inf


def test_lingering_memory_delays_only_what_the_forward_keeps() -> None:
    """Gaps after the forward do not know of it: taking the forward's limits for theirs would make the bound too high."""
    chain = random_chain(random.Random("transformer 3"), 5, "transformer")
    for budget, best in best_by_budget(judge_all(chain, lingering_bytes=200)).items():
        assert lower_bound_seconds(chain, budget, lingering_bytes=200) <= best.seconds


# ---------------------------------------------------------------------------------------------------- on a plan


def test_plan_with_ample_budget_has_no_gap() -> None:
    chain = random_chain(random.Random(3), 12, "heterogeneous")
    found = plan(chain, simulate(chain, Schedule.keep_all(12)).peak_bytes)
    assert found.gap == pytest.approx(0, abs=1e-9)
    assert found.lower_bound_seconds == pytest.approx(chain.step_seconds)


def test_plan_knows_the_step_that_it_was_made_for() -> None:
    chain = random_chain(random.Random(4), 8, "heterogeneous")
    step = {"gradients_exist": True, "lingering_bytes": 200}
    found = minimum_budget(chain, **step)
    assert found.lower_bound_seconds == lower_bound_seconds(chain, found.budget_bytes, **step)
    assert 0 <= found.gap < 1


def test_bound_is_found_when_asked_for_and_then_remembered() -> None:
    chain = random_chain(random.Random(5), 8, "cnn")
    before = bounds.lower_bound_seconds.cache_info().misses
    found = plan(chain, minimum_budget(chain).peak_bytes)
    assert bounds.lower_bound_seconds.cache_info().misses == before
    gap = found.gap
    assert pickle.loads(pickle.dumps(found)).gap == gap
    assert bounds.lower_bound_seconds.cache_info().misses == before + 1


# ---------------------------------------------------------------------------------------------------- with a link


@settings(max_examples=examples(12, 30))
@given(st.randoms(use_true_random=False))
def test_bound_with_a_link_is_at_most_any_schedule_that_moves_something(rng: random.Random) -> None:
    chain = random_chain(rng, rng.randint(2, 5), rng.choice(KINDS))
    link = random_link(rng, chain)
    for _ in range(3):
        schedule = random_moves(rng, chain, random_schedule(rng, chain))
        simulation = simulate(chain, schedule, link=link)
        bound = lower_bound_seconds(chain, max(simulation.peak_bytes, 1), link=link)
        assert bound <= simulation.seconds * (1 + 1e-9)


@settings(max_examples=examples(12, 30))
@given(st.randoms(use_true_random=False))
def test_bound_with_a_link_falls_with_the_budget_and_is_no_larger_than_without(rng: random.Random) -> None:
    chain = random_chain(rng, rng.randint(2, 5), rng.choice(KINDS))
    link = random_link(rng, chain)
    most = simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
    budget = max(int(most * rng.uniform(0.2, 1.0)), 1)
    with_link = lower_bound_seconds(chain, budget, link=link)
    assert with_link <= lower_bound_seconds(chain, budget) * (1 + 1e-9)
    # Halving an interval leaves it this wide.
    assert lower_bound_seconds(chain, 2 * budget, link=link) <= with_link * (1 + 2**-7)


def test_no_room_at_the_other_end_is_as_good_as_no_link() -> None:
    chain = random_chain(random.Random(3), 5, "heterogeneous")
    budget = simulate(chain, Schedule.parse("(0-3) 4")).peak_bytes
    nowhere = Link(1e12, 1e12, room_bytes=0)
    without = lower_bound_seconds(chain, budget)
    assert without * (1 - 2**-7) <= lower_bound_seconds(chain, budget, link=nowhere) <= without
    assert lower_bound_seconds(chain, budget, link=Link(1e12, 1e12)) < without * (1 - 2**-7)
