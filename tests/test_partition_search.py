"""What the searches for cuts promise where not all cuts can be tried: never slower than what anybody would cut by hand, and true bounds."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rotor.pipeline.partition import Link, PartitionError, PipelineDevice, Problem, partition
from lightning_rotor.pipeline.partition.cuts import cuts_of, runs_of, simple_balances
from lightning_rotor.pipeline.partition.run_costs import Costs
from lightning_rotor.pipeline.partition.seconds_bounds import Bounds
from tests.strategies import KINDS, random_chain

LINKS = (Link(), Link(1e5, 1e-5), Link(1e6), Link(1e4))


def random_problem(seed, schedule, *, stages=(14, 22), memory=True):
    """Devices of unequal speed, links, and perhaps a limit on memory that matters."""
    rng = random.Random(f"{seed} {schedule}")
    chain = random_chain(rng, rng.randint(*stages), rng.choice(KINDS))
    per_device = 2 if schedule == "interleaved" else 1
    count = rng.randint(3, min(5, len(chain) // per_device))
    kept = sum(stage.output_bytes + stage.keep.saved_bytes for stage in chain)
    limit = int(kept * rng.uniform(0.6, 2)) if memory else None
    return Problem(
        chain,
        tuple(PipelineDevice(limit, rng.choice((0.5, 1, 1, 2))) for _ in range(count)),
        2 * count,
        schedule=schedule,
        stages_per_device=per_device,
        link=rng.choice(LINKS),
    )


def solved(problem, balance):
    return partition(
        problem.chain,
        problem.devices,
        micro_batches=problem.micro_batches,
        balance=balance,
        schedule=problem.schedule,
        stages_per_device=problem.stages_per_device,
        link=problem.link,
    )


def seconds_with(problem, balance):
    try:
        return solved(problem, balance).seconds
    except PartitionError:
        return math.inf


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), memory=st.booleans())
def test_no_simple_balance_is_faster(schedule, seed, memory):
    # Interleaved stages are planned for many shares of memory, so few of them.
    stages = (10, 13) if memory and schedule == "interleaved" else (14, 22)
    problem = random_problem(seed, schedule, stages=stages, memory=memory)
    fit = [seconds_with(problem, balance) for balance in simple_balances(problem.chain, problem.stages)]
    if min(fit) < math.inf:
        found = solved(problem, "auto")
        assert found.seconds <= min(fit) * (1 + 1e-9)
        assert found.bound_seconds <= found.seconds


def simulated(problem, costs, cuts):
    choices = costs.together(runs_of(cuts, len(problem.chain)))
    return problem.simulator.step_seconds([choice.load for choice in choices])


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("seed", range(6))
def test_no_step_is_faster_than_its_bound(seed, schedule):
    problem = random_problem(seed, schedule, stages=(10, 12), memory=False)
    costs, rng = Costs(problem), random.Random(seed)
    bounds = Bounds(costs, len(problem.chain))
    every = [(0, *middle) for middle in itertools.combinations(range(1, len(problem.chain)), problem.stages - 1)]
    some = rng.sample(every, min(len(every), 60))
    steps = np.array([simulated(problem, costs, cuts) for cuts in some])
    least = bounds.step_seconds(np.array(some))
    assert (least <= steps * (1 + 1e-9)).all()
    assert (least >= 0.6 * steps).all(), "a bound that low keeps nothing from being simulated"
    assert bounds.work_seconds() <= steps.min() * (1 + 1e-9)
    through = bounds.through()
    for cuts, step in zip(some, steps, strict=True):
        runs = enumerate(runs_of(cuts, len(problem.chain)))
        assert max(through[stage, first, last - first] for stage, (first, last) in runs) <= step * (1 + 1e-9)
    assert least == pytest.approx(steps, rel=1e-9)  # nothing is recomputed


def test_cuts_of_many_unlike_stages_gain_on_simple_ones_and_no_single_move_gains_more():
    chain = random_chain(random.Random(3), 40, "cnn")
    problem = Problem(chain, (PipelineDevice(),) * 12, 24, schedule="interleaved", stages_per_device=2, link=Link(1e6))
    costs, found = Costs(problem), solved(problem, "auto")
    simple = min(simulated(problem, costs, cuts_of(each)) for each in simple_balances(chain, problem.stages))
    assert found.seconds < 0.95 * simple
    cuts = cuts_of(found.balance)
    for place, by in itertools.product(range(1, len(cuts)), (1, -1)):
        moved = (*cuts[:place], cuts[place] + by, *cuts[place + 1 :])
        if all(left < right for left, right in itertools.pairwise((*moved, len(chain)))):
            assert simulated(problem, costs, moved) >= found.seconds * (1 - 1e-9)


def test_equal_problems_share_the_order_of_their_actions():
    chain = random_chain(random.Random(0), 6, "cnn")
    problem = Problem(chain, (PipelineDevice(),) * 3, 4)
    limited = replace(problem, devices=(PipelineDevice(10**9),) * 3, recompute="always")
    assert limited.order is problem.order
    assert replace(problem, micro_batches=5).order is not problem.order
