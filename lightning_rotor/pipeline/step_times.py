"""When the actions of a pipeline's step begin and end, for many partitions at once.

A planner of partitions asks this some thousand times, so time is an array with an entry for each partition, and what
depends on the order of actions alone is found out once. Numbers in the arrays::

    work            stage for forwards, number of stages + stage for backwards
    place of an     work * micro-batches + micro-batch; one more row of them takes what nobody waits for: outputs of
    arrival         the last stage, and gradients of the first one's inputs
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.pipeline_schedule import Integers, actions
from lightning_rotor.pipeline.stage_loads import PipelineStageLoad, seconds_of

Reals: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Round:
    """Actions at once: one entry for each device that acts.

    Attributes:
        devices: That act.
        places: Of their actions in the devices' orders.
        works: Row of the seconds: twice the work, and one more for the last micro-batch.
        needs: Place of the arrival that the action waits for.
        makes: Place of the arrival at whoever waits for it.
        links: That carry it.
        sends: Row of the travel times: the work.
    """

    devices: Integers
    places: Integers
    works: Integers
    needs: Integers
    makes: Integers
    links: Integers
    sends: Integers


class StepSimulator:
    """Times of an order's actions, for many loads in turn and many partitions at once.

    In each round every device whose next action has its input does that action. Rounds depend on the order alone: about
    ``2 (m + S)`` for ``S`` devices and ``m`` micro-batches. A few dozen partitions take hardly longer than one.
    """

    def __init__(self, order: Integers, *, stages: int, micro_batches: int) -> None:
        self._stages, self._micro_batches, self._devices = stages, micro_batches, len(order)
        if order[..., 0].max() >= stages:
            raise PipelineError(
                f"an action belongs to none of the {stages} pipeline stages: expected a load for each stage"
            )
        self._nobody = 2 * stages
        self._needed_by = self._works_that_need()
        self._rounds = tuple(self._rounds_of(order))

    def _works_that_need(self) -> Integers:
        """By work, the work that needs what it makes."""
        stages = self._stages
        by_forward = np.arange(1, stages + 1)
        by_backward = np.arange(stages - 1, 2 * stages - 1)
        needed_by: Integers = np.concatenate((by_forward, by_backward))
        # The last stage's own output is there for its backward, and what the first one gives is for user code.
        last_forward, first_backward = stages - 1, stages
        needed_by[[last_forward, first_backward]] = self._nobody
        return needed_by

    def _rounds_of(self, order: Integers) -> Iterator[_Round]:
        """The actions, round by round."""
        count, stages = self._micro_batches, self._stages
        stage, work, micro_batch = order[..., 0], order[..., 1], order[..., 2]
        # The arrival that each action needs has the place of the action itself.
        needed = (stage + work * stages) * count + micro_batch
        has_arrived = np.zeros((2 * stages + 1, count), bool)
        # Inputs of the first stage, and of the last one's backward.
        has_arrived[[0, 2 * stages - 1]] = True
        next_place = np.zeros(len(order), np.int64)
        active = np.arange(len(order))
        while len(active):
            # A device does its actions in its order, so only the next one of each is looked at.
            needs = needed[active, next_place[active]]
            can_act = has_arrived.flat[needs]
            if not can_act.any():
                raise self._deadlock(order, active, next_place)
            devices = active[can_act]
            needs = needs[can_act]
            works, numbers = needs // count, needs % count
            targets = self._needed_by[works]
            has_arrived[targets, numbers] = True
            is_last = numbers == count - 1
            yield _Round(
                devices=devices,
                places=next_place[devices],
                works=2 * works + is_last,
                needs=needs,
                makes=targets * count + numbers,
                links=self._links_of(devices, works),
                sends=works,
            )
            next_place[devices] += 1
            active = active[next_place[active] < needed.shape[1]]

    def _links_of(self, devices: Integers, works: Integers) -> Integers:
        """Numbers of the links on which devices send: forwards to one neighbour, backwards to the other."""
        links: Integers = 2 * devices
        if self._devices > 2:
            links = links + works // self._stages
        # Between two devices, gradients of one stage go the way of activations of another.
        return links

    @staticmethod
    def _deadlock(order: Integers, active: Integers, next_place: Integers) -> PipelineError:
        waiting = []
        # A few are enough to see where it hangs.
        for device in active[:4]:
            action = actions(order[device])[next_place[device]]
            waiting.append(f"device {device} for {action}")
        return PipelineError(
            f"the devices wait for one another for ever ({', '.join(waiting)}): expected an order that can be run"
        )

    def step_seconds(self, loads: Sequence[PipelineStageLoad], times: Reals | None = None) -> float:
        """Seconds of a step; starts and ends of its actions go into ``times``, ``(2, devices, actions)``."""
        seconds = np.array([[seconds_of(load) for load in loads]])
        return float(self.simulated(seconds, times)[0])

    def simulated(self, seconds: Reals, times: Reals | None = None) -> Reals:
        """Seconds of a step for many partitions; ``times`` are those of the first one's actions.

        ``seconds`` are those of :func:`.seconds_of` by partition and stage.
        """
        stages, count = self._stages, len(seconds)
        # By work, forwards of all stages first; partitions are neighbours in memory, since each round takes whole rows.
        by_work = seconds.reshape(count, stages, 2, 3).transpose(2, 1, 3, 0)
        seconds = np.ascontiguousarray(by_work)
        # On a single device nothing travels.
        travel = seconds[:, :, 2].reshape(2 * stages, count) * (self._devices > 1)
        # The last stage's outputs and the gradients of the first one's inputs stay.
        travel[[stages - 1, stages]] = 0.0
        seconds = seconds[:, :, :2].reshape(4 * stages, count)
        arrived = np.zeros(((2 * stages + 1) * self._micro_batches, count))
        done = np.zeros((self._devices, count))
        link_free = np.zeros((2 * self._devices, count))
        for now in self._rounds:
            # When its input is there, and when its device is free.
            arrival = arrived.take(now.needs, axis=0)
            starts = np.maximum(arrival, done.take(now.devices, axis=0))
            ends = starts + seconds.take(now.works, axis=0)
            done[now.devices] = ends
            # A link carries one message after the other.
            leaves = np.maximum(ends, link_free.take(now.links, axis=0))
            arrives = leaves + travel.take(now.sends, axis=0)
            link_free[now.links] = arrives
            arrived[now.makes] = arrives
            if times is not None:
                times[:, now.devices, now.places] = starts[:, 0], ends[:, 0]
        last: Reals = done.max(axis=0)
        return last
