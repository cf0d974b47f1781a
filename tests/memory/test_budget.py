"""Budgets of chains: less for one reason or another, plans within them, and errors in terms of the user's limit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.random_chains import random_chain
from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.memory.budget import Budget, limit_error
from lightning_rotor.planning import Plan, minimum_budget, scheduled
from lightning_rotor.schedule import Schedule


def chain() -> Chain:
    return random_chain(random.Random(0), 6, "cnn")


def least_bytes(costs: Chain) -> int:
    return minimum_budget(costs).peak_bytes


class Foretold:
    """Peaks of steps by a function; ``least`` is the plan under which they are lowest."""

    def __init__(self, peak: Callable[[Plan], int], least: Plan | None = None) -> None:
        self._peak, self._least = peak, least

    def __call__(self, plan: Plan) -> int:
        return self._peak(plan)

    def plan_within(self, limit_bytes: int, like: Plan) -> Plan | None:
        return self._least


def test_a_budget_is_what_a_limit_leaves() -> None:
    budget = Budget(600, gradients_exist=True, lingering_bytes=5, reserved_bytes=400)
    assert budget.limit_bytes == 1000
    assert budget.conditions == {"gradients_exist": True, "lingering_bytes": 5}


def test_a_plan_that_fits_may_be_foreseen_to_exceed_the_limit_and_that_is_no_error() -> None:
    costs = chain()
    fastest = Budget(10 * costs.kept_bytes).plan(costs)
    size_bytes = fastest.peak_bytes
    # Steps take ten bytes more than is reserved, whatever the plan.
    foreseen = Budget(size_bytes, reserved_bytes=5, foresight=Foretold(lambda plan: plan.peak_bytes + 15))
    assert foreseen.foresees_excess(fastest)
    assert foreseen.plan(costs).peak_bytes + 15 <= foreseen.limit_bytes
    assert not Budget(size_bytes, reserved_bytes=5).foresees_excess(fastest)
    # Small beside the budget: nobody looks.
    roomy = Budget(2 * size_bytes, foresight=Foretold(lambda _: pytest.fail("asked")))
    assert not roomy.foresees_excess(fastest)
    # Where nothing keeps what is only foreseen, the step decides, and training goes on.
    hopeless = Budget(size_bytes, foresight=Foretold(lambda plan: 2 * size_bytes))
    assert hopeless.plan(costs).schedule == fastest.schedule
    # The first step of a size begins with the plan that takes least.
    assert replace(hopeless, is_new_size=True).plan(costs).peak_bytes == least_bytes(costs)


def test_where_no_smaller_budget_helps_the_plan_for_the_whole_step_is_made() -> None:
    costs = chain()
    size_bytes = 10 * costs.kept_bytes
    keep_all = scheduled(costs, Schedule.keep_all(len(costs)))
    fastest = Budget(size_bytes).plan(costs)

    def peak(plan: Plan) -> int:
        return 2 * size_bytes - (plan.schedule == least.schedule)

    least = minimum_budget(costs)
    made = Budget(size_bytes, foresight=Foretold(peak, least)).plan(costs)
    assert made.schedule == least.schedule
    # It is for this budget, or the next call would be planned again.
    assert made.budget_bytes == fastest.budget_bytes == size_bytes
    # One that the budget has no room for is left aside.
    least = keep_all
    small = Budget(keep_all.peak_bytes - 1, foresight=Foretold(peak, keep_all))
    assert small.plan(costs).schedule != keep_all.schedule


def test_a_budget_is_reduced_for_a_reason_and_the_limit_stays() -> None:
    budget = Budget(600, reserved_bytes=400, reserved_for="parameters (400 B)")
    smaller = budget.reduced_to(500, "the loss")
    assert (smaller.available_bytes, smaller.reserved_bytes, smaller.limit_bytes) == (500, 500, 1000)
    assert smaller.reserved_for == "parameters (400 B), the loss (100 B)"
    assert Budget(600).reduced_to(500, "the loss").reserved_for == "the loss (100 B)"


def test_a_ceiling_lowers_a_budget_that_is_above_it() -> None:
    budget = Budget(600)
    assert budget.capped(None) is budget
    assert budget.capped(600) is budget
    capped = budget.capped(599)
    assert (capped.available_bytes, capped.reserved_for) == (599, "memory that the device did not have (1 B)")


def test_a_plan_fits_the_budget_that_it_was_made_for() -> None:
    costs = chain()
    budget = Budget(10 * least_bytes(costs))
    plan = budget.plan(costs)
    assert budget.fits(plan)
    assert plan.peak_bytes <= budget.available_bytes
    assert not budget.reduced_to(budget.available_bytes - 1, "the loss").fits(plan)
    assert not Budget(budget.available_bytes, gradients_exist=True).fits(plan)


def test_a_guess_is_not_worth_an_error() -> None:
    costs = chain()
    minimum = least_bytes(costs)
    plan = Budget(minimum - 10, guessed_bytes=10).plan(costs)
    assert plan.peak_bytes <= minimum
    with pytest.raises(BudgetError, match="below"):
        Budget(minimum - 10, guessed_bytes=9).plan(costs)


def test_where_nothing_fits_the_error_names_the_least_limit_and_that_limit_works() -> None:
    costs = chain()
    budget = Budget(least_bytes(costs) // 2, reserved_bytes=1000, reserved_for="parameters (1000 B)")
    with pytest.raises(
        BudgetError, match=r"mem_limit .* is below the minimum .* parameters \(1000 B\), and at"
    ) as told:
        budget.plan(costs)
    error = told.value
    assert (error.budget_bytes, error.minimum_bytes) == (budget.limit_bytes, least_bytes(costs) + 1000)
    assert error.stage in costs.names
    least = budget.least_plan(costs, error, slots=500)
    assert least.budget_bytes == error.minimum_bytes - 1000
    Budget(error.minimum_bytes - 1000, reserved_bytes=1000).plan(costs)


def test_an_error_without_a_limit_around_is_the_planners() -> None:
    costs = chain()
    with pytest.raises(BudgetError, match=r"^(?!mem_limit)"):
        Budget(least_bytes(costs) // 2).plan(costs)


def test_a_refusal_may_name_another_stage() -> None:
    costs = chain()
    budget = Budget(least_bytes(costs) // 2, reserved_bytes=1000)
    error = BudgetError("", budget_bytes=1, minimum_bytes=2, stage="a", gradient_bytes=3)
    refusal = budget.minimum_error(5000, error, stage="b")
    assert (refusal.stage, refusal.minimum_bytes, refusal.gradient_bytes) == ("b", 6000, 3)
    assert budget.minimum_error(5000, error).stage == "a"


def test_errors_for_limits_read_alike() -> None:
    error = limit_error(2**20, 2**21, needs="all of it", stage="net", remedy="use less", gradient_bytes=7)
    assert str(error) == (
        "mem_limit 1.00 MiB is below the minimum 2.00 MiB (2,097,152 bytes) for this model and batch: all of it. Use less"
    )
    assert (error.stage, error.gradient_bytes) == ("net", 7)
