"""Pictures: memory over a step, budget against overhead, and which device of a pipeline does what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
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
INVERSION_LABEL = "inversion"
PHASE_LABELS: dict[Phase, str] = {"forward": "forward", "recompute": "recomputation", "backward": "backward"}
LINE_COLOURS = ("#222222", "#AA3377", "#117733", "#882255")
BUDGET_COLOUR = "#CC3311"
_WIDTH = 7.0
_LETTERS, _HANDLE = 15, 5  # of a legend in an inch, and what a label's handle takes
PLAIN_COLOUR = "#555555"


class PlotError(RotorError, RuntimeError):
    """A picture cannot be drawn: matplotlib is missing, or there is nothing to draw."""


def new_figure(width: float, height: float) -> Figure:
    """A figure that belongs to no window, in inches; ``PlotError`` without matplotlib."""
    try:
        from matplotlib.figure import Figure  # slow, and not a dependency
    except ImportError as error:
        raise PlotError(
            'drawing needs matplotlib, which is not installed: pip install "lightning-rotor[plot]"'
        ) from error
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


def legend_above(axes: Axes, title: str | None = None) -> None:
    """Labels above the figure, in as many columns as its width has room for."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    handles, labels = axes.get_legend_handles_labels()
    columns = int(figure.get_figwidth() * _LETTERS) // (max(map(len, labels)) + _HANDLE)
    figure.legend(
        handles, labels, loc="outside upper left", ncols=max(columns, 1), title=title, alignment="left", frameon=False,
        fontsize="small", handlelength=1.3, handletextpad=0.5, columnspacing=1.2,
    )  # fmt: skip


# -------------------------------------------------------------- Memory over a step, and below it which stage runs when.


_Point: TypeAlias = tuple[float, int]
_HEIGHT, _STAGES_HEIGHT = 3.2, 1.7
_MOST_NAMES = 13
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
    lines = {} if plain is None else {_PLAIN: _outline(plain.events, reserved_bytes)}
    lines |= {name: list(points) for name, points in (measured or {}).items() if points}
    events = () if simulation is None else simulation.events
    longest, highest = _extent([*lines.values(), _outline(events, reserved_bytes)], budget_bytes)
    (duration, in_seconds), (size, in_bytes) = duration_unit(longest), size_unit(highest)
    axes = panels[0]
    if events:
        _draw_phases(axes, events, duration, size, reserved_bytes)
    colours = cycle(LINE_COLOURS)
    for name, points in lines.items():
        style = (PLAIN_COLOUR, (0, (4, 2))) if name == _PLAIN else (next(colours), "-")
        x, y = [seconds / duration for seconds, _ in points], [level / size for _, level in points]
        axes.plot(x, y, label=name, drawstyle="steps-post", color=style[0], linestyle=style[1], linewidth=1.0)
    axes.set(xlim=(0, 1.01 * longest / duration), ylim=(0, 1.09 * highest / size), ylabel=f"memory ({in_bytes})")
    if budget_bytes is not None and budget_bytes / size <= axes.get_ylim()[1]:
        axes.axhline(budget_bytes / size, color=BUDGET_COLOUR, linewidth=1.2)
        axes.annotate(
            f"budget {format_bytes(budget_bytes)}", (longest / duration, budget_bytes / size), xytext=(-2, 3),
            textcoords="offset points", ha="right", color=BUDGET_COLOUR, fontsize="small",
        )  # fmt: skip
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


# -------------------------------------------------------------------- which stage runs when


def _draw_stages(axes: Axes, events: Sequence[Event], names: Sequence[str], duration: float) -> None:
    """A bar for each operation: its stage upwards, its duration to the right."""
    from matplotlib.ticker import MaxNLocator

    bars: dict[str, list[tuple[int, float, float]]] = {}
    start, height = 0.0, max(1.0, _LEAST_BAR * len(names))
    for event in events:
        bars.setdefault(_look(event)[1][0], []).append((event.stage, event.seconds / duration, start))
        start += event.seconds / duration
    for colour, spans in bars.items():
        stages, widths, lefts = zip(*spans, strict=True)
        axes.barh(stages, widths, height, lefts, color=colour, edgecolor=colour, linewidth=0.3)
    axes.yaxis.set_major_locator(MaxNLocator(_MOST_NAMES, integer=True))
    axes.yaxis.set_major_formatter(lambda at, _: shortened(names[round(at)], 20) if 0 <= at < len(names) else "")
    axes.set(ylim=(-0.5 - (height - 1) / 2, len(names) - 0.5 + (height - 1) / 2), ylabel="stage")
    axes.tick_params(axis="y", length=0, labelsize="x-small")


# -------------------------------------------------------------------- Budget against overhead as a picture.

_COLOUR, _PALE = PHASE_COLOURS["forward"]


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
    right = most + 0.06 * (most - least) + 0.02 * most
    left = max(least - 0.12 * (right - least), 0) if reserved_bytes or least > 0.3 * most else 0
    x = [(reserved_bytes + point.peak_bytes) / unit for point in frontier]
    y = [100 * point.overhead for point in frontier]
    top = 1.12 * max(y) or 1.0
    axes.axvspan(left / unit, x[0], facecolor="0.93", hatch="///", edgecolor="0.8", linewidth=0)
    axes.plot([*x, right / unit], [*y, y[-1]], drawstyle="steps-post", color=_COLOUR, linewidth=1.4)
    axes.fill_between([*x, right / unit], [*y, y[-1]], step="post", color=_PALE, alpha=0.45, linewidth=0)
    _mark(axes, frontier, reserved_bytes, unit)
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
    legend_above(axes, title)
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


# ------------------------ One step of a pipeline: devices upwards, time to the right, and below what each device holds.

_Bar: TypeAlias = tuple[int, float, float, str]  # device, start, end, and the number in it
_ROW, _LEAST, _MOST, _MEMORY_HEIGHT, _FRAME = 0.34, 0.9, 5.0, 1.5, 0.8
_BAR = 0.84
# A number in a bar that is narrower than this part of the axis for each of its digits would stick out.
_LEAST_WIDTH = 0.014
# With more devices their rows are too thin for numbers and edges, and only some are named.
_MOST_NUMBERED, _MOST_NAMED = 16, 16
_MOST_LINES = 4
# Of the same scheme as the others, and far from those of forward and backward, which stand right above.
_DEVICE_COLOURS = ("#222222", "#AA3377", "#228833", "#BBAA22")


def plot_pipeline(simulation: PipelineSimulation | Partition, *, title: str | None = None) -> Figure:
    """Draw one step of a pipeline.

    Args:
        simulation: The step, or a partition for its step. Every action is a bar with the number of its micro-batch;
            white is the bubble. With several stages per device, those behind the first are paler. Below is what devices
            hold if that is known: of a few devices each, of more the one that holds most and the last one.
        title: Above the picture. By default the duration of the step and its bubble.
    Returns:
        A figure that belongs to no window: save it with ``figure.savefig(path)``.
    Raises:
        PlotError: matplotlib is not installed, or nothing takes any time.
    """
    limits: list[int | None] = []
    if isinstance(simulation, Partition):
        limits = [device.memory_bytes for device in simulation.problem.devices]
        simulation = simulation.simulation
    if not simulation.seconds:
        raise PlotError("there is nothing to draw: expected actions that take time")
    devices = len(simulation.events)
    rows = min(max(_ROW * devices, _LEAST), _MOST)
    memory = any(simulation.peak_bytes)
    figure, panels = _panels((rows, _MEMORY_HEIGHT) if memory else (rows,), _FRAME)
    scale, in_seconds = duration_unit(simulation.seconds)
    _draw_actions(panels[0], simulation, scale)
    panels[0].set(xlim=(0, 1.01 * simulation.seconds / scale), ylim=(devices - 0.5, -0.5), ylabel="device")
    shown = range(0, devices, -(-devices // _MOST_NAMED))
    panels[0].set_yticks(list(shown), [str(device) for device in shown])
    panels[0].tick_params(axis="y", length=0)
    panels[0].spines["left"].set_visible(False)
    panels[0].grid(visible=False)
    if memory:
        _draw_memory(panels[1], simulation, scale, limits)
    panels[-1].set_xlabel(f"time in the step ({in_seconds})")
    default = f"{format_seconds(simulation.seconds)} per step, {simulation.bubble:.1%} bubble"
    legend_above(panels[0], title or default)
    return figure


def _bars(simulation: PipelineSimulation) -> dict[tuple[Phase, bool], list[_Bar]]:
    """Parts of actions by phase, and by whether their stage is not the first of its device."""
    devices = len(simulation.events)
    found: dict[tuple[Phase, bool], list[_Bar]] = {
        (phase, pale): [] for phase in PHASE_LABELS for pale in (False, True)
    }
    for event in (event for events in simulation.events for event in events):
        pale, number = event.action.stage >= devices, str(event.action.micro_batch)
        middle = event.start_seconds + event.recompute_seconds
        if event.recompute_seconds:
            found["recompute", pale].append((event.device, event.start_seconds, middle, ""))
        if event.end_seconds > middle:
            found[event.action.work, pale].append((event.device, middle, event.end_seconds, number))
    return {kind: bars for kind, bars in found.items() if bars}


def _draw_actions(axes: Axes, simulation: PipelineSimulation, scale: float) -> None:
    """A bar for each action, its recomputation in another colour."""
    devices, found = len(simulation.events), _bars(simulation)
    several = any(pale for _, pale in found)
    edge = {"edgecolor": "white", "linewidth": 0.5} if devices <= _MOST_NUMBERED else {"linewidth": 0.0}
    for (phase, pale), bars in found.items():
        rows = [device for device, *_ in bars]
        lefts, widths = [start / scale for _, start, *_ in bars], [(end - start) / scale for _, start, end, _ in bars]
        label = PHASE_LABELS[phase] + ((", later stages" if pale else ", first stage") if several else "")
        drawn = axes.barh(rows, widths, _BAR, lefts, color=PHASE_COLOURS[phase][pale], label=label, **edge)
        if devices <= _MOST_NUMBERED:
            least = _LEAST_WIDTH * simulation.seconds
            numbers = [number if end - start > least * len(number) else "" for _, start, end, number in bars]
            colour = "#333333" if pale else "white"
            axes.bar_label(drawn, numbers, label_type="center", color=colour, fontsize="x-small")


def _draw_memory(axes: Axes, simulation: PipelineSimulation, scale: float, limits: Sequence[int | None]) -> None:
    """Steps of what devices hold: each action at its peak, and behind it what is left."""
    highest = max(*simulation.peak_bytes, 1)
    unit, in_bytes = size_unit(highest)
    devices = list(range(len(simulation.events)))
    if len(devices) > _MOST_LINES:
        devices = sorted({max(devices, key=lambda device: simulation.peak_bytes[device]), devices[-1]})
    for device, colour in zip(devices, _DEVICE_COLOURS, strict=False):
        events = simulation.events[device]
        x = [seconds / scale for each in events for seconds in (each.start_seconds, each.end_seconds)]
        y = [size / unit for each in events for size in (each.peak_bytes, each.after_bytes)]
        label = f"device {device}: {format_bytes(simulation.peak_bytes[device])}"
        axes.plot(x, y, color=colour, drawstyle="steps-post", linewidth=1.0, label=label)
    shown = sorted({limit for limit in limits if limit is not None and limit <= 2 * highest})
    for limit in shown:
        axes.axhline(limit / unit, color=BUDGET_COLOUR, linewidth=1.2, label=f"limit: {format_bytes(limit)}")
    top = max([highest, *shown])
    axes.set(ylim=(0, 1.09 * top / unit), ylabel=f"memory ({in_bytes})")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="x-small", handlelength=1.2)
