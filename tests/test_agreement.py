"""How processes come to one plan, without the processes."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist
from torch import nn

from lightning_rotor import BudgetError, Plan, Schedule, simulate
from lightning_rotor.planned.ranks import PublishedPlans, communicates
from lightning_rotor.planning import minimum_budget
from tests.rank_runs import MeanOfAll
from tests.strategies import random_chain

CHAIN = random_chain(random.Random(3), 5, "cnn")
LEAST = minimum_budget(CHAIN)


def keep_all(budget_bytes: int) -> Plan:
    schedule = Schedule.keep_all(len(CHAIN))
    return Plan(CHAIN, schedule, budget_bytes, simulate(CHAIN, schedule), 0.0)


def test_the_first_published_plan_counts_for_the_same_call_and_budget() -> None:
    store = dist.HashStore()
    first, second = PublishedPlans(store), PublishedPlans(store)
    mine, theirs = Plan(CHAIN, LEAST.schedule, 10**9, LEAST.simulation, 0.0), keep_all(10**9)
    assert mine.schedule != theirs.schedule
    assert first.settle("call", mine).schedule == mine.schedule
    assert second.settle("call", theirs).schedule == mine.schedule
    assert second.settle("call", theirs).peak_bytes == mine.peak_bytes
    assert second.settle("another call", theirs).schedule == theirs.schedule
    assert second.settle("call", keep_all(10**9 + 1)).schedule == theirs.schedule


def test_a_published_plan_that_does_not_fit_is_left_aside() -> None:
    store = dist.HashStore()
    large = keep_all(LEAST.peak_bytes)  # of a process that was wrong about its costs
    assert large.peak_bytes > LEAST.peak_bytes
    PublishedPlans(store).settle("call", large)
    small = Plan(CHAIN, LEAST.schedule, LEAST.peak_bytes, LEAST.simulation, 0.0, slots=large.slots)
    assert PublishedPlans(store).settle("call", small) is small


def test_a_process_without_a_plan_says_so_and_publishes_nothing() -> None:
    plans = PublishedPlans(dist.HashStore())
    with pytest.raises(BudgetError, match="too little"):
        plans.settle("call", BudgetError("too little", budget_bytes=1, minimum_bytes=2, stage="0"))
    assert plans.settle("call", LEAST) == LEAST
    assert not plans.together  # nobody starts afresh for another
    assert not plans.any(False)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), True),
        (nn.Sequential(nn.Linear(2, 2), MeanOfAll(2)), True),
    ],
)
def test_modules_that_communicate_are_recognized(module: nn.Module, expected: bool) -> None:
    assert communicates(module) is expected
