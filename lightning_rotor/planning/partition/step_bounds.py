r"""What no step can beat, for many ways to cut at once, if nothing is recomputed.

With ``f_s`` and ``b_s`` the seconds of a micro-batch in pipeline stage ``s``, ``t_s = f_s + b_s``, ``c_s`` how long a message travels from ``s``
to ``s + 1`` and back together, ``A_s = Σ_{u<s} (t_u + c_u)`` once through everything before and back, ``R_s = c_s + Σ_{u>s} (t_u + c_u)``
the same behind, ``m`` micro-batches, and ``K_s`` of them in flight::

    devices    a device d begins with its first stage and ends with that one's backward. It works on all micro-batches in all its stages. Before
               its first backward a micro-batch went through all stages behind and back, and so did one behind its last forward:

               A_d + m · Σ t_s  +  max(0, first passage - forwards meanwhile)  +  max(0, last passage - backwards meanwhile)

    in flight  stage s takes a new micro-batch when the one that came K_s before has returned:          A_s + ⌈m / K_s⌉ · (t_s + R_s)
    links      from device to device, all messages one after the other. The first one leaves when the first micro-batch has come there, and
               behind the last one the last micro-batch goes on and back:                  A_d + f_d + m · Σ c_s / 2 + last passage, or
                                                                          A_d + first passage + b + m · Σ c_s / 2, without what is in A_d

The largest of them all bounds the step, and more than one that is large leaves less room for others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_rotor.planning.partition.problem import Costs, Integers, Problem, Reals


@dataclass(frozen=True, slots=True)
class CutSeconds:
    """What pipeline stages take, by way to cut and stage: ``(ways, stages)`` each.

    Attributes:
        forward: A forward.
        backward: A backward.
        travel: A message to the stage behind, or back from it.
    """

    forward: Reals
    backward: Reals
    travel: Reals

    @property
    def home_travel(self) -> Reals:
        """A message to the stage before."""
        shifted: Reals = np.column_stack((np.zeros(len(self.travel)), self.travel[:, :-1]))
        return shifted

    def table(self) -> Reals:
        """``(ways, stages, 6)``, as :meth:`.Waves.simulated` reads it."""
        forward, backward = self.forward, self.backward
        return np.stack((forward, forward, self.travel, backward, backward, self.home_travel), axis=-1)


class StepBounds:
    """Bounds for one problem.

    Args:
        problem: With 1F1B, plain or interleaved.
        costs: Of the problem.

    Attributes:
        exact: Nothing ever is.
    """

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self._problem = problem
        chain, self._devices, self._stages = problem.chain, len(problem.devices), problem.stages
        self.exact = problem.recompute == "never" or (
            problem.recompute == "rotor" and all(device.memory_bytes is None for device in problem.devices)
        )
        fastest = [min(stage.options, key=lambda each: each.forward_seconds + each.backward_seconds) for stage in chain]
        self._forward_before = _before([each.forward_seconds for each in fastest])
        self._backward_before = _before([each.backward_seconds for each in fastest])
        # Forward of one micro-batch and backward of another, with which options ever.
        self._least_before = _before(
            [
                min(stage.discard_seconds, *(each.forward_seconds for each in stage.options))
                + min(each.backward_seconds for each in stage.options)
                for stage in chain
            ]
        )
        self._travel = np.array(costs.travel_seconds)
        self._speeds = np.array([problem.device_of(stage).speed for stage in range(self._stages)])
        self._read_order()

    def _read_order(self) -> None:
        """How many forwards of each stage come before its device's first backward, and backwards behind its last forward."""
        order, self._ahead, self._left = self._problem.order, np.zeros(self._stages), np.zeros(self._stages)
        apart = []
        for actions in order:
            works = [action.work for action in actions]
            first, last = works.index("backward"), len(works) - 1 - works[::-1].index("forward")
            apart.append(first < last)
            for action in actions[:first]:
                self._ahead[action.stage] += 1
            for action in actions[last + 1 :]:
                self._left[action.stage] += 1
        self._apart: npt.NDArray[np.bool_] = np.array(apart)
        self._in_turns = np.ceil(self._problem.micro_batches / np.array(self._problem.in_flight))

    def seconds(self, cuts: Integers) -> CutSeconds:
        """What stages take.

        Args:
            cuts: ``(ways, stages)``, where pipeline stages begin.
        """
        n = len(self._problem.chain)
        ends = np.column_stack((cuts[:, 1:], np.full(len(cuts), n)))
        return CutSeconds(
            (self._forward_before[ends] - self._forward_before[cuts]) / self._speeds,
            (self._backward_before[ends] - self._backward_before[cuts]) / self._speeds,
            self._travel[ends],
        )

    def step_seconds(self, seconds: CutSeconds) -> Reals:
        """What no step beats that has such seconds: ``(ways,)``."""
        m, devices, forward, backward = self._problem.micro_batches, self._devices, seconds.forward, seconds.backward
        both, travel = forward + backward, seconds.travel
        steps = both + 2 * travel
        through = np.cumsum(steps, axis=1)
        before, behind = through - steps, through[:, -1:] - through + 2 * travel
        in_turns = before + self._in_turns * (both + behind)
        # Of each device's first stage, and its last.
        before, last = before[:, :devices], behind[:, -devices:]
        there = _passage(forward + travel, devices) - travel[:, -devices:] + last
        home = _passage(backward + travel, devices) - travel[:, -devices:] + last
        first_wait = np.maximum(there - _by_device(self._ahead * forward, devices), 0)
        last_wait = np.maximum(home - _by_device(self._left * backward, devices), 0)
        waits = np.where(self._apart, first_wait + last_wait, np.maximum(first_wait, last_wait))
        on_devices = before + m * _by_device(both, devices) + waits
        out = before + forward[:, :devices] + m * _by_device(travel, devices) + home - travel[:, -devices:]
        back = (
            before
            + there
            + backward[:, -devices:]
            + m * _by_device(seconds.home_travel, devices)
            - seconds.home_travel[:, :devices]
        )
        bounds: Reals = np.max(np.concatenate((on_devices, in_turns, out, back), axis=1), axis=1)
        return bounds

    def equal_parts(self) -> tuple[int, ...]:
        """Cuts into parts of about the same duration, at the speed of their devices."""
        n, before = len(self._problem.chain), self._forward_before + self._backward_before
        marks = np.cumsum(self._speeds)[:-1] / self._speeds.sum() * before[-1]
        cuts = [0]
        for stage, mark in enumerate(marks.tolist(), 1):
            nearest = int(np.abs(before - mark).argmin())
            cuts.append(min(max(nearest, cuts[-1] + 1), n - (self._stages - stage)))
        return tuple(cuts)

    def of_any_cuts(self) -> float:
        """What no cuts beat, recomputation or not.

        Each device does its part of the work, each link carries its part of the messages, a micro-batch passes through everything and back, and
        every stage of the chain works on all of them between the first one's way there and the last one's way home.
        """
        m, before = self._problem.micro_batches, self._forward_before + self._backward_before
        total, fastest = before[-1], float(self._speeds.max())
        sent = np.sort(self._travel[1:-1])[: self._stages - 1].sum()  # at least, by any cuts
        alone = (self._least_before[:-1] + m * np.diff(before)).max() / fastest
        work = m * total / self._speeds[: self._devices].sum()
        return float(max(work, alone, total / fastest + 2 * sent, m * sent / self._devices))


def _before(values: list[float]) -> Reals:
    before: Reals = np.concatenate(([0.0], np.cumsum(values)))
    return before


def _by_device(values: Reals, devices: int) -> Reals:
    """``(ways, stages)`` summed over the stages of each device."""
    summed: Reals = values.reshape(len(values), -1, devices).sum(axis=1)
    return summed


def _passage(steps: Reals, devices: int) -> Reals:
    """From each device's first stage to its last one, both included."""
    through = np.cumsum(steps, axis=1)
    passed: Reals = through[:, -devices:] - (through - steps)[:, :devices]
    return passed
