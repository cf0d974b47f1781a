"""Memory over one training step, and below it which stage runs when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, TypeAlias

from lightning_rotor.planning import Plan
from lightning_rotor.planning.tables import plain_simulation
from lightning_rotor.report.style import (
    BUDGET_COLOUR,
    INVERSION_COLOURS,
    INVERSION_LABEL,
    LINE_COLOURS,
    PHASE_COLOURS,
    PHASE_LABELS,
    PLAIN_COLOUR,
    PlotError,
    clear_frame,
    legend_above,
    new_figure,
)
from lightning_rotor.simulator import Event, Simulation
from lightning_rotor.units import duration_unit, format_bytes, size_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Point: TypeAlias = tuple[float, int]
_Part: TypeAlias = tuple[int, int, str]  # of the model: its first and last stage and its name
_WIDTH, _HEIGHT, _STAGES_HEIGHT = 7.0, 3.2, 1.7
_MOST_NAMES, _ENOUGH_NAMES, _MOST_CHARACTERS = 13, 4, 20
_PLAIN = "without recomputation"
# A bar is at least this part of the axis high, so that 300 stages are still to be seen.
_LEAST_BAR = 1 / 120


def plot_timeline(
    simulation: Simulation | Plan | None = None,
    *,
    plain: Simulation | None = None,
    measured: Mapping[str, Sequence[_Point]] | None = None,
    budget_bytes: int | None = None,
    reserved_bytes: int = 0,
    title: str | None = None,
) -> Figure:
    """Draw memory over one training step.

    Args:
        simulation: The step under a plan. Filled by phase: full colour for what stays allocated, pale for what
            operations take on top while they run. Of a plan, its simulation, with the plain step and the budget for
            comparison, and below it which stage runs when.
        plain: The step without recomputation, drawn as an outline.
        measured: Timelines from the allocator by name, points of seconds and bytes since the start of the step.
        budget_bytes: Drawn as a line.
        reserved_bytes: What the process holds besides activations; drawn below everything, so that the axis shows the
            whole process. Of measured timelines it is taken to be a part.
        title: Above the picture.
    Returns:
        A figure that belongs to no window: save it with ``figure.savefig(path)``.
    Raises:
        PlotError: matplotlib is not installed, or there is nothing to draw.
    """
    names: Sequence[str] = ()
    if isinstance(simulation, Plan):
        names = simulation.chain.names
        plain = plain or plain_simulation(simulation)
        budget_bytes = budget_bytes or reserved_bytes + simulation.budget_bytes
        simulation = simulation.simulation
    heights = (_HEIGHT, _STAGES_HEIGHT) if names else (_HEIGHT,)
    figure = new_figure(_WIDTH, sum(heights))
    lines = {} if plain is None else {_PLAIN: _outline(plain.events, reserved_bytes)}
    lines |= {name: list(points) for name, points in (measured or {}).items() if points}
    events = () if simulation is None else simulation.events
    longest, highest = _extent([*lines.values(), _outline(events, reserved_bytes)], budget_bytes)
    (duration, in_seconds), (size, in_bytes) = duration_unit(longest), size_unit(highest)
    panels: list[Axes] = [*figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False).flat]
    axes = panels[0]
    if events:
        _draw_phases(axes, events, duration, size, reserved_bytes)
    colours = cycle(LINE_COLOURS)
    for name, points in lines.items():
        style = (PLAIN_COLOUR, (0, (4, 2))) if name == _PLAIN else (next(colours), "-")
        x, y = [seconds / duration for seconds, _ in points], [level / size for _, level in points]
        axes.plot(x, y, label=name, drawstyle="steps-post", color=style[0], linestyle=style[1], linewidth=1.0)
    axes.set(xlim=(0, 1.01 * longest / duration), ylim=(0, 1.09 * highest / size), ylabel=f"memory ({in_bytes})")
    if budget_bytes is not None:
        _draw_budget(axes, budget_bytes, size, longest / duration)
    clear_frame(axes)
    if names:
        _draw_stages(panels[1], events, names, duration)
    panels[-1].set_xlabel(f"time in the step ({in_seconds})")
    legend_above(axes, title)
    return figure


def _outline(events: Sequence[Event], base: int) -> list[_Point]:
    """The highest level at each moment."""
    points, seconds = [], 0.0
    for event in events:
        points.append((seconds, base + event.peak_bytes))
        seconds += event.seconds
    return [*points, (seconds, base + events[-1].after_bytes)] if events else []


def _extent(lines: Iterable[Sequence[_Point]], budget_bytes: int | None) -> tuple[float, int]:
    """Seconds and bytes up to which there is something to show."""
    points = [point for line in lines for point in line]
    if not points:
        raise PlotError("there is nothing to draw: expected a simulation or a measured timeline")
    highest = max(1, *(level for _, level in points))
    # A budget far above everything would leave the picture empty.
    shown = budget_bytes if budget_bytes is not None and budget_bytes <= 2 * highest else 0
    return max(seconds for seconds, _ in points), max(highest, shown)


def _draw_phases(axes: Axes, events: Sequence[Event], duration: float, size: int, reserved_bytes: int) -> None:
    """What stays after each operation in full colour, what it takes meanwhile in a pale one."""
    labels: set[str] = set()
    base = reserved_bytes / size
    start, before = 0.0, base
    for event in events:
        end, after, peak = start + event.seconds / duration, base + event.after_bytes / size, event.peak_bytes / size
        label, (full, pale) = _look(event)
        span, held = (start, end), (before, after)
        # Edges in the same colour close the seams that antialiasing leaves between neighbours.
        axes.fill_between(span, held, base + peak, facecolor=pale, edgecolor=pale, linewidth=0.3)
        named = None if label in labels else label
        axes.fill_between(span, held, base, facecolor=full, edgecolor=full, linewidth=0.3, label=named)
        labels.add(label)
        start, before = end, after
    axes.fill_between((), (), facecolor="0.82", label="while running")
    if reserved_bytes:
        axes.fill_between((0, start), base, facecolor="0.6", linewidth=0, label="held throughout")


def _look(event: Event) -> tuple[str, tuple[str, str]]:
    """What the legend calls an operation, and its colours, full and pale."""
    if event.inverts:
        return INVERSION_LABEL, INVERSION_COLOURS
    return PHASE_LABELS[event.phase], PHASE_COLOURS[event.phase]


def _draw_budget(axes: Axes, budget_bytes: int, size: int, right: float) -> None:
    if budget_bytes / size <= axes.get_ylim()[1]:
        axes.axhline(budget_bytes / size, color=BUDGET_COLOUR, linewidth=1.2)
        axes.annotate(
            f"budget {format_bytes(budget_bytes)}", (right, budget_bytes / size), xytext=(-2, 3),
            textcoords="offset points", ha="right", color=BUDGET_COLOUR, fontsize="small",
        )  # fmt: skip


# -------------------------------------------------------------------- which stage runs when


def _draw_stages(axes: Axes, events: Sequence[Event], names: Sequence[str], duration: float) -> None:
    """A bar for each operation: its stage upwards, its duration to the right."""
    bars: dict[str, list[tuple[int, float, float]]] = {}
    start, height = 0.0, max(1.0, _LEAST_BAR * len(names))
    for event in events:
        bars.setdefault(_look(event)[1][0], []).append((event.stage, event.seconds / duration, start))
        start += event.seconds / duration
    for colour, spans in bars.items():
        stages, widths, lefts = zip(*spans, strict=True)
        axes.barh(stages, widths, height, lefts, color=colour, edgecolor=colour, linewidth=0.3)
    groups, starts = name_groups(names, most=_MOST_NAMES)
    # Lines where a part of the model begins, its name in the middle of it.
    axes.set_yticks([start - 0.5 for start in starts], minor=True)
    middles, shown = [(first + last) / 2 for first, last, _ in groups], [_short(name) for _, _, name in groups]
    axes.set_yticks(middles, shown, fontsize="x-small")
    axes.set(ylim=(-0.5 - (height - 1) / 2, len(names) - 0.5 + (height - 1) / 2), ylabel="stage")
    axes.tick_params(axis="y", which="both", length=0)
    clear_frame(axes, which="minor")


def _short(name: str) -> str:
    return name if len(name) <= _MOST_CHARACTERS else f"…{name[1 - _MOST_CHARACTERS :]}"


def name_groups(names: Sequence[str], *, most: int) -> tuple[list[_Part], list[int]]:
    """Names for the axis of stages that do not overlap: parts of the user's model, ``layer3`` or ``layers.0``.

    Args:
        names: Of the stages.
        most: How many names have room.
    Returns:
        First and last stage and name of each part that gets one, and where parts begin.
    """
    paths = [name.partition(" … ")[0].split(".") for name in names]
    best: tuple[list[_Part], list[int]] = ([], [])
    for depth in range(1, max(map(len, paths)) + 1):
        parts: list[_Part] = []
        for stage, path in enumerate(paths):
            if not stage or path[:depth] != paths[stage - 1][:depth]:
                parts.append((stage, stage, ".".join(path[:depth])))
            parts[-1] = (parts[-1][0], stage, parts[-1][2])
        shown = _spaced(parts, len(names) / most)
        if len(shown) > len(best[0]):
            best = shown, [part[0] for part in (parts if len(parts) <= 2 * most else shown)]
        if len(shown) >= _ENOUGH_NAMES:
            break
    return best


def _spaced(parts: Sequence[_Part], least: float) -> list[_Part]:
    """Parts whose middles are that far apart, the longest ones first."""
    shown: list[_Part] = []
    for part in sorted(parts, key=lambda part: (part[0] - part[1], part[0])):
        if all(abs(sum(part[:2]) - sum(other[:2])) >= 2 * least for other in shown):
            shown.append(part)
    return sorted(shown)
