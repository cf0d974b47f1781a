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

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.pipeline.schedule import Action, Actions, PipelineError

Reals: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]
# Arrival times that are kept at once: 16 MiB.
_MOST_TIMES = 2_000_000


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


@dataclass(frozen=True)
class PipelineSimulation:
    """One step of a pipeline."""

    seconds: float
    events: tuple[tuple[PipelineEvent, ...], ...]
    peak_bytes: tuple[int, ...]

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """By device, seconds of work."""
        return tuple(sum(each.end_seconds - each.start_seconds for each in events) for events in self.events)

    @property
    def bubble(self) -> float:
        """Part of all devices' time spent waiting: 0.25 is a quarter."""
        total = self.seconds * len(self.events)
        return 1 - sum(self.busy_seconds) / total if total else 0.0

    @property
    def recompute_seconds(self) -> float:
        """Seconds of recomputation on all devices."""
        return sum(each.recompute_seconds for events in self.events for each in events)


def simulate_pipeline(
    order: Sequence[Actions],
    loads: Sequence[PipelineStageLoad],
    *,
    micro_batches: int,
    gradients_exist: bool = False,
    lingering: Sequence[Sequence[int]] = (),
    results_bytes: int = 0,
) -> PipelineSimulation:
    """Run a step on paper, from actions by device and loads by pipeline stage; ``results_bytes`` come behind it.

    Raises a PipelineError if devices wait for one another for ever, or an action has no stage.
    """
    starts, ends = StepSimulator(order, stages=len(loads), micro_batches=micro_batches).times(loads)
    events, peaks = [], []
    for device, actions in enumerate(order):
        until = lingering[device] if lingering else ()
        memory = DeviceMemory(actions, until, micro_batches=micro_batches, gradients_exist=gradients_exist)
        peaks.append(memory.peak_bytes(loads, results_bytes))
        again = [loads[stage].both[number == micro_batches - 1].recompute_seconds for stage, _, number in actions]
        spans = zip(actions, starts[device].tolist(), ends[device].tolist(), strict=False)
        events.append(
            tuple(
                PipelineEvent(device, action, start, end, seconds if action.work == "backward" else 0.0, *levels)
                for (action, start, end), seconds, levels in zip(spans, again, memory.levels(loads), strict=True)
            )
        )
    return PipelineSimulation(float(ends.max(initial=0.0)), tuple(events), tuple(peaks))


@dataclass(frozen=True, slots=True)
class _Round:
    """What happens at once: one entry for each device that acts."""

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

    def __init__(self, order: Sequence[Actions], *, stages: int, micro_batches: int) -> None:
        self._stages, self._m, self._devices = stages, micro_batches, len(order)
        if any(action.stage >= stages for actions in order for action in actions):
            raise PipelineError(
                f"an action belongs to none of the {stages} pipeline stages: expected a load for each stage"
            )
        self._longest = max(map(len, order))
        # Who needs what a work makes: nobody behind the last stage and before the first, whose own inputs are there.
        targets = np.concatenate((np.arange(1, stages + 1), np.arange(stages - 1, 2 * stages - 1)))
        targets[[stages - 1, stages]] = 2 * stages
        self._targets: Integers = targets
        found = list(self._found(order))
        self._kept = self._most_kept(found)
        self._slots = np.concatenate(([0], np.cumsum(self._kept)))
        self._rounds = tuple(self._round(*each) for each in found)

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self._rounds)

    def step_seconds(self, loads: Sequence[PipelineStageLoad]) -> float:
        """Seconds of a step."""
        return self.simulated(np.array([[seconds_of(load) for load in loads]]))[0]

    def times(self, loads: Sequence[PipelineStageLoad]) -> tuple[Reals, Reals]:
        """Starts and ends of actions, ``(devices, longest order)`` each."""
        times = np.zeros((2, self._devices, self._longest))
        self._simulated(np.array([[seconds_of(load) for load in loads]]), times)
        return times[0], times[1]

    def simulated(self, seconds: Reals) -> list[float]:
        """Seconds of a step for many partitions."""
        at_once = max(_MOST_TIMES // int(self._slots[-1]), 1)
        parts = (seconds[start : start + at_once] for start in range(0, len(seconds), at_once))
        return [float(each) for part in parts for each in self._simulated(part)]

    def _simulated(self, seconds: Reals, times: Reals | None = None) -> Reals:
        stages, count = self._stages, len(seconds)
        # By work, forwards of all stages first; partitions are neighbours in memory.
        seconds = np.ascontiguousarray(seconds.reshape(count, stages, 2, 3).transpose(2, 1, 3, 0))
        travel = seconds[:, :, 2].reshape(2 * stages, count) * (self._devices > 1)
        travel[[stages - 1, stages]] = 0.0  # the last stage's outputs and the gradients of the first one's inputs stay
        seconds = seconds[:, :, :2].reshape(4 * stages, count)
        arrived = np.zeros((int(self._slots[-1]), count))
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

    def _found(self, order: Sequence[Actions]) -> Iterator[tuple[Integers, Integers, Integers]]:
        """By round, devices that act, places of their actions, and which work of which stage on which micro-batch."""
        m, stages = self._m, self._stages
        counts = np.array([len(each) for each in order])
        needed = np.zeros((len(order), self._longest), np.int64)
        for device, actions in enumerate(order):
            needed[device, : len(actions)] = [
                (stage + (work == "backward") * stages) * m + number for stage, work, number in actions
            ]
        there = np.zeros((2 * stages + 1, m), bool)
        there[[0, 2 * stages - 1]] = True
        places, active = np.zeros(len(order), np.int64), np.flatnonzero(counts)
        while len(active):
            needs = needed[active, places[active]]
            can = there.flat[needs]
            if not can.any():
                waiting = ", ".join(f"device {device} for {order[device][places[device]]}" for device in active[:4])
                raise PipelineError(
                    f"the devices wait for one another for ever ({waiting}): expected an order that can be run"
                )
            now, needs = active[can], needs[can]
            there[self._targets[needs // m], needs % m] = True
            yield now, places[now], needs
            places[now] += 1
            active = active[places[active] < counts[active]]

    def _most_kept(self, found: Sequence[tuple[Integers, Integers, Integers]]) -> Integers:
        """By work, so many arrivals that none is overwritten before it is needed."""
        made = np.full((2 * self._stages + 1, self._m), len(found))
        used = np.full_like(made, -1)
        for number, (_, _, needs) in enumerate(found):
            works, micro_batches = needs // self._m, needs % self._m
            used[works, micro_batches] = number
            made[self._targets[works], micro_batches] = number
        kept = np.full(len(made), self._m)
        for fewer in (1 << power for power in reversed(range(self._m.bit_length() - 1))):
            kept[~(made[:, fewer:] < used[:, :-fewer]).any(axis=1)] = fewer
        return kept

    def _round(self, devices: Integers, places: Integers, needs: Integers) -> _Round:
        works, numbers = needs // self._m, needs % self._m
        targets = self._targets[works]
        # Between two devices, gradients of one stage go the way of activations of another.
        links = 2 * devices + (works // self._stages if self._devices > 2 else 0)
        rows = 2 * works + (numbers == self._m - 1)
        needed = self._slots[works] + numbers % self._kept[works]
        makes = self._slots[targets] + numbers % self._kept[targets]
        return _Round(devices, places, rows, needed, makes, links, works)


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

    def __init__(
        self, order: Actions, lingering: Sequence[int] = (), *, micro_batches: int, gradients_exist: bool = False
    ) -> None:
        self.stages = sorted({action.stage for action in order})
        count, rows = len(order), np.arange(len(order))
        stage = np.array([self.stages.index(action.stage) for action in order], np.int64)
        number = np.array([action.micro_batch for action in order], np.int64)
        is_forward = np.array([action.work == "forward" for action in order], bool)
        last = (number == micro_batches - 1).astype(np.int64)
        until = np.array(lingering) if len(lingering) else rows
        backward = np.flatnonzero(~is_forward)
        forward_of = np.zeros((len(self.stages), micro_batches), np.int64)
        forward_of[stage[is_forward], number[is_forward]] = rows[is_forward]
        # What each action brings and takes away. What lingers of a micro-batch begins when its backward is done.
        changes = np.zeros((count, len(self.stages), _LEVELS), np.int64)
        changes[rows, stage, last] = np.where(is_forward, 1, -1)
        ends = ((_OUTPUTS, until[forward_of[stage[backward], number[backward]]]), (_INPUT_GRADIENTS, until[backward]))
        for kind, end in ends:
            stays = end > backward
            whose = stage[backward[stays]]
            changes[backward[stays], whose, kind] += 1
            np.add.at(changes[..., kind], (end[stays], whose), -1)  # several may end at once
        first = backward[np.unique(stage[backward], return_index=True)[1]]
        changes[first, stage[first], _GRADIENTS] = not gradients_exist
        after = np.cumsum(changes, axis=0)
        after[..., _GRADIENTS] += gradients_exist
        meanwhile = np.roll(after, 1, axis=0)
        meanwhile[0] = 0
        meanwhile[0, :, _GRADIENTS] = gradients_exist
        # While a micro-batch goes back, its own peak counts what it held.
        meanwhile[backward, :, :_OUTPUTS] = after[backward, :, :_OUTPUTS]
        self._after, self._meanwhile = (each.reshape(count, -1).astype(np.int32) for each in (after, meanwhile))
        kinds = np.where(is_forward, 0, 1)
        kinds[first] = 1 if gradients_exist else 2
        self._own = (stage * len(_OWN) + kinds) * 2 + last

    def levels(self, loads: Loads) -> list[tuple[int, int]]:
        """By action, the most that the device holds during it, and what it holds afterwards."""
        peaks, after = self._levels(loads)
        return list(zip(peaks.tolist(), after.tolist(), strict=True))

    def peak_bytes(self, loads: Loads, results_bytes: int = 0) -> int:
        """Most bytes that the device holds."""
        behind = sum(loads[stage].static_bytes + loads[stage].gradient_bytes for stage in self.stages) + results_bytes
        return max(behind, int(self._levels(loads)[0].max(initial=0)))

    def _levels(self, loads: Loads) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
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
