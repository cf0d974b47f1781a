"""The parts that all pictures share: colours, panels over one axis of time, legends, lines of bytes, bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lightning_rotor.errors import RotorError
from lightning_rotor.simulator import Phase
from lightning_rotor.units import format_bytes, size_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Full and pale; hues of Paul Tol's schemes, which colour-blind readers can tell apart.
PHASE_COLOURS: dict[Phase, tuple[str, str]] = {
    "forward": ("#4477AA", "#B9CCE0"),
    "recompute": ("#EE7733", "#F9CFB3"),
    "backward": ("#66A998", "#C7E0D9"),
    "wait": ("#BBBBBB", "#E4E4E4"),
}
# Of the same scheme, and far from those of forward and backward.
INVERSION_COLOURS = ("#332288", "#B8B2D6")
PHASE_LABELS: dict[Phase, str] = {
    "forward": "forward",
    "recompute": "recomputation",
    "backward": "backward",
    "wait": "wait for a copy",
}
LINE_COLOURS = ("#222222", "#AA3377", "#117733", "#882255")
LIMIT_COLOUR = "#CC3311"
_PLAIN_COLOUR = "#555555"
PLAIN = "without recomputation"
"""Name of the line of the step that keeps everything, which is drawn dashed and grey."""
_WIDTH = 7.0
# Letters of a legend in an inch, and how many of them its coloured sample and the gap beside it take.
_LETTERS_PER_INCH = 15
_SAMPLE_LETTERS = 5
Points: TypeAlias = Sequence[tuple[float, int]]
"""Seconds since the step began, and bytes from then on."""


class Bar(NamedTuple):
    """Something that takes a while."""

    row: int
    start_seconds: float
    end_seconds: float
    colour: str


class PlotError(RotorError, RuntimeError):
    """A picture cannot be drawn: matplotlib is missing, or there is nothing to draw."""


def new_figure(width: float, height: float) -> Figure:
    """A figure that belongs to no window, in inches; ``PlotError`` without matplotlib."""
    try:
        # Here, since it is slow to import, and not a dependency.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("drawing needs matplotlib, which is not installed: pip install matplotlib") from error
    # Not by pyplot, which would open a window, and hold every figure until it is closed.
    return Figure(figsize=(width, height), layout="constrained")


def panels_over_time(
    heights: Sequence[float],
    margin: float = 0.0,
    width: float = _WIDTH,
) -> tuple[Figure, list[Axes]]:
    """A figure with panels of these heights, one above the other, over one axis of time."""
    figure = new_figure(width, sum(heights) + margin)
    # Always an array, also of a single panel.
    grid = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    panels = grid.ravel().tolist()
    for axes in panels:
        # No box around the data, pale lines behind it.
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, panels


def add_legend(figure: Figure, title: str | None) -> None:
    """Labels of all panels above the figure, in as many columns as its width has room for."""
    handles: list[Any] = []
    labels: list[str] = []
    for axes in figure.axes:
        own_handles, own_labels = axes.get_legend_handles_labels()
        handles += own_handles
        labels += own_labels
    # Letters are counted, since the width of a text is known only once the figure is drawn.
    room = int(figure.get_figwidth() * _LETTERS_PER_INCH)
    widest = max(map(len, labels)) + _SAMPLE_LETTERS
    columns = max(room // widest, 1)
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=columns,
        title=title,
        alignment="left",
        frameon=False,
        fontsize="small",
        handlelength=1.3,
        handletextpad=0.5,
        columnspacing=1.2,
    )


def draw_levels(
    axes: Axes,
    lines: Mapping[str, Points],
    duration: float,
    limits: Iterable[tuple[str, int | None]],
    *,
    most: int = 1,
) -> int:
    """Lines of bytes over time, and limits that are near them; returns the unit of the axis, which shows ``most``."""
    highest = max(most, 1)
    for points in lines.values():
        for _, level in points:
            highest = max(highest, level)
    # Once each: devices of a pipeline mostly have the same limit.
    near: dict[tuple[str, int], None] = {}
    top = highest
    for name, limit in limits:
        # A limit far above everything would leave the picture empty.
        if limit is not None and limit <= 2 * highest:
            near[name, limit] = None
            top = max(top, limit)
    unit, name_of_unit = size_unit(highest)
    colours = cycle(LINE_COLOURS)
    for name, points in lines.items():
        colour, style = _PLAIN_COLOUR, "--"
        if name != PLAIN:
            colour, style = next(colours), "-"
        seconds = [moment / duration for moment, _ in points]
        levels = [level / unit for _, level in points]
        # In steps: memory does not rise from one moment to the next, it jumps.
        axes.plot(
            seconds,
            levels,
            style,
            label=name,
            drawstyle="steps-post",
            color=colour,
            linewidth=1.0,
        )
    for name, limit in near:
        label = f"{name} {format_bytes(limit)}"
        axes.axhline(limit / unit, color=LIMIT_COLOUR, linewidth=1.2, label=label)
    axes.set(ylim=(0, 1.09 * top / unit), ylabel=f"memory ({name_of_unit})")
    return unit


def draw_bars(axes: Axes, bars: Sequence[Bar], duration: float, height: float, edge: str | None = None) -> None:
    """Bars side by side and above one another."""
    rows = []
    widths = []
    starts = []
    colours = []
    for bar in bars:
        rows.append(bar.row)
        widths.append((bar.end_seconds - bar.start_seconds) / duration)
        starts.append(bar.start_seconds / duration)
        colours.append(bar.colour)
    # All in one call, as there are thousands of bars in a pipeline of many devices.
    axes.barh(rows, widths, height, starts, color=colours, edgecolor=edge or colours, linewidth=0.4)
