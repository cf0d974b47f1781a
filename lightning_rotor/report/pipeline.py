"""One step of a pipeline: devices upwards, time to the right, and below what each device holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from lightning_rotor.pipeline.partition import Partition
from lightning_rotor.pipeline.simulator import PipelineEvent, PipelineSimulation
from lightning_rotor.report.style import (
    BUDGET_COLOUR,
    PHASE_COLOURS,
    PHASE_LABELS,
    PlotError,
    clear_frame,
    duration_unit,
    legend_above,
    new_figure,
    size_unit,
)
from lightning_rotor.simulator import Phase
from lightning_rotor.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _ROW, _LEAST, _MOST, _MEMORY_HEIGHT, _FRAME = 7.0, 0.34, 0.9, 5.0, 1.5, 0.8
_BAR = 0.84
# A number in a bar that is narrower than this part of the axis for each of its digits would stick out.
_LEAST_WIDTH = 0.014
# With more devices their rows are too thin for numbers and edges, and only some are named.
_MOST_NUMBERED, _MOST_NAMED = 16, 16
_MOST_LINES = 4
# Of the same scheme as the others, and far from those of forward and backward, which stand right above.
_DEVICE_COLOURS = ("#222222", "#AA3377", "#228833", "#BBAA22")


def plot_pipeline(
    simulation: PipelineSimulation | Partition, *, memory: bool | None = None, title: str | None = None
) -> Figure:
    """Draw one step of a pipeline.

    Args:
        simulation: The step, or a partition for its step. Every action is a bar with the number of its micro-batch; what is left white is
            the bubble. With several stages per device, those behind the first are paler.
        memory: Draw below what devices hold: of a few devices each, of more the one that holds most and the last one. By default if the
            simulation knows of any.
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
    memory = any(simulation.peak_bytes) if memory is None else memory
    figure = new_figure(_WIDTH, rows + _FRAME + (_MEMORY_HEIGHT if memory else 0))
    scale, in_seconds = duration_unit(simulation.seconds)
    axes, below = figure.add_subplot(), None
    if memory:
        axes.remove()
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(rows, _MEMORY_HEIGHT))
    _draw_actions(axes, simulation, scale)
    axes.set(xlim=(0, 1.01 * simulation.seconds / scale), ylim=(devices - 0.5, -0.5), ylabel="device")
    shown = range(0, devices, -(-devices // _MOST_NAMED))
    axes.set_yticks(list(shown), [str(device) for device in shown])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if below is not None:
        _draw_memory(below, simulation, scale, limits)
        below.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="x-small", handlelength=1.2)
    (below if below is not None else axes).set_xlabel(f"time in the step ({in_seconds})")
    default = f"{format_seconds(simulation.seconds)} per step, {simulation.bubble:.1%} bubble"
    _legend(axes, simulation, title or default)
    return figure


def _draw_actions(axes: Axes, simulation: PipelineSimulation, scale: float) -> None:
    """A bar for each action, its recomputation in another colour."""
    devices = len(simulation.events)
    edge = {"edgecolor": "white", "linewidth": 0.5} if devices <= _MOST_NUMBERED else {"linewidth": 0.0}
    for phase in PHASE_COLOURS:
        for pale in (False, True):
            spans = [
                (each.device, start / scale, (end - start) / scale)
                for events in simulation.events
                for each in events
                if (each.action.stage >= devices) == pale
                for name, start, end in _parts(each)
                if name == phase and end > start
            ]
            if spans:
                rows, lefts, widths = zip(*spans, strict=True)
                axes.barh(rows, widths, _BAR, lefts, color=_colour(phase, pale=pale), **edge)
    if devices > _MOST_NUMBERED:
        return
    right = simulation.seconds
    for events in simulation.events:
        for each in events:
            number = str(each.action.micro_batch)
            _, start, end = _parts(each)[-1]
            if (end - start) / right > _LEAST_WIDTH * len(number):
                pale = each.action.stage >= devices
                colour = "#333333" if pale else "white"
                axes.text(
                    (start + end) / 2 / scale,
                    each.device,
                    number,
                    color=colour,
                    fontsize="x-small",
                    ha="center",
                    va="center_baseline",
                )


def _parts(event: PipelineEvent) -> list[tuple[Phase, float, float]]:
    """Spans of one action, what gives it its number last."""
    start, end = event.start_seconds, event.end_seconds
    if event.action.work == "forward":
        return [("forward", start, end)]
    middle = start + event.recompute_seconds
    return [("recompute", start, middle), ("backward", middle, end)]


def _colour(phase: Phase, *, pale: bool) -> str:
    return PHASE_COLOURS[phase][pale]


def _legend(axes: Axes, simulation: PipelineSimulation, title: str) -> None:
    """Colours above the figure, only those that are there."""
    devices = len(simulation.events)
    found = {
        (phase, each.action.stage >= devices)
        for events in simulation.events
        for each in events
        for phase, start, end in _parts(each)
        if end > start
    }
    several = any(pale for _, pale in found)
    for phase, label in PHASE_LABELS.items():
        for pale in (False, True):
            if (phase, pale) in found:
                stage = (", later stages" if pale else ", first stage") if several else ""
                axes.bar([0], [0], color=_colour(phase, pale=pale), label=f"{label}{stage}")
    legend_above(axes, title, columns=3 if several else None)


def _draw_memory(axes: Axes, simulation: PipelineSimulation, scale: float, limits: Sequence[int | None]) -> None:
    """Steps of what devices hold, with the peaks of actions."""
    unit, in_bytes = size_unit(max(*simulation.peak_bytes, 1))
    devices = list(range(len(simulation.events)))
    if len(devices) > _MOST_LINES:
        devices = sorted({max(devices, key=lambda device: simulation.peak_bytes[device]), devices[-1]})
    for device, colour in zip(devices, _DEVICE_COLOURS, strict=False):
        points = _levels(simulation.events[device])
        label = f"device {device}: {format_bytes(simulation.peak_bytes[device])}"
        axes.plot(
            [at / scale for at, _ in points],
            [size / unit for _, size in points],
            color=colour,
            linewidth=1.0,
            label=label,
        )
    highest = max(*simulation.peak_bytes, 1)
    lines = _limit_lines(limits, devices)
    for limit, colour, label in lines:
        if limit <= 2 * highest:
            axes.axhline(
                limit / unit, color=colour, linewidth=1.2, linestyle="-" if len(lines) == 1 else "--", label=label
            )
    highest = max([highest, *(limit for limit, _, _ in lines if limit <= 2 * highest)])
    axes.set(ylim=(0, 1.09 * highest / unit), ylabel=f"memory ({in_bytes})")
    clear_frame(axes)


def _limit_lines(limits: Sequence[int | None], devices: Sequence[int]) -> list[tuple[int, str, str]]:
    """Limits with their colours and names: one for all, or where devices differ, of each that is drawn."""
    known = {limit for limit in limits if limit is not None}
    if len(known) <= 1 and None not in limits:
        return [(limit, BUDGET_COLOUR, f"limit: {format_bytes(limit)}") for limit in known]
    return [
        (limit, colour, f"limit of {device}: {format_bytes(limit)}")
        for device, colour in zip(devices, _DEVICE_COLOURS, strict=False)
        if limits and (limit := limits[device]) is not None
    ]


def _levels(events: Sequence[PipelineEvent]) -> list[tuple[float, float]]:
    """Corners of a line: in each action at its peak, between actions at what is left."""
    points: list[tuple[float, float]] = []
    for each in events:
        points += [(each.start_seconds, each.peak_bytes), (each.end_seconds, each.peak_bytes)]
        points.append((each.end_seconds, each.after_bytes))
    ends = [(right.start_seconds, left.after_bytes) for left, right in pairwise(events)]
    joined: list[tuple[float, float]] = []
    for number in range(len(events)):
        joined += points[3 * number : 3 * number + 3]
        joined += ends[number : number + 1]
    return joined
