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

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.pipeline.partition.balance import Cuts, cuts_of, least_bottleneck, runs_of, simple_balances
from lightning_rotor.pipeline.partition.problem import Costs, Problem, StageChoice
from lightning_rotor.pipeline.schedule import Integers
from lightning_rotor.pipeline.simulator import Reals

# Most cuts that are bounded one by one, and candidates of the dynamic program.
_FEW, _CANDIDATES = 20_000, 50
# Work, as simulated actions of about 11 ns, after which candidates, and then the local search, are no longer improved.
# Counted, so that the cuts do not depend on the machine.
_MOST_WORK, _JUDGED = (200_000_000, 400_000_000), 100_000
# Partitions simulated at once.
_AT_ONCE = 32
# Least number of runs with bounds, and numbers in one array of the knapsack.
_MOST_RUNS = 4_000_000
_MOST_AT_ONCE = 4_000_000
_SAME = 1e-9
Judgement: TypeAlias = tuple[int, float]
"""How many pipeline stages have too little memory, and the seconds of a step if none has."""


def impossible(problem: Problem, stage: int, first: Integers, last: Integers) -> npt.NDArray[np.bool_]:
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
        backwards = [[each.backward_seconds] for each in fastest]
        if costs.recomputes:
            forwards = [[stage.discard_seconds, *(each.forward_seconds for each in stage.options)] for stage in chain]
            backwards = [[each.backward_seconds for each in stage.options] for stage in chain]
        self._plain = _before(each.seconds for each in fastest)
        self._forward, self._most_forward = _before(map(min, forwards)), _before(map(max, forwards))
        self._backward = _before(map(min, backwards))
        self._travel = np.array(costs.travel_seconds)
        self._read_recomputation()
        # Recomputation by pipeline stage, first stage of the chain and length less one; infinite where a run cannot be.
        self.extra = np.stack([self._least_extra(stage) for stage in range(self._stages)])

    def learn(self, stage: int, first: int, last: int, choice: StageChoice | None) -> None:
        """Take the seconds of a planned run."""
        if last - first < self.longest:
            extra = math.inf
            if choice is not None:
                least = min(each.forward_seconds + each.backward_seconds for each in choice.load.both)
                plain = (self._plain[last + 1] - self._plain[first]) / self._speeds[stage]
                extra = max(least - plain, 0.0)
            self.extra[stage, first, last - first] = extra

    # ---------------------------------------------------------------- runs

    def _read_recomputation(self) -> None:
        """By stage of the chain, bytes held if kept, least seconds per byte saved, seconds of one forward."""
        chain = self._problem.chain
        self._kept, self._price, self._again = (np.zeros(self._n) for _ in range(3))
        for number, stage in enumerate(chain):
            # A boundary that both sides save is freed by neither alone.
            shared = number == 0 or any(option.saved_output_bytes for option in chain.stages[number - 1].options)
            ways = [
                (each.saved_bytes + (0 if shared else each.saved_input_bytes), each.seconds) for each in stage.options
            ]
            most, least = max(held for held, _ in ways), min(seconds for _, seconds in ways)
            if stage.recomputable:
                again = min(each.again_seconds + each.backward_seconds for each in stage.options)
                ways.append((0, stage.discard_seconds + again))
                self._again[number] = stage.discard_seconds * all(each.saved_tensors for each in stage.options)
            prices = [max(seconds - least, 0.0) / (most - held) for held, seconds in ways if held < most]
            self._kept[number], self._price[number] = most, min(prices, default=math.inf)

    def _least_extra(self, stage: int) -> Reals:
        """``(n, longest)``, least recomputation of every run that this pipeline stage may be."""
        problem = self._problem
        memory = problem.device_of(stage).memory_bytes
        extra = np.zeros((self._n, self.longest))
        if problem.recompute == "always":  # all forwards again, the last one up to its last saved tensor
            saved = [
                max(each.forward_seconds - each.replay_seconds for each in stage.options) for stage in problem.chain
            ]
            last = np.maximum(saved, 0)[np.minimum(self._ends, self._n) - 1]
            extra = np.maximum(self._sums(_before(self._again)) - last, 0)
        elif problem.recompute == "rotor" and memory is not None and problem.stages_per_device == 1:
            extra = self._recomputed(stage, memory)
        extra /= self._speeds[stage]
        extra[impossible(problem, stage, self._firsts, self._ends - 1)] = math.inf
        return extra

    def _sums(self, before: Reals) -> Reals:
        """``(n, longest)``, sums over every run."""
        sums: Reals = before[np.minimum(self._ends, self._n)] - before[:-1, None]
        return sums

    def _recomputed(self, stage: int, memory_bytes: int) -> Reals:
        """``(n, longest)``, least seconds for what does not fit into the memory, by stages of rising price."""
        n, in_flight = self._n, self._problem.in_flight[stage]
        last = np.minimum(self._ends, n) - 1
        output = np.array([each.output_bytes for each in self._problem.chain])[last]
        free = memory_bytes - self._costs.fixed_bytes(stage, self._firsts, last)
        needed = self._sums(_before(self._kept)) + output - free / in_flight
        extra = np.zeros((n, self.longest))
        rows = np.flatnonzero((needed > 0).any(axis=1))
        rows = rows[(rows >= stage) & (rows <= n - (self._stages - stage))]
        for some in np.array_split(rows, len(rows) * self.longest**2 // _MOST_AT_ONCE + 1):
            members = np.minimum(some[:, None] + np.arange(self.longest), n - 1)
            order = np.argsort(self._price[members], axis=1, kind="stable")
            places = np.take_along_axis(members, order, axis=1)
            inside = order[:, :, None] < np.arange(1, self.longest + 1)
            freed = np.cumsum(self._kept[places][:, :, None] * inside, axis=1)
            given = np.diff(np.minimum(freed, np.clip(needed[some], 0, None)[:, None]), axis=1, prepend=0.0)
            with np.errstate(invalid="ignore"):
                spent = np.where(given > 0, given * self._price[places][:, :, None], 0.0).sum(axis=1)
            # Bounds of bytes are rough, so they refuse no run that needs more than can be freed.
            extra[some] = np.where(np.isfinite(spent), spent, 0.0)
        return extra

    # ---------------------------------------------------------------- steps

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
        through = np.full_like(self.extra, math.inf)
        for stage in range(stages):
            before, behind = front[stage, :n, None], 2 * travel + back[stage + 1][ends]
            np.minimum.at(front[stage + 1], ends, before + least[stage] + 2 * travel)
            with np.errstate(invalid="ignore"):
                through[stage] = before + self._stay(stage, plain, least[stage], behind, travel)
        through[~np.isfinite(through)] = math.inf
        return through

    def _stay(self, stage: int, plain: Reals, least: Reals, behind: Reals, travel: Reals) -> Reals:
        """``(n, longest)``, least seconds from the first forward of a pipeline stage to its last backward."""
        problem, speed, extra = self._problem, self._speeds[stage], self.extra[stage]
        m, in_flight = problem.micro_batches, problem.in_flight[stage]
        forward = self._sums(self._forward) / speed
        if problem.schedule == "gpipe":
            both: Reals = forward + self._sums(self._backward) / speed
            return least + behind + (m - 1) * both
        work = m * least
        if problem.stages_per_device == 1:
            hidden = self._sums(self._most_forward) / speed, plain / speed + extra - forward
            first, last = (np.maximum(behind - (in_flight - 1) * each, 0) for each in hidden)
            work = work + (first + last if in_flight < m else np.maximum(first, last))
        turns = math.ceil(m / in_flight) * (least + behind)
        stay: Reals = np.maximum(work, np.maximum(turns, least + behind + (m - 1) * travel))
        return stay

    def step_seconds(self, cuts: Integers) -> Reals:
        """By row of ``(ways, stages)``, least seconds of a step with these cuts: simulated with each stage's least."""
        ends = np.column_stack((cuts[:, 1:], np.full(len(cuts), self._n)))
        lengths = ends - cuts
        extra = self.extra[np.arange(self._stages), cuts, np.minimum(lengths, self.longest) - 1]
        possible = (np.isfinite(extra) & (lengths <= self.longest)).all(axis=1)
        plain, forward, most_forward, backward = (
            (before[ends] - before[cuts]) / self._speeds
            for before in (self._plain, self._forward, self._most_forward, self._backward)
        )
        backward = np.maximum(backward, np.where(np.isfinite(extra), plain + extra, plain) - most_forward)
        travel = self._travel[ends]
        home_travel = np.column_stack((np.zeros(len(travel)), travel[:, :-1]))
        table = np.stack((forward, forward, travel, backward, backward, home_travel), axis=-1)
        return np.where(possible, self._problem.simulator.simulated(table), math.inf)

    def work_seconds(self) -> float:
        """Least seconds of any cuts, since each device does its part of the work."""
        speeds = sum(device.speed for device in self._problem.devices)
        return float(self._problem.micro_batches * self._plain[-1] / speeds)


class Search:
    """Cuts one chain."""

    def __init__(self, costs: Costs) -> None:
        self._problem, self._costs = costs.problem, costs
        self._n, self._stages = len(costs.problem.chain), costs.problem.stages
        self._judged: dict[Cuts, Judgement] = {}
        self._best: tuple[Judgement, Cuts] = (self._stages + 1, math.inf), ()
        self._bounds: Bounds | None = None
        self._spent = 0  # work other than planning

    def run(self) -> tuple[list[StageChoice] | None, float]:
        """The best cuts, or None if none was found that fits, and the least seconds that any take."""
        simple = [cuts_of(balance) for balance in simple_balances(self._problem.chain, self._stages)]
        for cuts in simple:
            self._judge(cuts)
        n, stages = self._n, self._stages
        longest = min(n - stages + 1, max(4 * math.ceil(n / stages) + 4, _MOST_RUNS // (n * stages)))
        while longest > 1 and self._longer_seconds(longest - 1) >= self._seconds:
            longest -= 1
        self._bounds = bounds = Bounds(self._costs, longest)
        count = math.comb(n - 1, stages - 1)
        if count <= _FEW and self._actions * count <= _MOST_WORK[0]:
            bound = self._all(bounds)
        else:
            bound = self._candidates(bounds)
        bound = min(bound, self._longer_seconds(longest))
        if bound < self._seconds * (1 - _SAME):
            for cuts in dict.fromkeys([self._best[1], *sorted(simple, key=self._judged.__getitem__)]):
                self._climb(bounds, cuts)
        return self.only(self._best[1]), min(bound, self._seconds)

    def only(self, cuts: Cuts) -> list[StageChoice] | None:
        """These cuts, without a search."""
        found = [choice for choice in self._costs.together(runs_of(cuts, self._n)) if choice is not None]
        return found if len(found) == self._stages else None

    def _longer_seconds(self, longest: int) -> float:
        """Least seconds of partitions with a longer run."""
        if longest >= self._n - self._stages + 1:
            return math.inf
        before = _before(min(each.seconds for each in stage.options) for stage in self._problem.chain)
        least = (before[longest + 1 :] - before[: -longest - 1]).min()
        return float(self._problem.micro_batches * least / max(device.speed for device in self._problem.devices))

    @property
    def _seconds(self) -> float:
        return self._best[0][1]

    @property
    def _actions(self) -> int:
        """Actions of a step."""
        return 2 * self._problem.micro_batches * self._stages

    @property
    def _work(self) -> int:
        """What the search has cost so far."""
        return self._spent + self._costs.planning_work

    def _judge(self, cuts: Cuts) -> Judgement:
        """Plan all runs of a partition and simulate it."""
        if cuts in self._judged:
            return self._judged[cuts]
        runs = runs_of(cuts, self._n)
        choices = self._costs.together(runs)
        loads = [choice.load for choice in choices if choice is not None]
        misfits = len(choices) - len(loads)
        seconds = math.inf if misfits else self._problem.simulator.step_seconds(loads)
        self._spent += _JUDGED + _AT_ONCE * self._actions  # as much as so many at once, with what becomes of its runs
        self._judged[cuts] = misfits, seconds
        self._best = min(self._best, ((misfits, seconds), cuts))
        if self._bounds is not None and self._problem.stages_per_device == 1:
            for stage, (run, choice) in enumerate(zip(runs, choices, strict=True)):
                self._bounds.learn(stage, *run, choice)
        return misfits, seconds

    def _all(self, bounds: Bounds) -> float:
        """Judge all cuts by rising bound, until no other one can be better; returns the least seconds of any."""
        cuts = np.array([(0, *middle) for middle in combinations(range(1, self._n), self._stages - 1)])
        seconds = bounds.step_seconds(cuts)
        order = _rising(seconds, math.inf)
        # Better shares of a device's memory may exist than those found.
        shares = self._problem.stages_per_device > 1 and self._costs.recomputes
        least = float(seconds[order[0]]) if shares and len(order) else math.inf
        for start in range(0, len(order), _AT_ONCE):
            some = order[start : start + _AT_ONCE]
            if seconds[some[0]] >= self._seconds * (1 - _SAME):
                break
            if self._work > _MOST_WORK[1] and self._seconds < math.inf:
                return min(least, float(seconds[some[0]]))
            for each in self._promising(bounds, cuts[some], self._seconds):
                self._judge(each)
        return min(least, self._seconds)

    def _candidates(self, bounds: Bounds) -> float:
        """Judge cuts of the dynamic program, which learns from each; returns the least seconds of any cuts."""
        bound = 0.0
        for number in range(self._n * self._stages):
            through = bounds.through()
            cuts = least_bottleneck(through)
            if cuts is None:
                return self._seconds
            runs = enumerate(runs_of(cuts, self._n))
            bound = float(max(through[stage, first, last - first] for stage, (first, last) in runs))
            known = cuts in self._judged
            self._judge(cuts)
            spent = number >= _CANDIDATES or self._work > _MOST_WORK[0]
            if known or (spent and self._seconds < math.inf):
                break
        return max(bound, bounds.work_seconds())

    # ---------------------------------------------------------------- local search

    def _climb(self, bounds: Bounds, cuts: Cuts) -> None:
        """Try one kind of moves after the other, until none of them helps."""
        through, kinds, start = bounds.through(), self._kinds(), None
        while cuts != start:
            start = cuts
            for kind in kinds:
                while better := self._better(bounds, through, cuts, self._moved(cuts, *kind)):
                    cuts = better

    def _better(self, bounds: Bounds, through: Reals, cuts: Cuts, moved: Integers) -> Cuts | None:
        """The first better cuts among moves, the most promising bounds first."""
        misfits, seconds = self._judged[cuts]
        lengths = np.diff(moved, axis=1, append=self._n)
        possible = (lengths <= bounds.longest).all(axis=1)
        moved, lengths = moved[possible], lengths[possible]
        least = through[np.arange(self._stages), moved, lengths - 1].max(axis=1, initial=0.0)
        order = _rising(least, seconds * (1 - _SAME))
        for start in range(0, len(order), _AT_ONCE):
            if self._work > _MOST_WORK[1]:
                break
            for each in self._promising(bounds, moved[order[start : start + _AT_ONCE]], seconds):
                if self._judge(each) < (misfits, seconds * (1 - _SAME)):
                    return each
        return None

    def _promising(self, bounds: Bounds, cuts: Integers, seconds: float) -> list[Cuts]:
        """Cuts whose steps may be shorter, the least bounds first."""
        self._spent += len(cuts) * self._actions
        return [tuple(cuts[place].tolist()) for place in _rising(bounds.step_seconds(cuts), seconds * (1 - _SAME))]

    def _kinds(self) -> list[tuple[int, int]]:
        """Kinds of moves: number of neighbouring cuts and of stages of the chain, long ways first."""
        steps, counts = [max(self._n // self._stages // 2, 1)], [1]
        while steps[-1] > 1:
            steps.append(steps[-1] // 2)
        while counts[-1] < self._stages - 1:
            counts.append(min(2 * counts[-1], self._stages - 1))
        return [(count, step) for step in steps for count in counts]

    def _moved(self, cuts: Cuts, count: int, step: int) -> Integers:
        """All moves of one kind; at the end fewer cuts move."""
        places = np.arange(1, self._stages)
        moving = (places[:, None] <= np.arange(self._stages)) & (np.arange(self._stages) < places[:, None] + count)
        moved = np.array(cuts) + step * np.concatenate((moving, -moving.astype(np.int64)))
        allowed: Integers = moved[(np.diff(moved, axis=1, append=self._n) > 0).all(axis=1)]
        return allowed


def _before(values: Iterable[float]) -> Reals:
    before: Reals = np.concatenate(([0.0], np.cumsum(list(values))))
    return before


def _rising(values: Reals, below: float) -> Integers:
    """Places of values below a limit, the least first."""
    order = np.argsort(values, kind="stable")
    found: Integers = order[values[order] < below]
    return found
