"""Pictures of a step: what they show of a plan and of measurements, and what is missing without matplotlib."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from lightning_rotor.link import Link
from lightning_rotor.report.figures import PlotError
from lightning_rotor.report.timeline import plot_timeline
from lightning_rotor.simulator import traffic
from tests.report.small_plans import KEEP_ALL, MIB, legend, plan_for


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


def test_a_legend_is_as_wide_as_its_figure() -> None:
    figure = plot_timeline(
        plan_for("(0-2) (3-5) 6-7"), reserved_bytes=MIB, measured={"measured by the allocator": [(0, 1), (1, 2)]}
    )
    figure.savefig(io.BytesIO())
    assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1
    assert len(legend(figure)) >= 7


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


def test_copies_are_two_lanes_below_the_memory_and_waits_are_hatched() -> None:
    found = plan_for("0>2 1> 2-7", link=Link(4e9, 1e9, latency=0.0))
    assert found.stall_seconds > 0
    _, link, stages = plot_timeline(found).axes
    (bars,) = link.containers
    lanes = [round(bar.get_y() + bar.get_height() / 2) for bar in bars]
    assert lanes.count(1) == lanes.count(0) > 0
    copies = traffic(found.chain, found.schedule, found.conditions).transfers
    assert [bar.get_width() for bar in bars] == pytest.approx(
        [1e3 * (copy.end_seconds - copy.begin_seconds) for copy in copies]
    )
    assert stages.get_ylabel() == "stage"
    assert len(plot_timeline(plan_for("0-7", link=Link(1e9, 1e9))).axes) == 2
