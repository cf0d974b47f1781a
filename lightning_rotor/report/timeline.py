"""Memory over one training step, and below it which stage runs when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeAlias

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
    duration_unit,
    legend_above,
    new_figure,
    size_unit,
)
from lightning_rotor.simulator import Event, Simulation
from lightning_rotor.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Point: TypeAlias = tuple[float, int]
_WIDTH, _HEIGHT, _STAGES_HEIGHT = 7.0, 3.2, 1.7
_MOST_NAMES, _ENOUGH_NAMES = 13, 4
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
        simulation: The step under a plan. Filled by phase: full colour for what stays allocated, pale for what operations take
            on top while they run. Of a plan, its simulation, with the plain step and the budget for comparison, and below it which
            stage runs when.
        plain: The step without recomputation, drawn as an outline.
        measured: Timelines from the allocator by name, points of seconds and bytes since the start of the step.
        budget_bytes: Drawn as a line.
        reserved_bytes: What the process holds besides activations; drawn below everything, so that the axis shows the whole process. Of
            measured timelines it is taken to be a part.
        title: Above the picture.
    Returns:
        A figure that belongs to no window: save it with ``figure.savefig(path)``.
    Raises:
        PlotError: matplotlib is not installed, or there is nothing to draw.
    """
    names: Sequence[str] | None = None
    if isinstance(simulation, Plan):
        names = simulation.chain.names
        plain = plain or plain_simulation(simulation)
        budget_bytes = budget_bytes or reserved_bytes + simulation.budget_bytes
        simulation = simulation.simulation
    figure = new_figure(_WIDTH, _HEIGHT + (_STAGES_HEIGHT if names else 0))
    lines = _lines(plain, measured or {}, reserved_bytes)
    scale = _Scale.for_points(
        [point for points in lines.values() for point in points], simulation, budget_bytes, reserved_bytes
    )
    axes, below = figure.add_subplot(), None
    if names and simulation is not None:
        axes.remove()
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(_HEIGHT, _STAGES_HEIGHT))
    if simulation is not None:
        _draw_phases(axes, simulation.events, scale, reserved_bytes)
    for (name, points), style in zip(lines.items(), _line_styles(plain is not None), strict=False):
        axes.plot(*scale.apply(points), label=name, drawstyle="steps-post", **style)
    if budget_bytes is not None:
        _draw_budget(axes, budget_bytes, scale)
    axes.set(xlim=(0, 1.01 * scale.right), ylim=(0, scale.top), ylabel=f"memory ({scale.size_unit})")
    clear_frame(axes)
    if below is not None and names is not None and simulation is not None:
        _draw_stages(below, simulation.events, names, scale)
    (below or axes).set_xlabel(f"time in the step ({scale.duration_unit})")
    legend_above(axes, title)
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
    def for_points(
        cls, points: list[_Point], simulation: Simulation | None, budget_bytes: int | None, reserved_bytes: int
    ) -> _Scale:
        highest_line = max((size for _, size in points), default=0)
        if simulation is not None:
            points = [
                *points,
                (sum(event.seconds for event in simulation.events), reserved_bytes + simulation.peak_bytes),
            ]
        if not points:
            raise PlotError("there is nothing to draw: expected a simulation or a measured timeline")
        longest = max(seconds for seconds, _ in points)
        highest = max(*(size for _, size in points), highest_line, 1)
        # A budget far above everything would leave the picture empty.
        if budget_bytes is not None and budget_bytes <= 2 * highest:
            highest = max(highest, budget_bytes)
        (duration, in_seconds), (size, in_bytes) = duration_unit(longest), size_unit(highest)
        return cls(duration, in_seconds, size, in_bytes, longest / duration, 1.09 * highest / size)

    def apply(self, points: Sequence[_Point]) -> tuple[list[float], list[float]]:
        return [seconds / self.duration for seconds, _ in points], [size / self.size for _, size in points]


def _lines(
    plain: Simulation | None, measured: Mapping[str, Sequence[_Point]], reserved_bytes: int
) -> dict[str, Sequence[_Point]]:
    outline = {} if plain is None else {"without recomputation": _outline(plain.events, reserved_bytes)}
    return outline | {name: points for name, points in measured.items() if points}


def _line_styles(plain: bool) -> Iterator[dict[str, Any]]:
    if plain:
        yield {"color": PLAIN_COLOUR, "linewidth": 1.0, "linestyle": (0, (4, 2))}
    for colour in cycle(LINE_COLOURS):
        yield {"color": colour, "linewidth": 1.0}


def _outline(events: Sequence[Event], base: int) -> list[_Point]:
    """The highest level at each moment."""
    points, seconds = [], 0.0
    for event in events:
        points.append((seconds, base + event.peak_bytes))
        seconds += event.seconds
    return [*points, (seconds, base + events[-1].after_bytes)] if events else []


def _draw_phases(axes: Axes, events: Sequence[Event], scale: _Scale, reserved_bytes: int) -> None:
    """What stays after each operation in full colour, what it takes meanwhile in a pale one."""
    labelled: set[str] = set()
    base = reserved_bytes / scale.size
    start, before = 0.0, base
    for event in events:
        end, after = start + event.seconds / scale.duration, base + event.after_bytes / scale.size
        span, held, peak = (start, end), (before, after), base + event.peak_bytes / scale.size
        label, (full, pale) = _look(event)
        # Edges in the same colour close the seams that antialiasing leaves between neighbours.
        axes.fill_between(span, held, (peak, peak), facecolor=pale, edgecolor=pale, linewidth=0.3)
        axes.fill_between(
            span, held, base, facecolor=full, edgecolor=full, linewidth=0.3, label=None if label in labelled else label
        )
        labelled.add(label)
        start, before = end, after
    axes.fill_between((), (), facecolor="0.82", label="while running")
    if reserved_bytes:
        axes.fill_between((0, start), base, facecolor="0.6", linewidth=0, label="held throughout")


def _look(event: Event) -> tuple[str, tuple[str, str]]:
    """What the legend calls an operation, and its colours, full and pale."""
    if event.inverts:
        return INVERSION_LABEL, INVERSION_COLOURS
    return PHASE_LABELS[event.phase], PHASE_COLOURS[event.phase]


def _draw_budget(axes: Axes, budget_bytes: int, scale: _Scale) -> None:
    level = budget_bytes / scale.size
    if level > scale.top:
        return
    axes.axhline(level, color=BUDGET_COLOUR, linewidth=1.2)
    axes.annotate(
        f"budget {format_bytes(budget_bytes)}",
        (scale.right, level),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        color=BUDGET_COLOUR,
        fontsize="small",
    )


# -------------------------------------------------------------------- which stage runs when


def _draw_stages(axes: Axes, events: Sequence[Event], names: Sequence[str], scale: _Scale) -> None:
    """A bar for each operation: its stage upwards, its duration to the right."""
    colours = (*(full for full, _ in PHASE_COLOURS.values()), INVERSION_COLOURS[0])
    bars: dict[str, tuple[list[float], list[float], list[float]]] = {colour: ([], [], []) for colour in colours}
    start, height = 0.0, max(1.0, _LEAST_BAR * len(names))
    for event in events:
        lefts, widths, stages = bars[_look(event)[1][0]]
        lefts.append(start)
        widths.append(event.seconds / scale.duration)
        stages.append(event.stage)
        start += event.seconds / scale.duration
    for colour, (lefts, widths, stages) in bars.items():
        axes.barh(stages, widths, height, lefts, color=colour, edgecolor=colour, linewidth=0.3)
    axes.set_ylim(-0.5 - (height - 1) / 2, len(names) - 0.5 + (height - 1) / 2)
    groups, starts = name_groups(names, most=_MOST_NAMES)
    # Lines where a part of the model begins, its name in the middle of it.
    axes.set_yticks([start - 0.5 for start in starts], minor=True)
    axes.set_yticks(
        [(first + last) / 2 for first, last, _ in groups], [_short(name) for _, _, name in groups], fontsize="x-small"
    )
    axes.tick_params(axis="y", which="both", length=0)
    axes.set_ylabel("stage")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", which="minor", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _short(name: str, most: int = 20) -> str:
    name = name.partition(" … ")[0]
    return name if len(name) <= most else f"…{name[1 - most :]}"


def name_groups(names: Sequence[str], *, most: int) -> tuple[list[tuple[int, int, str]], list[int]]:
    """Names for the axis of stages that do not overlap: parts of the user's model, ``layer3`` or ``layers.0``.

    Args:
        names: Of the stages.
        most: How many names have room.
    Returns:
        First and last stage and name of each part that gets one, and where parts begin.
    """
    paths = [name.partition(" … ")[0].split(".") for name in names]
    best: tuple[list[tuple[int, int, str]], list[int]] = ([], [])
    for depth in range(1, max(map(len, paths)) + 1):
        starts = [n for n in range(len(paths)) if not n or paths[n][:depth] != paths[n - 1][:depth]]
        runs = [
            (start, end - 1, ".".join(paths[start][:depth]))
            for start, end in zip(starts, [*starts[1:], len(paths)], strict=True)
        ]
        shown = _spaced(runs, len(names) / most)
        if len(shown) > len(best[0]):
            best = shown, [run[0] for run in (runs if len(runs) <= 2 * most else shown)]
        if len(shown) >= _ENOUGH_NAMES:
            break
    return best


def _spaced(runs: list[tuple[int, int, str]], least: float) -> list[tuple[int, int, str]]:
    """Runs whose middles are that far apart, the longest ones first."""
    shown: list[tuple[int, int, str]] = []
    for run in sorted(runs, key=lambda run: (run[0] - run[1], run[0])):
        if all(abs(sum(run[:2]) - sum(other[:2])) >= 2 * least for other in shown):
            shown.append(run)
    return sorted(shown)
