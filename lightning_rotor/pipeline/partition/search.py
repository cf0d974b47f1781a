"""Where to cut: candidates from a dynamic program, judged by the simulator, and a local search from the best of them.

If cuts are few, each is bounded by a simulated step of its least loads, and judged in this order until none can be
better. Else cuts come from the dynamic program over ``seconds_bounds``, one after the other: each that is judged shows
the real costs of its runs, with which the next one is found.
"""

import math
from functools import cached_property
from itertools import combinations

import numpy as np

from lightning_rotor.pipeline.partition.cuts import Cuts, cuts_of, least_bottleneck, runs_of, simple_balances
from lightning_rotor.pipeline.partition.run_costs import Costs, StageChoice
from lightning_rotor.pipeline.partition.seconds_bounds import Bounds
from lightning_rotor.pipeline.pipeline_schedule import Integers
from lightning_rotor.pipeline.step_times import Reals
from lightning_rotor.planning.effort import SAME

# Most cuts that are bounded one by one, and candidates of the dynamic program.
_FEW, _CANDIDATES = 20_000, 50
# Work, as simulated actions of about 11 ns, after which cuts are no longer improved; half of it is for candidates.
# Counted, so that the cuts do not depend on the machine.
_MOST_WORK, _JUDGED = 400_000_000, 100_000
# Partitions simulated at once.
_AT_ONCE = 32
# Least number of runs with bounds.
_MOST_RUNS = 1_000_000


class Search:
    """Cuts one chain."""

    def __init__(self, costs: Costs) -> None:
        self._problem, self._costs = costs.problem, costs
        self._n, self._stages = len(costs.problem.chain), costs.problem.stages
        self._judged: set[Cuts] = set()
        # Pipeline stages with too little memory, seconds of a step if none has, and the cuts.
        self._best: tuple[int, float, Cuts] = self._stages + 1, math.inf, ()
        # Of a step.
        self._actions = 2 * self._problem.micro_batches * self._stages
        # Work other than planning.
        self._spent = 0

    @cached_property
    def _bounds(self) -> Bounds:
        # Long runs are rare in good cuts and make the table large: several even lengths, or as many as have room.
        n, stages = self._n, self._stages
        even_length = math.ceil(n / stages)
        longest = max(4 * even_length + 4, _MOST_RUNS // (n * stages))
        return Bounds(self._costs, longest)

    def run(self) -> tuple[list[StageChoice] | None, float]:
        """The best cuts, or None if none was found that fits, and the least seconds that any take."""
        # Balances by hand first, so that the answer is never slower than one of them.
        for balance in simple_balances(self._problem.chain, self._stages):
            self._judge(cuts_of(balance))
        count = math.comb(self._n - 1, self._stages - 1)
        if count <= _FEW and self._actions * count <= _MOST_WORK // 20:
            bound = self._all()
        else:
            bound = self._candidates()
        bound = min(bound, self._bounds.longer_seconds())
        if bound < self._seconds * (1 - SAME):
            self._climb()
        return self.only(self._best[2]), min(bound, self._seconds)

    def only(self, cuts: Cuts) -> list[StageChoice] | None:
        """These cuts, without a search."""
        choices = self._costs.together(runs_of(cuts, self._n))
        fitting = [choice for choice in choices if choice is not None]
        if len(fitting) < self._stages:
            return None
        return fitting

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
        seconds = math.inf
        if not misfits:
            seconds = self._problem.simulator.step_seconds(loads)
        # As much as so many at once, with what becomes of its runs.
        self._spent += _JUDGED + _AT_ONCE * self._actions
        self._judged.add(cuts)
        # Misfits come first: a search among cuts that do not fit goes where fewer devices have too little memory.
        self._best = min(self._best, (misfits, seconds, cuts))
        # A stage that shares its device has no costs of its own: they depend on the others there.
        if self._problem.stages_per_device == 1:
            for stage, (run, choice) in enumerate(zip(runs, choices, strict=True)):
                self._bounds.learn(stage, *run, choice)

    def _judge_rising(self, cuts: Integers, least: Reals, *, once: bool = False) -> float:
        """Judge cuts that may be better by rising bound, if ``once`` until one is. Returns the others' least bound."""
        order = np.argsort(least, kind="stable")
        before = self._best
        for start in range(0, len(order), _AT_ONCE):
            some = order[start : start + _AT_ONCE]
            if least[some[0]] >= self._seconds * (1 - SAME):
                break
            if self._work > _MOST_WORK and (once or self._seconds < math.inf):
                return float(least[some[0]])
            self._spent += len(some) * self._actions
            # Runs that were planned since have other bounds.
            again = self._bounds.step_seconds(cuts[some])
            for place in np.argsort(again, kind="stable").tolist():
                if again[place] < self._seconds * (1 - SAME):
                    self._judge(tuple(cuts[some[place]].tolist()))
                if once and self._best != before:
                    return 0.0
        return self._seconds

    def _all(self) -> float:
        """Judge all cuts by rising bound, until no other one can be better; returns the least seconds of any."""
        stages_from_second = combinations(range(1, self._n), self._stages - 1)
        cuts = np.array([(0, *firsts) for firsts in stages_from_second])
        least = self._bounds.step_seconds(cuts)
        bound = self._judge_rising(cuts, least)
        if self._problem.stages_per_device > 1 and self._costs.recomputes:
            # Better shares of a device's memory may exist than those found, so judged cuts are not done with.
            bound = min(bound, float(least.min()))
        return bound

    def _candidates(self) -> float:
        """Judge cuts of the dynamic program, which learns from each; returns the least seconds of any cuts."""
        bound = 0.0
        for number in range(self._n * self._stages):
            through = self._bounds.through()
            cuts = least_bottleneck(through)
            if cuts is None:
                return self._seconds
            bound = 0.0
            for stage, (first, last) in enumerate(runs_of(cuts, self._n)):
                bound = max(bound, float(through[stage, first, last - first]))
            was_judged = cuts in self._judged
            self._judge(cuts)
            # The same cuts again: nothing was learned that would lead elsewhere.
            if was_judged:
                break
            spent = number >= _CANDIDATES or self._work > _MOST_WORK // 2
            if spent and self._seconds < math.inf:
                break
        return max(bound, self._bounds.work_seconds())

    def _climb(self) -> None:
        """Move neighbouring cuts of the best ones, by long ways first, until no move helps."""
        through = self._bounds.through()
        start = None
        while start != self._best:
            start = self._best
            for step in _powers(max(self._n // self._stages // 2, 1)):
                for count in reversed(_powers(self._stages - 1)):
                    self._move_on(through, count, step)

    def _move_on(self, through: Reals, count: int, step: int) -> None:
        """Move so many cuts by a step as long as it helps."""
        before = None
        while before != self._best:
            before = self._best
            self._move(through, count, step)

    def _move(self, through: Reals, count: int, step: int) -> None:
        """Take the first better cuts where so many move by a step, the least bounds first; at the end fewer move."""
        # A row for each first cut that moves, with so many behind it. The first stage begins the chain, and stays.
        stages = np.arange(self._stages)
        begin = np.arange(1, self._stages)[:, None]
        moving = ((begin <= stages) & (stages < begin + count)).astype(np.int64)
        moved = np.array(self._best[2]) + step * np.concatenate((moving, -moving))
        lengths = np.diff(moved, axis=1, append=self._n)
        possible = ((lengths > 0) & (lengths <= self._bounds.longest)).all(axis=1)
        moved, lengths = moved[possible], lengths[possible]
        least = through[stages, moved, lengths - 1].max(axis=1, initial=0.0)
        self._judge_rising(moved, least, once=True)


def _powers(most: int) -> list[int]:
    """Powers of two up to a number, the largest first."""
    return [2**exponent for exponent in reversed(range(most.bit_length()))]
