"""Memory over a step as a picture, and below it which stage runs when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_rotor.link import Transfer, Way
from lightning_rotor.planning import Plan
from lightning_rotor.planning.plan import plain_simulation
from lightning_rotor.report.figures import (
    INVERSION_COLOURS,
    PHASE_COLOURS,
    PHASE_LABELS,
    PLAIN,
    Bar,
    PlotError,
    Points,
    add_legend,
    draw_bars,
    draw_levels,
    panels_over_time,
)
from lightning_rotor.report.stage_names import shortened
from lightning_rotor.simulator import Event, Simulation, traffic
from lightning_rotor.units import duration_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches.
_HEIGHT = 3.2
_STAGES_HEIGHT = 1.7
_LINK_HEIGHT = 0.45
_MOST_NAMES = 13
_LANES: dict[Way, int] = {"out": 1, "back": 0}
_WAIT_HATCH = "////"
_TRANSFER_COLOUR = "#AA3377"
# Of a stage's name.
_MOST_LETTERS = 20
# A bar is at least this part of the axis high, so that 300 stages are still to be seen.
_LEAST_BAR = 1 / 120


def plot_timeline(
    simulation: Simulation | Plan | None = None,
    *,
    plain: Simulation | None = None,
    measured: Mapping[str, Points] | None = None,
    budget_bytes: int | None = None,
    reserved_bytes: int = 0,
    title: str | None = None,
) -> Figure:
    """Draw memory over one training step.

    Args:
        simulation: The step under a plan, filled by phase: full colour for what stays allocated, pale for what
            operations take on top while they run. A plan brings the plain step and the budget for comparison, and below
            it the copies out and back if it moves something, and which stage runs when.
        plain: The step without recomputation, drawn as an outline.
        measured: Timelines from the allocator by name, points of seconds and bytes since the start of the step.
        budget_bytes: Drawn as a line.
        reserved_bytes: What the process holds besides activations, drawn below everything and part of ``measured``.
        title: Above the picture.
    Returns:
        A figure that belongs to no window: save it with ``figure.savefig(path)``.
    Raises:
        PlotError: matplotlib is not installed, or there is nothing to draw.
    """
    names: Sequence[str] = ()
    transfers: Sequence[Transfer] = ()
    if isinstance(simulation, Plan):
        if simulation.moved:
            transfers = traffic(simulation.chain, simulation.schedule, simulation.conditions).transfers
        names = simulation.chain.names
        plain = plain or plain_simulation(simulation)
        budget_bytes = budget_bytes or reserved_bytes + simulation.budget_bytes
        simulation = simulation.simulation
    heights = [_HEIGHT]
    if transfers:
        heights.append(_LINK_HEIGHT)
    if names:
        # Only a plan knows what its stages are called.
        heights.append(_STAGES_HEIGHT)
    figure, panels = panels_over_time(heights)
    events: Sequence[Event] = ()
    if simulation is not None:
        events = simulation.events
    lines: dict[str, Points] = {}
    if plain is not None:
        lines[PLAIN] = _outline(plain.events, reserved_bytes)
    for name, points in (measured or {}).items():
        # A GPU's recording has peaks alone, and no points.
        if points:
            lines[name] = points
    outline = _outline(events, reserved_bytes)
    # The longest of all decides over the axis.
    moments = [seconds for points in (*lines.values(), outline) for seconds, _ in points]
    if not moments:
        raise PlotError("there is nothing to draw: expected a simulation or a measured timeline")
    end_seconds = max(moments)
    duration, in_seconds = duration_unit(end_seconds)
    # The areas below are no lines, and may be higher than all of them.
    most = max((level for _, level in outline), default=1)
    size = draw_levels(panels[0], lines, duration, [("budget", budget_bytes)], most=most)
    if events:
        _draw_phases(panels[0], events, duration, size, reserved_bytes)
    if names:
        _draw_stages(panels[-1], events, names, duration)
    if transfers:
        _draw_transfers(panels[1], transfers, duration)
    panels[0].set_xlim(0, 1.01 * end_seconds / duration)
    panels[-1].set_xlabel(f"time in the step ({in_seconds})")
    add_legend(figure, title)
    return figure


def _outline(events: Sequence[Event], base_bytes: int) -> list[tuple[float, int]]:
    """The highest level at each moment."""
    if not events:
        return []
    points = []
    seconds = 0.0
    for event in events:
        # The peak over the whole event: when within it an operation takes most is not known.
        points.append((seconds, base_bytes + event.peak_bytes))
        seconds += event.seconds
    points.append((seconds, base_bytes + events[-1].after_bytes))
    return points


def _draw_phases(axes: Axes, events: Sequence[Event], duration: float, size: int, reserved_bytes: int) -> None:
    """Areas: full colour for what stays after each operation, pale for what it takes meanwhile."""
    base = reserved_bytes / size
    start, before = 0.0, base
    for event in events:
        end = start + event.seconds / duration
        after = base + event.after_bytes / size
        peak = base + event.peak_bytes / size
        _, full, pale = _look(event)
        # Edges in the same colour close the seams that antialiasing leaves between neighbours.
        axes.fill_between((start, end), (before, after), peak, facecolor=pale, edgecolor=pale, linewidth=0.3)
        hatch = _WAIT_HATCH if event.phase == "wait" else None
        edge = "white" if hatch else full
        axes.fill_between(
            (start, end), (before, after), base, facecolor=full, edgecolor=edge, linewidth=0.3, hatch=hatch
        )
        start, before = end, after
    # Empty areas, for the legend: each kind of phase once, however often it comes.
    for label, full, _ in dict.fromkeys(map(_look, events)):
        axes.fill_between((), (), facecolor=full, label=label)
    axes.fill_between((), (), facecolor="0.82", label="while running")
    if reserved_bytes:
        axes.fill_between((0, start), base, facecolor="0.6", linewidth=0, label="held throughout")


def _look(event: Event) -> tuple[str, str, str]:
    """Name of an operation in the legend, and its colours, full and pale."""
    if event.inverts:
        return "inversion", *INVERSION_COLOURS
    return PHASE_LABELS[event.phase], *PHASE_COLOURS[event.phase]


def _draw_transfers(axes: Axes, transfers: Sequence[Transfer], duration: float) -> None:
    """Two lanes of bars: copies out above, copies back below."""
    bars = []
    for transfer in transfers:
        bars.append(Bar(_LANES[transfer.way], transfer.begin_seconds, transfer.end_seconds, _TRANSFER_COLOUR))
    draw_bars(axes, bars, duration, 0.7, edge="white")
    axes.set(ylim=(-0.5, 1.5), ylabel="link")
    axes.set_yticks(list(_LANES.values()), list(_LANES))
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0, labelsize="x-small")


def _draw_stages(axes: Axes, events: Sequence[Event], names: Sequence[str], duration: float) -> None:
    """A bar for each operation: its stage upwards, its duration to the right."""
    # Here, since matplotlib is slow to import, and not a dependency.
    from matplotlib.ticker import MaxNLocator

    bars = []
    start_seconds = 0.0
    for event in events:
        end_seconds = start_seconds + event.seconds
        _, full, _ = _look(event)
        bars.append(Bar(event.stage, start_seconds, end_seconds, full))
        start_seconds = end_seconds
    # In stages: a bar that is higher than one covers its neighbours, which are as thin.
    height = max(1.0, _LEAST_BAR * len(names))
    draw_bars(axes, bars, duration, height)

    def name_at(position: float, _: object) -> str:
        # Ticks may lie beyond the first and the last stage.
        if not 0 <= position < len(names):
            return ""
        return shortened(names[round(position)], _MOST_LETTERS)

    axes.yaxis.set_major_locator(MaxNLocator(_MOST_NAMES, integer=True))
    axes.yaxis.set_major_formatter(name_at)
    axes.set(ylim=(-height / 2, len(names) - 1 + height / 2), ylabel="stage")
    axes.tick_params(axis="y", length=0, labelsize="x-small")
