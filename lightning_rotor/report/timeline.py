"""Pictures: memory over a step, budget against overhead, and which device of a pipeline does what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, cycle
from typing import TYPE_CHECKING, TypeAlias

from lightning_rotor.errors import RotorError
from lightning_rotor.pipeline.partition import Partition
from lightning_rotor.pipeline.simulator import PipelineSimulation
from lightning_rotor.planning import Frontier, Plan
from lightning_rotor.planning.plan import plain_simulation, shortened
from lightning_rotor.simulator import Event, Phase, Simulation
from lightning_rotor.units import duration_unit, format_bytes, format_seconds, size_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Full and pale; hues of Paul Tol's schemes, which colour-blind readers can tell apart.
PHASE_COLOURS: dict[Phase, tuple[str, str]] = {
    "forward": ("#4477AA", "#B9CCE0"),
    "recompute": ("#EE7733", "#F9CFB3"),
    "backward": ("#66A998", "#C7E0D9"),
}
INVERSION_COLOURS = ("#332288", "#B8B2D6")
PHASE_LABELS: dict[Phase, str] = {"forward": "forward", "recompute": "recomputation", "backward": "backward"}
_LINE_COLOURS = ("#222222", "#AA3377", "#117733", "#882255")
_LIMIT_COLOUR, _PLAIN_COLOUR = "#CC3311", "#555555"
_WIDTH = 7.0
_LETTERS, _HANDLE = 15, 5  # of a legend in an inch, and what a label's handle takes
_Points: TypeAlias = Sequence[tuple[float, int]]
"""Seconds since the step began, and bytes from then on."""


class PlotError(RotorError, RuntimeError):
    """A picture cannot be drawn: matplotlib is missing, or there is nothing to draw."""


def new_figure(width: float, height: float) -> Figure:
    """A figure that belongs to no window, in inches; ``PlotError`` without matplotlib."""
    try:
        from matplotlib.figure import Figure  # slow, and not a dependency
    except ImportError as error:
        raise PlotError("drawing needs matplotlib, which is not installed: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def _panels(heights: Sequence[float], margin: float = 0.0, width: float = _WIDTH) -> tuple[Figure, list[Axes]]:
    """A figure with panels of these heights, one above the other, over one axis of time."""
    figure = new_figure(width, sum(heights) + margin)
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False).ravel().tolist()
    for axes in panels:  # no box around the data, pale lines behind it
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, panels


def _add_legend(figure: Figure, title: str | None) -> None:
    """Labels of all panels above the figure, in as many columns as its width has room for."""
    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles, labels = zip(*pairs, strict=True)
    columns = int(figure.get_figwidth() * _LETTERS) // (max(map(len, labels)) + _HANDLE)
    figure.legend(
        handles, labels, loc="outside upper left", ncols=max(columns, 1), title=title, alignment="left", frameon=False,
        fontsize="small", handlelength=1.3, handletextpad=0.5, columnspacing=1.2,
    )  # fmt: skip


def _draw_levels(
    axes: Axes,
    lines: Mapping[str, _Points],
    duration: float,
    limits: Iterable[tuple[str, int | None]],
    *,
    most: int = 1,
) -> int:
    """Lines of bytes over time, and limits that are near them; returns the unit of the axis, which shows ``most``."""
    highest = max(most, *(level for points in lines.values() for _, level in points), 1)
    # A limit far above everything would leave the picture empty.
    shown = dict.fromkeys((name, limit) for name, limit in limits if limit is not None and limit <= 2 * highest)
    unit, name_of_unit = size_unit(highest)
    colours = cycle(_LINE_COLOURS)
    for name, points in lines.items():
        colour, style = (_PLAIN_COLOUR, "--") if name == _PLAIN else (next(colours), "-")
        x, y = [seconds / duration for seconds, _ in points], [level / unit for _, level in points]
        axes.plot(x, y, style, label=name, drawstyle="steps-post", color=colour, linewidth=1.0)
    for name, limit in shown:
        label = f"{name} {format_bytes(limit)}"
        axes.axhline(limit / unit, color=_LIMIT_COLOUR, linewidth=1.2, label=label)
    top = max(highest, *(limit for _, limit in shown), 1)
    axes.set(ylim=(0, 1.09 * top / unit), ylabel=f"memory ({name_of_unit})")
    return unit


def _draw_bars(
    axes: Axes, bars: Sequence[tuple[int, float, float, str]], duration: float, height: float, edge: str | None = None
) -> None:
    """Bars, given by row, start, end and colour."""
    rows, starts, ends, colours = zip(*bars, strict=True)
    widths = [(end - start) / duration for start, end in zip(starts, ends, strict=True)]
    lefts = [start / duration for start in starts]
    axes.barh(rows, widths, height, lefts, color=colours, edgecolor=edge or colours, linewidth=0.4)


# -------------------------------------------------------------- Memory over a step, and below it which stage runs when.


_HEIGHT, _STAGES_HEIGHT = 3.2, 1.7
_MOST_NAMES = 13
_PLAIN = "without recomputation"
# A bar is at least this part of the axis high, so that 300 stages are still to be seen.
_LEAST_BAR = 1 / 120


def plot_timeline(
    simulation: Simulation | Plan | None = None,
    *,
    plain: Simulation | None = None,
    measured: Mapping[str, _Points] | None = None,
    budget_bytes: int | None = None,
    reserved_bytes: int = 0,
    title: str | None = None,
) -> Figure:
    """Draw memory over one training step.

    Args:
        simulation: The step under a plan, filled by phase: full colour for what stays allocated, pale for what
            operations take on top while they run. A plan brings the plain step and the budget for comparison, and below
            it which stage runs when.
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
    if isinstance(simulation, Plan):
        names = simulation.chain.names
        plain = plain or plain_simulation(simulation)
        budget_bytes = budget_bytes or reserved_bytes + simulation.budget_bytes
        simulation = simulation.simulation
    figure, panels = _panels((_HEIGHT, _STAGES_HEIGHT) if names else (_HEIGHT,))
    events = () if simulation is None else simulation.events
    lines: dict[str, _Points] = {} if plain is None else {_PLAIN: _outline(plain.events, reserved_bytes)}
    lines |= {name: points for name, points in (measured or {}).items() if points}
    outline = _outline(events, reserved_bytes)
    moments = [seconds for points in (*lines.values(), outline) for seconds, _ in points]
    if not moments:
        raise PlotError("there is nothing to draw: expected a simulation or a measured timeline")
    duration, in_seconds = duration_unit(max(moments))
    most = max((level for _, level in outline), default=1)
    size = _draw_levels(panels[0], lines, duration, [("budget", budget_bytes)], most=most)
    if events:
        _draw_phases(panels[0], events, duration, size, reserved_bytes)
    if names:
        _draw_stages(panels[1], events, names, duration)
    panels[0].set_xlim(0, 1.01 * max(moments) / duration)
    panels[-1].set_xlabel(f"time in the step ({in_seconds})")
    _add_legend(figure, title)
    return figure


def _outline(events: Sequence[Event], base: int) -> list[tuple[float, int]]:
    """The highest level at each moment."""
    points, seconds = [], 0.0
    for event in events:
        points.append((seconds, base + event.peak_bytes))
        seconds += event.seconds
    return [*points, (seconds, base + events[-1].after_bytes)] if events else []


def _draw_phases(axes: Axes, events: Sequence[Event], duration: float, size: int, reserved_bytes: int) -> None:
    """What stays after each operation in full colour, what it takes meanwhile in a pale one."""
    base = reserved_bytes / size
    start, before = 0.0, base
    for event in events:
        end, after, peak = start + event.seconds / duration, base + event.after_bytes / size, event.peak_bytes / size
        _, full, pale = _look(event)
        # Edges in the same colour close the seams that antialiasing leaves between neighbours.
        axes.fill_between((start, end), (before, after), base + peak, facecolor=pale, edgecolor=pale, linewidth=0.3)
        axes.fill_between((start, end), (before, after), base, facecolor=full, edgecolor=full, linewidth=0.3)
        start, before = end, after
    for label, full, _ in dict.fromkeys(map(_look, events)):
        axes.fill_between((), (), facecolor=full, label=label)
    axes.fill_between((), (), facecolor="0.82", label="while running")
    if reserved_bytes:
        axes.fill_between((0, start), base, facecolor="0.6", linewidth=0, label="held throughout")


def _look(event: Event) -> tuple[str, str, str]:
    """What the legend calls an operation, and its colours, full and pale."""
    if event.inverts:
        return "inversion", *INVERSION_COLOURS
    return PHASE_LABELS[event.phase], *PHASE_COLOURS[event.phase]


def _draw_stages(axes: Axes, events: Sequence[Event], names: Sequence[str], duration: float) -> None:
    """A bar for each operation: its stage upwards, its duration to the right."""
    from matplotlib.ticker import MaxNLocator

    ends = list(accumulate(event.seconds for event in events))
    height = max(1.0, _LEAST_BAR * len(names))
    bars = [(each.stage, end - each.seconds, end, _look(each)[1]) for each, end in zip(events, ends, strict=True)]
    _draw_bars(axes, bars, duration, height)
    axes.yaxis.set_major_locator(MaxNLocator(_MOST_NAMES, integer=True))
    axes.yaxis.set_major_formatter(lambda at, _: shortened(names[round(at)], 20) if 0 <= at < len(names) else "")
    axes.set(ylim=(-height / 2, len(names) - 1 + height / 2), ylabel="stage")
    axes.tick_params(axis="y", length=0, labelsize="x-small")


# -------------------------------------------------------------------- Budget against overhead as a picture.


def plot_frontier(
    frontier: Frontier, *, reserved_bytes: int = 0, limits: Mapping[str, int] | None = None, title: str | None = None
) -> Figure:
    """Draw what every budget costs in time.

    Args:
        frontier: The curve.
        reserved_bytes: What the process holds besides activations, added to the budgets.
        limits: Sizes to mark by name, such as memories of devices, in the units of the axis.
        title: Above the picture.
    Returns:
        A figure that belongs to no window: save it with ``figure.savefig(path)``.
    Raises:
        PlotError: matplotlib is not installed.
    """
    figure, (axes,) = _panels((3.8,), width=4.6)
    most = max(frontier[-1].peak_bytes, frontier.budget_bytes or 0) + reserved_bytes
    least = frontier[0].peak_bytes + reserved_bytes
    unit, unit_name = size_unit(most)
    left, right = max(0, least - 0.2 * (most - least)) / unit, (1.02 * most + 0.06 * (most - least)) / unit
    x = [*((reserved_bytes + point.peak_bytes) / unit for point in frontier), right]
    y = [100 * point.overhead for point in (*frontier, frontier[-1])]
    full, pale = PHASE_COLOURS["forward"]
    axes.axvspan(left, x[0], facecolor="0.93", hatch="///", edgecolor="0.8", linewidth=0, label="no schedule")
    axes.plot(x, y, drawstyle="steps-post", color=full, linewidth=1.4)
    axes.fill_between(x, y, step="post", color=pale, alpha=0.45, linewidth=0)
    _mark(axes, frontier, reserved_bytes, unit)
    for (name, size), colour in zip((limits or {}).items(), cycle(_LINE_COLOURS)):
        if left < size / unit < right:
            axes.axvline(
                size / unit, color=colour, linewidth=0.9, linestyle="--", label=f"{name}: {format_bytes(size)}"
            )
    axes.set(xlim=(left, right), ylim=(0, 1.12 * max(y) or 1.0))
    axes.set(xlabel=f"memory budget ({unit_name})", ylabel="recomputation (% of the step)")
    _add_legend(figure, title)
    return figure


def _mark(axes: Axes, frontier: Frontier, reserved_bytes: int, unit: int) -> None:
    """The least budget, the knee, the plan, and where recomputation ends; the legend names them, so none overlap."""
    planned = None if frontier.budget_bytes is None else frontier.at(frontier.budget_bytes)
    spots = [("least", frontier[0], "v"), ("plan", planned, "o"), ("knee", frontier.knee, "*")]
    spots += [("keep all", frontier[-1], "P")] if len(frontier) > 1 else []
    colours = {"plan": _LIMIT_COLOUR, "knee": _LINE_COLOURS[0]}
    for name, point, marker in spots:
        if point is None:
            continue
        size, percent = reserved_bytes + point.peak_bytes, 100 * point.overhead
        axes.plot(
            size / unit, percent, marker, color=colours.get(name, PHASE_COLOURS["forward"][0]), clip_on=False,
            markersize=8 if marker == "*" else 6, markeredgecolor="white", markeredgewidth=0.5,
            zorder=5 if name == "plan" else 4, label=f"{name}: {format_bytes(size)}, {percent:.1f} %",
        )  # fmt: skip


# ------------------------ One step of a pipeline: devices upwards, time to the right, and below what each device holds.

_ROW, _LEAST, _MOST, _MEMORY_HEIGHT, _FRAME = 0.34, 0.9, 5.0, 1.5, 0.8
_BAR = 0.84
# A number in a bar that is narrower than this part of the axis for each of its digits would stick out.
_LEAST_WIDTH = 0.014
_MOST_NAMED, _MOST_LINES = 16, 4  # with more devices their rows are too thin for numbers and edges


def plot_pipeline(simulation: PipelineSimulation | Partition, *, title: str | None = None) -> Figure:
    """Draw one step of a pipeline.

    Args:
        simulation: The step, or a partition for its step. Every action is a bar with the number of its micro-batch;
            white is the bubble. With several stages per device, those behind the first are paler. Below is what devices
            hold if that is known, of many devices the four that hold most.
        title: Above the picture. By default the duration of the step and its bubble.
    Returns:
        A figure that belongs to no window: save it with ``figure.savefig(path)``.
    Raises:
        PlotError: matplotlib is not installed, or nothing takes any time.
    """
    limits: list[tuple[str, int | None]] = []
    if isinstance(simulation, Partition):
        limits = [("limit", device.memory_bytes) for device in simulation.problem.devices]
        simulation = simulation.simulation
    if not simulation.seconds:
        raise PlotError("there is nothing to draw: expected actions that take time")
    devices = len(simulation.events)
    rows = min(max(_ROW * devices, _LEAST), _MOST)
    figure, (axes, *below) = _panels((rows, _MEMORY_HEIGHT) if any(simulation.peak_bytes) else (rows,), _FRAME)
    duration, in_seconds = duration_unit(simulation.seconds)
    _draw_actions(axes, simulation, duration)
    axes.set(xlim=(0, 1.01 * simulation.seconds / duration), ylim=(devices - 0.5, -0.5), ylabel="device")
    axes.set_yticks(range(0, devices, -(-devices // _MOST_NAMED)))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    for panel in below:
        _draw_levels(panel, _levels(simulation), duration, limits)
    figure.axes[-1].set_xlabel(f"time in the step ({in_seconds})")
    _add_legend(figure, title or f"{format_seconds(simulation.seconds)} per step, {simulation.bubble:.1%} bubble")
    return figure


def _draw_actions(axes: Axes, simulation: PipelineSimulation, duration: float) -> None:
    """A bar for each action with the number of its micro-batch, its recomputation in another colour."""
    devices, bars, looks = len(simulation.events), list[tuple[int, float, float, str]](), set[tuple[Phase, bool]]()
    has_room = devices <= _MOST_NAMED
    for event in chain.from_iterable(simulation.events):
        pale, middle = event.action.stage >= devices, event.start_seconds + event.recompute_seconds
        work, number = event.action.work, str(event.action.micro_batch)
        parts: list[tuple[Phase, float, float]] = [("recompute", event.start_seconds, middle)]
        for phase, start, end in [*parts, (work, middle, event.end_seconds)]:
            if end > start:
                looks.add((phase, pale))
                bars.append((event.device, start, end, PHASE_COLOURS[phase][pale]))
        if has_room and event.end_seconds - middle > _LEAST_WIDTH * simulation.seconds * len(number):
            place, colour = (middle + event.end_seconds) / 2 / duration, "#333333" if pale else "white"
            axes.text(place, event.device, number, ha="center", va="center", color=colour, fontsize="x-small")
    _draw_bars(axes, bars, duration, _BAR, "white" if has_room else None)
    several = any(pale for _, pale in looks)
    for phase, pale in sorted(looks, key=lambda look: (list(PHASE_LABELS).index(look[0]), look[1])):
        label = PHASE_LABELS[phase] + ((", later stages" if pale else ", first stage") if several else "")
        axes.fill_between((), (), facecolor=PHASE_COLOURS[phase][pale], label=label)


def _levels(simulation: PipelineSimulation) -> dict[str, _Points]:
    """What the devices that hold most hold: each action at its peak, and behind it what is left."""
    peaks = simulation.peak_bytes
    devices = sorted(sorted(range(len(peaks)), key=peaks.__getitem__)[-_MOST_LINES:])
    return {
        f"device {device}: {format_bytes(peaks[device])}": [
            point
            for each in simulation.events[device]
            for point in ((each.start_seconds, each.peak_bytes), (each.end_seconds, each.after_bytes))
        ]
        for device in devices
    }
