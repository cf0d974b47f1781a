"""Several calls of a step as one chain, against each chain alone and against every split of the budget."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from lightning_rotor import Schedule, plan, simulate
from lightning_rotor.chain import BackwardPeaks, Chain, Skip
from lightning_rotor.errors import BudgetError
from lightning_rotor.planning.joint_chain import Outside, StepPlan, concatenated, first_stages, joined, split
from lightning_rotor.planning.plan import Plan, scheduled
from tests.strategies import KINDS, random_chain
from tests.test_simulator import STAGE

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


TWO = Chain((STAGE, STAGE), input_bytes=40, rng_state_bytes=3, segment_seconds=0.1, device="cuda:1")
THREE = Chain((STAGE, STAGE, STAGE), rng_state_bytes=2, segment_seconds=0.2)


def test_the_users_code_is_a_stage_that_runs_once_behind_each_call() -> None:
    """Around the calls of two and three stages, whose outputs have ten bytes each."""
    around = [Outside(7, 50, 9, 1000), Outside(37, 80, 40, 190)]
    chain = joined(["left", "right"], [TWO, THREE], around)
    assert chain.names == (
        *("left.stage", "left.stage", "behind left"),
        *("right.stage", "right.stage", "right.stage", "behind right"),
    )
    assert (chain.input_bytes, chain.rng_state_bytes, chain.segment_seconds, chain.device) == (40, 3, 0.2, "cuda:1")
    left, right = chain.stages[2], chain.stages[6]
    assert not left.recomputable
    assert (left.output_bytes, left.keep.forward_peak_bytes, left.keep.saved_bytes) == (0, 50 - 7, 37 - 7)
    assert (left.keep.saved_input_bytes, left.keep.input_gradient_bytes, left.keep.backward_peak_bytes) == (10, 10, 10)
    # The largest of 9 - 7 and 40 - 37 is there in all backwards, so the loss takes that much less by itself.
    assert (right.keep.forward_peak_bytes, right.keep.saved_bytes) == (80 - 37, 0)
    assert (right.keep.backward_peak_bytes, right.pinned_bytes) == (190 - 37 - 3, 3)
    assert [stage.pinned_bytes for stage in chain] == [7, 0, 0, 0, 0, 0, 3]


def test_the_users_code_holds_at_least_what_is_there_before_the_next_call() -> None:
    chain = joined(["a", "b"], [TWO, TWO], [Outside(5, 10, 0, 0), Outside(45, 50, 0, 0)])
    assert chain.stages[2].keep.forward_peak_bytes == 45 - 5
    falling = joined(["a", "b"], [TWO, TWO], [Outside(45, 50, 0, 0), Outside(5, 60, 0, 0)])
    assert falling.stages[2].keep.saved_bytes == 0
    assert falling.stages[5].keep.forward_peak_bytes == 60 - 45
    assert falling.stages[5].pinned_bytes == 0


def test_with_nothing_outside_the_loss_leaves_the_gradient_of_the_output() -> None:
    chain = joined(["net"], [TWO])
    assert chain.stages[2].keep.backward_peak_bytes == chain.stages[2].keep.input_gradient_bytes == 10
    assert chain.stages[2].keep.forward_peak_bytes == 0
    assert [stage.pinned_bytes for stage in chain] == [0, 0, 0]


def test_a_module_that_is_called_again_adds_to_the_gradients_of_its_later_call() -> None:
    """Backwards come in the reverse order, so the first call's finds gradients, and no other module's does."""
    peaks = BackwardPeaks(21, 22, 23, 24)
    keep = replace(STAGE.keep, parameter_gradient_bytes=5, accumulating=peaks)
    chain = Chain((replace(STAGE, options=(keep,)),))
    first, second, other, third = (joined(["net", "net", "other", "net"], [chain] * 4).stages[n] for n in (0, 2, 4, 6))
    for stage in (first, second):
        assert stage.keep.parameter_gradient_bytes == 0
        assert stage.keep.backward_peak_bytes == 21
        assert stage.keep.backward_segment_peak_bytes == 22
        assert stage.keep.backward_held_peak_bytes == 23
        assert stage.keep.backward_replayed_peak_bytes == 24
    for stage in (other, third):
        assert stage.keep.parameter_gradient_bytes == 5
        assert stage.keep.backward_peak_bytes == STAGE.keep.backward_peak_bytes


def test_skips_of_later_calls_are_those_of_their_own_stages() -> None:
    saving = replace(STAGE, options=(replace(STAGE.keep, saved_skips=(0,)),))
    chain = Chain((STAGE, STAGE, saving), skips=(Skip(0, (2,), 4, (4,)),))
    whole = joined(["a", "b"], [chain, chain])
    assert whole.skips == (Skip(0, (2,), 4, (4,)), Skip(4, (6,), 4, (4,)))
    assert whole.stages[2].keep.saved_skips == (0,)
    assert whole.stages[6].keep.saved_skips == (1,)


def test_schedules_join_and_fall_apart() -> None:
    left, right = Schedule.parse("0 (1 2:1) 3"), Schedule.parse("(0 (1) 2) 3")
    whole = concatenated([left, right])
    assert str(whole) == "0 (1 2:1) 3-4 (5 (6) 7) 8-9"
    assert split(whole, [4, 4]) == [left, right]
    assert first_stages([4, 4, 2]) == [0, 5, 10]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lingering_bytes", [0, 13])
def test_a_call_may_use_what_the_calls_before_leave_of_the_budget(seed: int, lingering_bytes: int) -> None:
    chains = pair(seed)
    chain = joined(NAMES, chains)
    schedule = Schedule.keep_all(len(chain))
    whole = scheduled(chain, schedule, 10_000, slots=77, lingering_bytes=lingering_bytes)
    step = StepPlan.of(whole, NAMES, chains)
    assert step.names == NAMES
    assert step.budget_bytes == 10_000
    first, second = step.calls
    assert first.budget_bytes == 10_000
    assert first.slots == second.slots == 77
    assert first.conditions == second.conditions == whole.conditions
    held = simulate(chain, schedule, lingering_bytes=lingering_bytes).events[len(chains[0])].after_bytes
    assert second.budget_bytes == 10_000 - (held - lingering_bytes)
    tight = StepPlan.of(scheduled(chain, schedule, 1, lingering_bytes=lingering_bytes), NAMES, chains)
    assert [call.budget_bytes for call in tight.calls] == [call.peak_bytes for call in tight.calls]


@pytest.mark.parametrize("lingering_bytes", [0, 13])
def test_a_settled_call_has_its_own_peaks(lingering_bytes: int) -> None:
    """Two kept stages that save their ten bytes of input and ten of their own."""
    plan = scheduled(TWO, Schedule.keep_all(2), lingering_bytes=lingering_bytes)
    stage = joined(["net"], [plan]).stages[0]
    assert stage.name == "net"
    assert not stage.recomputable
    assert stage.output_bytes == 10
    # The first keeps 10 bytes of its own; its output is the second's input; then 20 bytes in its forward.
    assert stage.keep.forward_peak_bytes == 10 + 10 + 20
    assert stage.keep.saved_bytes == 10 + 10 + 10
    assert stage.keep.saved_output_bytes == 0
    assert stage.keep.input_gradient_bytes == 0
    alone = joined(["net"], [TWO])
    folded = joined(["net"], [plan])
    step = {"lingering_bytes": lingering_bytes}
    full = simulate(alone, Schedule.keep_all(3), **step)  # type: ignore[arg-type]
    one = simulate(folded, Schedule.keep_all(2), **step)  # type: ignore[arg-type]
    assert one.peak_bytes == full.peak_bytes
    assert one.held_bytes == full.held_bytes


@pytest.mark.parametrize("saved_output_bytes", [0, 4, 10])
def test_a_settled_call_saves_as_much_of_its_output_as_its_last_stage(saved_output_bytes: int) -> None:
    keep = replace(STAGE.keep, saved_output_bytes=saved_output_bytes, parameter_gradient_bytes=6)
    chain = Chain((replace(STAGE, options=(keep,)),))
    stage = joined(["net"], [scheduled(chain, Schedule.keep_all(1))]).stages[0]
    assert stage.keep.saved_output_bytes == saved_output_bytes
    assert stage.keep.parameter_gradient_bytes == 6
    assert stage.keep.saved_bytes == 10


def test_by_default_nothing_lies_outside() -> None:
    assert Outside() == Outside(0, 0, 0, 0)


def test_the_users_code_takes_no_time_and_is_in_no_segment() -> None:
    code = joined(["net"], [TWO]).stages[2]
    assert code.discard_seconds == code.keep.forward_seconds == 0
    assert code.keep.replay_seconds == code.keep.backward_seconds == 0
    assert code.keep.saved_tensors == 1
    assert not code.recomputable


def test_the_users_code_holds_the_output_of_the_calls_last_stage() -> None:
    chain = Chain((replace(STAGE, output_bytes=30), STAGE))
    assert joined(["net"], [chain]).stages[2].keep.saved_input_bytes == 10


def test_without_an_output_the_code_between_calls_takes_nothing_in_its_backward() -> None:
    chain = Chain((replace(STAGE, output_bytes=0),))
    assert joined(["a", "b"], [chain, chain]).stages[1].keep.backward_peak_bytes == 0


def test_what_the_first_stage_pins_comes_on_top_of_what_is_there_before() -> None:
    chain = Chain((replace(STAGE, pinned_bytes=6), replace(STAGE, pinned_bytes=1)))
    assert joined(["net"], [chain], [Outside(forward_bytes=5)]).stages[0].pinned_bytes == 11


def test_somebody_holds_the_input_of_every_call() -> None:
    """So the first stage of the second call has the peak of a backward whose input is held."""
    keep = replace(STAGE.keep, backward_held_peak_bytes=500)
    chain = Chain((replace(STAGE, options=(keep,)),))
    events = simulate(joined(["a", "b"], [chain, chain]), Schedule.keep_all(4)).events
    peaks = {event.stage: event.peak_bytes for event in events if event.phase == "backward"}
    assert peaks[2] > 500
    assert peaks[0] > 500


def test_a_settled_calls_backward_peaks_as_its_own_stages_do() -> None:
    """Not as the user's code behind it, whose backward is larger here, and which stays a stage of its own."""
    small = replace(STAGE.keep, unpack_peak_bytes=0, unpack_bytes=0, backward_held_peak_bytes=1, input_gradient_bytes=0)
    chain = Chain((replace(STAGE, output_bytes=100, options=(small,)),))
    stage = joined(["net"], [scheduled(chain, Schedule.keep_all(1))]).stages[0]
    alone = simulate(joined(["net"], [chain]), Schedule.keep_all(2)).events
    code, own = (event for event in alone if event.phase == "backward")
    assert code.peak_bytes > own.peak_bytes
    assert stage.keep.backward_peak_bytes == own.peak_bytes - (code.after_bytes - 100)
