"""Pictures of a curve: which points and limits are marked."""

from __future__ import annotations

from lightning_rotor.link import Link
from lightning_rotor.planning import Frontier, frontier, plan
from lightning_rotor.report.frontier_plot import plot_frontier
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import Simulation
from lightning_rotor.units import format_bytes
from tests.report.small_plans import CHAIN, FEW, MIB, legend


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


def test_the_curve_without_moves_is_a_line_beside() -> None:
    found, staying = frontier(FEW, link=Link(2e9, 2e9)), frontier(FEW)
    figure = plot_frontier(found, staying=staying)
    (axes,) = figure.axes
    assert "without moves" in legend(figure)
    (line,) = [line for line in axes.lines if line.get_label() == "without moves"]
    assert line.get_ydata()[0] == 100 * staying[0].overhead
    # No point of it is cut off above.
    assert axes.get_ylim()[1] > 100 * max(staying[0].overhead, found[0].overhead)
