"""Tables and pictures: what they say, for whom they fit, and what is missing without matplotlib."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.planning import Plan
from lightning_rotor.report import PlotError, plan_table, plot_timeline, schedule_line
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment
from lightning_rotor.simulator import simulate
from lightning_rotor.units import format_bytes

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
        "Budget": "60.0 MiB",
        "Peak without recomputation": "72.0 MiB",
        "Peak with the plan": format_bytes(plan.peak_bytes),
        "Recompute overhead": "25.0 % of the step",
        "Gap to the optimum": "at most 13.3 % of the step",
        "Recomputed stages": "6 of 8",
        "Planning": "12.3 ms",
        "Schedule": "(0-2) (3-5) 6-7",
    }


def test_the_table_shows_the_whole_process_if_it_knows_it():
    table = plan_table(
        plan_for("0-7"),
        reserved_bytes=100 * MIB,
        measured_peak_bytes=170 * MIB,
        plain_peak_bytes=200 * MIB,
        extra_rows=[("Accuracy", "97 %")],
    )
    shown = rows(table)
    assert shown["Budget"] == "160 MiB, 100 MiB of it not for activations"
    assert shown["Peak without recomputation"] == "200 MiB"
    assert shown["Peak with the plan"] == "172 MiB"
    assert shown["Peak measured"] == "170 MiB"
    assert list(shown)[-1] == "Accuracy"
    assert rows(plan_table(plan_for("0-7"), reserved_bytes=100 * MIB))["Peak without recomputation"] == "172 MiB"


def test_the_table_fits_a_terminal():
    text = printed(plan_table(plan_for("((0 1-2) 3-5) 6-7"), reserved_bytes=MIB))
    assert max(map(len, text.splitlines())) <= 80
    assert "((0-2) 3-5) 6-7" in text or "((0 1-2) 3-5) 6-7" in text


@pytest.mark.parametrize(
    ("text", "most", "line"),
    [
        ("0 ((1 2) 3 4) 5", 100, "0 ((1-2) 3-4) 5"),
        ("0 ((1 2) 3 4) 5", 12, "0 (… 3-4) 5"),
        ("0 ((1 2) 3 4) 5", 8, "0 … 5"),
        ("0 (((1-2) 3) (4-5) 6) (7-8) 9", 22, "0 (… 6) (7-8) 9"),
        ("0 (1) (2) 3", 9, "0 … 3"),
        ("0:1 1:1 2:1 3:1 4:1 5:1 6:1", 15, "0:1 … 5:1 6:1"),
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
    }
    assert [text.get_text() for text in axes.texts] == ["budget 60.0 MiB"]
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


def test_a_missing_matplotlib_names_the_extra(monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PlotError, match=r'pip install "lightning-rotor\[plot\]"'):
        plot_timeline(KEEP_ALL)
