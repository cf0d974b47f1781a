"""How long a step takes on many devices: the simulator's rules, applied to all devices at once.

In each round every device that has what its next action needs does that action. For ``S`` devices and ``m`` micro-batches there are about
``2 (m + S)`` rounds, each a handful of array operations, where :mod:`lightning_rotor.pipeline_simulator` goes through ``2 m S`` actions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_rotor.pipeline_schedule import Actions, PipelineError
from lightning_rotor.pipeline_simulator import PipelineStageLoad, load_of


class Waves:
    """An order of actions, ready for many loads.

    Args:
        order: By device, three or more of them, each with the stages whose numbers are its own modulo the number of devices.
        stages: How many pipeline stages there are.
        micro_batches: How many micro-batches.
    """

    def __init__(self, order: Sequence[Actions], *, stages: int, micro_batches: int) -> None:
        if len(order) < 3:
            raise PipelineError(
                f"{len(order)} devices: expected at least 3, between which no link serves two directions"
            )
        self._stages, self._m, self._devices = stages, micro_batches, len(order)
        self._counts = np.array([len(each) for each in order])
        shape = len(order), int(self._counts.max())
        # Which work of which stage, and on which micro-batch: one number for each action.
        self._works = np.zeros(shape, np.int64)
        self._needs = np.zeros(shape, np.int64)
        for device, actions in enumerate(order):
            works = np.array([action.stage + (action.work == "backward") * stages for action in actions])
            numbers = np.array([action.micro_batch for action in actions])
            self._works[device, : len(actions)] = works
            self._needs[device, : len(actions)] = works * micro_batches + numbers

    def step_seconds(self, loads: Sequence[PipelineStageLoad]) -> float:
        """The same as :func:`lightning_rotor.pipeline_simulator.step_seconds`.

        Raises:
            PipelineError: The devices wait for one another for ever.
        """
        m, stages = self._m, self._stages
        seconds = np.array(
            [
                [getattr(load_of(load, number, m), f"{work}_seconds") for number in (m - 2, m - 1)]
                for work in ("forward", "backward")
                for load in loads
            ]
        )
        travel = np.array(
            [load.send_forward_seconds for load in loads] + [load.send_backward_seconds for load in loads]
        )
        # Who needs what a work makes: nobody behind the last stage and before the first, whose own inputs are there.
        targets = np.concatenate((np.arange(1, stages + 1), np.arange(stages - 1, 2 * stages - 1)))
        targets[[stages - 1, stages]] = 2 * stages
        arrivals = np.full((2 * stages + 1, m), -1.0)
        arrivals[[0, 2 * stages - 1]] = 0.0
        arrived = arrivals.reshape(-1)
        places, done = np.zeros(self._devices, np.int64), np.zeros(self._devices)
        link_free = np.zeros((self._devices, 2))
        active = np.arange(self._devices)
        while len(active):
            needs = self._needs[active, places[active]]
            can = arrived[needs] >= 0
            if not can.any():
                raise PipelineError("the devices wait for one another for ever: expected an order that can be run")
            now, needs = active[can], needs[can]
            works, numbers = self._works[now, places[now]], needs % m
            ends = np.maximum(arrived[needs], done[now]) + seconds[works, (numbers == m - 1).astype(int)]
            done[now] = ends
            links = now, works // stages
            link_free[links] = np.maximum(ends, link_free[links]) + travel[works]
            arrived[targets[works] * m + numbers] = link_free[links]
            places[now] += 1
            active = active[places[active] < self._counts[active]]
        return float(done.max())
