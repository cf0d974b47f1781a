"""Budget against overhead as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

from lightning_rotor.planning import Frontier
from lightning_rotor.report.figures import LIMIT_COLOUR, LINE_COLOURS, PHASE_COLOURS, add_legend, panels_over_time
from lightning_rotor.simulator import Simulation
from lightning_rotor.units import format_bytes, size_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_frontier(
    frontier: Frontier,
    *,
    reserved_bytes: int = 0,
    limits: Mapping[str, int] | None = None,
    staying: Frontier | None = None,
    title: str | None = None,
) -> Figure:
    """Draw what every budget costs in time.

    Args:
        frontier: The curve.
        reserved_bytes: What the process holds besides activations, added to the budgets.
        limits: Sizes to mark by name, such as memories of devices, in the units of the axis.
        staying: The curve of plans that move nothing, drawn beside one of plans that may.
        title: Above the picture.
    Returns:
        A figure that belongs to no window: save it with ``figure.savefig(path)``.
    Raises:
        PlotError: matplotlib is not installed.
    """
    figure, (axes,) = panels_over_time((3.8,), width=4.6)
    # Not up to a budget far above, which would press the curve against the left border.
    most_bytes = frontier[-1].peak_bytes + reserved_bytes
    least_bytes = frontier[0].peak_bytes + reserved_bytes
    span_bytes = most_bytes - least_bytes
    unit, unit_name = size_unit(most_bytes)
    # With room on the left, so that the least budget is seen to be an end.
    left = max(0, least_bytes - 0.2 * span_bytes) / unit
    right = (1.02 * most_bytes + 0.06 * span_bytes) / unit
    budgets, percents = _line(frontier, reserved_bytes, unit, right)
    full, pale = PHASE_COLOURS["forward"]
    axes.axvspan(
        left,
        budgets[0],
        facecolor="0.93",
        hatch="///",
        edgecolor="0.8",
        linewidth=0,
        label="no schedule",
    )
    # In steps: between two points, a budget has the schedule of the smaller one.
    axes.plot(budgets, percents, drawstyle="steps-post", color=full, linewidth=1.4)
    axes.fill_between(budgets, percents, step="post", color=pale, alpha=0.45, linewidth=0)
    highest = max(percents)
    if staying is not None:
        staying_budgets, staying_percents = _line(staying, reserved_bytes, unit, right)
        label = "without moves"
        axes.plot(
            staying_budgets, staying_percents, "--", drawstyle="steps-post", color="0.35", linewidth=1.1, label=label
        )
        highest = max(highest, *staying_percents)
    _mark(axes, frontier, reserved_bytes, unit)
    colours = cycle(LINE_COLOURS)
    for name, size_bytes in (limits or {}).items():
        colour = next(colours)
        place = size_bytes / unit
        # Others would squeeze the curve into a corner.
        if left < place < right:
            label = f"{name}: {format_bytes(size_bytes)}"
            axes.axvline(place, color=colour, linewidth=0.9, linestyle="--", label=label)
    # A curve of a single point without recomputation would give an axis of no height.
    axes.set(xlim=(left, right), ylim=(0, 1.12 * highest or 1.0))
    axes.set(xlabel=f"memory budget ({unit_name})", ylabel="recomputation (% of the step)")
    add_legend(figure, title)
    return figure


def _line(frontier: Frontier, reserved_bytes: int, unit: int, right: float) -> tuple[list[float], list[float]]:
    """Budgets in units of the axis, and percents of overhead."""
    budgets = [(reserved_bytes + point.peak_bytes) / unit for point in frontier]
    percents = [100 * point.overhead for point in frontier]
    # The last step goes on to the right border.
    return [*budgets, right], [*percents, percents[-1]]


class _Spot(NamedTuple):
    """A marked point of the curve."""

    name: str
    point: Simulation
    marker: str
    colour: str


def _mark(axes: Axes, frontier: Frontier, reserved_bytes: int, unit: int) -> None:
    """The least budget, the knee, the plan, and where recomputation ends; the legend names them, so none overlap."""
    line_colour = PHASE_COLOURS["forward"][0]
    spots = [_Spot("least", frontier[0], "v", line_colour)]
    if frontier.budget_bytes is not None:
        spots.append(_Spot("plan", frontier.at(frontier.budget_bytes), "o", LIMIT_COLOUR))
    spots.append(_Spot("knee", frontier.knee, "*", LINE_COLOURS[0]))
    if len(frontier) > 1:
        spots.append(_Spot("keep all", frontier[-1], "P", line_colour))
    for spot in spots:
        size_bytes = reserved_bytes + spot.point.peak_bytes
        percent = 100 * spot.point.overhead
        axes.plot(
            size_bytes / unit,
            percent,
            spot.marker,
            color=spot.colour,
            # Markers at the border are whole.
            clip_on=False,
            # A star looks smaller than other shapes.
            markersize=8 if spot.marker == "*" else 6,
            markeredgecolor="white",
            markeredgewidth=0.5,
            # The plan may be at the knee or at an end, and is what readers look for.
            zorder=5 if spot.name == "plan" else 4,
            label=f"{spot.name}: {format_bytes(size_bytes)}, {percent:.1f} %",
        )
