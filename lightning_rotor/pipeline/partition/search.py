r"""Where to cut: candidates from a dynamic program, judged by the simulator, and a local search from the best of them.

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

A dynamic program finds the cuts whose largest bound is least, other stages at their least (:meth:`Bounds.through`). If
cuts are few, each is bounded by a simulated step of its least loads, and judged in this order until none can be better.
Runs are planned when a candidate has them; until then a fractional knapsack bounds their recomputation.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.chain import Chain
from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.partition.problem import Problem
from lightning_rotor.pipeline.partition.run_costs import Costs, StageChoice
from lightning_rotor.pipeline.pipeline_schedule import Integers
from lightning_rotor.pipeline.step_times import Reals
from lightning_rotor.planning.effort import SAME
from lightning_rotor.units import is_positive_integer

Cuts: TypeAlias = tuple[int, ...]
"""First stage of the chain in each pipeline stage."""

# Most cuts that are bounded one by one, and candidates of the dynamic program.
_FEW, _CANDIDATES = 20_000, 50
# Work, as simulated actions of about 11 ns, after which cuts are no longer improved; half of it is for candidates.
# Counted, so that the cuts do not depend on the machine.
_MOST_WORK, _JUDGED = 400_000_000, 100_000
# Partitions simulated at once.
_AT_ONCE = 32
# Least number of runs with bounds.
_MOST_RUNS = 1_000_000


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
        fastest = [min(stage.options, key=lambda each: each.seconds) for stage in chain]
        forwards = [[each.forward_seconds] for each in fastest]
        if costs.recomputes:
            forwards = [[stage.discard_seconds, *(each.forward_seconds for each in stage.options)] for stage in chain]
        self._plain = _before(each.seconds for each in fastest)
        self._forward, self._most_forward = _before(map(min, forwards)), _before(map(max, forwards))
        self._travel = np.array(costs.travel_seconds)
        # Recomputation by pipeline stage, first stage of the chain and length less one; infinite where a run cannot be.
        self.extra = self._least_extra() / self._speeds[:, None, None]
        stage = np.arange(self._stages)[:, None, None]
        self.extra[impossible(self._problem, stage, self._firsts, self._ends - 1)] = math.inf

    def learn(self, stage: int, first: int, last: int, choice: StageChoice | None) -> None:
        """Take the seconds of a planned run."""
        if last - first < self.longest:
            extra = math.inf
            if choice is not None:
                least = min(each.forward_seconds + each.backward_seconds for each in choice.load.both)
                plain = (self._plain[last + 1] - self._plain[first]) / self._speeds[stage]
                extra = max(least - plain, 0.0)
            self.extra[stage, first, last - first] = extra

    def _least_extra(self) -> Reals:
        """By run, least seconds of recomputation on the measured device."""
        problem, chain, last = self._problem, self._problem.chain, np.minimum(self._ends, self._n) - 1
        extra: Reals = np.zeros((self._stages, self._n, self.longest))
        if problem.recompute == "rotor" and problem.stages_per_device == 1 and self._costs.recomputes:
            kept, price = np.array([_kept_and_price(chain, number) for number in range(self._n)]).T
            output = np.array([each.output_bytes for each in chain])[last]
            given = [problem.device_of(stage).memory_bytes for stage in range(self._stages)]
            memory = np.array([math.inf if size is None else size for size in given])[:, None, None]
            free = (memory - self._costs.fixed_bytes(self._firsts, last)) / np.array(problem.in_flight)[:, None, None]
            left = np.maximum(self._sums(_before(kept)) + output - free, 0)
            # Bounds of bytes are rough, so they refuse no run that needs more than can be freed.
            for place in np.argsort(price, kind="stable")[: int(np.isfinite(price).sum())].tolist():
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


class Search:
    """Cuts one chain."""

    def __init__(self, costs: Costs) -> None:
        self._problem, self._costs = costs.problem, costs
        self._n, self._stages = len(costs.problem.chain), costs.problem.stages
        self._judged: set[Cuts] = set()
        # Pipeline stages with too little memory, seconds of a step if none has, and the cuts.
        self._best: tuple[int, float, Cuts] = self._stages + 1, math.inf, ()
        self._actions = 2 * self._problem.micro_batches * self._stages  # of a step
        self._spent = 0  # work other than planning

    @cached_property
    def _bounds(self) -> Bounds:
        n, stages = self._n, self._stages
        return Bounds(self._costs, max(4 * math.ceil(n / stages) + 4, _MOST_RUNS // (n * stages)))

    def run(self) -> tuple[list[StageChoice] | None, float]:
        """The best cuts, or None if none was found that fits, and the least seconds that any take."""
        for balance in simple_balances(self._problem.chain, self._stages):
            self._judge(cuts_of(balance))
        count = math.comb(self._n - 1, self._stages - 1)
        few = count <= _FEW and self._actions * count <= _MOST_WORK // 20
        bound = min(self._all() if few else self._candidates(), self._bounds.longer_seconds())
        if bound < self._seconds * (1 - SAME):
            self._climb()
        return self.only(self._best[2]), min(bound, self._seconds)

    def only(self, cuts: Cuts) -> list[StageChoice] | None:
        """These cuts, without a search."""
        found = [choice for choice in self._costs.together(runs_of(cuts, self._n)) if choice is not None]
        return found if len(found) == self._stages else None

    @property
    def _seconds(self) -> float:
        return self._best[1]

    @property
    def _work(self) -> int:
        """Work that the search has cost so far."""
        return self._spent + self._costs.planning_work

    def _judge(self, cuts: Cuts) -> None:
        """Plan all runs of a partition and simulate it."""
        if cuts in self._judged:
            return
        runs = runs_of(cuts, self._n)
        choices = self._costs.together(runs)
        loads = [choice.load for choice in choices if choice is not None]
        misfits = len(choices) - len(loads)
        seconds = math.inf if misfits else self._problem.simulator.step_seconds(loads)
        self._spent += _JUDGED + _AT_ONCE * self._actions  # as much as so many at once, with what becomes of its runs
        self._judged.add(cuts)
        self._best = min(self._best, (misfits, seconds, cuts))
        if self._problem.stages_per_device == 1:
            for stage, (run, choice) in enumerate(zip(runs, choices, strict=True)):
                self._bounds.learn(stage, *run, choice)

    def _judge_rising(self, cuts: Integers, least: Reals, *, once: bool = False) -> float:
        """Judge cuts that may be better by rising bound, if ``once`` until one is. Returns the others' least bound."""
        order, before = np.argsort(least, kind="stable"), self._best
        for start in range(0, len(order), _AT_ONCE):
            some = order[start : start + _AT_ONCE]
            if least[some[0]] >= self._seconds * (1 - SAME):
                break
            if self._work > _MOST_WORK and (once or self._seconds < math.inf):
                return float(least[some[0]])
            self._spent += len(some) * self._actions
            again = self._bounds.step_seconds(cuts[some])  # runs that were planned since have other bounds
            for place in np.argsort(again, kind="stable").tolist():
                if again[place] < self._seconds * (1 - SAME):
                    self._judge(tuple(cuts[some[place]].tolist()))
                if once and self._best != before:
                    return 0.0
        return self._seconds

    def _all(self) -> float:
        """Judge all cuts by rising bound, until no other one can be better; returns the least seconds of any."""
        cuts = np.array([(0, *middle) for middle in combinations(range(1, self._n), self._stages - 1)])
        least = self._bounds.step_seconds(cuts)
        # Better shares of a device's memory may exist than those found.
        shares = self._problem.stages_per_device > 1 and self._costs.recomputes
        return min(self._judge_rising(cuts, least), float(least.min()) if shares else math.inf)

    def _candidates(self) -> float:
        """Judge cuts of the dynamic program, which learns from each; returns the least seconds of any cuts."""
        bound = 0.0
        for number in range(self._n * self._stages):
            through = self._bounds.through()
            cuts = least_bottleneck(through)
            if cuts is None:
                return self._seconds
            runs = enumerate(runs_of(cuts, self._n))
            bound = float(max(through[stage, first, last - first] for stage, (first, last) in runs))
            known = cuts in self._judged
            self._judge(cuts)
            spent = number >= _CANDIDATES or self._work > _MOST_WORK // 2
            if known or (spent and self._seconds < math.inf):
                break
        return max(bound, self._bounds.work_seconds())

    def _climb(self) -> None:
        """Move neighbouring cuts of the best ones, by long ways first, until no move helps."""
        through, start = self._bounds.through(), None
        while start != self._best:
            start = self._best
            for step in _powers(max(self._n // self._stages // 2, 1)):
                for count in reversed(_powers(self._stages - 1)):
                    before = None
                    while before != self._best:
                        before = self._best
                        self._move(through, count, step)

    def _move(self, through: Reals, count: int, step: int) -> None:
        """Take the first better cuts where so many move by a step, the least bounds first; at the end fewer move."""
        places = np.arange(1, self._stages)
        moving = (places[:, None] <= np.arange(self._stages)) & (np.arange(self._stages) < places[:, None] + count)
        moved = np.array(self._best[2]) + step * np.concatenate((moving, -moving.astype(np.int64)))
        lengths = np.diff(moved, axis=1, append=self._n)
        possible = ((lengths > 0) & (lengths <= self._bounds.longest)).all(axis=1)
        moved, lengths = moved[possible], lengths[possible]
        least = through[np.arange(self._stages), moved, lengths - 1].max(axis=1, initial=0.0)
        self._judge_rising(moved, least, once=True)


def _powers(most: int) -> list[int]:
    """Powers of two up to a number, the largest first."""
    return [2**exponent for exponent in reversed(range(most.bit_length()))]


def _kept_and_price(chain: Chain, number: int) -> tuple[float, float]:
    """Most bytes that a stage saves, and the least seconds for each that it saves less."""
    stage = chain.stages[number]
    # A boundary that both sides save is freed by neither alone.
    shared = number == 0 or any(option.saved_output_bytes for option in chain.stages[number - 1].options)
    ways = [(each.saved_bytes + (0 if shared else each.saved_input_bytes), each.seconds) for each in stage.options]
    most, least = max(held for held, _ in ways), min(seconds for _, seconds in ways)
    if stage.recomputable:
        again = min(each.again_seconds + each.backward_seconds for each in stage.options)
        ways.append((0, stage.discard_seconds + again))
    prices = [max(seconds - least, 0.0) / (most - held) for held, seconds in ways if held < most]
    return most, min(prices, default=math.inf)


def _before(values: Iterable[float]) -> Reals:
    before: Reals = np.concatenate(([0.0], np.cumsum(list(values))))
    return before


# -------------------------------------------------------------- cuts, and those from one number per stage (torchgpipe)


def stage_seconds(chain: Chain) -> list[float]:
    """Seconds of each stage; recomputation does not count."""
    return [stage.keep.seconds for stage in chain]


def stage_bytes(chain: Chain, param_scale: float = 2.0) -> list[float]:
    """Bytes of each stage: what plain training saves, and ``param_scale`` for each byte of trained parameters."""
    if not (math.isfinite(param_scale) and param_scale >= 0):
        raise PipelineError(
            f"param_scale is {param_scale!r}: expected a number that is not negative, such as 2 for SGD, 3 with "
            "momentum, 4 for Adam"
        )
    return [
        stage.keep.saved_bytes + stage.output_bytes + param_scale * stage.keep.parameter_gradient_bytes
        for stage in chain
    ]


def cuts_of(balance: Sequence[int]) -> tuple[int, ...]:
    """First stage of each part."""
    return tuple(int(sum(balance[:place])) for place in range(len(balance)))


def runs_of(cuts: Sequence[int], stages: int) -> list[tuple[int, int]]:
    """First and last stage of each part."""
    return [(first, end - 1) for first, end in zip(cuts, (*cuts[1:], stages), strict=True)]


def even_balance(stages: int, parts: int) -> list[int]:
    """Parts of equal size, or of one stage each if there are too few."""
    return [stages // parts + (place < stages % parts) for place in range(parts)] if parts <= stages else [1] * stages


def simple_balances(chain: Chain, parts: int) -> list[list[int]]:
    """Balances that one would make by hand; a search must end with nothing slower."""
    by_time, by_size = (least_largest(values, parts) for values in (stage_seconds(chain), stage_bytes(chain)))
    return [even_balance(len(chain), parts), by_time, by_size]


def least_largest(values: Sequence[float], partitions: int) -> list[int]:
    """Contiguous parts whose largest sum is least."""
    n, parts = len(values), partitions
    if not is_positive_integer(parts) or parts > n:
        raise PipelineError(
            f"partitions is {partitions!r}, but the chain has {n} stages: expected an integer from 1 to {n}, such as "
            f"partitions={n}"
        )
    before = np.concatenate(([0.0], np.cumsum(np.asarray(values, float))))
    # No part needs more than an equal share and one stage, which bounds its length.
    most = (before[-1] / parts + max(values)) * (1 + 1e-9)
    longest = int((np.searchsorted(before, before + most, "right") - np.arange(n + 1)).max()) - 1
    ends = np.arange(n)[:, None] + np.arange(1, longest + 1)
    sums = np.where(ends <= n, before[np.minimum(ends, n)] - before[:-1, None], math.inf)
    cuts = least_bottleneck(np.broadcast_to(sums, (parts, n, longest)))
    assert cuts is not None, "equal parts are no longer"
    return [last + 1 - first for first, last in runs_of(cuts, n)]


def least_bottleneck(values: Reals) -> Cuts | None:
    """Cuts whose largest value (by stage, first and length less one) is least; None if all are infinite."""
    stages, n, longest = values.shape
    most = np.full((stages + 1, n + longest + 1), math.inf)
    squares = most.copy()
    most[stages, n] = squares[stages, n] = 0.0
    ends = np.arange(n)[:, None] + np.arange(1, longest + 1)
    chosen = np.zeros((stages, n), np.int64)
    for stage in reversed(range(stages)):
        largest = np.maximum(values[stage], most[stage + 1][ends])
        least = largest.min(axis=1, keepdims=True)
        spread = np.where(largest <= least, values[stage] ** 2 + squares[stage + 1][ends], math.inf)
        chosen[stage] = np.argmin(spread, axis=1)
        most[stage, :n], squares[stage, :n] = least[:, 0], spread[np.arange(n), chosen[stage]]
    if most[0, 0] == math.inf:
        return None
    cuts = [0]
    for stage in range(stages - 1):
        cuts.append(cuts[-1] + int(chosen[stage, cuts[-1]]) + 1)
    return tuple(cuts)
