r"""What runs of stages take at least as pipeline stages, without planning them: seconds, for every run that may matter.

When the forwards of all ``k`` micro-batches in flight are done, each of them holds what its schedule keeps. So the kept sets of a run fit ``k``
times beside weights and gradients, and what does not fit is recomputed. How much time that takes at least is a fractional knapsack: the
stages that free most bytes per second of recomputation are given up first. Segments' inputs, peaks and nesting are left out, so it is a
lower bound, and where nothing needs to be given up it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_rotor.pipeline.partition.problem import Costs, Integers, Problem, Reals

# Numbers in one array of the knapsack.
_MOST_NUMBERS = 4_000_000


class LeastSeconds:
    """Lower bounds by pipeline stage, first stage of the chain and length less one: ``(stages, n, lengths)``, infinite where a run cannot be.

    Args:
        costs: The problem.
        longest: Runs of more stages of the chain than this are left out.

    Attributes:
        seconds: Forward and backward of a micro-batch.
        forward: The forward.
        backward: The backward.
        most_forward: No forward takes longer.
        most_backward: Nor a backward, if both together take no longer than ``seconds``: more of it costs more than it can hide.
    """

    def __init__(self, costs: Costs, longest: int) -> None:
        self._costs = costs
        problem = costs.problem
        chain, stages = problem.chain, problem.stages
        n = len(chain)
        self.longest = min(longest, n - stages + 1)
        whole = [[option.forward_seconds + option.backward_seconds for option in stage.options] for stage in chain]
        self._least = np.array([min(seconds) for seconds in whole])
        forwards = [[stage.discard_seconds, *(each.forward_seconds for each in stage.options)] for stage in chain]
        backwards = [min(each.backward_seconds for each in stage.options) for stage in chain]
        self._read_ways()
        plain = self._sums(self._least)
        forward, most_forward = (
            self._sums(np.array(list(map(min, forwards)))),
            self._sums(np.array(list(map(max, forwards)))),
        )
        backward = self._sums(np.array(backwards))
        if problem.recompute in ("always", "except_last"):
            plain = plain + self._checkpointed()
        speeds = [problem.device_of(stage).speed for stage in range(stages)]
        self.seconds = np.stack([plain / speed for speed in speeds])
        self.forward = np.stack([forward / speed for speed in speeds])
        self.backward = np.stack([backward / speed for speed in speeds])
        self.most_forward = np.stack([most_forward / speed for speed in speeds])
        if problem.recompute == "rotor":
            for stage in range(stages):
                memory = problem.device_of(stage).memory_bytes
                if memory is not None:
                    self.seconds[stage] += self._recomputed(stage, memory) / speeds[stage]
        self.most_backward = self.seconds - self.forward
        for stage in range(stages):
            self._forbid_impossible(stage, n, stages)

    def _sums(self, values: Reals) -> Reals:
        """``(n, lengths)``: over every run."""
        before = np.concatenate(([0.0], np.cumsum(values)))
        n = len(values)
        ends = np.minimum(np.arange(n)[:, None] + np.arange(1, self.longest + 1), n)
        sums: Reals = before[ends] - before[:-1, None]
        return sums

    def _forbid_impossible(self, stage: int, n: int, stages: int) -> None:
        """Every pipeline stage before and behind needs a stage of the chain."""
        first = np.arange(n)[:, None]
        last = first + np.arange(self.longest)
        wrong = (first < stage) | (last > n - (stages - stage)) | ((stage == 0) & (first > 0))
        if stage == stages - 1:
            wrong |= last != n - 1
        self.seconds[stage][np.broadcast_to(wrong, self.seconds[stage].shape)] = math.inf

    # ---------------------------------------------------------------- recomputation

    def _read_ways(self) -> None:
        """What a stage holds when it is kept as plain training keeps it, and the least seconds per byte to hold less."""
        chain = self._costs.problem.chain
        self._kept, self._price = np.zeros(len(chain)), np.full(len(chain), math.inf)
        self._again = np.zeros(len(chain))
        for number, stage in enumerate(chain):
            # Of a boundary that both sides save, neither side frees anything alone.
            shared = number == 0 or any(option.saved_output_bytes for option in chain.stages[number - 1].options)
            held = [each.saved_bytes + (0 if shared else each.saved_input_bytes) for each in stage.options]
            seconds = [each.forward_seconds + each.backward_seconds for each in stage.options]
            most = max(held)
            again = [
                stage.discard_seconds + each.backward_seconds + min(each.replay_seconds, each.forward_seconds)
                for each in stage.options
            ]
            bare = [stage.discard_seconds + each.backward_seconds for each in stage.options if not each.saved_tensors]
            ways = list(zip(held, seconds, strict=True))
            if stage.recomputable:
                ways.append((0, min(again + bare)))
            extra = [(most - taken, max(time - self._least[number], 0.0)) for taken, time in ways]
            self._kept[number] = most
            self._price[number] = min((time / freed for freed, time in extra if freed > 0), default=math.inf)
            self._again[number] = stage.discard_seconds if stage.recomputable and not bare else 0.0

    def _checkpointed(self) -> Reals:
        """A whole run in one segment: all forwards once more, the last one up to its last saved tensor."""
        chain = self._costs.problem.chain
        saved = np.array([max(each.forward_seconds - each.replay_seconds for each in stage.options) for stage in chain])
        n = len(chain)
        ends = np.minimum(np.arange(n)[:, None] + np.arange(self.longest), n - 1)
        total: Reals = np.maximum(self._sums(self._again) - np.maximum(saved, 0)[ends], 0)
        return total

    def _recomputed(self, stage: int, memory_bytes: int) -> Reals:
        """``(n, lengths)``: seconds at least for what does not fit into so much memory."""
        n, longest = len(self._kept), self.longest
        in_flight = self._costs.problem.in_flight[stage]
        extra = np.zeros((n, longest))
        excess = self._excess(stage, memory_bytes) / in_flight
        # Every pipeline stage before and behind has a stage of the chain at least.
        behind = n - (self._costs.problem.stages - stage)
        rows = stage + np.flatnonzero((excess[stage : behind + 1] > 0).any(axis=1))
        step = max(_MOST_NUMBERS // longest**2, 1)
        for begin in range(0, len(rows), step):
            first = rows[begin : begin + step]
            members = np.minimum(first[:, None] + np.arange(longest), n - 1)
            order = np.argsort(self._price[members], axis=1, kind="stable")
            places = np.take_along_axis(members, order, axis=1)
            inside = order[:, :, None] < np.arange(1, longest + 1)
            freed = np.cumsum(self._kept[places][:, :, None] * inside, axis=1)
            needed = np.clip(excess[first], 0, None)[:, None, :]
            given = np.diff(np.minimum(freed, needed), axis=1, prepend=0.0)
            price = self._price[places]
            with np.errstate(invalid="ignore"):
                spent = np.where(given > 0, given * price[:, :, None], 0.0).sum(axis=1)
            # What cannot be freed at all is somebody else's to refuse: bounds of bytes are rough.
            extra[first] = np.where(np.isfinite(spent), spent, 0.0)
        return extra

    def _excess(self, stage: int, memory_bytes: int) -> Reals:
        """``(n, lengths)``: bytes that do not fit if every run keeps everything, over all micro-batches in flight."""
        costs, in_flight = self._costs, self._costs.problem.in_flight[stage]
        n, longest = len(self._kept), self.longest
        first = np.arange(n)[:, None]
        ends = np.minimum(first + np.arange(longest), n - 1)
        static = costs.static_table(stage, first, ends) + costs.gradient_table(first, ends)
        output = np.array([each.output_bytes for each in costs.problem.chain])[ends]
        excess: Reals = in_flight * (self._sums(self._kept) + output) + static - memory_bytes
        return excess


# ----------------------------------------------------------------------------------------------------
# What no step can beat, for many ways to cut at once, if nothing is recomputed.


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
