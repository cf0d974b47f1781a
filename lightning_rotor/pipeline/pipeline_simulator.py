r"""The judge of pipelines: who works when, how long a step takes, how much each device holds at most.

An action of ``pipeline_schedule`` begins when its device has done all actions before it and its input has arrived: the
activations of the stage before for a forward, the gradient from the stage behind for a backward::

    device 0   F0 F1 F2 ..... B0───── F3 B1───── ..      F3 waits for its device, B1 for a gradient
               │└──────────────▲┘
               ▼   ┆gradient   ┆
    device 1   . F0 . B0───── F1 B1───── F2 ..

A message leaves when its action ends, while the device goes on, and arrives after the link's seconds. Each pair of
devices has one link per direction, for one message at a time. Where sending holds up the sender, count the seconds as
the stage's own. Memory of a device, at any moment of an action::

    what is always there      weights, optimizer state, receive buffers            ``static_bytes``
    gradients of parameters   from the stage's first backward on                   ``gradient_bytes``
    micro-batches in flight   all but the running one, of all the device's stages  ``held_bytes`` each
    the running action        what it adds to that                                 ``forward_peak_bytes``, ...
    what lingers              sent, or made for everybody, and not let go          ``output_bytes``, ...
    results                   behind the last action, in the place of what lingers ``results_bytes``

The peak is the largest sum over all actions, so it is exact where these loads are. ``step_times`` computes the
seconds and ``device_levels`` the bytes; here both become events.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rotor.pipeline.device_levels import DeviceLevels
from lightning_rotor.pipeline.pipeline_schedule import Action, Integers, actions
from lightning_rotor.pipeline.stage_loads import PipelineStageLoad
from lightning_rotor.pipeline.step_times import StepSimulator


@dataclass(frozen=True, slots=True)
class PipelineEvent:
    """One action, when it ran since the step began, and the memory of its device.

    Attributes:
        device: That acts.
        action: The action.
        start_seconds: When it begins.
        end_seconds: When it ends.
        recompute_seconds: Of recomputation, at its beginning.
        peak_bytes: Most that the device holds during it.
        after_bytes: What the device holds behind it.
    """

    device: int
    action: Action
    start_seconds: float
    end_seconds: float
    recompute_seconds: float
    peak_bytes: int
    after_bytes: int


@dataclass(frozen=True, slots=True)
class PipelineSimulation:
    """One step of a pipeline: its seconds, and by device its events and the most bytes."""

    seconds: float
    events: tuple[tuple[PipelineEvent, ...], ...]
    peak_bytes: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Part of all devices' time spent waiting: 0.25 is a quarter."""
        total = self.seconds * len(self.events)
        if not total:
            # A chain of measured zeros: nothing is waited for.
            return 0.0
        busy = 0.0
        for events in self.events:
            for event in events:
                busy += event.end_seconds - event.start_seconds
        return 1 - busy / total


def simulate_pipeline(
    order: Integers,
    loads: Sequence[PipelineStageLoad],
    *,
    micro_batches: int,
    lingering: Sequence[Integers] = (),
    results_bytes: int = 0,
) -> PipelineSimulation:
    """Run a step on paper, from orders and loads by pipeline stage; ``results_bytes`` come behind it."""
    # Starts and ends, which the simulator, made for a planner that asks for the sum alone, fills in on request.
    times = np.zeros((2, *order.shape[:2]))
    simulator = StepSimulator(order, stages=len(loads), micro_batches=micro_batches)
    seconds = simulator.step_seconds(loads, times)
    events_by_device, peaks = [], []
    for device, own_order in enumerate(order):
        # Without a schedule of torch in mind, nothing lingers.
        own_lingering = lingering[device] if lingering else None
        memory = DeviceLevels(own_order, own_lingering, micro_batches=micro_batches)
        # Apart from the events: results come behind the last of them.
        peaks.append(memory.peak_bytes(loads, results_bytes))
        peak_bytes, after_bytes = memory.levels(loads)
        starts, ends = times[:, device].tolist()
        rows = zip(actions(own_order), starts, ends, peak_bytes.tolist(), after_bytes.tolist(), strict=True)
        events = []
        for action, start, end, peak, after in rows:
            recompute_seconds = 0.0
            if action.work == "backward":
                is_last = action.micro_batch == micro_batches - 1
                # A part of the backward's own seconds, since autograd starts the recomputation.
                recompute_seconds = loads[action.stage].both[is_last].recompute_seconds
            event = PipelineEvent(device, action, start, end, recompute_seconds, peak, after)
            events.append(event)
        events_by_device.append(tuple(events))
    return PipelineSimulation(seconds, tuple(events_by_device), tuple(peaks))
