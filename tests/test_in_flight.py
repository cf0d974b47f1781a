"""Plans of one pipeline stage with several micro-batches in flight, against every schedule there is."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from benchmarks.reference import all_schedules
from lightning_rotor.pipeline.partition.in_flight import InFlightPlanner, StagePlan
from lightning_rotor.pipeline.partition.sub_chains import END, with_end, without_end
from lightning_rotor.planning import plan
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from tests.strategies import KINDS, random_chain


def every_plan(chain):
    """All schedules, those that end in a segment included."""
    ended = with_end(chain)
    for schedule in all_schedules(ended):
        yield StagePlan(ended, schedule)
        shorter = without_end(schedule)
        if shorter is not None:
            yield StagePlan(chain, shorter)


def compared(seed, kinds):
    """What the planner finds and the best there is, for several budgets."""
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(1, 5), rng.choice(kinds))
    planner = InFlightPlanner(chain)
    plans = list(every_plan(chain))
    for in_flight in (2, 3, 5):
        budgets = sorted({each.bytes(in_flight) for each in plans})
        for budget in rng.sample(budgets, min(5, len(budgets))):
            best = min(each.seconds for each in plans if each.bytes(in_flight) <= budget)
            found = planner.plan(in_flight, budget)
            assert found is None or found.bytes(in_flight) <= budget
            yield found, best


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_is_as_fast_as_any_schedule(seed):
    # Where segments remember states the program approximates, see its docstring.
    for found, best in compared(seed, tuple(kind for kind in KINDS if kind != "odd")):
        assert found is not None
        assert found.seconds == pytest.approx(best, rel=1e-9)


def test_with_states_and_stages_that_must_be_kept_hardly_any_plan_is_slower():
    missed, slower, total = 0, 0, 0
    for seed in range(100, 112):
        for found, best in compared(seed, ("odd",)):
            total += 1
            missed += found is None
            slower += found is not None and found.seconds > best * (1 + 1e-9)
    assert (missed + slower) <= total / 50


def test_one_micro_batch_is_planned_as_without_a_pipeline():
    chain = random_chain(random.Random(3), 8, "cnn")
    full = simulate(chain, Schedule.keep_all(len(chain)), gradients_exist=True)
    for part in (0.5, 0.7, 0.9):
        budget = int(part * full.peak_bytes)
        found = InFlightPlanner(chain).plan(1, budget)
        assert found.seconds == pytest.approx(plan(chain, budget, gradients_exist=True).seconds)
        assert found.bytes(1) <= budget


@pytest.mark.parametrize("kind", KINDS)
def test_more_memory_is_never_slower_and_fewer_micro_batches_neither(kind):
    chain = random_chain(random.Random(7), 12, kind)
    planner = InFlightPlanner(chain)
    least, most = planner.least(4).bytes(4), planner.kept.bytes(4)
    budgets = [least + (most - least) * step // 6 for step in range(7)]
    plans = [planner.plan(4, budget) for budget in budgets]
    assert all(found is not None and found.bytes(4) <= budget for found, budget in zip(plans, budgets, strict=True))
    seconds = [found.seconds for found in plans]
    assert all(more <= less * (1 + 2e-3) for less, more in pairwise(seconds))
    assert planner.plan(2, budgets[2]).seconds <= plans[2].seconds * (1 + 2e-3)
    assert plans[-1].simulation.recompute_seconds == pytest.approx(0, abs=1e-12)


def test_the_least_memory_is_the_least():
    for seed in range(6):
        chain = random_chain(random.Random(seed), 4, "cnn")
        least = min(each.bytes(3) for each in every_plan(chain))
        found = InFlightPlanner(chain).least(3)
        assert least <= found.bytes(3) <= least * 1.002 + 1
        assert InFlightPlanner(chain).plan(3, least - 1) is None


def test_a_stage_may_end_in_a_segment_when_others_are_in_flight():
    """In a step of its own nobody would recompute the last stage; here its saved tensors would be held several times."""
    chain = random_chain(random.Random(0), 3, "heterogeneous")
    planner = InFlightPlanner(chain)
    found, kept = planner.checkpointed, planner.kept
    assert found.chain.names[-1] == END
    assert str(found.schedule) == "(0-2) 3"
    assert found.held_bytes == chain.stages[-1].output_bytes
    assert found.seconds > kept.seconds
    assert found.load.recompute_seconds > 0
    assert kept.load.recompute_seconds == 0


@pytest.mark.parametrize("kind", ["cnn", "heterogeneous"])
def test_an_end_changes_neither_memory_nor_time_of_what_is_kept(kind):
    for seed in range(10):
        chain = random_chain(random.Random(seed), 4, kind)
        if chain.stages[-1].keep.saved_output_bytes:
            continue  # counted twice, as said
        ended, plain = InFlightPlanner(with_end(chain)).kept, InFlightPlanner(chain).kept
        assert (ended.bytes(3), ended.held_bytes, ended.seconds) == (plain.bytes(3), plain.held_bytes, plain.seconds)


def test_the_load_adds_up():
    chain = random_chain(random.Random(2), 6, "cnn")
    planner = InFlightPlanner(chain)
    found = planner.plan(3, (planner.least(3).bytes(3) + planner.kept.bytes(3)) // 2)
    load = found.load
    assert load.forward_seconds + load.backward_seconds == pytest.approx(found.seconds)
    assert max(load.forward_peak_bytes, load.backward_peak_bytes) == found.simulation.peak_bytes
    assert load.recompute_seconds > 0
    assert load.held_bytes == found.held_bytes < planner.kept.held_bytes
