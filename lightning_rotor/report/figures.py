"""The parts that all pictures share: colours, panels over one axis of time, legends, lines of bytes, bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

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
        from matplotlib.figure import Figure  # slow, and not a dependency
    except ImportError as error:
        raise PlotError("drawing needs matplotlib, which is not installed: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def panels_over_time(heights: Sequence[float], margin: float = 0.0, width: float = _WIDTH) -> tuple[Figure, list[Axes]]:
    """A figure with panels of these heights, one above the other, over one axis of time."""
    figure = new_figure(width, sum(heights) + margin)
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False).ravel().tolist()
    for axes in panels:  # no box around the data, pale lines behind it
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, panels


def add_legend(figure: Figure, title: str | None) -> None:
    """Labels of all panels above the figure, in as many columns as its width has room for."""
    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles, labels = zip(*pairs, strict=True)
    room = int(figure.get_figwidth() * _LETTERS_PER_INCH)
    widest = max(map(len, labels)) + _SAMPLE_LETTERS
    columns = max(room // widest, 1)
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, title=title, alignment="left", frameon=False,
        fontsize="small", handlelength=1.3, handletextpad=0.5, columnspacing=1.2,
    )  # fmt: skip


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
        highest = max(highest, *(level for _, level in points))
    # A limit far above everything would leave the picture empty.
    near = dict.fromkeys((name, limit) for name, limit in limits if limit is not None and limit <= 2 * highest)
    unit, name_of_unit = size_unit(highest)
    colours = cycle(LINE_COLOURS)
    for name, points in lines.items():
        is_plain = name == PLAIN
        colour = _PLAIN_COLOUR if is_plain else next(colours)
        seconds = [moment / duration for moment, _ in points]
        levels = [level / unit for _, level in points]
        axes.plot(
            seconds, levels, "--" if is_plain else "-", label=name, drawstyle="steps-post", color=colour, linewidth=1.0
        )
    for name, limit in near:
        axes.axhline(limit / unit, color=LIMIT_COLOUR, linewidth=1.2, label=f"{name} {format_bytes(limit)}")
    top = max(highest, *(limit for _, limit in near), 1)
    axes.set(ylim=(0, 1.09 * top / unit), ylabel=f"memory ({name_of_unit})")
    return unit


def draw_bars(axes: Axes, bars: Sequence[Bar], duration: float, height: float, edge: str | None = None) -> None:
    """Bars side by side and above one another."""
    colours = [bar.colour for bar in bars]
    axes.barh(
        [bar.row for bar in bars],
        [(bar.end_seconds - bar.start_seconds) / duration for bar in bars],
        height,
        [bar.start_seconds / duration for bar in bars],
        color=colours,
        edgecolor=edge or colours,
        linewidth=0.4,
    )
