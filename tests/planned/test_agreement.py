"""How processes come to one plan, without the processes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lightning_rotor import BudgetError, RotorError, Schedule, simulate
from lightning_rotor.planned.agreement import Agreement, Offer
from lightning_rotor.planning import minimum_budget, plan
from tests.strategies import random_chain

CHAIN = random_chain(random.Random(3), 5, "cnn")
LEAST = minimum_budget(CHAIN)


def test_a_process_by_itself_runs_its_own_plan_or_says_that_it_has_none() -> None:
    plans = Agreement()
    with pytest.raises(BudgetError, match="too little"):
        plans.settle(BudgetError("too little", budget_bytes=1, minimum_bytes=2, stage="0"))
    assert plans.settle(LEAST) is LEAST
    assert not plans.together  # nobody starts afresh for another
    assert not plans.any(False)
    with plans.watching():
        assert not plans.watches


class Pair(Agreement):
    """Two processes with costs of their own, of which the other one's answers are known."""

    def __init__(self, *others: Any) -> None:
        super().__init__()
        self._others = list(others)

    @property
    def together(self) -> bool:
        return True

    def _told(self, value: Any) -> list[Any]:
        return [value, self._others.pop(0)]


KEEP = str(Schedule.keep_all(len(CHAIN)))
KEPT_BYTES = simulate(CHAIN, Schedule.keep_all(len(CHAIN))).peak_bytes
MIDDLE = plan(CHAIN, (LEAST.peak_bytes + KEPT_BYTES) // 2)


def test_where_the_tightest_schedule_does_not_fit_another_one_may() -> None:
    """Here the other process lacks more, and keeps all, which this one cannot; its own schedule fits both."""
    assert MIDDLE.peak_bytes < KEPT_BYTES
    settled = Pair(Offer(KEPT_BYTES, KEEP, exceeds=False), [-1, 0]).settle(MIDDLE)
    assert settled.schedule == MIDDLE.schedule
    with pytest.raises(RotorError, match="no plan fits all processes"):
        Pair(Offer(KEPT_BYTES, KEEP, exceeds=False), [-1, 1]).settle(MIDDLE)


def test_plans_that_take_least_may_exceed_so_that_a_step_shows_what_it_needs() -> None:
    """The one that exceeds least is run by both."""
    settled = Pair(Offer(KEPT_BYTES, KEEP, exceeds=True), [-1, 1]).settle(LEAST, exceeds=True)
    assert settled.schedule == LEAST.schedule
    assert settled.budget_bytes >= settled.peak_bytes
