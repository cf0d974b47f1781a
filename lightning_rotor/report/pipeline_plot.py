"""One step of a pipeline as a picture: devices upwards, time to the right, and below what each device holds."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING

from lightning_rotor.pipeline.partition import Partition
from lightning_rotor.pipeline.pipeline_simulator import PipelineSimulation
from lightning_rotor.report.figures import (
    PHASE_COLOURS,
    PHASE_LABELS,
    Bar,
    PlotError,
    Points,
    add_legend,
    draw_bars,
    draw_levels,
    panels_over_time,
)
from lightning_rotor.simulator import Phase
from lightning_rotor.units import duration_unit, format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: of a device's row, of all rows at least and at most, of the memory below, and around both.
_ROW_HEIGHT = 0.34
_LEAST_HEIGHT, _MOST_HEIGHT = 0.9, 5.0
_MEMORY_HEIGHT = 1.5
_FRAME = 0.8
# Of its row.
_BAR = 0.84
# A number in a bar that is narrower than this part of the axis for each of its digits would stick out.
_LEAST_WIDTH = 0.014
# With more devices their rows are too thin for numbers and edges.
_MOST_NAMED = 16
# Of memory: more lines than there are colours in a picture could not be told apart.
_MOST_LINES = 4


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
    rows_height = max(_ROW_HEIGHT * devices, _LEAST_HEIGHT)
    heights = [min(rows_height, _MOST_HEIGHT)]
    # A simulation from times alone knows of no bytes.
    if any(simulation.peak_bytes):
        heights.append(_MEMORY_HEIGHT)
    figure, (axes, *below) = panels_over_time(heights, _FRAME)
    duration, in_seconds = duration_unit(simulation.seconds)
    _draw_actions(axes, simulation, duration)
    # The first device at the top, where micro-batches come in.
    axes.set(xlim=(0, 1.01 * simulation.seconds / duration), ylim=(devices - 0.5, -0.5), ylabel="device")
    apart = math.ceil(devices / _MOST_NAMED)
    axes.set_yticks(range(0, devices, apart))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    for panel in below:
        draw_levels(panel, _levels(simulation), duration, limits)
    figure.axes[-1].set_xlabel(f"time in the step ({in_seconds})")
    add_legend(figure, title or f"{format_seconds(simulation.seconds)} per step, {simulation.bubble:.1%} bubble")
    return figure


def _draw_actions(axes: Axes, simulation: PipelineSimulation, duration: float) -> None:
    """A bar for each action with the number of its micro-batch, its recomputation in another colour."""
    devices = len(simulation.events)
    bars: list[Bar] = []
    looks: set[tuple[Phase, bool]] = set()
    has_room = devices <= _MOST_NAMED
    for event in chain.from_iterable(simulation.events):
        is_later_stage = event.action.stage >= devices
        middle = event.start_seconds + event.recompute_seconds
        parts: list[tuple[Phase, float, float]] = [
            ("recompute", event.start_seconds, middle),
            (event.action.work, middle, event.end_seconds),
        ]
        for phase, start, end in parts:
            if end > start:
                looks.add((phase, is_later_stage))
                bars.append(Bar(event.device, start, end, PHASE_COLOURS[phase][is_later_stage]))
        number = str(event.action.micro_batch)
        width = event.end_seconds - middle
        if has_room and width > _LEAST_WIDTH * simulation.seconds * len(number):
            axes.text(
                (middle + event.end_seconds) / 2 / duration,
                event.device,
                number,
                ha="center",
                va="center",
                # White cannot be read on the paler bars.
                color="#333333" if is_later_stage else "white",
                fontsize="x-small",
            )
    # Edges tell bars of one colour apart. Of rows that are a few pixels high they would be all that is seen.
    draw_bars(axes, bars, duration, _BAR, "white" if has_room else None)
    has_later_stages = any(is_later_stage for _, is_later_stage in looks)
    # In the order in which a step has them, not in that of the alphabet.
    for phase in PHASE_LABELS:
        for is_later_stage in (False, True):
            if (phase, is_later_stage) not in looks:
                continue
            label = PHASE_LABELS[phase]
            if has_later_stages:
                label += ", later stages" if is_later_stage else ", first stage"
            # Empty, for the legend alone: the bars are one collection with many colours.
            axes.fill_between((), (), facecolor=PHASE_COLOURS[phase][is_later_stage], label=label)


def _levels(simulation: PipelineSimulation) -> dict[str, Points]:
    """Levels of the devices that hold most: each action at its peak, and behind it what is left."""
    peaks = simulation.peak_bytes
    by_peak = sorted(range(len(peaks)), key=peaks.__getitem__)
    levels: dict[str, Points] = {}
    for device in sorted(by_peak[-_MOST_LINES:]):
        points: list[tuple[float, int]] = []
        for event in simulation.events[device]:
            points.append((event.start_seconds, event.peak_bytes))
            points.append((event.end_seconds, event.after_bytes))
        levels[f"device {device}: {format_bytes(peaks[device])}"] = points
    return levels
