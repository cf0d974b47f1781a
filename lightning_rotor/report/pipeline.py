"""One step of a pipeline: devices upwards, time to the right, and below what each device holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from lightning_rotor.pipeline.partition import Partition
from lightning_rotor.pipeline.simulator import PipelineEvent, PipelineSimulation
from lightning_rotor.report.style import (
    BUDGET_COLOUR,
    PHASE_COLOURS,
    PHASE_LABELS,
    PlotError,
    clear_frame,
    legend_above,
    new_figure,
)
from lightning_rotor.simulator import Phase
from lightning_rotor.units import duration_unit, format_bytes, format_seconds, size_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Bar: TypeAlias = tuple[int, float, float, str]  # device, start, end, and the number in it
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
        simulation: The step, or a partition for its step. Every action is a bar with the number of its micro-batch;
            what is left white is the bubble. With several stages per device, those behind the first are paler.
        memory: Draw below what devices hold: of a few devices each, of more the one that holds most and the last one.
            By default if the simulation knows of any.
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
    heights = (rows, _MEMORY_HEIGHT) if memory else (rows,)
    figure = new_figure(_WIDTH, sum(heights) + _FRAME)
    scale, in_seconds = duration_unit(simulation.seconds)
    panels: list[Axes] = [*figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False).flat]
    several = _draw_actions(panels[0], simulation, scale)
    panels[0].set(xlim=(0, 1.01 * simulation.seconds / scale), ylim=(devices - 0.5, -0.5), ylabel="device")
    shown = range(0, devices, -(-devices // _MOST_NAMED))
    panels[0].set_yticks(list(shown), [str(device) for device in shown])
    panels[0].tick_params(axis="y", length=0)
    panels[0].spines[["top", "right", "left"]].set_visible(False)
    if memory:
        _draw_memory(panels[1], simulation, scale, limits)
    panels[-1].set_xlabel(f"time in the step ({in_seconds})")
    default = f"{format_seconds(simulation.seconds)} per step, {simulation.bubble:.1%} bubble"
    legend_above(panels[0], title or default, columns=3 if several else None)
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


def _draw_actions(axes: Axes, simulation: PipelineSimulation, scale: float) -> bool:
    """A bar for each action, its recomputation in another colour. True if devices have several stages."""
    devices, found = len(simulation.events), _bars(simulation)
    several = any(pale for _, pale in found)
    edge = {"edgecolor": "white", "linewidth": 0.5} if devices <= _MOST_NUMBERED else {"linewidth": 0.0}
    for (phase, pale), bars in found.items():
        rows = [device for device, *_ in bars]
        lefts, widths = [start / scale for _, start, *_ in bars], [(end - start) / scale for _, start, end, _ in bars]
        label = PHASE_LABELS[phase] + ((", later stages" if pale else ", first stage") if several else "")
        axes.barh(rows, widths, _BAR, lefts, color=PHASE_COLOURS[phase][pale], label=label, **edge)
        for device, start, end, number in bars if devices <= _MOST_NUMBERED else ():
            if (end - start) / simulation.seconds > _LEAST_WIDTH * len(number):
                axes.text(
                    (start + end) / 2 / scale, device, number, color="#333333" if pale else "white",
                    fontsize="x-small", ha="center", va="center_baseline",
                )  # fmt: skip
    return several


def _draw_memory(axes: Axes, simulation: PipelineSimulation, scale: float, limits: Sequence[int | None]) -> None:
    """Steps of what devices hold, with the peaks of actions."""
    highest = max(*simulation.peak_bytes, 1)
    unit, in_bytes = size_unit(highest)
    devices = list(range(len(simulation.events)))
    if len(devices) > _MOST_LINES:
        devices = sorted({max(devices, key=lambda device: simulation.peak_bytes[device]), devices[-1]})
    for device, colour in zip(devices, _DEVICE_COLOURS, strict=False):
        seconds, sizes = zip(*_levels(simulation.events[device]), strict=True)
        label = f"device {device}: {format_bytes(simulation.peak_bytes[device])}"
        x, y = [at / scale for at in seconds], [size / unit for size in sizes]
        axes.plot(x, y, color=colour, linewidth=1.0, label=label)
    lines = [line for line in _limit_lines(limits, devices) if line[0] <= 2 * highest]
    for limit, colour, style, label in lines:
        axes.axhline(limit / unit, color=colour, linewidth=1.2, linestyle=style, label=label)
    top = max([highest, *(limit for limit, *_ in lines)])
    axes.set(ylim=(0, 1.09 * top / unit), ylabel=f"memory ({in_bytes})")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="x-small", handlelength=1.2)
    clear_frame(axes)


def _limit_lines(limits: Sequence[int | None], devices: Sequence[int]) -> list[tuple[int, str, str, str]]:
    """Limits with colours, styles and names: one for all, or where devices differ, of each that is drawn."""
    known = {limit for limit in limits if limit is not None}
    if len(known) <= 1 and None not in limits:
        return [(limit, BUDGET_COLOUR, "-", f"limit: {format_bytes(limit)}") for limit in known]
    return [
        (limit, colour, "--", f"limit of {device}: {format_bytes(limit)}")
        for device, colour in zip(devices, _DEVICE_COLOURS, strict=False)
        if (limit := limits[device]) is not None
    ]


def _levels(events: Sequence[PipelineEvent]) -> Iterator[tuple[float, int]]:
    """Corners of a line: in each action at its peak, between actions at what is left."""
    before = None
    for event in events:
        if before is not None:
            yield event.start_seconds, before
        yield from ((event.start_seconds, event.peak_bytes), (event.end_seconds, event.peak_bytes))
        yield event.end_seconds, event.after_bytes
        before = event.after_bytes
