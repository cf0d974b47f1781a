"""The search for a budget: it ends, never returns to what was too much, and leaves little of the limit unused."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightning_rotor.planning.budget_search import BudgetSearch, Trial

LIMIT = 10_000


def trials_of(*, start: int, outside: int, slope: float, step: int) -> list[Trial]:
    """Trials of a process whose plans have peaks in steps, and whose own peak rises with them."""
    search, trials, budget = BudgetSearch(), [], start
    for _ in range(20):
        plan_bytes = max(budget // step * step, 1)
        trials.append(Trial(budget, plan_bytes, outside + int(slope * plan_bytes)))
        following = search.next_budget(trials[-1], LIMIT)
        if following is None:
            return trials
        budget = max(following, 1)
    raise AssertionError(f"no end: {trials}")


@given(
    start=st.integers(1, 2 * LIMIT),
    outside=st.integers(0, LIMIT // 2),
    slope=st.floats(1.0, 3.0),
    step=st.integers(1, LIMIT // 20),
)
def test_the_search_ends_below_the_limit_near_it_and_never_returns_to_what_was_too_much(
    start: int, outside: int, slope: float, step: int
) -> None:
    trials = trials_of(start=start, outside=outside, slope=slope, step=step)
    for number, trial in enumerate(trials):
        too_much = [each.plan_bytes for each in trials[:number] if each.measured_bytes > LIMIT]
        assert all(trial.budget_bytes < budget for budget in too_much)
    assert trials[-1].measured_bytes <= LIMIT
    # What may stay unused: a tenth of the limit, and what the next step of plans would take.
    assert trials[-1].measured_bytes >= 0.88 * LIMIT - slope * step - 1


def test_a_budget_that_keeps_the_limit_stays() -> None:
    search = BudgetSearch()
    assert search.next_budget(Trial(5000, 4900, 9100), LIMIT) is None


def test_after_an_overshoot_the_budget_grows_again_between_the_two() -> None:
    search = BudgetSearch()
    assert search.next_budget(Trial(8000, 8000, 13_000), LIMIT) == 5000  # two calls in a step: it falls too far
    grown = search.next_budget(Trial(5000, 5000, 7000), LIMIT)
    assert grown == 6500  # not 8000, which was too much
    assert search.next_budget(Trial(6500, 6500, 10_000), LIMIT) is None


def test_budgets_that_do_not_help_come_to_an_end() -> None:
    search = BudgetSearch()
    budgets = [9000]
    while (following := search.next_budget(Trial(budgets[-1], budgets[-1], 10_100), LIMIT)) is not None:
        budgets.append(following)
    assert [left - right for left, right in pairwise(budgets)] == [100, 200, 400, 800, 1600]
