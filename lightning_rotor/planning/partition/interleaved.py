r"""Cuts for the interleaved schedule, where each device has several stages.

Device ``d`` of ``D`` has the pipeline stages ``d, d + D, d + 2D, ...``, so what matters is the sum of runs that are far apart, and no
dynamic program over cuts finds the best. Instead cuts move as long as the simulated step gets faster: from those that the simple ways to cut
propose, the best of them first. A move shifts some neighbouring cuts by as much, which takes stages of the chain from one run and gives
them to another. Of all moves of a kind :mod:`.interleaved_bounds` says which ones cannot be better; the others are simulated, the most promising
ones first, and many at once where nothing needs to be planned for them.

With few possibilities all are tried instead, and the best is optimal for the plans of :mod:`.device_shares`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import TypeAlias

import numpy as np

from lightning_rotor.planning.partition.balance import cuts_of, runs_of, simple_balances
from lightning_rotor.planning.partition.device_shares import DeviceShares
from lightning_rotor.planning.partition.interleaved_bounds import InterleavedBounds
from lightning_rotor.planning.partition.problem import Costs, Integers, Problem, StageChoice
from lightning_rotor.planning.partition.search import Cuts, Found

# So many partitions are tried one by one.
_MOST_TRIED = 400
# Actions of partitions that are simulated before the cuts stay where they are: one after the other, or many at once.
_MOST_ACTIONS, _MOST_ACTIONS_AT_ONCE = 3_000_000, 100_000_000
# How many are simulated at once.
_AT_ONCE = 32
_SAME = 1e-9
_Judgement: TypeAlias = tuple[int, float]
"""How many devices have too little memory, and the seconds of a step if none has."""


class InterleavedSearch:
    """Cuts one chain for the interleaved schedule.

    Args:
        problem: With several pipeline stages per device.
        costs: Of the problem.
    """

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self._problem, self._n, self._stages, self._devices = (
            problem,
            len(problem.chain),
            problem.stages,
            len(problem.devices),
        )
        self._shares, self._bounds = DeviceShares(problem, costs), InterleavedBounds(problem, costs)
        self._judged: dict[Cuts, _Judgement] = {}
        self._actions = sum(map(len, problem.order))
        # Between two devices, links serve both directions, for which only the plain simulator is right.
        self._at_once = self._bounds.exact and self._devices > 2

    def run(self) -> Found | None:
        """The best cuts, or None if none was found that fits."""
        simple = [cuts_of(balance) for balance in simple_balances(self._problem.chain, self._stages)]
        simple.append(self._bounds.equal_parts())
        self._judge(simple)
        if math.comb(self._n - 1, self._stages - 1) <= _MOST_TRIED:
            self._judge((0, *middle) for middle in combinations(range(1, self._n), self._stages - 1))
        else:
            self._climb_from(sorted(set(simple), key=self._judged.__getitem__))
        cuts, (misfits, seconds) = min(self._judged.items(), key=lambda item: item[1])
        if misfits:
            return None
        choices = self._choices(cuts)
        seconds = self._problem.step_seconds([choice.load for choice in choices])
        return Found(cuts, choices, seconds, min(self._bounds.of_any_cuts(), seconds))

    def only(self, cuts: Cuts) -> Found | None:
        """These cuts, whatever others would take."""
        choices = self._choices(cuts)
        if len(choices) < self._stages:
            return None
        return Found(cuts, choices, self._problem.step_seconds([choice.load for choice in choices]), 0.0)

    # ---------------------------------------------------------------- judgement

    def _judge(self, many: Iterable[Cuts]) -> _Judgement:
        """Judge each of these cuts once; returns the best judgement."""
        many = list(many)
        new = [cuts for cuts in dict.fromkeys(many) if cuts not in self._judged]
        if self._at_once and new:
            seconds = self._bounds.seconds(np.array(new))
            found = self._problem.simulated_at_once(seconds.table())
            self._judged |= {cuts: (0, each) for cuts, each in zip(new, found, strict=True)}
        else:
            self._judged |= {cuts: self._judgement(cuts) for cuts in new}
        return min(self._judged[cuts] for cuts in many)

    def _judgement(self, cuts: Cuts) -> _Judgement:
        choices = self._choices(cuts)
        if len(choices) < self._stages:
            return self._misfits(cuts), math.inf
        return 0, self._problem.step_seconds([choice.load for choice in choices])

    def _on_devices(self, cuts: Cuts) -> list[tuple[StageChoice, ...] | None]:
        runs = runs_of(cuts, self._n)
        return [self._shares.choices(device, runs[device :: self._devices]) for device in range(self._devices)]

    def _misfits(self, cuts: Cuts) -> int:
        return sum(each is None for each in self._on_devices(cuts))

    def _choices(self, cuts: Cuts) -> tuple[StageChoice, ...]:
        """By pipeline stage; fewer of them if some device has too little memory."""
        found = [choices for choices in self._on_devices(cuts) if choices is not None]
        return tuple(on_device[turn] for turn in range(self._problem.stages_per_device) for on_device in found)

    # ---------------------------------------------------------------- where the cuts go

    def _climb_from(self, starts: list[Cuts]) -> None:
        """From the best start as far as it goes, then from the others, as long as there is work left."""
        at_most = _MOST_ACTIONS_AT_ONCE if self._at_once else _MOST_ACTIONS
        for number, cuts in enumerate(starts, 1):
            # Half of what is left, and all of it in the end.
            spent = len(self._judged) * self._actions
            self._climb(cuts, spent + (at_most - spent) // (2 if number < len(starts) else 1))

    def _climb(self, cuts: Cuts, most_actions: int) -> None:
        """Hill climbing over one kind of moves after the other, until none of them gets anywhere."""
        kinds = self._kinds()
        best, kind, in_vain = self._judge([cuts]), 0, 0
        while in_vain < len(kinds):
            moved = self._moved(cuts, *kinds[kind])
            found = self._first_better(moved, best, most_actions)
            if len(self._judged) * self._actions > most_actions:
                return
            if found is None:
                kind, in_vain = (kind + 1) % len(kinds), in_vain + 1
            else:
                cuts, in_vain = found, 0
                best = self._judged[cuts]

    def _first_better(self, moved: Integers, best: _Judgement, most_actions: int) -> Cuts | None:
        """The best of the first part of all that may be better, the most promising ones first, in which one is."""
        at_once = _AT_ONCE if self._at_once else 1
        for part in self._promising(moved, best, at_once):
            if len(self._judged) * self._actions > most_actions:
                return None
            found = self._judge(part)
            if found[0] < best[0] or (found[0] == best[0] and found[1] < best[1] * (1 - _SAME)):
                return min(part, key=self._judged.__getitem__)
        return None

    def _promising(self, moved: Integers, best: _Judgement, at_once: int) -> Iterator[list[Cuts]]:
        bounds = self._bounds.step_seconds(self._bounds.seconds(moved)) if len(moved) else np.zeros(0)
        order = np.argsort(bounds, kind="stable")
        order = order[bounds[order] < best[1] * (1 - _SAME)]
        for start in range(0, len(order), at_once):
            yield [tuple(cuts) for cuts in moved[order[start : start + at_once]].tolist()]

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
