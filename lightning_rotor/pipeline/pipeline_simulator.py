r"""The judge of pipelines: who works when, how long a step takes, how much each device holds at most.

An action of :mod:`.schedule` begins when its device has done all actions before it and its input has arrived: the
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

The peak is the largest sum over all actions, so it is exact where these loads are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.pipeline_schedule import WORKS, Action, Integers, actions

Reals: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MicroBatchLoad:
    """Costs of one micro-batch in one pipeline stage."""

    forward_seconds: float
    backward_seconds: float  # recomputation included
    recompute_seconds: float = 0.0
    held_bytes: int = 0  # between forward and backward
    forward_peak_bytes: int = 0  # beyond what was there before it
    backward_peak_bytes: int = 0  # beyond the other micro-batches and gradients of parameters
    first_backward_peak_bytes: int = 0  # the same where gradients of parameters appear in it


@dataclass(frozen=True, slots=True)
class PipelineStageLoad:
    """Costs of one pipeline stage on its device."""

    micro_batch: MicroBatchLoad
    last: MicroBatchLoad | None = None  # the last micro-batch if it is another
    static_bytes: int = 0  # always there
    gradient_bytes: int = 0  # of parameters
    send_forward_seconds: float = 0.0  # travel time of the output to the stage behind
    send_backward_seconds: float = 0.0  # travel time of the input's gradient to the stage before
    output_bytes: int = 0  # part of held_bytes that is sent, or the output of the whole
    input_gradient_bytes: int = 0

    @property
    def both(self) -> tuple[MicroBatchLoad, MicroBatchLoad]:
        """Loads of usual micro-batches, and of the last one."""
        return self.micro_batch, self.last or self.micro_batch


Loads: TypeAlias = Sequence[PipelineStageLoad] | Mapping[int, PipelineStageLoad]


@dataclass(frozen=True, slots=True)
class PipelineEvent:
    """One action, when it ran since the step began, and the memory of its device."""

    device: int
    action: Action
    start_seconds: float
    end_seconds: float
    recompute_seconds: float  # at its beginning
    peak_bytes: int  # most during it
    after_bytes: int


@dataclass(frozen=True, slots=True)
class PipelineSimulation:
    """One step of a pipeline."""

    seconds: float
    events: tuple[tuple[PipelineEvent, ...], ...]
    peak_bytes: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Part of all devices' time spent waiting: 0.25 is a quarter."""
        total = self.seconds * len(self.events)
        busy = sum(each.end_seconds - each.start_seconds for events in self.events for each in events)
        return 1 - busy / total if total else 0.0


def simulate_pipeline(
    order: Integers,
    loads: Sequence[PipelineStageLoad],
    *,
    micro_batches: int,
    lingering: Sequence[Integers] = (),
    results_bytes: int = 0,
) -> PipelineSimulation:
    """Run a step on paper, from orders and loads by pipeline stage; ``results_bytes`` come behind it."""
    times = np.zeros((2, *order.shape[:2]))
    seconds = StepSimulator(order, stages=len(loads), micro_batches=micro_batches).step_seconds(loads, times)
    events, peaks = [], []
    for device, own in enumerate(order):
        memory = DeviceMemory(own, lingering[device] if lingering else None, micro_batches=micro_batches)
        peaks.append(memory.peak_bytes(loads, results_bytes))
        columns = [each.tolist() for each in (*times[:, device], *memory.levels(loads))]
        found = []
        for action, start, end, *levels in zip(actions(own), *columns, strict=True):
            load = loads[action.stage].both[action.micro_batch == micro_batches - 1]
            again = load.recompute_seconds if action.work == "backward" else 0.0
            found.append(PipelineEvent(device, action, start, end, again, *levels))
        events.append(tuple(found))
    return PipelineSimulation(seconds, tuple(events), tuple(peaks))


@dataclass(frozen=True, slots=True)
class _Round:
    """Actions at once: one entry for each device that acts."""

    devices: Integers
    places: Integers  # of their actions
    works: Integers  # row of the seconds: twice the work of the stage, and one more for the last micro-batch
    needs: Integers  # place of the arrival that the action waits for
    makes: Integers  # place of the arrival at whoever waits for it
    links: Integers  # that carry it
    sends: Integers  # row of the travel times


class StepSimulator:
    """Times of an order's actions, for many loads in turn and many partitions at once.

    In each round every device whose next action has its input does that action. Rounds depend on the order alone: about
    ``2 (m + S)`` for ``S`` devices and ``m`` micro-batches. A few dozen partitions take hardly longer than one.
    """

    def __init__(self, order: Integers, *, stages: int, micro_batches: int) -> None:
        self._stages, self._m, self._devices = stages, micro_batches, len(order)
        if order[..., 0].max() >= stages:
            raise PipelineError(
                f"an action belongs to none of the {stages} pipeline stages: expected a load for each stage"
            )
        # Who needs what a work makes: nobody behind the last stage and before the first, whose own inputs are there.
        targets = np.concatenate((np.arange(1, stages + 1), np.arange(stages - 1, 2 * stages - 1)))
        targets[[stages - 1, stages]] = 2 * stages
        self._targets: Integers = targets
        self._rounds = tuple(self._found(order))

    def step_seconds(self, loads: Sequence[PipelineStageLoad], times: Reals | None = None) -> float:
        """Seconds of a step; starts and ends of its actions go into ``times``, ``(2, devices, actions)``."""
        return float(self.simulated(np.array([[seconds_of(load) for load in loads]]), times)[0])

    def simulated(self, seconds: Reals, times: Reals | None = None) -> Reals:
        """Seconds of a step for many partitions; ``times`` are those of the first one's actions."""
        stages, count = self._stages, len(seconds)
        # By work, forwards of all stages first; partitions are neighbours in memory.
        seconds = np.ascontiguousarray(seconds.reshape(count, stages, 2, 3).transpose(2, 1, 3, 0))
        travel = seconds[:, :, 2].reshape(2 * stages, count) * (self._devices > 1)
        travel[[stages - 1, stages]] = 0.0  # the last stage's outputs and the gradients of the first one's inputs stay
        seconds = seconds[:, :, :2].reshape(4 * stages, count)
        arrived = np.zeros(((2 * stages + 1) * self._m, count))
        done = np.zeros((self._devices, count))
        link_free = np.zeros((2 * self._devices, count))
        for now in self._rounds:
            starts = np.maximum(arrived.take(now.needs, axis=0), done.take(now.devices, axis=0))
            ends = starts + seconds.take(now.works, axis=0)
            done[now.devices] = ends
            arrives = np.maximum(ends, link_free.take(now.links, axis=0)) + travel.take(now.sends, axis=0)
            link_free[now.links] = arrives
            arrived[now.makes] = arrives
            if times is not None:
                times[:, now.devices, now.places] = starts[:, 0], ends[:, 0]
        last: Reals = done.max(axis=0)
        return last

    def _found(self, order: Integers) -> Iterator[_Round]:
        """The actions, round by round."""
        m, stages = self._m, self._stages
        needed = (order[..., 0] + order[..., 1] * stages) * m + order[..., 2]
        there = np.zeros((2 * stages + 1, m), bool)
        there[[0, 2 * stages - 1]] = True
        places, active = np.zeros(len(order), np.int64), np.arange(len(order))
        while len(active):
            needs = needed[active, places[active]]
            can = there.flat[needs]
            if not can.any():
                waiting = ", ".join(f"device {each} for {actions(order[each])[places[each]]}" for each in active[:4])
                raise PipelineError(
                    f"the devices wait for one another for ever ({waiting}): expected an order that can be run"
                )
            now, needs = active[can], needs[can]
            works, numbers = needs // m, needs % m
            targets = self._targets[works]
            there[targets, numbers] = True
            # Between two devices, gradients of one stage go the way of activations of another.
            links = 2 * now + (works // stages if self._devices > 2 else 0)
            yield _Round(now, places[now], 2 * works + (numbers == m - 1), needs, targets * m + numbers, links, works)
            places[now] += 1
            active = active[places[active] < needed.shape[1]]


def seconds_of(load: PipelineStageLoad) -> tuple[float, ...]:
    """Seconds of the forward of a usual micro-batch, of the last one, and of its message; then of the backward."""
    usual, last = load.both
    forward = usual.forward_seconds, last.forward_seconds, load.send_forward_seconds
    return *forward, usual.backward_seconds, last.backward_seconds, load.send_backward_seconds


# Peaks of actions, and a stage's memory at any moment.
_OWN = ("forward_peak_bytes", "backward_peak_bytes", "first_backward_peak_bytes")
_OUTPUTS, _INPUT_GRADIENTS, _GRADIENTS, _LEVELS = range(2, 6)  # behind micro-batches in flight, the usual and the last


class DeviceMemory:
    """Memory of one device during its actions, for many loads in turn; it does not depend on when they run."""

    def __init__(self, order: Integers, lingering: Integers | None = None, *, micro_batches: int) -> None:
        stages, stage = np.unique(order[:, 0], return_inverse=True)
        self.stages: list[int] = stages.tolist()
        count, rows, number = len(order), np.arange(len(order)), order[:, 2]
        is_forward = order[:, 1] == WORKS.index("forward")
        last = (number == micro_batches - 1).astype(np.int64)
        until = rows if lingering is None else lingering
        backward = np.flatnonzero(~is_forward)
        forward_of = np.zeros((len(stages), micro_batches), np.int64)
        forward_of[stage[is_forward], number[is_forward]] = rows[is_forward]
        # What each action brings and takes away. What lingers of a micro-batch begins when its backward is done.
        changes = np.zeros((count, len(stages), _LEVELS), np.int64)
        changes[rows, stage, last] = np.where(is_forward, 1, -1)
        ends = ((_OUTPUTS, until[forward_of[stage[backward], number[backward]]]), (_INPUT_GRADIENTS, until[backward]))
        for kind, end in ends:
            stays = end > backward
            whose = stage[backward[stays]]
            changes[backward[stays], whose, kind] += 1
            np.add.at(changes[..., kind], (end[stays], whose), -1)  # several may end at once
        first = backward[np.unique(stage[backward], return_index=True)[1]]
        changes[first, stage[first], _GRADIENTS] = 1
        after = np.cumsum(changes, axis=0)
        meanwhile = np.concatenate((np.zeros_like(after[:1]), after[:-1]))
        # While a micro-batch goes back, its own peak counts what it held.
        meanwhile[backward, :, :_OUTPUTS] = after[backward, :, :_OUTPUTS]
        self._after, self._meanwhile = (each.reshape(count, -1).astype(np.int32) for each in (after, meanwhile))
        kinds = np.where(is_forward, 0, 1)
        kinds[first] = 2
        self._own = (stage * len(_OWN) + kinds) * 2 + last

    def peak_bytes(self, loads: Loads, results_bytes: int = 0) -> int:
        """Most bytes that the device holds."""
        behind = sum(loads[stage].static_bytes + loads[stage].gradient_bytes for stage in self.stages) + results_bytes
        return max(behind, int(self.levels(loads)[0].max(initial=0)))

    def levels(self, loads: Loads) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """By action, the most that the device holds during it, and what it holds afterwards."""
        own: list[int] = []
        sizes: list[int] = []
        for stage in self.stages:
            load = loads[stage]
            own += [getattr(each, name) for name in _OWN for each in load.both]
            sizes += [each.held_bytes for each in load.both]
            sizes += [load.output_bytes, load.input_gradient_bytes, load.gradient_bytes]
        static = sum(loads[stage].static_bytes for stage in self.stages)
        after = static + self._after @ np.array(sizes, np.int64)
        peaks = static + np.array(own, np.int64)[self._own] + self._meanwhile @ np.array(sizes, np.int64)
        return np.maximum(peaks, after), after
