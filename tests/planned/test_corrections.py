"""What measured steps have taught about chains."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from benchmarks.random_chains import random_chain
from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned import corrections
from lightning_rotor.planned.corrections import Corrections, MeasuredStep
from lightning_rotor.planning import Plan, minimum_budget, plan
from lightning_rotor.planning.joint_chain import Outside
from lightning_rotor.planning.outside import Foresight
from tests.planned.joint_steps import scaled


def chain(seed: int, stages: int = 6) -> Chain:
    return random_chain(random.Random(seed), stages, "odd")


class Modules:
    """Plans one chain with what a search leaves it of so many bytes."""

    def __init__(self, known: Corrections, available_bytes: int) -> None:
        self.known, self.available_bytes, self.made = known, available_bytes, list[Plan]()

    def replan(self, stale: Plan) -> Plan:
        budget_bytes = self.available_bytes - self.known.of(stale.chain)
        try:
            self.made.append(plan(stale.chain, max(budget_bytes, 1)))
        except BudgetError as error:
            raise BudgetError(
                str(error), budget_bytes=budget_bytes, minimum_bytes=error.minimum_bytes, stage=error.stage
            ) from None
        return self.made[-1]

    def may_have_other_code(self, plan: Plan) -> bool:
        return False


def corrected(known: Corrections, before: Plan, measured_bytes: int, limit_bytes: int) -> tuple[bool, list[Plan]]:
    modules: Any = Modules(known, limit_bytes)
    step = MeasuredStep(before, measured_bytes, lambda: None)
    is_better = known.correct_plan(modules, step, limit_bytes=limit_bytes, available_bytes=limit_bytes)
    return is_better, modules.made


def teach(known: Corrections, costs: Chain, correction_bytes: int) -> None:
    search = known.search_for(costs)
    search.correction_bytes, search.is_measured = correction_bytes, True


def test_a_chain_that_was_never_watched_gets_the_largest_correction_in_proportion() -> None:
    known, small, large = Corrections(), chain(1), chain(1, 24)
    assert known.of(small) == 0
    teach(known, small, 100)
    assert known.of(small) == 100
    assert small in known
    assert large not in known
    assert known.of(large) == int(100 * large.kept_bytes / small.kept_bytes) > 100
    teach(known, chain(2), -5)
    assert known.of(small) == 100
    # That one chain takes less than was predicted says nothing of another.
    alone = Corrections()
    teach(alone, small, -5)
    assert alone.of(small) == -5
    assert alone.of(large) == 0


def test_what_was_taken_over_from_another_chain_is_not_taken_over_again() -> None:
    known, small, large = Corrections(), chain(1), chain(1, 24)
    teach(known, small, 100)
    once = known.of(large)
    for seed in range(20):  # sizes go up and down, and none of them is corrected
        known.search_for(chain(seed + 2))
        known.search_for(large)
        known.search_for(chain(seed + 2, 24))
    assert known.of(large) == once
    assert known.of(small) == 100


def test_plain_types_bring_corrections_back() -> None:
    known = Corrections()
    teach(known, chain(3), 77)
    again = Corrections()
    again.recall(known.to_plain())
    assert again.of(chain(3)) == 77
    assert again.to_plain() == known.to_plain()


def test_only_the_chains_used_last_are_remembered(monkeypatch: Any) -> None:
    monkeypatch.setattr(corrections, "_MOST_CHAINS", 2)
    known = Corrections()
    for seed in (4, 5, 4, 6):
        known.search_for(chain(seed))
    assert chain(4) in known
    assert chain(5) not in known
    assert chain(6) in known


def test_a_step_beyond_the_limit_leads_to_a_smaller_plan() -> None:
    known, costs = Corrections(), chain(7)
    least = minimum_budget(costs).peak_bytes
    before = plan(costs, 2 * least)
    is_better, made = corrected(known, before, 2 * least + least // 2, 2 * least)
    assert is_better
    assert made[-1].peak_bytes < before.peak_bytes


def test_a_step_far_below_the_limit_leads_to_a_larger_plan() -> None:
    known, costs = Corrections(), chain(8)
    least = minimum_budget(costs).peak_bytes
    before = plan(costs, int(1.2 * least))
    is_better, made = corrected(known, before, before.peak_bytes, 10 * least)
    assert is_better
    assert made[-1].seconds < before.seconds


def test_where_the_loss_takes_most_the_plan_that_holds_least_follows() -> None:
    """No smaller budget leads to it: its own peak is above that of the chain's least plan, under which steps exceed."""
    costs = chain(6)
    size_bytes = costs.kept_bytes
    foretold = Foresight((Outside(after_bytes=size_bytes, loss_bytes=size_bytes),), size_bytes, 0)
    least = minimum_budget(costs)
    limit_bytes = foretold(foretold.plan_within(1, least))
    assert foretold(least) > limit_bytes
    known = Corrections()

    class Foreseeing(Modules):
        """As a budget does it, with what the last step foretells."""

        def replan(self, stale: Plan) -> Plan:
            available_bytes = max(self.available_bytes - self.known.of(stale.chain), 1)
            foreseen = self.known.foresight_for(stale.chain)
            budget = Budget(available_bytes, reserved_bytes=limit_bytes - available_bytes, foresight=foreseen)
            try:
                self.made.append(budget.plan(stale.chain))
            except BudgetError as error:
                minimum_bytes = error.minimum_bytes - budget.reserved_bytes
                raise BudgetError(
                    str(error), budget_bytes=available_bytes, minimum_bytes=minimum_bytes, stage=error.stage
                ) from None
            return self.made[-1]

    modules: Any = Foreseeing(known, limit_bytes)
    running = plan(costs, 2 * size_bytes)
    for _ in range(8):
        step = MeasuredStep(running, foretold(running), lambda: foretold)
        known.note(step)
        if step.peak_bytes <= limit_bytes:
            break
        assert known.correct_plan(modules, step, limit_bytes=limit_bytes, available_bytes=limit_bytes)
        running = modules.made[-1]
    assert foretold(running) == limit_bytes
    assert running.peak_bytes > least.peak_bytes


def test_the_least_plan_beyond_the_limit_cannot_be_bettered() -> None:
    known, costs = Corrections(), chain(9)
    before = minimum_budget(costs)
    is_better, made = corrected(known, before, 2 * before.peak_bytes, before.peak_bytes)
    assert not is_better
    assert not [each for each in made if each.schedule != before.schedule]


def test_the_last_measured_step_of_a_chain_foretells_those_under_other_plans(monkeypatch: Any) -> None:
    monkeypatch.setattr(corrections, "_MOST_CHAINS", 1)
    known, costs = Corrections(), chain(7)
    assert known.foresight_for(costs) is None
    large = plan(costs, costs.kept_bytes * 2)
    small = plan(costs, minimum_budget(costs).peak_bytes)
    # It foresees ten bytes too much for the step itself, so for every other one.
    known.note(MeasuredStep(large, large.peak_bytes + 90, lambda: lambda other: other.peak_bytes + 100))
    foresight = known.foresight_for(costs)
    assert foresight is not None
    assert foresight(small) == small.peak_bytes + 90
    known.note(MeasuredStep(large, large.peak_bytes, lambda: None))
    foresight = known.foresight_for(costs)
    assert foresight is not None
    assert foresight(small) == 0
    other = plan(chain(8, 5), chain(8, 5).kept_bytes * 2)
    known.note(MeasuredStep(other, other.peak_bytes, lambda: None))
    assert known.foresight_for(costs) is None


def test_steps_of_the_nearest_measured_size_foretell_those_of_a_new_one() -> None:
    known = Corrections()
    small, near, new = (scaled(chain(7), factor) for factor in (2, 9, 10))
    for costs, around_bytes, is_exact in ((small, 100, True), (near, 3, False), (scaled(chain(7), 8), 50, True)):
        keep_all = plan(costs, costs.kept_bytes * 2)

        def foresee(other: Plan, around_bytes: int = around_bytes) -> int:
            return other.peak_bytes + around_bytes

        step = MeasuredStep(
            keep_all, keep_all.peak_bytes, lambda foresee=foresee: foresee, reserved_bytes=7, is_exact=is_exact
        )
        step = replace(step, overstates=False)
        known.note(step)
    keep_all = plan(new, new.kept_bytes * 2)
    assert known.has_seen(small)
    assert not known.has_seen(new)
    foretold = known.foresight_for(new, reserved_bytes=1007)
    assert foretold is not None
    # Not of the size with bounds on costs, beside which less seems to lie around the call. The batch is larger now.
    assert foretold(keep_all) == keep_all.peak_bytes + 50 + 1000
    # Nobody knows what lies around a module of other stages.
    assert known.foresight_for(chain(7, 5)) is None


def test_a_step_that_took_as_much_under_the_same_plan_teaches_nothing() -> None:
    known, costs = Corrections(), chain(7)
    large, small = plan(costs, costs.kept_bytes * 2), plan(costs, minimum_budget(costs).peak_bytes)
    assert not known.teaches_nothing(large, 0)
    known.note(MeasuredStep(large, 1000, lambda: None))
    assert known.teaches_nothing(large, 1000)
    assert known.teaches_nothing(large, 900)
    assert not known.teaches_nothing(large, 1001)
    assert not known.teaches_nothing(small, 900)
