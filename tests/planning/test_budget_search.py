"""The search for a budget: it ends, never returns to what was too much, and leaves little of the limit unused."""

from __future__ import annotations

from itertools import pairwise

import pytest
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


def test_a_search_tells_what_it_was_given() -> None:
    search = BudgetSearch(700, -30)
    assert (search.chain_bytes, search.correction_bytes) == (700, -30)
    assert (BudgetSearch().chain_bytes, BudgetSearch().correction_bytes) == (1, 0)


def test_a_peak_of_exactly_the_limit_keeps_it() -> None:
    assert BudgetSearch().next_budget(Trial(5000, 5000, LIMIT), LIMIT) is None
    assert BudgetSearch().next_budget(Trial(5000, 5000, LIMIT + 1), LIMIT) == 4999


@pytest.mark.parametrize(("measured", "following"), [(9000, None), (8999, 6001)])
def test_nine_tenths_of_the_limit_are_close_enough(measured: int, following: int | None) -> None:
    assert BudgetSearch().next_budget(Trial(5000, 5000, measured), LIMIT) == following


@pytest.mark.parametrize(("budget", "following"), [(6900, None), (6899, 7000)])
def test_a_budget_that_hardly_grows_is_not_tried(budget: int, following: int | None) -> None:
    """The plan takes 5000 of its budget, and 2000 of the limit are free."""
    assert BudgetSearch().next_budget(Trial(budget, 5000, 8000), LIMIT) == following


def test_a_budget_grows_eight_times_at_most() -> None:
    search = BudgetSearch()
    budgets = [100]
    while (following := search.next_budget(Trial(budgets[-1], budgets[-1], 5000), LIMIT)) is not None:
        budgets.append(following)
    assert budgets == [100 + 5000 * number for number in range(9)]


@pytest.mark.parametrize(
    ("good", "bad", "following"),
    [
        (Trial(5000, 5000, 8000), Trial(7000, 7000, 12_000), 6000),  # in the middle of the line
        (Trial(5000, 5000, 8000), Trial(7000, 7000, 10_001), 6800),  # near the bad one, so at least a tenth from it
        (Trial(5000, 5000, 8000), Trial(7000, 7000, 90_000), 5200),  # near the good one, likewise
    ],
)
def test_between_a_good_and_a_bad_budget_a_line_tells_the_next(good: Trial, bad: Trial, following: int) -> None:
    upwards, downwards = BudgetSearch(), BudgetSearch()
    upwards.next_budget(bad, LIMIT)
    assert upwards.next_budget(good, LIMIT) == following
    downwards.next_budget(good, LIMIT)
    assert downwards.next_budget(bad, LIMIT) == following


@pytest.mark.parametrize(("gap", "following"), [(100, 5000), (101, 5050)])
def test_of_two_budgets_that_are_close_the_good_one_stays(gap: int, following: int) -> None:
    search = BudgetSearch()
    search.next_budget(Trial(5000, 5000, 8000), LIMIT)
    bad = Trial(5000 + gap, 5000 + gap, 12_000)
    assert search.next_budget(bad, LIMIT) == following


def test_the_largest_good_budget_is_the_lower_end_and_the_smallest_bad_plan_the_upper() -> None:
    search = BudgetSearch()
    for trial in (
        Trial(5000, 5000, 8000),
        Trial(4000, 4000, 8500),
        Trial(9000, 9000, 12_000),
        Trial(9500, 9500, 30_000),
    ):
        following = search.next_budget(trial, LIMIT)
    assert following == 7000  # half of the way from 5000 to 9000, as the line from 8000 to 12,000 says


def test_the_last_of_equal_bad_plans_counts() -> None:
    search = BudgetSearch()
    for trial in (Trial(5000, 5000, 8000), Trial(9000, 9000, 28_000), Trial(9000, 9000, 12_000)):
        following = search.next_budget(trial, LIMIT)
    assert following == 7000


def test_the_first_of_equal_good_budgets_counts() -> None:
    search = BudgetSearch()
    for trial in (Trial(5000, 5000, 8000), Trial(5000, 5000, 8500), Trial(9000, 9000, 12_000)):
        following = search.next_budget(trial, LIMIT)
    assert following == 7000


def test_a_budget_that_has_kept_the_limit_once_and_then_not_is_no_longer_good() -> None:
    search = BudgetSearch()
    search.next_budget(Trial(5000, 5000, 8000), LIMIT)
    assert search.next_budget(Trial(5000, 5000, 10_300), LIMIT) == 4700
    search = BudgetSearch()
    search.next_budget(Trial(5000, 5000, 8000), LIMIT)
    assert search.next_budget(Trial(4900, 4900, 10_300), LIMIT) == 4600


def test_after_five_overshoots_the_good_budget_is_taken() -> None:
    search = BudgetSearch()
    search.next_budget(Trial(5000, 5000, 8000), LIMIT)
    bad = Trial(9000, 9000, 12_000)
    assert [search.next_budget(bad, LIMIT) for _ in range(6)] == [*[7000] * 5, 5000]


def test_nothing_grows_where_a_bad_plan_is_close_above_the_good_budget() -> None:
    search = BudgetSearch()
    search.next_budget(Trial(5050, 5050, 12_000), LIMIT)
    assert search.next_budget(Trial(5000, 5000, 8000), LIMIT) is None
