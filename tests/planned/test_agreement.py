"""How processes come to one plan, without the processes."""

from __future__ import annotations

import random

import pytest

from lightning_rotor import BudgetError
from lightning_rotor.planned.agreement import Agreement
from lightning_rotor.planning import minimum_budget
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
