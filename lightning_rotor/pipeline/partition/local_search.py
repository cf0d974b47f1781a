r"""Hill climbing over cuts: for interleaved stages, where no dynamic program finds the best, and behind a search that was not finished.

A move shifts some neighbouring cuts by as much, which takes stages of the chain from one run and gives them to another. Of all moves of a kind
:mod:`.step_bounds` says which ones cannot be better without recomputation. The others are simulated without it, the most promising ones first, and
many at once. Where memory is limited those that are still better are planned, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np

from lightning_rotor.pipeline.partition.bounds import StepBounds
from lightning_rotor.pipeline.partition.problem import Costs, Cuts, Integers, Problem, Reals

# Actions of simulated partitions, and runs of stages that are planned, before the cuts stay where they are. Long runs take long to plan: fewer
# of them, in proportion to the square of their usual length.
_MOST_ACTIONS = 100_000_000
_MOST_PLANS, _MOST_SQUARES = 400, 10_000
# How many partitions are simulated at once.
_AT_ONCE = 32
_SAME = 1e-9
Judgement: TypeAlias = tuple[int, float]
"""How many devices have too little memory, and the seconds of a step if none has."""


class Climb:
    """Moves cuts.

    Args:
        problem: What there is to cut.
        costs: Of the problem.
        bounds: Of the problem.
        judge: Plans all runs of a partition and simulates it.

    Attributes:
        judged: By cuts.
    """

    def __init__(self, problem: Problem, costs: Costs, bounds: StepBounds, judge: Callable[[Cuts], Judgement]) -> None:
        self._problem, self._costs, self._bounds, self._judge_one = problem, costs, bounds, judge
        self._n, self._stages = len(problem.chain), problem.stages
        self._actions = sum(map(len, problem.order))
        self._plans_in_all = min(_MOST_PLANS, int(_MOST_SQUARES * (self._stages / self._n) ** 2))
        # Between two devices a link serves both directions, for which only the plain simulator is right.
        self._at_once = len(problem.devices) > 2
        self._is_simulation_enough = bounds.exact and self._at_once
        self.judged: dict[Cuts, Judgement] = {}
        self._simulated = 0

    def judge(self, many: Iterable[Cuts]) -> None:
        """Judge each of these cuts once."""
        new = [cuts for cuts in dict.fromkeys(many) if cuts not in self.judged]
        if self._is_simulation_enough and new:
            self._simulated += len(new)
            seconds = self._problem.simulated_at_once(self._bounds.seconds(np.array(new)).table())
            self.judged |= {cuts: (0, each) for cuts, each in zip(new, seconds, strict=True)}
        else:
            self.judged |= {cuts: self._judge_one(cuts) for cuts in new}

    def run(self, starts: Iterable[Cuts]) -> None:
        """From the best start as far as it goes, then from the others, as long as there is work left."""
        starts = list(dict.fromkeys(starts))
        self.judge(starts)
        starts.sort(key=self.judged.__getitem__)
        plans = self._costs.plans
        for number, cuts in enumerate(starts):
            # Half of what is left, and all of it in the end.
            share = 1 if number == len(starts) - 1 else 2
            self._most_simulated = self._simulated + (_MOST_ACTIONS // self._actions - self._simulated) // share
            self._most_plans = self._costs.plans + (self._plans_in_all - (self._costs.plans - plans)) // share
            self._climb(cuts)

    def _climb(self, cuts: Cuts) -> None:
        """One kind of moves after the other, until none of them gets anywhere."""
        kinds = self._kinds()
        kind = in_vain = 0
        while in_vain < len(kinds) and not self._is_spent:
            better = self._better(cuts, self._moved(cuts, *kinds[kind]))
            if better is None:
                kind, in_vain = (kind + 1) % len(kinds), in_vain + 1
            else:
                cuts, in_vain = better, 0

    @property
    def _is_spent(self) -> bool:
        return self._simulated >= self._most_simulated or self._costs.plans >= self._most_plans

    def _better(self, cuts: Cuts, moved: Integers) -> Cuts | None:
        """The best of the first few among which one is better."""
        misfits, seconds = self.judged[cuts]
        for some in self._promising(moved, seconds):
            if self._is_spent:
                return None
            self.judge(some)
            best = min(some, key=self.judged.__getitem__)
            found = self.judged[best]
            if found[0] < misfits or (found[0] == misfits and found[1] < seconds * (1 - _SAME)):
                return best
        return None

    def _promising(self, moved: Integers, best_seconds: float) -> Iterator[list[Cuts]]:
        """Moves that may be better, the most promising ones first: as many as are simulated at once, or one that is to be planned."""
        below = best_seconds * (1 - _SAME)
        order = _rising(self._bounds.step_seconds(self._bounds.seconds(moved)), below)
        for start in range(0, len(order), _AT_ONCE):
            some = moved[order[start : start + _AT_ONCE]]
            if self._at_once and not self._is_simulation_enough and not self._is_spent:
                self._simulated += len(some)
                seconds = self._problem.simulated_at_once(self._bounds.seconds(some).table())
                some = some[_rising(np.array(seconds), below)]
            few = len(some) if self._is_simulation_enough else 1
            for first in range(0, len(some), max(few, 1)):
                yield [tuple(cuts) for cuts in some[first : first + few].tolist()]

    def _kinds(self) -> list[tuple[int, int]]:
        """How many neighbouring cuts move, and by how many stages of the chain: long ways first."""
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
        ends = np.column_stack((moved[:, 1:], np.full(len(moved), self._n)))
        allowed: Integers = moved[(moved < ends).all(axis=1)]
        return allowed


def _rising(values: Reals, below: float) -> Integers:
    """Places of those that are less, the least first."""
    order = np.argsort(values, kind="stable")
    found: Integers = order[values[order] < below]
    return found
