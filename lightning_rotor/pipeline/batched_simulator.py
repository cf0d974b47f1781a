"""How long a step takes on many devices: the simulator's rules, applied to all devices at once, and to many partitions.

In each round every device that has what its next action needs does that action. Who that is depends on the order alone, so rounds are found
once; there are about ``2 (m + S)`` for ``S`` devices and ``m`` micro-batches. To simulate takes a handful of array operations for each of them,
where :mod:`lightning_rotor.pipeline.simulator` goes through ``2 m S`` actions, and a few dozen partitions take hardly longer than one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.pipeline.schedule import Actions, PipelineError
from lightning_rotor.pipeline.simulator import PipelineStageLoad, load_of

Reals: TypeAlias = npt.NDArray[np.float64]
# Arrival times that are kept at once: 128 MiB.
_MOST_TIMES = 16_000_000


@dataclass(frozen=True, slots=True)
class _Round:
    """What happens at once: one entry for each device that acts.

    Attributes:
        devices: Which ones.
        works: What they do: row of the seconds, twice the work, and one more for the last micro-batch.
        needs: Place of the arrival that it waits for.
        makes: Place of the arrival at whoever waits for it.
        links: Which link carries it.
        sends: Whose message it is.
    """

    devices: npt.NDArray[np.int64]
    works: npt.NDArray[np.int64]
    needs: npt.NDArray[np.int64]
    makes: npt.NDArray[np.int64]
    links: npt.NDArray[np.int64]
    sends: npt.NDArray[np.int64]


class Waves:
    """An order of actions, ready for many loads.

    Args:
        order: By device, three or more of them, each with the stages whose numbers are its own modulo the number of devices.
        stages: How many pipeline stages there are.
        micro_batches: How many micro-batches.
    Raises:
        PipelineError: The devices wait for one another for ever.
    """

    def __init__(self, order: Sequence[Actions], *, stages: int, micro_batches: int) -> None:
        if len(order) < 3:
            raise PipelineError(
                f"{len(order)} devices: expected at least 3, between which no link serves two directions"
            )
        self._stages, self._m, self._devices = stages, micro_batches, len(order)
        self._rounds = tuple(self._found(order))

    def step_seconds(self, loads: Sequence[PipelineStageLoad]) -> float:
        """The same as :func:`lightning_rotor.pipeline.simulator.step_seconds`."""
        return self.simulated(np.array([[seconds_of(load, self._m) for load in loads]]))[0]

    def simulated(self, seconds: Reals) -> list[float]:
        """Steps of many partitions.

        Args:
            seconds: ``(partitions, stages, 6)``: forward of a usual micro-batch, of the last one, its message; the same of the backward.
        """
        at_once = max(_MOST_TIMES // ((2 * self._stages + 1) * self._m), 1)
        parts = (seconds[start : start + at_once] for start in range(0, len(seconds), at_once))
        return [float(each) for part in parts for each in self._simulated(part)]

    def _simulated(self, seconds: Reals) -> Reals:
        m, stages, count = self._m, self._stages, len(seconds)
        # By work, forwards of all stages first; partitions are neighbours in memory.
        seconds = np.ascontiguousarray(seconds.reshape(count, stages, 2, 3).transpose(2, 1, 3, 0))
        travel = seconds[:, :, 2].reshape(2 * stages, count)
        seconds = seconds[:, :, :2].reshape(4 * stages, count)
        arrived = np.zeros(((2 * stages + 1) * m, count))
        done = np.zeros((self._devices, count))
        link_free = np.zeros((2 * self._devices, count))
        for now in self._rounds:
            ends = np.maximum(arrived[now.needs], done[now.devices]) + seconds[now.works]
            done[now.devices] = ends
            arrives = np.maximum(ends, link_free[now.links]) + travel[now.sends]
            link_free[now.links] = arrives
            arrived[now.makes] = arrives
        last: Reals = done.max(axis=0)
        return last

    def _found(self, order: Sequence[Actions]) -> Iterator[_Round]:
        m, stages = self._m, self._stages
        counts = np.array([len(each) for each in order])
        # Which work of which stage, and on which micro-batch: one number for each action.
        needed = np.zeros((len(order), int(counts.max())), np.int64)
        for device, actions in enumerate(order):
            needed[device, : len(actions)] = [
                (stage + (work == "backward") * stages) * m + number for stage, work, number in actions
            ]
        # Who needs what a work makes: nobody behind the last stage and before the first, whose own inputs are there.
        targets = np.concatenate((np.arange(1, stages + 1), np.arange(stages - 1, 2 * stages - 1)))
        targets[[stages - 1, stages]] = 2 * stages
        there = np.zeros((2 * stages + 1, m), bool)
        there[[0, 2 * stages - 1]] = True
        is_there = there.reshape(-1)
        places, active = np.zeros(len(order), np.int64), np.arange(len(order))
        while len(active):
            needs = needed[active, places[active]]
            can = is_there[needs]
            if not can.any():
                raise PipelineError("the devices wait for one another for ever: expected an order that can be run")
            now, needs = active[can], needs[can]
            works, numbers = needs // m, needs % m
            makes = targets[works] * m + numbers
            is_there[makes] = True
            places[now] += 1
            active = active[places[active] < counts[active]]
            yield _Round(now, 2 * works + (numbers == m - 1), needs, makes, 2 * now + works // stages, works)


def seconds_of(load: PipelineStageLoad, micro_batches: int) -> tuple[float, ...]:
    """A row of what :meth:`Waves.simulated` reads."""
    usual, last = load_of(load, micro_batches - 2, micro_batches), load_of(load, micro_batches - 1, micro_batches)
    return (
        *(usual.forward_seconds, last.forward_seconds, load.send_forward_seconds),
        *(usual.backward_seconds, last.backward_seconds, load.send_backward_seconds),
    )
