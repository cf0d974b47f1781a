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

from lightning_rotor.chain import Chain, Option
from lightning_rotor.pipeline.partition.problem import Problem
from lightning_rotor.pipeline.partition.run_costs import Costs, StageChoice
from lightning_rotor.pipeline.pipeline_schedule import Integers
from lightning_rotor.pipeline.step_times import Reals


def impossible(
    problem: Problem,
    stage: Integers,
    first: Integers,
    last: Integers,
) -> npt.NDArray[np.bool_]:
    """True for runs that leave other pipeline stages without any stage of the chain, or that end beyond it."""
    n, stages = len(problem.chain), problem.stages
    too_early = first < stage
    too_late = last > n - (stages - stage)
    # The first pipeline stage begins with the chain, and the last one ends with it.
    skips_begin = (stage == 0) & (first > 0)
    skips_end = (stage == stages - 1) & (last != n - 1)
    wrong: npt.NDArray[np.bool_] = too_early | too_late | skips_begin | skips_end
    return wrong


class Bounds:
    """Seconds that no run of stages and no step can beat.

    What does not fit of the saved tensors of micro-batches in flight is recomputed, the most bytes per second first;
    segments' inputs, peaks and nesting are left out, and all recomputation that one micro-batch is spared.
    """

    def __init__(self, costs: Costs, longest: int) -> None:
        self._costs, self._problem = costs, costs.problem
        chain = costs.problem.chain
        self._n, self._stages = len(chain), costs.problem.stages
        self.longest = min(longest, self._n - self._stages + 1)
        # Arrays of runs have a row for each first stage and a column for each length. Their ends may lie beyond the
        # chain: such entries are infinite, so they are never chosen.
        self._firsts = np.arange(self._n)[:, None]
        self._ends = self._firsts + np.arange(1, self.longest + 1)
        speeds = [self._problem.device_of(stage).speed for stage in range(self._stages)]
        self._speeds = np.array(speeds)
        # Sums up to each boundary, so that those of a run are a difference.
        fastest = [min(cost.options, key=_seconds_of) for cost in chain]
        self._plain = _before(option.seconds for option in fastest)
        # The forward of a stage has other seconds when it is recomputed later, or when it runs under another option.
        # Which it will be is not known here, so bounds take the least of it in one place and the most in another.
        least_forward = []
        most_forward = []
        for cost, option in zip(chain, fastest, strict=True):
            seconds = [option.forward_seconds]
            if costs.recomputes:
                seconds = [cost.discard_seconds]
                seconds += [other.forward_seconds for other in cost.options]
            least_forward.append(min(seconds))
            most_forward.append(max(seconds))
        self._forward = _before(least_forward)
        self._most_forward = _before(most_forward)
        self._travel = np.array(costs.travel_seconds)
        # Recomputation by pipeline stage, first stage of the chain and length less one; infinite where a run cannot be.
        self.extra = self._least_extra() / self._speeds[:, None, None]
        stage = np.arange(self._stages)[:, None, None]
        self.extra[impossible(self._problem, stage, self._firsts, self._ends - 1)] = math.inf

    def learn(self, stage: int, first: int, last: int, choice: StageChoice | None) -> None:
        """Take the seconds of a planned run."""
        # Longer runs have no bounds of their own, see ``longer_seconds``.
        if last - first >= self.longest:
            return
        extra = math.inf
        if choice is not None:
            # The last micro-batch may have another plan, and a bound must hold for both.
            loads = choice.load.both
            least = min(load.forward_seconds + load.backward_seconds for load in loads)
            plain = (self._plain[last + 1] - self._plain[first]) / self._speeds[stage]
            extra = max(least - plain, 0.0)
        self.extra[stage, first, last - first] = extra

    def _least_extra(self) -> Reals:
        """By run, least seconds of recomputation on the measured device."""
        problem, chain = self._problem, self._problem.chain
        extra: Reals = np.zeros((self._stages, self._n, self.longest))
        # Stages that share a device share its memory in ways that this does not know, so nothing is certain of one.
        shares_device = problem.stages_per_device > 1
        if problem.recompute != "rotor" or shares_device or not self._costs.recomputes:
            return extra
        last = np.minimum(self._ends, self._n) - 1
        kept, price = np.array([_kept_and_price(chain, place) for place in range(self._n)]).T
        output = np.array([cost.output_bytes for cost in chain])[last]
        memory = np.full((self._stages, 1, 1), math.inf)
        for stage in range(self._stages):
            limit = problem.device_of(stage).memory_bytes
            if limit is not None:
                memory[stage] = limit
        in_flight = np.array(problem.in_flight)[:, None, None]
        free = (memory - self._costs.fixed_bytes(self._firsts, last)) / in_flight
        # Bytes that are still to be freed. Bounds of bytes are rough, so they refuse no run that needs more than can be
        # freed.
        left = np.maximum(self._sums(_before(kept)) + output - free, 0)
        # A knapsack whose pieces may be cut: taking the cheapest bytes first is its optimum, and no whole choice of
        # stages to recompute costs less. Stages of infinite price cannot free anything, and are at the end.
        cheapest_first = np.argsort(price, kind="stable")
        affordable = int(np.isfinite(price).sum())
        for place in cheapest_first[:affordable].tolist():
            # Runs that have this stage.
            rows = slice(max(place - self.longest + 1, 0), place + 1)
            has_stage = self._ends[rows] > place
            freed = np.where(has_stage, np.minimum(left[:, rows], kept[place]), 0.0)
            left[:, rows] -= freed
            extra[:, rows] += freed * price[place]
        return extra

    def _sums(self, before: Reals) -> Reals:
        """``(n, longest)``, sums over every run."""
        sums: Reals = before[np.minimum(self._ends, self._n)] - before[:-1, None]
        return sums

    def through(self) -> Reals:
        """By run, the least seconds of partitions that have it: other stages at their least.

        Two sweeps over the pipeline stages, O(stages · n · longest): ``back`` from the end of the chain, ``front`` from
        its beginning, each the least of ``t + 2 c`` that the stages on that side can have.
        """
        n, stages, ends = self._n, self._stages, self._ends
        # Room for ends beyond the chain, where nothing travels, since nothing is there.
        travel = np.concatenate((self._travel, np.zeros(self.longest)))[ends]
        there_and_back = 2 * travel
        plain = self._sums(self._plain)
        back = np.full((stages + 1, n + self.longest + 1), math.inf)
        front = back.copy()
        back[stages, n] = front[0, 0] = 0.0
        least = [plain / speed + extra for speed, extra in zip(self._speeds, self.extra, strict=True)]
        for stage in reversed(range(stages)):
            behind = there_and_back + back[stage + 1][ends]
            back[stage, :n] = (least[stage] + behind).min(axis=1)

        through: Reals = np.full_like(self.extra, math.inf)
        m = self._problem.micro_batches
        for stage in range(stages):
            before = front[stage, :n, None]
            behind = there_and_back + back[stage + 1][ends]
            np.minimum.at(front[stage + 1], ends, before + least[stage] + there_and_back)
            # Infinite less infinite is no number, where a run cannot be: it is made infinite below.
            with np.errstate(invalid="ignore"):
                work = m * least[stage]
                # With several stages, a device works on others while one of them waits.
                if self._problem.stages_per_device == 1:
                    work = work + self._waits(stage, least[stage], behind)
                round_trip = least[stage] + behind
                turns = math.ceil(m / self._problem.in_flight[stage]) * round_trip
                # Through the link, one message after the other.
                one_by_one = round_trip + (m - 1) * travel
                through[stage] = before + np.maximum(work, np.maximum(turns, one_by_one))
        through[~np.isfinite(through)] = math.inf
        return through

    def _waits(self, stage: int, least: Reals, behind: Reals) -> Reals:
        """By run, least seconds that a pipeline stage waits: for its first backward, and between its last ones."""
        in_flight = self._problem.in_flight[stage]
        speed = self._speeds[stage]
        least_forward = self._sums(self._forward) / speed
        most_forward = self._sums(self._most_forward) / speed
        # Work on other micro-batches hides a part of a wait. It is at its most here, so the wait is at its least.
        first = np.maximum(behind - (in_flight - 1) * most_forward, 0)
        last = np.maximum(behind - (in_flight - 1) * (least - least_forward), 0)
        if in_flight < self._problem.micro_batches:
            waits: Reals = first + last
        else:
            # All forwards come before all backwards: both waits may be the same one.
            waits = np.maximum(first, last)
        return waits

    def step_seconds(self, cuts: Integers) -> Reals:
        """By row of ``(ways, stages)``, least seconds of a step with these cuts: simulated with each stage's least."""
        ends = np.column_stack((cuts[:, 1:], np.full(len(cuts), self._n)))
        lengths = ends - cuts
        column = np.minimum(lengths, self.longest) - 1
        extra = self.extra[np.arange(self._stages), cuts, column]
        is_known = np.isfinite(extra)
        possible = (is_known & (lengths <= self.longest)).all(axis=1)

        def run_sums(before: Reals) -> Reals:
            sums: Reals = (before[ends] - before[cuts]) / self._speeds
            return sums

        plain = run_sums(self._plain)
        forward = run_sums(self._forward)
        both = np.where(is_known, plain + extra, plain)
        backward = np.maximum(both - run_sums(self._most_forward), 0.0)
        travel = self._travel[ends]
        # A stage sends its gradient over the cut at its beginning, and the first one sends none.
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
        # Such a run holds one that is longer than the bounds by a single stage, and lasts no less.
        length = self.longest + 1
        least = (self._plain[length:] - self._plain[:-length]).min()
        return float(self._problem.micro_batches * least / self._speeds.max())


def _seconds_of(option: Option) -> float:
    return option.seconds


def _kept_and_price(chain: Chain, number: int) -> tuple[float, float]:
    """Most bytes that a stage saves, and the least seconds for each that it saves less."""
    stage = chain.stages[number]
    # A boundary that both sides save is freed by neither alone.
    shared = number == 0
    if number > 0:
        before = chain.stages[number - 1]
        shared = any(option.saved_output_bytes for option in before.options)
    ways = []
    for option in stage.options:
        held = option.saved_bytes
        if not shared:
            held += option.saved_input_bytes
        ways.append((held, option.seconds))
    most = max(held for held, _ in ways)
    least_seconds = min(seconds for _, seconds in ways)
    if stage.recomputable:
        again = min(option.again_seconds + option.backward_seconds for option in stage.options)
        ways.append((0, stage.discard_seconds + again))
    prices = []
    for held, seconds in ways:
        if held < most:
            # Measured seconds are noisy, and recomputing may look faster than keeping: then bytes are free.
            prices.append(max(seconds - least_seconds, 0.0) / (most - held))
    return most, min(prices, default=math.inf)


def _before(values: Iterable[float]) -> Reals:
    """Sums of the values before each place, and of all."""
    before: Reals = np.concatenate(([0.0], np.cumsum(list(values))))
    return before
