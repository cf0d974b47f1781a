"""The planner against exhaustive search, baselines and its own promises."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reference import baselines, best_by_budget, judge_all
from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.errors import BudgetError, RotorError
from lightning_rotor.planning import Solver, fine_slots, minimum_budget, plan, schedule_search
from lightning_rotor.planning.edits import edits
from lightning_rotor.planning.solver import plan_of_tables
from lightning_rotor.profiling import profile_chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import Simulation, simulate
from lightning_rotor.stages.sequential import sequential_stages
from tests.grids import examples, few
from tests.models import Case, cases
from tests.strategies import KINDS, Kind, chains, random_chain, with_skips

# Times within this factor are the same: they are sums of the same durations in another order.
SAME = 1 + 1e-9
CHAINS_PER_BATCH = 25
BATCHES = 5  # of each of the five kinds: 625 chains, of which `make test` takes 50


def uniform_chain(stages: int, *, size_bytes: int = 1000, draws_random: bool = False) -> Chain:
    """Equal stages that save their input and as much again."""
    keep = Option(
        name="keep",
        saved_bytes=size_bytes,
        saved_input_bytes=size_bytes,
        saved_output_bytes=0,
        saved_tensors=2,
        forward_peak_bytes=2 * size_bytes,
        replay_peak_bytes=size_bytes,
        unpack_peak_bytes=size_bytes,
        unpack_bytes=size_bytes,
        backward_peak_bytes=2 * size_bytes,
        backward_segment_peak_bytes=2 * size_bytes,
        backward_held_peak_bytes=2 * size_bytes,
        input_gradient_bytes=size_bytes,
        parameter_gradient_bytes=0,
        forward_seconds=1.0,
        replay_seconds=0.9,
        backward_seconds=2.0,
    )
    stage = StageCost("stage", size_bytes, 2 * size_bytes, 1.0, (keep,), draws_random=draws_random)
    return Chain(tuple(replace(stage, name=f"stage{index}") for index in range(stages)), input_bytes=size_bytes)


# ---------------------------------------------------------------------------------------------------- against the oracle


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", few(range(BATCHES), 0))
def test_plan_is_as_fast_as_the_best_of_all_schedule_trees(kind: Kind, batch: int) -> None:
    cases = equal = 0
    for number in range(examples(10, CHAINS_PER_BATCH)):
        rng = random.Random(f"{kind} {batch} {number}")
        stages = rng.choice((1, 2, 3, 4, 4, 5, 5, 6, 6))
        grain = rng.choice((1, 512, 997))
        chain = random_chain(rng, stages, kind, grain=grain)
        step = {"gradients_exist": rng.random() < 0.3, "lingering_bytes": grain * rng.choice((0, 0, 30))}
        solver = Solver(chain, slots=fine_slots(stages), **step)
        before = float("inf")
        for budget_bytes, best in best_by_budget(judge_all(chain, **step)).items():
            found = solver.plan(budget_bytes)  # raises if it finds nothing where a tree fits
            assert found.peak_bytes <= budget_bytes
            assert found.seconds <= before, f"{budget_bytes} bytes are slower than less: {found} for {chain}"
            assert found.seconds <= 1.05 * best.seconds, f"{found} against {best} for {chain}"
            before = found.seconds
            cases += 1
            equal += found.seconds <= SAME * best.seconds
    assert equal >= 0.95 * cases, f"only {equal} of {cases} are as fast as the best"


def test_least_budget_is_the_least_peak_of_all_schedule_trees() -> None:
    for seed in range(examples(20, 60)):
        rng = random.Random(seed)
        chain = random_chain(rng, rng.randint(1, 6), KINDS[seed % len(KINDS)])
        assert minimum_budget(chain).peak_bytes == judge_all(chain)[0].peak_bytes


# ---------------------------------------------------------------------------------------------------- promises at any size


def assert_minimum_is_one(solver: Solver) -> None:
    """What is named for a budget that is too small can be planned, and nothing below it."""
    with pytest.raises(BudgetError, match="minimum") as refused:
        solver.plan(1)
    least = refused.value.minimum_bytes
    assert solver.minimum().peak_bytes == least
    assert solver.plan(least).peak_bytes <= least
    # Closely below it is where edits of other candidates might fit.
    for below in (1, 2, *(least * per_mille // 1000 for per_mille in (1, 2, 5, 10, 20, 50))):
        if 0 < below < least:
            with pytest.raises(BudgetError, match="is below this chain's minimum") as refused:
                solver.plan(least - below)
            assert refused.value.minimum_bytes == least


@settings(max_examples=examples(8, 30))
@given(chains(max_stages=14), st.sampled_from((60, 100, 300)), st.integers(0, 50), st.randoms(use_true_random=False))
def test_minimum_can_be_planned_and_nothing_below_it(
    chain: Chain, slots: int, lingering_bytes: int, rng: random.Random
) -> None:
    if len(chain) > 2 and rng.random() < 0.3:
        chain = with_skips(rng, chain)
    assert_minimum_is_one(Solver(chain, slots=slots, lingering_bytes=lingering_bytes))


@pytest.mark.parametrize("seed", [2, 47, 57, 106])
def test_minimum_is_found_where_edits_of_the_lowest_candidate_do_not_lead_to_it(seed: int) -> None:
    assert_minimum_is_one(Solver(random_chain(random.Random(seed), 14, "odd"), slots=100))


@pytest.mark.parametrize("seed", few([0, 2]))
def test_no_edit_of_the_least_schedule_of_a_long_chain_takes_less(seed: int) -> None:
    chain = random_chain(random.Random(seed), 64, "odd", grain=4099)
    least = minimum_budget(chain)
    assert least.peak_bytes <= min(simulate(chain, edited).peak_bytes for edited in edits(least.schedule, chain))


# Two layers may be one stage, which has a minimum as well.
@pytest.mark.filterwarnings("ignore:all .* layers were merged into one stage")
@settings(max_examples=4)
@given(cases(), st.booleans())
def test_minimum_of_a_measured_chain_can_be_planned_and_nothing_below_it(case: Case, gradients_exist: bool) -> None:
    chain = profile_chain(sequential_stages(case.net), case.batch, repeats=1).chain
    assert_minimum_is_one(Solver(chain, slots=200, gradients_exist=gradients_exist))


@settings(max_examples=examples(12, 60))
@given(chains(max_stages=14))
def test_peak_never_exceeds_the_budget_and_the_simulation_is_the_simulators(chain: Chain) -> None:
    solver = Solver(chain, slots=500)
    least, most = solver.minimum().peak_bytes, simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
    for budget_bytes in range(least, most + 1, max((most - least) // 7, 1)):
        found = solver.plan(budget_bytes)
        assert found.peak_bytes <= budget_bytes == found.budget_bytes
        assert found.simulation == simulate(chain, found.schedule)


@settings(max_examples=examples(10, 20))
@given(chains(max_stages=8))
def test_nothing_in_the_tables_is_faster_than_a_plan_without_them(chain: Chain) -> None:
    solver = Solver(chain)
    found = solver.plan(10**15)
    assert all(each.seconds >= found.seconds * (1 - 1e-12) for each in solver.candidates())


@settings(max_examples=examples(8, 40))
@given(chains(max_stages=14))
def test_more_budget_is_never_slower(chain: Chain) -> None:
    solver = Solver(chain, slots=300)
    least, most = solver.minimum().peak_bytes, simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
    seconds = [solver.plan(budget).seconds for budget in range(least, most + 2, max((most - least) // 40, 1))]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        pytest.param(kind, stages, marks=pytest.mark.wide if stages == 60 and kind != "odd" else [])
        for kind in KINDS
        for stages in (1, 2, 9, 24, 60)
    ],
)
def test_plan_is_never_slower_than_a_baseline_that_fits(kind: Kind, stages: int) -> None:
    chain = random_chain(random.Random(f"{kind} {stages}"), stages, kind, grain=4096 + stages)
    solver = Solver(chain, slots=fine_slots(stages))
    for name, schedule in baselines(chain).items():
        rival = simulate(chain, schedule)
        assert solver.plan(rival.peak_bytes).seconds <= SAME * rival.seconds, f"{name} {schedule} is better"


def test_long_chain_whose_boundaries_are_smaller_than_a_slot_still_beats_the_baselines() -> None:
    chain = random_chain(random.Random(1), examples(60, 90), "cnn", grain=4099)
    solver = Solver(chain, slots=350)
    least_peak_bytes = min(simulate(chain, schedule).peak_bytes for schedule in baselines(chain).values())
    assert solver.minimum().peak_bytes <= 1.01 * least_peak_bytes
    for schedule in baselines(chain).values():
        rival = simulate(chain, schedule)
        if rival.peak_bytes <= 1.01 * least_peak_bytes:
            continue  # that close to the minimum, slots are too coarse
        found = solver.plan(rival.peak_bytes)
        assert found.peak_bytes <= rival.peak_bytes
        assert found.seconds <= SAME * rival.seconds


@pytest.mark.parametrize(
    ("seed", "kind"),
    [pytest.param(5, "transformer", marks=pytest.mark.wide), (0, "heterogeneous"), pytest.param(1, "odd", marks=pytest.mark.wide)],
)  # fmt: skip
def test_more_budget_is_never_slower_on_a_long_chain_and_each_plan_is_near_its_bound(seed: int, kind: Kind) -> None:
    stages = examples(50, 100)
    chain = random_chain(random.Random(seed), stages, kind, grain=4096)
    rng = random.Random(0)  # no two stages alike, so that no size of slots suits them all
    chain = replace(
        chain,
        stages=tuple(replace(stage, discard_seconds=stage.discard_seconds * rng.uniform(1, 1.01)) for stage in chain),
    )
    solver = Solver(chain, slots=200)
    least, most = solver.minimum().peak_bytes, simulate(chain, Schedule.keep_all(stages)).peak_bytes
    percents = (1, 2, 3, 5, 7, 10, 15, 20, 35, 50, 100)
    plans = [solver.plan(least + percent * (most - least) // 100) for percent in percents]
    seconds = [plan.seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    bounds = [plan.lower_bound_seconds for plan in plans]
    assert all(found <= 1.2 * bound for found, bound in zip(seconds[:3], bounds[:3], strict=True))
    assert all(found <= 1.07 * bound for found, bound in zip(seconds[3:], bounds[3:], strict=True))


def test_stages_that_differ_in_a_second_option_use_it_where_it_pays() -> None:
    chain = uniform_chain(6)
    half = replace(chain.stages[0].keep, name="half", saved_bytes=100, forward_peak_bytes=1500, backward_seconds=2.1)
    chain = replace(chain, stages=tuple(replace(stage, options=(stage.keep, half)) for stage in chain))
    keep_all = simulate(chain, Schedule.keep_all(6))
    found = plan(chain, keep_all.peak_bytes - 1)
    assert found.schedule.recomputed == ()
    assert str(found.schedule).count(":1") == 1
    assert found.overhead == pytest.approx(0.1 / 18)


def test_edits_switch_to_the_options_that_save_the_next_less_and_more() -> None:
    chain = uniform_chain(2)
    options = tuple(replace(chain.stages[0].keep, name=str(size), saved_bytes=size) for size in (500, 100, 900, 300))
    chain = replace(chain, stages=(replace(chain.stages[0], options=options), chain.stages[1]))
    switched = {str(edited) for edited in edits(Schedule.parse("0:3 1"), chain)}
    assert switched == {"0:1 1", "0-1", "(0:3) 1"}


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[Schedule]:
    """Schedules that planners have had simulated."""
    found: list[Schedule] = []

    def noted(chain: Chain, schedule: Schedule, **step: Any) -> Simulation:
        found.append(schedule)
        return simulate(chain, schedule, **step)

    monkeypatch.setattr(schedule_search, "simulate", noted)
    return found


def test_many_options_of_a_short_chain_do_not_make_a_plan_long(judged: list[Schedule]) -> None:
    chain = uniform_chain(20)
    sizes = range(1000, 0, -100)
    options = tuple(
        replace(chain.stages[0].keep, saved_bytes=size, backward_seconds=2.1 - size / 10000) for size in sizes
    )
    chain = replace(chain, stages=tuple(replace(stage, options=options) for stage in chain))
    solver = Solver(chain, slots=500)
    keep_all = solver.plan(10**9)
    found = solver.plan(keep_all.peak_bytes * 2 // 3)
    assert ":" in str(found.schedule)
    assert len(judged) < 100


def test_stage_that_must_not_be_recomputed_is_kept() -> None:
    chain = uniform_chain(8)
    chain = replace(chain, stages=tuple(replace(stage, recomputable=index != 3) for index, stage in enumerate(chain)))
    found = minimum_budget(chain)
    assert 3 not in found.recomputed
    assert found.recomputed


# ---------------------------------------------------------------------------------------------------- examples by hand


def test_ample_budget_keeps_everything() -> None:
    chain = uniform_chain(5)
    found = plan(chain, 10**9)
    assert found.schedule == Schedule.keep_all(5)
    assert (found.seconds, found.overhead, found.recomputed) == (15.0, 0.0, ())


def test_one_byte_less_than_everything_recomputes_one_stage() -> None:
    chain = uniform_chain(5)
    found = plan(chain, plan(chain, 10**9).peak_bytes - 1)
    # The second pass over a stage stops at its last saved tensor: one discarded forward more, a tenth of a forward less.
    assert len(found.recomputed) == 1
    assert found.seconds == pytest.approx(15.9)


def test_long_uniform_chain_needs_little_recomputation() -> None:
    """Doubling the depth of nesting multiplies what fits: one more forward buys a third of the memory here."""
    chain = uniform_chain(40)
    budget_bytes = simulate(chain, Schedule.keep_all(40)).peak_bytes // 3
    found = plan(chain, budget_bytes)
    assert found.peak_bytes <= budget_bytes
    assert 0.15 < found.overhead < 0.35  # at most one more forward per stage


def test_summary_of_a_plan_is_one_line_with_its_figures() -> None:
    found = plan(uniform_chain(3), 10**6)
    assert found.summary() == "3 stages within 977 KiB: peak 7.81 KiB, 9 s per step (+0.0%), 0 stages recomputed: 0-2"


def test_minimum_has_its_own_peak_as_budget() -> None:
    found = minimum_budget(uniform_chain(10))
    assert found.budget_bytes == found.peak_bytes
    assert found.schedule.segments > 1


def test_solve_seconds_pay_for_the_table_once(judged: list[Schedule]) -> None:
    solver = Solver(uniform_chain(30), slots=2000)
    budget_bytes = solver.plan(10**6).peak_bytes - 1  # fits as it is, which takes no table
    assert len(judged) == 1
    first, second = solver.plan(budget_bytes), solver.plan(budget_bytes)
    assert 0 < second.solve_seconds < first.solve_seconds


def test_candidates_rise_in_peak_and_are_all_distinct() -> None:
    candidates = Solver(uniform_chain(8)).candidates()
    peaks = [candidate.peak_bytes for candidate in candidates]
    assert peaks == sorted(peaks)
    assert len({candidate.schedule for candidate in candidates}) == len(candidates) > 3


# ---------------------------------------------------------------------------------------------------- bad input


def test_budget_below_the_minimum_names_it_and_the_stage() -> None:
    chain = uniform_chain(4, size_bytes=2**20)
    message = r"budget 4\.00 MiB is below this chain's minimum 5\.00 MiB \(set by 'stage3'\): raise mem_limit or lower the batch size"
    with pytest.raises(BudgetError, match=message) as caught:
        plan(chain, 4 * 2**20)
    assert caught.value.minimum_bytes == minimum_budget(chain).peak_bytes == 5 * 2**20
    assert caught.value.budget_bytes == 4 * 2**20
    assert caught.value.stage == "stage3"
    assert isinstance(caught.value, RotorError)
    assert plan(chain, caught.value.minimum_bytes).peak_bytes == 5 * 2**20


def test_a_minimum_of_parameter_gradients_is_not_blamed_on_the_batch() -> None:
    chain = uniform_chain(4, size_bytes=2**10)
    peaks = dict.fromkeys(
        ("backward_peak_bytes", "backward_segment_peak_bytes", "backward_held_peak_bytes"), 2**20 + 2**11
    )
    heavy = replace(chain.stages[0].keep, parameter_gradient_bytes=2**20, **peaks)
    chain = replace(chain, stages=(replace(chain.stages[0], options=(heavy,)), *chain.stages[1:]))
    cause = r"\(set by 'stage0', with 1\.00 MiB of new parameter gradients\): raise mem_limit"
    with pytest.raises(
        BudgetError, match=f"{cause}, for a smaller batch does not make the gradients smaller"
    ) as caught:
        plan(chain, 2**19)
    assert caught.value.gradient_bytes == 2**20
    with pytest.raises(BudgetError, match=f"{cause} or lower the batch size"):
        plan(chain, 2**20 + 1)
    with pytest.raises(BudgetError, match=r"\(set by 'stage0'\): raise mem_limit or lower the batch size"):
        plan(chain, 2**19, gradients_exist=True)


def test_budget_a_byte_below_the_minimum_is_told_in_bytes() -> None:
    with pytest.raises(BudgetError, match=r"budget 5,242,879 bytes is below this chain's minimum 5,242,880 bytes"):
        plan(uniform_chain(4, size_bytes=2**20), 5 * 2**20 - 1)


@pytest.mark.parametrize("budget", [0, -5, 2.5e9, True, "2GiB", None])
def test_budget_that_is_no_positive_integer_is_refused(budget: object) -> None:
    with pytest.raises(BudgetError, match=r"expected a positive integer of bytes, and at least this chain's minimum"):
        plan(uniform_chain(3), budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [0, -1, 1.5, True])
def test_slots_that_are_no_positive_integer_are_refused(slots: object) -> None:
    with pytest.raises(ValueError, match=r"slots is .*: expected a positive integer"):
        plan(uniform_chain(3), 10**6, slots=slots)  # type: ignore[arg-type]


def test_plan_survives_pickling() -> None:
    found = plan(uniform_chain(4), 10**6)
    assert pickle.loads(pickle.dumps(found)) == found


# ---------------------------------------------------------------------------------------------------- baselines


def test_baselines_look_as_documented() -> None:
    texts = {name: str(schedule) for name, schedule in baselines(uniform_chain(6)).items()}
    assert texts["keep_all"] == "0-5"
    assert texts["per_stage"] == "(0) (1) (2) (3) (4) 5"
    assert texts["periodic_2"] == "(0-2) 3-5"
    assert texts["whole"] == "(0-4) 5"
    assert texts["halving"] == "((0) 1-2) 3-5"


@settings(max_examples=examples(20, 50))
@given(chains(max_stages=12, kinds=("odd",)))
def test_baselines_keep_what_must_be_kept(chain: Chain) -> None:
    for schedule in baselines(chain).values():
        simulate(chain, schedule)  # raises if it recomputes such a stage


@settings(max_examples=examples(10, 40), deadline=None)
@given(chains())
def test_a_plan_of_the_tables_fits_and_is_missing_only_where_the_least_peak_is_asked_for(chain: Chain) -> None:
    least, most = minimum_budget(chain).peak_bytes, plan(chain, 10**15).peak_bytes
    assert plan_of_tables(chain, least - 1) is None
    for budget_bytes in (least, (least + most) // 2, most):
        found = plan_of_tables(chain, budget_bytes)
        if found is None:
            # Only the schedule of least peak fits.
            assert plan(chain, budget_bytes).peak_bytes == least
        else:
            assert found.peak_bytes <= budget_bytes
            assert found.seconds >= plan(chain, budget_bytes).seconds
    assert plan_of_tables(chain, most) is not None
