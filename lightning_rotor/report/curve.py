"""Budget against overhead as a picture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING

from lightning_rotor.planning import Frontier
from lightning_rotor.report.style import (
    BUDGET_COLOUR,
    LINE_COLOURS,
    PHASE_COLOURS,
    PLAIN_COLOUR,
    clear_frame,
    legend_above,
    new_figure,
)
from lightning_rotor.simulator import Simulation
from lightning_rotor.units import format_bytes, size_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOUR, _PALE = PHASE_COLOURS["forward"]


def plot_frontier(
    frontier: Frontier,
    *,
    reserved_bytes: int = 0,
    rivals: Mapping[str, Simulation] | None = None,
    limits: Mapping[str, int] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw what every budget costs in time.

    Args:
        frontier: The curve.
        reserved_bytes: What the process holds besides activations; added to the budgets, so that the axis shows the
            whole process.
        rivals: Other schedules of the same chain by name, such as those of
            :func:`~lightning_rotor.planning.baselines`, drawn as crosses.
        limits: Sizes to mark by name, such as memories of devices, in the units of the axis.
        title: Above the picture.
    Returns:
        A figure that belongs to no window: save it with ``figure.savefig(path)``.
    Raises:
        PlotError: matplotlib is not installed.
    """
    figure = new_figure(4.6, 3.8)
    axes = figure.add_subplot()
    most = max(frontier[-1].peak_bytes, frontier.budget_bytes or 0) + reserved_bytes
    least = frontier[0].peak_bytes + reserved_bytes
    unit, unit_name = size_unit(most)
    right = most + 0.06 * (most - least) + 0.02 * most
    left = max(least - 0.12 * (right - least), 0) if reserved_bytes or least > 0.3 * most else 0
    x = [(reserved_bytes + point.peak_bytes) / unit for point in frontier]
    y = [100 * point.overhead for point in frontier]
    top = 1.12 * max(y) or 1.0
    axes.axvspan(left / unit, x[0], facecolor="0.93", hatch="///", edgecolor="0.8", linewidth=0)
    axes.plot([*x, right / unit], [*y, y[-1]], drawstyle="steps-post", color=_COLOUR, linewidth=1.4)
    axes.fill_between([*x, right / unit], [*y, y[-1]], step="post", color=_PALE, alpha=0.45, linewidth=0)
    _mark(axes, frontier, reserved_bytes, unit)
    _draw_rivals(axes, rivals or {}, reserved_bytes, unit, (left, right), top)
    for name, size in (limits or {}).items():
        if left < size < right:
            axes.axvline(size / unit, color=PLAIN_COLOUR, linewidth=0.9, linestyle=(0, (4, 2)))
            axes.annotate(
                name, (size / unit, top), xytext=(-2, -2), textcoords="offset points", ha="right", va="top",
                rotation=90, fontsize="x-small", color=PLAIN_COLOUR,
            )  # fmt: skip
    axes.set(xlim=(left / unit, right / unit), ylim=(0, top))
    axes.set_xlabel(f"memory budget ({unit_name})")
    axes.set_ylabel("recomputation (% of the step)")
    if x[0] - left / unit > 0.05 * (right - left) / unit:
        axes.annotate(
            "no schedule", ((x[0] + left / unit) / 2, top / 2), rotation=90, ha="center", va="center",
            fontsize="x-small", color="0.35", bbox={"facecolor": "0.93", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    clear_frame(axes)
    legend_above(axes, title, columns=2)
    return figure


def _mark(axes: Axes, frontier: Frontier, reserved_bytes: int, unit: int) -> None:
    """The least budget, the knee, the plan, and where recomputation ends; the legend names them, so none overlap."""
    planned = None if frontier.budget_bytes is None else frontier.at(frontier.budget_bytes)
    spots = [("least", frontier[0], "v", _COLOUR)]
    spots += [("plan", planned, "o", BUDGET_COLOUR)] if planned is not None else []
    spots += [("knee", frontier.knee, "*", LINE_COLOURS[0])]
    spots += [("keep all", frontier[-1], "P", _COLOUR)] if len(frontier) > 1 else []
    for name, point, marker, colour in spots:
        size, percent = reserved_bytes + point.peak_bytes, 100 * point.overhead
        axes.plot(
            size / unit, percent, marker, color=colour, markersize=8 if marker == "*" else 6, markeredgecolor="white",
            markeredgewidth=0.5, clip_on=False, zorder=5 if name == "plan" else 4,
            label=f"{name}: {format_bytes(size)}, {percent:.1f} %",
        )  # fmt: skip


def _draw_rivals(
    axes: Axes,
    rivals: Mapping[str, Simulation],
    reserved_bytes: int,
    unit: int,
    span: tuple[float, float],
    top: float,
) -> None:
    shown: dict[str, list[tuple[float, float]]] = {}
    for name, rival in rivals.items():
        size, percent = reserved_bytes + rival.peak_bytes, 100 * rival.overhead
        if span[0] <= size <= span[1] and percent <= top:
            kind = re.sub(r"_\d+$", "", name)
            shown.setdefault(_RIVAL_NAMES.get(kind, kind), []).append((size / unit, percent))
    for (name, points), (marker, colour) in zip(shown.items(), cycle(_RIVAL_STYLES), strict=False):
        axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=4, label=name)


_RIVAL_NAMES = {
    "per_stage": "each stage",
    "periodic": "equal segments",
    "whole": "one segment",
    "halving": "nested halves",
}
_RIVAL_STYLES = (("s", "#EE7733"), ("D", "#AA3377"), ("^", "#117733"), ("x", "#777777"))
