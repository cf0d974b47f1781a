"""Inverted stages as an option of the planner: against exhaustive search, in both tables, in bounds, files and reports."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from benchmarks.optimum import Optimum
from benchmarks.reference import best_by_budget, judge_all
from lightning_rotor.chain import Chain
from lightning_rotor.errors import ScheduleError
from lightning_rotor.planning import Plan, Solver, fine_slots, lower_bound_seconds, minimum_budget, plan
from lightning_rotor.planning.backtracking import schedule_at
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.requirements import requirements_of
from lightning_rotor.report import draw_chain, plot_timeline
from lightning_rotor.report.figures import INVERSION_COLOURS
from lightning_rotor.schedule import Leaf, Schedule
from lightning_rotor.simulator import simulate
from tests.grids import examples
from tests.planning.test_solver import uniform_chain
from tests.strategies import random_chain, with_inversion, with_skips

SAME = 1 + 1e-9


def invertible_chain(stages: int, *, evaluations: int = 2) -> Chain:
    """Equal stages, all but the first of which can be inverted for so many forwards more. The output goes when the input is there again."""
    chain = uniform_chain(stages)
    first, *others = chain.stages
    option = replace(
        first.keep,
        name="invert",
        saved_bytes=0,
        saved_input_bytes=0,
        saved_output_bytes=1000,
        saved_tensors=1,
        forward_peak_bytes=2000,
        replay_peak_bytes=2000,
        backward_peak_bytes=3000,
        backward_segment_peak_bytes=3000,
        backward_held_peak_bytes=3000,
        replay_seconds=1.0,
        backward_seconds=2.0 + evaluations,
        inverts=True,
    )
    return replace(chain, stages=(first, *(replace(each, options=(each.keep, option)) for each in others)))


def test_plan_is_as_fast_as_the_best_of_all_schedule_trees_with_inverted_stages() -> None:
    cases = equal = inverting = 0
    for number in range(examples(30, 70)):
        rng = random.Random(f"invertible {number}")
        stages = rng.choice((2, 3, 4, 4, 5, 5))
        grain = rng.choice((1, 512, 997))
        chain = random_chain(rng, stages, "invertible", grain=grain)
        step = {"gradients_exist": rng.random() < 0.3, "lingering_bytes": grain * rng.choice((0, 0, 30))}
        solver = Solver(chain, slots=fine_slots(stages), **step)
        judged = judge_all(chain, **step)
        assert solver.minimum().peak_bytes == judged[0].peak_bytes
        before = float("inf")
        for budget_bytes, best in best_by_budget(judged).items():
            found = solver.plan(budget_bytes)
            assert found.peak_bytes <= budget_bytes
            assert found.seconds <= min(before, 1.05 * best.seconds), f"{found} against {best} for {chain}"
            assert lower_bound_seconds(chain, budget_bytes, **step) <= best.seconds, f"{best} for {chain}"
            before = found.seconds
            cases += 1
            equal += found.seconds <= SAME * best.seconds
            inverting += bool(found.inverted)
    assert equal >= 0.95 * cases, f"only {equal} of {cases} are as fast as the best"
    assert inverting >= cases / 10


@settings(max_examples=examples(24, 60), deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from((30, 150, 600)), st.booleans())
def test_compiled_and_plain_kernel_fill_the_same_table(rng: random.Random, slots: int, gradients_exist: bool) -> None:
    chain = random_chain(rng, rng.randint(2, 9), "invertible", grain=rng.choice((1, 997)))
    chain = replace(chain, segment_seconds=0.0)  # nested segments take more of it than is counted
    chain = with_skips(rng, chain) if len(chain) >= 3 and rng.random() < 0.3 else chain
    most_bytes = simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
    requirements = requirements_of(chain, unit=most_bytes / slots, gradients_exist=gradients_exist)
    plain, compiled = (Table(requirements, slots=slots, compiled=choice) for choice in (False, True))
    plain.solve()
    compiled.solve()
    np.testing.assert_array_equal(plain.seconds, compiled.seconds)
    for memory in np.flatnonzero(np.isfinite(plain.seconds))[::9].tolist():
        schedule = schedule_at(plain, memory)
        assert schedule == schedule_at(compiled, memory)
        assert simulate(chain, schedule, gradients_exist=gradients_exist).seconds == pytest.approx(
            float(plain.seconds[memory]), rel=1e-9
        )


def test_bound_is_at_most_the_optimum_and_close_to_it_where_stages_may_be_inverted() -> None:
    """The optimum runs anything again at any time, as no schedule tree can."""
    ratios = []
    for seed in range(24):
        rng = random.Random(f"invertible bound {seed}")
        grain = rng.choice((1, 512))
        chain = replace(random_chain(rng, rng.choice((3, 4, 4, 5)), "invertible", grain=grain), segment_seconds=0.0)
        step = {"gradients_exist": rng.random() < 0.4, "lingering_bytes": grain * rng.choice((0, 0, 30))}
        least = minimum_budget(chain, **step).peak_bytes
        most = simulate(chain, Schedule.keep_all(len(chain)), **step).peak_bytes
        optimum = Optimum(chain, **step)
        for budget_bytes in (least, rng.randint(least, max(most, least))):
            seconds = optimum.seconds(budget_bytes)
            bound = lower_bound_seconds(chain, budget_bytes, **step)
            assert bound <= seconds <= plan(chain, budget_bytes, **step).seconds * SAME, (
                f"{budget_bytes} bytes, {chain}"
            )
            ratios.append(bound / seconds)
    assert statistics.mean(ratios) > 0.97
    assert min(ratios) > 0.75


def test_48_stages_at_the_tightest_budget_are_faster_inverted_and_faster_still_with_a_fused_backward() -> None:
    least = minimum_budget(uniform_chain(48)).peak_bytes
    tightest = max(least, minimum_budget(invertible_chain(48)).peak_bytes)
    recomputed, inverted, fused = (
        plan(chain, tightest)
        for chain in (uniform_chain(48), invertible_chain(48), invertible_chain(48, evaluations=1))
    )
    assert recomputed.seconds > inverted.seconds > fused.seconds
    assert inverted.seconds <= 48 * 5.0
    assert fused.seconds <= 48 * 4.0
    assert max(inverted.gap, fused.gap) < 0.01  # proven: nothing that fits is faster by more


def test_held_bytes_of_an_inverted_chain_do_not_grow_with_its_length() -> None:
    held = [simulate(invertible_chain(n), Schedule.parse(f"(0) 1-{n - 1}:1")).held_bytes for n in (16, 64, 256)]
    assert held == [1000, 1000, 1000]  # the output, which is the caller's


def test_what_a_stage_saved_of_its_output_is_gone_while_the_next_stage_is_inverted() -> None:
    chain = invertible_chain(3)
    saving = replace(chain.stages[0].keep, saved_output_bytes=1000)
    chain = replace(chain, stages=(replace(chain.stages[0], options=(saving,)), *chain.stages[1:]))
    kept, inverted = (simulate(chain, Schedule.parse(text)) for text in ("0-2", "0 1:1 2"))
    # Stage 0 saves 1000 bytes besides its output, stage 2 saves its input and as much again, and the caller holds the output.
    assert inverted.held_bytes == 1000 + 2000 + 1000
    assert kept.held_bytes == inverted.held_bytes + 1000 + 1000


@pytest.mark.parametrize("text", ["0:1 1-3", "0 (1:1 2) 3", "0 ((1:1 2) 3) 4"])
def test_an_input_that_is_somebody_elses_is_not_dropped(text: str) -> None:
    chain = invertible_chain(5 if "4" in text else 4)
    chain = replace(chain, stages=(chain.stages[1], *chain.stages[1:]))
    with pytest.raises(ScheduleError, match="inverts stage 'stage1' where nothing comes before it"):
        simulate(chain, Schedule.parse(text))


def test_text_of_a_schedule_shows_runs_of_inverted_stages() -> None:
    schedule = Schedule((Leaf(0), *(Leaf(stage, 1) for stage in range(1, 7)), Leaf(7), Leaf(8)))
    assert str(schedule) == "0 1-6:1 7-8"
    assert Schedule.parse(str(schedule)) == schedule


def test_plan_says_what_is_inverted_and_is_the_same_after_a_file(tmp_path: Path) -> None:
    chain = invertible_chain(12)
    chain = replace(chain, stages=(replace(chain.stages[0], not_inverted="its inverse is off by 3"), *chain.stages[1:]))
    found = minimum_budget(chain)
    assert found.inverted
    text = str(found)
    assert "whose input is rebuilt from their output" in text
    assert "'stage0': its inverse is off by 3" in text
    assert " invert " in text
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", chain).schedule == found.schedule
    assert 0 <= found.gap < 1


def test_drawing_and_timeline_show_inverted_stages_as_such() -> None:
    chain = invertible_chain(8)
    schedule = Schedule.parse("(0-2) 3 4-6:1 7")
    picture = draw_chain(chain, schedule=schedule, fold=False).replace("&#160;", " ")
    assert picture.count("> inverted <") == 3
    assert f"fill: {INVERSION_COLOURS[0].lower()}" in picture
    assert picture.count("keeps ") == 5
    assert "dark blue: inverted" in picture
    assert "dark&#160;blue" not in draw_chain(chain, schedule=Schedule.keep_all(8))
    assert ">&#160;inverted&#160;<" not in draw_chain(chain)
    simulation = simulate(chain, schedule)
    figure = plot_timeline(Plan(chain, schedule, simulation.peak_bytes, simulation, 0.0))
    assert "inversion" in [text.get_text() for text in figure.legends[0].get_texts()]
    bars = [patch for patch in figure.axes[1].patches if to_hex(patch.get_facecolor()) == INVERSION_COLOURS[0]]
    assert sorted(round(bar.get_y() + bar.get_height() / 2) for bar in bars) == [4, 5, 6]
    assert not any(event.inverts for event in simulate(chain, Schedule.keep_all(8)).events)


def test_chain_without_inverses_is_planned_as_before() -> None:
    rng = random.Random(3)
    chain = random_chain(rng, 12, "cnn")
    slow = tuple(
        with_inversion(rng, stage) if number and stage.output_bytes == chain.stages[number - 1].output_bytes else stage
        for number, stage in enumerate(chain.stages)
    )
    least = minimum_budget(chain).peak_bytes
    most = simulate(chain, Schedule.keep_all(12)).peak_bytes
    for budget in np.linspace(least, most, 9).astype(int).tolist():
        assert plan(replace(chain, stages=slow), budget).seconds <= SAME * plan(chain, budget).seconds
