r"""Seconds that no partition with a certain run of stages can beat.

``t_s`` is forward and backward of a micro-batch in pipeline stage ``s``, ``f_s`` and ``b_s`` its parts, ``c_s`` the
travel time of a message from ``s`` to ``s + 1`` and back, ``m`` the number of micro-batches, ``K_s`` how many are in
flight. A step takes about ``(m - 1) · max t + Σ (t + c)``. Each stage bounds it: before its first forward a micro-batch
comes through all stages before; after its last backward a gradient goes back; between, it works on ``m``, and waits::

    first        K - 1 forwards   ┊ waits ┊  backward  ...  last forward ┊ K - 1 backwards ┊ waits ┊ backward
    of stage s   └──── R_s: through all stages behind ──┘                └──────── R_s ─────────────┘

    bound_s = Σ_{u<s} (t_u + c_u) + m · t_s + max(0, R_s - (K_s - 1) · f_s) + max(0, R_s - (K_s - 1) · b_s)

with ``R_s = c_s + Σ_{u>s} (t_u + c_u)``; where ``m ≤ K_s`` only the longer of the two waits counts. A stage takes in a
micro-batch when the one ``K_s`` before has returned, and a link carries one message after the other::

    Σ_{u<s} (t_u + c_u) + ⌈m / K_s⌉ · (t_s + R_s)                    Σ_{u<s} (t_u + c_u) + t_s + R_s + (m - 1) · c_s / 2

A dynamic program finds the cuts whose largest bound is least, other stages at their least (:meth:`Bounds.through`).
Runs are planned when a candidate has them; until then a fractional knapsack bounds their recomputation.
"""

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from lightning_rotor.chain import Chain
from lightning_rotor.pipeline.partition.problem import Problem
from lightning_rotor.pipeline.partition.run_costs import Costs, StageChoice
from lightning_rotor.pipeline.pipeline_schedule import Integers
from lightning_rotor.pipeline.step_times import Reals


def impossible(problem: Problem, stage: Integers, first: Integers, last: Integers) -> npt.NDArray[np.bool_]:
    """True for runs that leave other pipeline stages without any stage of the chain, or that end beyond it."""
    n, stages = len(problem.chain), problem.stages
    wrong = (first < stage) | (last > n - (stages - stage)) | ((stage == 0) & (first > 0))
    found: npt.NDArray[np.bool_] = wrong | ((stage == stages - 1) & (last != n - 1))
    return found


class Bounds:
    """Seconds that no run of stages and no step can beat.

    What does not fit of the saved tensors of micro-batches in flight is recomputed, the most bytes per second first;
    segments' inputs, peaks and nesting are left out, and all recomputation that one micro-batch is spared.
    """

    def __init__(self, costs: Costs, longest: int) -> None:
        self._costs, self._problem = costs, costs.problem
        chain, self._n, self._stages = costs.problem.chain, len(costs.problem.chain), costs.problem.stages
        self.longest = min(longest, self._n - self._stages + 1)
        self._firsts = np.arange(self._n)[:, None]
        self._ends = self._firsts + np.arange(1, self.longest + 1)
        self._speeds = np.array([self._problem.device_of(stage).speed for stage in range(self._stages)])
        fastest = [min(stage.options, key=lambda option: option.seconds) for stage in chain]
        # By stage, the seconds that its forward may take.
        forwards = [[option.forward_seconds] for option in fastest]
        if costs.recomputes:
            forwards = []
            for stage_cost in chain:
                forwards.append([stage_cost.discard_seconds])
                forwards[-1] += [option.forward_seconds for option in stage_cost.options]
        # Sums up to each boundary, so that those of a run are a difference.
        self._plain = _before(option.seconds for option in fastest)
        self._forward = _before(map(min, forwards))
        self._most_forward = _before(map(max, forwards))
        self._travel = np.array(costs.travel_seconds)
        # Recomputation by pipeline stage, first stage of the chain and length less one; infinite where a run cannot be.
        self.extra = self._least_extra() / self._speeds[:, None, None]
        stage = np.arange(self._stages)[:, None, None]
        self.extra[impossible(self._problem, stage, self._firsts, self._ends - 1)] = math.inf

    def learn(self, stage: int, first: int, last: int, choice: StageChoice | None) -> None:
        """Take the seconds of a planned run."""
        if last - first >= self.longest:
            return
        extra = math.inf
        if choice is not None:
            least = min(load.forward_seconds + load.backward_seconds for load in choice.load.both)
            plain = (self._plain[last + 1] - self._plain[first]) / self._speeds[stage]
            extra = max(least - plain, 0.0)
        self.extra[stage, first, last - first] = extra

    def _least_extra(self) -> Reals:
        """By run, least seconds of recomputation on the measured device."""
        problem, chain = self._problem, self._problem.chain
        extra: Reals = np.zeros((self._stages, self._n, self.longest))
        if problem.recompute != "rotor" or problem.stages_per_device > 1 or not self._costs.recomputes:
            return extra
        last = np.minimum(self._ends, self._n) - 1
        kept, price = np.array([_kept_and_price(chain, number) for number in range(self._n)]).T
        output = np.array([stage.output_bytes for stage in chain])[last]
        memory = np.full((self._stages, 1, 1), math.inf)
        for number in range(self._stages):
            limit = problem.device_of(number).memory_bytes
            if limit is not None:
                memory[number] = limit
        in_flight = np.array(problem.in_flight)[:, None, None]
        free = (memory - self._costs.fixed_bytes(self._firsts, last)) / in_flight
        # Bytes that are still to be freed. Bounds of bytes are rough, so they refuse no run that needs more than can be
        # freed.
        left = np.maximum(self._sums(_before(kept)) + output - free, 0)
        cheapest_first = np.argsort(price, kind="stable")
        for place in cheapest_first[: int(np.isfinite(price).sum())].tolist():
            # Runs that have this stage.
            rows = slice(max(place - self.longest + 1, 0), place + 1)
            freed = np.where(self._ends[rows] > place, np.minimum(left[:, rows], kept[place]), 0.0)
            left[:, rows] -= freed
            extra[:, rows] += freed * price[place]
        return extra

    def _sums(self, before: Reals) -> Reals:
        """``(n, longest)``, sums over every run."""
        sums: Reals = before[np.minimum(self._ends, self._n)] - before[:-1, None]
        return sums

    def through(self) -> Reals:
        """By run, the least seconds of partitions that have it: other stages at their least."""
        n, stages, ends = self._n, self._stages, self._ends
        travel = np.concatenate((self._travel, np.zeros(self.longest)))[ends]
        plain = self._sums(self._plain)
        back = np.full((stages + 1, n + self.longest + 1), math.inf)
        front = back.copy()
        back[stages, n] = front[0, 0] = 0.0
        least = [plain / speed + extra for speed, extra in zip(self._speeds, self.extra, strict=True)]
        for stage in reversed(range(stages)):
            back[stage, :n] = (least[stage] + 2 * travel + back[stage + 1][ends]).min(axis=1)
        through: Reals = np.full_like(self.extra, math.inf)
        m, in_flight = self._problem.micro_batches, self._problem.in_flight
        for stage in range(stages):
            before, behind = front[stage, :n, None], 2 * travel + back[stage + 1][ends]
            np.minimum.at(front[stage + 1], ends, before + least[stage] + 2 * travel)
            with np.errstate(invalid="ignore"):
                work, turns = m * least[stage], math.ceil(m / in_flight[stage]) * (least[stage] + behind)
                if self._problem.stages_per_device == 1:
                    forwards = self._forward, self._most_forward
                    forward, most_forward = (self._sums(each) / self._speeds[stage] for each in forwards)
                    hidden = most_forward, least[stage] - forward
                    first, last = (np.maximum(behind - (in_flight[stage] - 1) * each, 0) for each in hidden)
                    work = work + (first + last if in_flight[stage] < m else np.maximum(first, last))
                one_by_one = least[stage] + behind + (m - 1) * travel  # through the link
                through[stage] = before + np.maximum(work, np.maximum(turns, one_by_one))
        through[~np.isfinite(through)] = math.inf
        return through

    def step_seconds(self, cuts: Integers) -> Reals:
        """By row of ``(ways, stages)``, least seconds of a step with these cuts: simulated with each stage's least."""
        ends = np.column_stack((cuts[:, 1:], np.full(len(cuts), self._n)))
        lengths = ends - cuts
        extra = self.extra[np.arange(self._stages), cuts, np.minimum(lengths, self.longest) - 1]
        possible = (np.isfinite(extra) & (lengths <= self.longest)).all(axis=1)
        plain, forward, most_forward = (
            (before[ends] - before[cuts]) / self._speeds for before in (self._plain, self._forward, self._most_forward)
        )
        backward = np.maximum(np.where(np.isfinite(extra), plain + extra, plain) - most_forward, 0.0)
        travel = self._travel[ends]
        home_travel = np.column_stack((np.zeros(len(travel)), travel[:, :-1]))
        table = np.stack((forward, forward, travel, backward, backward, home_travel), axis=-1)
        return np.where(possible, self._problem.simulator.simulated(table), math.inf)

    def work_seconds(self) -> float:
        """Least seconds of any cuts, since each device does its part of the work."""
        speeds = sum(device.speed for device in self._problem.devices)
        return float(self._problem.micro_batches * self._plain[-1] / speeds)

    def longer_seconds(self) -> float:
        """Least seconds of partitions with a run that is longer than those with bounds."""
        if self.longest == self._n - self._stages + 1:
            return math.inf
        least = (self._plain[self.longest + 1 :] - self._plain[: -self.longest - 1]).min()
        return float(self._problem.micro_batches * least / self._speeds.max())


def _kept_and_price(chain: Chain, number: int) -> tuple[float, float]:
    """Most bytes that a stage saves, and the least seconds for each that it saves less."""
    stage = chain.stages[number]
    # A boundary that both sides save is freed by neither alone.
    shared = number == 0 or any(option.saved_output_bytes for option in chain.stages[number - 1].options)
    ways = []
    for option in stage.options:
        held = option.saved_bytes
        if not shared:
            held += option.saved_input_bytes
        ways.append((held, option.seconds))
    most, least = max(held for held, _ in ways), min(seconds for _, seconds in ways)
    if stage.recomputable:
        again = min(option.again_seconds + option.backward_seconds for option in stage.options)
        ways.append((0, stage.discard_seconds + again))
    prices = [max(seconds - least, 0.0) / (most - held) for held, seconds in ways if held < most]
    return most, min(prices, default=math.inf)


def _before(values: Iterable[float]) -> Reals:
    """Sums of the values before each place, and of all."""
    before: Reals = np.concatenate(([0.0], np.cumsum(list(values))))
    return before
