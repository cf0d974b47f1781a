"""Tables and pictures: what they say, for whom they fit, and what is missing without matplotlib."""

from __future__ import annotations

import io
import random
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.reference import baselines
from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.planning import Frontier, Plan, frontier, plan
from lightning_rotor.report import (
    PlotError,
    frontier_table,
    plan_table,
    plot_frontier,
    plot_timeline,
    schedule_line,
    stage_table,
)
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment
from lightning_rotor.simulator import Simulation, held_by_stage, simulate
from lightning_rotor.units import format_bytes
from tests.strategies import chains, random_chain, with_skips

MIB = 2**20


def stage(number: int) -> StageCost:
    size = 4 * MIB
    keep = Option(
        name="keep",
        saved_bytes=size,
        saved_input_bytes=size,
        saved_output_bytes=0,
        saved_tensors=2,
        forward_peak_bytes=2 * size,
        replay_peak_bytes=2 * size,
        unpack_peak_bytes=size,
        unpack_bytes=size,
        backward_peak_bytes=2 * size,
        backward_segment_peak_bytes=2 * size,
        backward_held_peak_bytes=2 * size,
        input_gradient_bytes=size,
        parameter_gradient_bytes=0,
        forward_seconds=0.001,
        replay_seconds=0.001,
        backward_seconds=0.002,
    )
    return StageCost(f"layer{number}", size, 2 * size, 0.001, (keep,))


CHAIN = Chain(tuple(stage(number) for number in range(8)))
KEEP_ALL = simulate(CHAIN, Schedule.keep_all(8))


def plan_for(text: str, budget_bytes: int = 60 * MIB) -> Plan:
    schedule = Schedule.parse(text)
    return Plan(CHAIN, schedule, budget_bytes, simulate(CHAIN, schedule), 0.0123)


def printed(table: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def rows(table: object) -> dict[str, str]:
    cells = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in printed(table, 200).splitlines()]
    return {row[0]: row[1] for row in cells if len(row) == 2}


def test_the_table_says_what_a_plan_costs():
    plan = plan_for("(0-2) (3-5) 6-7")
    assert rows(plan_table(plan)) == {
        "Limit": "60.0 MiB",
        "Peak without recomputation": "72.0 MiB",
        "Peak with this plan": format_bytes(plan.peak_bytes),
        "Time added to these modules": "25.0 %, predicted",
        "Planning took": "12.3 ms",
        "Recomputed": "6 of 8 stages",
        "Schedule, recomputed in ()": "(0-2) (3-5) 6-7",
        "A better plan could save": "at most 13.3 % of that time",
    }


def test_the_rows_answer_questions_in_their_order():
    names = list(
        rows(
            plan_table(
                plan_for("(0-2) (3-5) 6-7"), memory_rows=[("Reserved", "2 GiB")], extra_rows=[("Planned", "net")]
            )
        )
    )
    fits, costs, what, better = names[:4], names[4:6], names[6:9], names[9:]
    assert fits == ["Limit", "Peak without recomputation", "Peak with this plan", "Reserved"]
    assert costs == ["Time added to these modules", "Planning took"]
    assert what == ["Recomputed", "Schedule, recomputed in ()", "Planned"]
    assert better == ["A better plan could save"]


def test_one_number_stands_for_one_thing_the_measured_one_if_there_is_one():
    plan = plan_for("(0-2) (3-5) 6-7")
    planned = rows(plan_table(plan, final_peak_bytes=90 * MIB))
    until = format_bytes(plan.peak_bytes)
    assert planned["Peak with this plan"] == f"90.0 MiB, when the optimizer steps; {until} until then"
    table = plan_table(
        plan, final_peak_bytes=90 * MIB, measured_peak_bytes=91 * MIB, measured_overhead=0.3, measuring_seconds=2
    )
    shown = rows(table)
    assert shown["Peak with this plan"] == "91.0 MiB, measured"
    assert shown["Time added to these modules"] == "30.0 %, measured"
    assert shown["Measuring, planning took"] == "2 s, 12.3 ms"


def test_an_optimal_plan_says_that_none_is_faster():
    assert rows(plan_table(plan_for("0-7")))["A better plan could save"].startswith("nothing: no schedule within")


def test_a_table_that_is_printed_again_says_why():
    text = printed(plan_table(plan_for("0-7"), reason="a larger input came"), 100)
    assert text.startswith("Recomputation plan, printed again: a larger input came")


def test_the_table_shows_the_whole_process_if_it_knows_it():
    table = plan_table(
        plan_for("0-7", budget_bytes=80 * MIB),
        reserved_bytes=100 * MIB,
        measured_peak_bytes=170 * MIB,
        plain_peak_bytes=200 * MIB,
        extra_rows=[("Accuracy", "97 %")],
    )
    shown = rows(table)
    assert shown["Limit"] == "180 MiB, 80.0 MiB of it for activations and new gradients"
    assert shown["Peak without recomputation"] == "200 MiB"
    assert shown["Peak with this plan"] == "170 MiB, measured"
    assert list(shown)[-2:] == ["Accuracy", "A better plan could save"]
    assert rows(plan_table(plan_for("0-7"), reserved_bytes=100 * MIB))["Peak without recomputation"] == "172 MiB"


def test_the_table_of_a_plan_beyond_the_limit_says_so():
    shown = rows(plan_table(plan_for("0-7"), limit_bytes=110 * MIB, reserved_bytes=100 * MIB))
    assert shown["Limit"] == "110 MiB, which no plan keeps: this one takes least"
    assert shown["Peak with this plan"] == "172 MiB"


def test_the_table_fits_a_terminal():
    text = printed(plan_table(plan_for("((0 1-2) 3-5) 6-7"), reserved_bytes=MIB))
    assert max(map(len, text.splitlines())) <= 80
    assert "((0-2) 3-5) 6-7" in text or "((0 1-2) 3-5) 6-7" in text


@pytest.mark.parametrize(
    ("text", "most", "line"),
    [
        ("0 ((1 2) 3 4) 5", 100, "0 ((1-2) 3-4) 5"),
        ("0 ((1 2) 3 4) 5", 12, "0 (…) 5"),
        ("0 ((1 2) 3 4) 5", 6, "0 … 5"),
        ("0 (((1-2) 3) (4-5) 6) (7-8) 9", 22, "0 (…) (…) 9"),
        ("0 (1) (2) 3", 8, "0 … 3"),
        ("0:1 1:2 2:1 3:2 4:1 5:2 6:1", 15, "0:1 … 5:2 6:1"),
        ("0:1 1:1 2:1 3:1 4:1 5:1 6", 15, "0-5:1 6"),
    ],
)
def test_a_long_schedule_loses_its_inside(text, most, line):
    assert schedule_line(Schedule.parse(text), most_characters=most) == line


@st.composite
def items(draw: st.DrawFn, first: int, last: int, depth: int) -> tuple[Item, ...]:
    """Items for stages ``first .. last``, the last one a leaf."""
    made: list[Item] = []
    while first < last:
        end = draw(st.integers(first, last - 1))
        if depth and draw(st.booleans()):
            made.append(Segment(draw(items(first, end, depth - 1))))
        else:
            made.extend(Leaf(number, draw(st.integers(0, 2))) for number in range(first, end + 1))
        first = end + 1
    return (*made, Leaf(last))


@given(st.integers(0, 60).flatmap(lambda last: items(0, last, 4)), st.integers(20, 120))
def test_a_schedule_line_is_short_balanced_and_complete_when_it_fits(made, most):
    text = str(Schedule(made))
    line = schedule_line(Schedule(made), most_characters=most)
    assert len(line) <= most
    assert "\n" not in line
    if len(text) <= most:
        assert line == text
    else:
        assert "…" in line
        assert line.count("(") == line.count(")")
        assert line.endswith(text.rpartition(" ")[2])


def test_the_picture_shows_phases_outline_measurement_and_budget(tmp_path):
    plan = plan_for("((0-1) 2-3) (4-5) 6-7")
    measured = [(0.0, 0), (0.01, 30 * MIB), (0.03, 10 * MIB)]
    figure = plot_timeline(
        plan.simulation, plain=KEEP_ALL, measured={"measured": measured}, budget_bytes=60 * MIB, title="A step"
    )
    (axes,) = figure.axes
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert set(names) == {
        "forward",
        "recomputation",
        "backward",
        "while running",
        "without recomputation",
        "measured",
        "budget 60.0 MiB",
    }
    assert next(line for line in axes.lines if line.get_label() == "budget 60.0 MiB").get_ydata()[0] == 60
    assert axes.get_xlabel() == "time in the step (ms)"
    assert axes.get_ylabel() == "memory (MiB)"
    outline, measurement = (line for line in axes.lines if line.get_label() in ("without recomputation", "measured"))
    assert max(outline.get_ydata()) == 72
    assert list(measurement.get_xdata()) == [0, 10, 30]
    assert axes.get_ylim()[1] > 72
    figure.savefig(tmp_path / "step.png")
    assert Path(tmp_path / "step.png").stat().st_size > 10_000


def test_measured_timelines_can_stand_alone():
    figure = plot_timeline(
        measured={"plain": [(0.0, 0), (2.0, 3 * 2**30)], "rotor": [(0.0, 0), (3.0, 2**30)], "none": []}
    )
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["plain", "rotor"]
    assert axes.get_xlabel() == "time in the step (s)"
    assert axes.get_ylabel() == "memory (GiB)"


def test_nothing_to_draw_is_an_error():
    with pytest.raises(PlotError, match="nothing to draw: expected a simulation or a measured timeline"):
        plot_timeline(measured={"empty": []}, budget_bytes=10)


def test_a_missing_matplotlib_names_the_package(monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PlotError, match=r"pip install matplotlib"):
        plot_timeline(KEEP_ALL)


# ---------------------------------------------------------------------------------------------------- what a plan does with stages


def cells(table: object) -> list[list[str]]:
    """Without the header."""
    _, *lines = [line for line in printed(table, 120).splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_the_stages_are_told_in_runs_of_equal_treatment():
    assert cells(stage_table(plan_for("((0-1) 2) 3-5 (6) 7"))) == [
        ["0-2", "layer0 … layer2", "recompute, up to twice", "0 B", "5 ms"],
        ["3-5", "layer3 … layer5", "keep", "24.0 MiB", ""],
        ["6", "layer6", "recompute", "4.00 MiB", "1 ms"],
        ["7", "layer7", "keep", "12.0 MiB", ""],
        ["", "peak 48.0 MiB at layer7", "", "40.0 MiB", "6 ms"],
    ]


@given(chains(max_stages=12), st.randoms(use_true_random=False))
def test_what_stages_hold_is_what_the_forward_leaves_behind(chain: Chain, rng: random.Random):
    chain = with_skips(rng, chain) if len(chain) > 3 else chain
    for each in baselines(chain).values():
        found = Plan(chain, each, 10**9, simulate(chain, each), 0.0)
        after_forward = next(
            after.after_bytes
            for event, after in zip(found.simulation.events[1:], found.simulation.events, strict=False)
            if event.phase != "forward"
        )
        states = sum(stage.state_bytes for stage in chain) + chain.rng_state_bytes * len(chain)
        # The input of the last stage may still be around, and segments remember states.
        last_input = chain.stages[-2].output_bytes if len(chain) > 1 else 0
        held = sum(held_by_stage(chain, each))
        skips = sum(skip.size_bytes for skip in chain.skips)
        assert held <= after_forward + skips
        assert after_forward <= held + last_input + states + skips


def test_a_long_table_loses_its_middle():
    chain = random_chain(random.Random(0), 200, "heterogeneous")
    schedule = Schedule.parse(" ".join(f"({number}) {number + 1}" for number in range(0, 200, 2)))
    found = Plan(chain, schedule, 10**6, simulate(chain, schedule), 0.0)
    rows_shown = cells(stage_table(found, most_rows=11))
    assert len(rows_shown) == 11 + 1
    assert set(rows_shown[5]) == {"⋮"}
    assert rows_shown[0][0] == "0"
    assert rows_shown[-2][0] == "199"
    assert max(map(len, str(found).splitlines())) <= 100


def test_a_plan_prints_as_its_tables():
    text = str(plan_for("(0-2) 3-7"))
    assert text.startswith("Recomputation plan\n╭")
    assert "layer3 … layer7" in text
    assert printed(plan_for("(0-2) 3-7"), 100).split() == text.split()


def test_the_frontier_is_told_with_what_the_process_holds_besides():
    found = frontier(CHAIN)
    shown = cells(frontier_table(found, reserved_bytes=1024 * MIB, most_rows=5))
    assert len(shown) <= 5
    assert shown[0][0] == format_bytes(1024 * MIB + found[0].peak_bytes)
    assert shown[-1][1:3] == ["0.00%", "24 ms"]
    assert {"least", "keep all"} <= {row[4] for row in shown}


# ---------------------------------------------------------------------------------------------------- pictures of plans


@pytest.mark.parametrize(
    "shown", [CHAIN, KEEP_ALL, frontier(CHAIN), plan_for("(0-2) (3-5) 6-7")], ids=lambda shown: type(shown).__name__
)
def test_what_python_shows_of_it_is_one_line(shown: object) -> None:
    assert repr(shown).startswith(f"<{type(shown).__name__} of ")
    assert len(repr(shown)) < 200


@pytest.mark.parametrize(
    "shown", [CHAIN, frontier(CHAIN), plan_for("(0-2) (3-5) 6-7")], ids=lambda shown: type(shown).__name__
)
def test_notebooks_show_a_picture_and_a_table(shown: Any) -> None:
    html = shown._repr_html_()
    assert html.count("<svg") == html.count("</svg>") == 1
    if not isinstance(shown, Chain):
        assert escape(str(shown)) in html
    assert "layer0" in html or isinstance(shown, Frontier)


def test_notebooks_without_matplotlib_show_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    html = frontier(CHAIN)._repr_html_()  # type: ignore[attr-defined]
    assert html.startswith("<pre")


def test_a_legend_is_as_wide_as_its_figure() -> None:
    figure = plot_timeline(
        plan_for("(0-2) (3-5) 6-7"), reserved_bytes=MIB, measured={"measured by the allocator": [(0, 1), (1, 2)]}
    )
    figure.savefig(io.BytesIO())
    assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1
    assert len(legend(figure)) >= 7


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_picture_of_a_plan_shows_which_stage_runs_when(tmp_path):
    found = plan_for("((0-1) 2-3) (4-5) 6-7")
    figure = plot_timeline(found, title="A plan")
    above, below = figure.axes
    assert "without recomputation" in legend(figure)
    assert "budget 60.0 MiB" in legend(figure)
    bars = [bar for bars in below.containers for bar in bars]
    assert len(bars) == len(found.simulation.events)
    assert max(bar.get_x() + bar.get_width() for bar in bars) == pytest.approx(found.seconds * 1e3)
    assert above.get_shared_x_axes().joined(above, below)
    assert below.get_xlabel() == "time in the step (ms)"
    figure.savefig(tmp_path / "plan.svg")


def test_what_the_process_holds_besides_lies_below_the_picture():
    found = plan_for("((0-1) 2-3) (4-5) 6-7")
    figure = plot_timeline(found, reserved_bytes=100 * MIB)
    (above, _) = figure.axes
    assert "held throughout" in legend(figure)
    assert "budget 160 MiB" in legend(figure)
    (plain,) = (line for line in above.lines if line.get_label() == "without recomputation")
    assert max(plain.get_ydata()) == pytest.approx(100 + 72)
    assert min(plain.get_ydata()) >= 100
    filled = [
        path.vertices[:, 1].min() for each in above.collections[:-1] for path in each.get_paths() if len(path.vertices)
    ]
    assert min(filled) >= 100


def test_a_budget_far_above_everything_does_not_squeeze_the_picture():
    figure = plot_timeline(plan_for("0-7", budget_bytes=100_000 * MIB))
    assert figure.axes[0].get_ylim()[1] < 100
    assert not any("budget" in label for label in legend(figure))


def test_stages_are_named_at_the_ticks_beside_them():
    found = plan_for("((0-1) 2-3) (4-5) 6-7")
    figure = plot_timeline(found)
    below = figure.axes[1]
    figure.draw_without_rendering()
    at = dict(zip(below.get_yticks(), (label.get_text() for label in below.get_yticklabels()), strict=True))
    assert {place: name for place, name in at.items() if 0 <= place < 8} == {n: f"layer{n}" for n in range(8)}


def test_the_picture_of_a_frontier_marks_points_and_limits(tmp_path):
    found = plan(CHAIN, 50 * MIB).frontier()
    figure = plot_frontier(
        found, reserved_bytes=100 * MIB, limits={"small": 160 * MIB, "huge": 10**15}, title="A curve"
    )
    (axes,) = figure.axes
    said = legend(figure)
    assert said[0] == "no schedule"
    assert said[1] == f"least: {format_bytes(100 * MIB + found[0].peak_bytes)}, {100 * found[0].overhead:.1f} %"
    assert [text.partition(":")[0] for text in said[1:5]] == ["least", "plan", "knee", "keep all"]
    assert said[5:] == ["small: 160 MiB"]  # and no "huge", which is far away
    assert axes.get_xlabel() == "memory budget (MiB)"
    assert axes.get_xlim()[0] > 90
    figure.savefig(tmp_path / "curve.png")


def test_a_frontier_of_one_point_can_be_drawn(tmp_path):
    only = Frontier((Simulation(Schedule.keep_all(1), MIB, 1.0, 0.0, 0, ()),))
    plot_frontier(only).savefig(tmp_path / "curve.png")
    assert str(only).count("1.00 MiB") == 1
