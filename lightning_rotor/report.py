"""What a plan costs, for people: a table for the terminal, and memory over a training step as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import TYPE_CHECKING, Any, TypeAlias

from rich import box
from rich.table import Table

from lightning_rotor.errors import RotorError
from lightning_rotor.planning import Plan
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import Event, Phase, Simulation, simulate
from lightning_rotor.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_CHARACTERS = 100
# Full and pale; hues of Paul Tol's schemes, which colour-blind readers can tell apart.
_PHASE_COLOURS: dict[Phase, tuple[str, str]] = {
    "forward": ("#4477AA", "#B9CCE0"),
    "recompute": ("#EE7733", "#F9CFB3"),
    "backward": ("#66A998", "#C7E0D9"),
}
_PHASE_LABELS: dict[Phase, str] = {"forward": "forward", "recompute": "recomputation", "backward": "backward"}
_LINE_COLOURS = ("#222222", "#AA3377", "#117733", "#882255")
_BUDGET_COLOUR = "#CC3311"
_PLAIN_COLOUR = "#555555"
_DURATIONS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))

_Point: TypeAlias = tuple[float, int]


class PlotError(RotorError, RuntimeError):
    """A picture cannot be drawn: matplotlib is missing, or there is nothing to draw."""


# -------------------------------------------------------------------- table


def plan_table(
    plan: Plan,
    *,
    reserved_bytes: int = 0,
    measured_peak_bytes: int | None = None,
    plain_peak_bytes: int | None = None,
    extra_rows: Iterable[tuple[str, str]] = (),
) -> Table:
    """Summarise a plan in a few rows.

    Args:
        plan: What was planned.
        reserved_bytes: What the process holds besides activations; added to the plan's budget and peaks, so that the table shows
            the process as a whole.
        measured_peak_bytes: The allocator's peak in a step with the plan, ``reserved_bytes`` included.
        plain_peak_bytes: Peak of a step without recomputation, ``reserved_bytes`` included. By default what the simulator says.
        extra_rows: Names and values to add at the end.
    Returns:
        A table to print with ``rich.print``.
    """
    if plain_peak_bytes is None:
        plain_peak_bytes = reserved_bytes + simulate(plan.chain, Schedule.keep_all(len(plan.chain))).peak_bytes
    budget = format_bytes(reserved_bytes + plan.budget_bytes)
    if reserved_bytes:
        budget += f", {format_bytes(reserved_bytes)} of it not for activations"
    table = Table(title="Recomputation plan", box=box.ROUNDED, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("Budget", budget)
    table.add_row("Peak without recomputation", format_bytes(plain_peak_bytes))
    table.add_row("Peak with the plan", format_bytes(reserved_bytes + plan.peak_bytes))
    if measured_peak_bytes is not None:
        table.add_row("Peak measured", format_bytes(measured_peak_bytes))
    table.add_row("Recompute overhead", f"{100 * plan.overhead:.1f} % of the step")
    table.add_row("Gap to the optimum", f"at most {100 * plan.gap:.1f} % of the step")
    table.add_row("Recomputed stages", f"{len(plan.recomputed)} of {len(plan.chain)}")
    table.add_row("Planning", format_seconds(plan.solve_seconds))
    table.add_row("Schedule", schedule_line(plan.schedule))
    for name, value in extra_rows:
        table.add_row(name, value)
    return table


def schedule_line(schedule: Schedule, *, most_characters: int = _MOST_CHARACTERS) -> str:
    """The text of a schedule, shortened from the inside if it is long.

    Stages are consecutive, so what ``…`` stands for is what is missing between its neighbours. The most deeply nested segments
    go first, then all segments, then the middle.

    Args:
        schedule: Any schedule.
        most_characters: Length of the result at most.
    Returns:
        One line.
    Example:
        >>> schedule_line(Schedule.parse("0 ((1 2) 3 4) 5"), most_characters=12)
        '0 (… 3-4) 5'
    """
    text = str(schedule)
    depth = max(accumulate((character == "(") - (character == ")") for character in text))
    while len(text) > most_characters and depth > 0:
        depth -= 1
        text = _without_deeper(text, depth)
    return text if len(text) <= most_characters else _without_middle(text, most_characters)


def _without_deeper(text: str, depth: int) -> str:
    """Replace parentheses nested deeper than ``depth``."""
    kept, level = [], 0
    for character in text:
        level += character == "("
        if level <= depth:
            kept.append(character)
        elif character == "(" and level == depth + 1:
            kept.append("…")
        level -= character == ")"
    return _with_one_gap("".join(kept))


def _with_one_gap(text: str) -> str:
    """Neighbouring gaps become one."""
    return re.sub(r"…( …)+", "…", text)


def _without_middle(text: str, most_characters: int) -> str:
    """Keep whole words at both ends, in turns, while they fit."""
    words = text.split()
    head, tail = 0, 0
    line = "…"
    while head + tail < len(words):
        head, tail = (head, tail + 1) if tail <= head else (head + 1, tail)
        longer = _with_one_gap(" ".join([*words[:head], "…", *words[len(words) - tail :]]))
        if len(longer) > most_characters:
            break
        line = longer
    return line


# -------------------------------------------------------------------- picture


def plot_timeline(
    simulation: Simulation | None = None,
    *,
    plain: Simulation | None = None,
    measured: Mapping[str, Sequence[_Point]] | None = None,
    budget_bytes: int | None = None,
    title: str | None = None,
) -> Figure:
    """Draw memory over one training step.

    Args:
        simulation: The step under a plan. Filled by phase: full colour for what stays allocated, pale for what operations take
            on top while they run.
        plain: The step without recomputation, drawn as an outline.
        measured: Timelines from the allocator by name, points of seconds and bytes since the start of the step.
        budget_bytes: Drawn as a line.
        title: Above the picture.
    Returns:
        A figure that belongs to no window: save it with ``figure.savefig(path)``.
    Raises:
        PlotError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure  # slow to import, and not a dependency
    except ImportError as error:
        raise PlotError(
            'drawing needs matplotlib, which is not installed: pip install "lightning-rotor[plot]"'
        ) from error
    lines = _lines(plain, measured or {})
    scale = _Scale.for_points([point for points in lines.values() for point in points], simulation, budget_bytes)
    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    axes = figure.add_subplot()
    if simulation is not None:
        _draw_phases(axes, simulation.events, scale)
    for (name, points), style in zip(lines.items(), _line_styles(plain is not None), strict=False):
        axes.plot(*scale.apply(points), label=name, drawstyle="steps-post", **style)
    if budget_bytes is not None:
        _draw_budget(axes, budget_bytes, scale)
    _dress(axes, scale, title)
    return figure


@dataclass(frozen=True, slots=True)
class _Scale:
    """Units that suit the values, and where the axes end."""

    duration: float
    duration_unit: str
    size: int
    size_unit: str
    right: float
    top: float

    @classmethod
    def for_points(cls, points: list[_Point], simulation: Simulation | None, budget_bytes: int | None) -> _Scale:
        if simulation is not None:
            points = [*points, (sum(event.seconds for event in simulation.events), simulation.peak_bytes)]
        if not points:
            raise PlotError("there is nothing to draw: expected a simulation or a measured timeline")
        longest = max(seconds for seconds, _ in points)
        highest = max(*(size for _, size in points), budget_bytes or 0, 1)
        duration, duration_unit = next((unit for unit in _DURATIONS if longest >= unit[0]), _DURATIONS[-1])
        size, size_unit = next((unit for unit in _SIZES if highest >= unit[0]), _SIZES[-1])
        return cls(duration, duration_unit, size, size_unit, longest / duration, 1.09 * highest / size)

    def apply(self, points: Sequence[_Point]) -> tuple[list[float], list[float]]:
        return [seconds / self.duration for seconds, _ in points], [size / self.size for _, size in points]


def _lines(plain: Simulation | None, measured: Mapping[str, Sequence[_Point]]) -> dict[str, Sequence[_Point]]:
    outline = {} if plain is None else {"without recomputation": _outline(plain.events)}
    return outline | {name: points for name, points in measured.items() if points}


def _line_styles(plain: bool) -> Iterator[dict[str, Any]]:
    if plain:
        yield {"color": _PLAIN_COLOUR, "linewidth": 1.0, "linestyle": (0, (4, 2))}
    for colour in cycle(_LINE_COLOURS):
        yield {"color": colour, "linewidth": 1.0}


def _outline(events: Sequence[Event]) -> list[_Point]:
    """The highest level at each moment."""
    points, seconds = [], 0.0
    for event in events:
        points.append((seconds, event.peak_bytes))
        seconds += event.seconds
    return [*points, (seconds, events[-1].after_bytes)] if events else []


def _draw_phases(axes: Axes, events: Sequence[Event], scale: _Scale) -> None:
    """What stays after each operation in full colour, what it takes meanwhile in a pale one."""
    labels = dict(_PHASE_LABELS)
    start, before = 0.0, 0.0
    for event in events:
        end, after = start + event.seconds / scale.duration, event.after_bytes / scale.size
        span, held, peak = (start, end), (before, after), event.peak_bytes / scale.size
        full, pale = _PHASE_COLOURS[event.phase]
        # Edges in the same colour close the seams that antialiasing leaves between neighbours.
        axes.fill_between(span, held, (peak, peak), facecolor=pale, edgecolor=pale, linewidth=0.3)
        axes.fill_between(
            span, held, facecolor=full, edgecolor=full, linewidth=0.3, label=labels.pop(event.phase, None)
        )
        start, before = end, after
    axes.fill_between((), (), facecolor="0.82", label="while running")


def _draw_budget(axes: Axes, budget_bytes: int, scale: _Scale) -> None:
    level = budget_bytes / scale.size
    axes.axhline(level, color=_BUDGET_COLOUR, linewidth=1.2)
    axes.annotate(
        f"budget {format_bytes(budget_bytes)}",
        (scale.right, level),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        color=_BUDGET_COLOUR,
        fontsize="small",
    )


def _dress(axes: Axes, scale: _Scale, title: str | None) -> None:
    axes.set(xlim=(0, 1.01 * scale.right), ylim=(0, scale.top))
    axes.set_xlabel(f"time in the step ({scale.duration_unit})")
    axes.set_ylabel(f"memory ({scale.size_unit})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.figure.legend(
        loc="outside upper left",
        ncols=len(axes.get_legend_handles_labels()[1]),
        title=title,
        alignment="left",
        frameon=False,
        fontsize="small",
        handlelength=1.3,
        handletextpad=0.5,
        columnspacing=1.2,
    )
