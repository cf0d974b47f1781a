"""Several calls of a step as one chain, against each chain alone and against every split of the budget."""

from __future__ import annotations

import random
from itertools import product

import pytest

from lightning_rotor import Schedule, plan, simulate
from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.planning.joint_chain import Outside, StepPlan, concatenated, joined, split
from lightning_rotor.planning.plan import Plan
from tests.strategies import KINDS, random_chain

NAMES = ("left", "right")


def pair(seed: int) -> list[Chain]:
    return [random_chain(random.Random(2 * seed + number), 5, KINDS[seed % len(KINDS)]) for number in range(2)]


def planned(chains: list[Chain], budget_bytes: int, outside: tuple[Outside | None, ...] = ()) -> StepPlan:
    return StepPlan.of(plan(joined(NAMES, chains, outside), budget_bytes), NAMES, chains)


def budgets(chains: list[Chain]) -> list[int]:
    """The least, two between, and what needs no recomputation."""
    chain = joined(NAMES, chains)
    with pytest.raises(BudgetError) as caught:
        plan(chain, 1)
    least, most = caught.value.minimum_bytes, simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
    return [least, (2 * least + most) // 3, (least + 2 * most) // 3, most]


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_falls_apart_into_plans_that_make_it_up(seed: int) -> None:
    chains = pair(seed)
    for budget in budgets(chains):
        whole = planned(chains, budget)
        assert whole.peak_bytes <= budget
        assert [plan.chain for plan in whole.calls] == chains
        assert concatenated([plan.schedule for plan in whole.calls]) == whole.schedule
        assert split(whole.schedule, [len(chain) for chain in chains]) == [plan.schedule for plan in whole.calls]
        for call in whole.calls:
            assert call.peak_bytes <= call.budget_bytes
        assert whole.seconds == pytest.approx(sum(call.seconds for call in whole.calls), rel=0.01)


@pytest.mark.parametrize("seed", range(6))
def test_no_split_of_the_budget_is_faster(seed: int) -> None:
    """Each chain's own plans at 20 budgets, in all pairs that fit together."""
    chains = pair(seed)
    chain = joined(NAMES, chains)
    for budget in budgets(chains):
        whole = planned(chains, budget)
        alone = [[own for part in range(1, 21) if (own := _plan(each, budget * part // 20))] for each in chains]
        together = (
            simulate(chain, concatenated([first.schedule, second.schedule])) for first, second in product(*alone)
        )
        best = min((found.seconds for found in together if found.peak_bytes <= budget), default=float("inf"))
        assert whole.seconds <= best * 1.0001


def _plan(chain: Chain, budget_bytes: int) -> Plan | None:
    try:
        return plan(chain, budget_bytes)
    except BudgetError:
        return None


OUTSIDE = (Outside(7, 50, 9, 0), Outside(37, 80, 40, 60))


@pytest.mark.parametrize("seed", range(6))
def test_what_lies_outside_is_kept_free(seed: int) -> None:
    chains = pair(seed)
    budget = budgets(chains)[1] + 200
    found = planned(chains, budget, OUTSIDE)
    plain = simulate(joined(NAMES, chains), found.schedule)
    assert plain.peak_bytes + 7 <= found.peak_bytes <= plain.peak_bytes + 80
    assert found.peak_bytes == simulate(joined(NAMES, chains, OUTSIDE), found.schedule).peak_bytes


@pytest.mark.parametrize("seed", range(6))
def test_a_settled_call_counts_as_much_as_in_full(seed: int) -> None:
    chains = pair(seed)
    whole = planned(chains, budgets(chains)[1])
    first, second = whole.calls
    lengths = (1, len(chains[1]))
    folded = joined(NAMES, [first, chains[1]])
    schedule = concatenated([Schedule.keep_all(1), second.schedule])
    assert [len(part) for part in split(schedule, lengths)] == list(lengths)
    assert simulate(folded, schedule).peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)
