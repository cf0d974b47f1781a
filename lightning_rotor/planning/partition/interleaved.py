r"""Cuts for the interleaved schedule, where each device has several stages.

Device ``d`` of ``D`` has the pipeline stages ``d, d + D, d + 2D, ...``, so what matters is the sum of runs that are far apart, and no
dynamic program over cuts finds the best. Instead cuts move as long as the simulated step gets faster, from each of those that the simple
ways to cut propose, see :mod:`.climbing`. With few possibilities all are tried instead, and the best is optimal for the plans of
:mod:`.device_shares`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

from lightning_rotor.planning.partition.balance import cuts_of, runs_of, simple_balances
from lightning_rotor.planning.partition.climbing import Climb, Judgement
from lightning_rotor.planning.partition.device_shares import DeviceShares
from lightning_rotor.planning.partition.problem import Costs, Cuts, Problem, StageChoice
from lightning_rotor.planning.partition.search import Found
from lightning_rotor.planning.partition.step_bounds import StepBounds

# So many partitions are tried one by one.
_MOST_TRIED = 400


class InterleavedSearch:
    """Cuts one chain for the interleaved schedule.

    Args:
        problem: With several pipeline stages per device.
        costs: Of the problem.
    """

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self._problem, self._costs = problem, costs
        self._n, self._stages, self._devices = len(problem.chain), problem.stages, len(problem.devices)
        self._shares = DeviceShares(problem, costs)

    def run(self) -> Found | None:
        """The best cuts, or None if none was found that fits."""
        bounds = StepBounds(self._problem, self._costs)
        climb = Climb(self._problem, self._costs, bounds, self._judgement)
        simple = [cuts_of(balance) for balance in simple_balances(self._problem.chain, self._stages)]
        simple.append(bounds.equal_parts())
        climb.judge(simple)
        if math.comb(self._n - 1, self._stages - 1) <= _MOST_TRIED:
            climb.judge((0, *middle) for middle in combinations(range(1, self._n), self._stages - 1))
        else:
            climb.run(simple)
        found = self.only(min(climb.judged, key=climb.judged.__getitem__))
        return found and replace(found, bound_seconds=min(bounds.of_any_cuts(), found.seconds))

    def only(self, cuts: Cuts) -> Found | None:
        """These cuts, whatever others would take."""
        choices = self._choices(cuts)
        if len(choices) < self._stages:
            return None
        return Found(cuts, choices, self._problem.step_seconds([choice.load for choice in choices]), 0.0)

    def _judgement(self, cuts: Cuts) -> Judgement:
        found = self.only(cuts)
        return (0, found.seconds) if found else (sum(each is None for each in self._on_devices(cuts)), math.inf)

    def _choices(self, cuts: Cuts) -> tuple[StageChoice, ...]:
        """By pipeline stage; fewer of them if some device has too little memory."""
        found = [choices for choices in self._on_devices(cuts) if choices is not None]
        return tuple(on_device[turn] for turn in range(self._problem.stages_per_device) for on_device in found)

    def _on_devices(self, cuts: Cuts) -> list[tuple[StageChoice, ...] | None]:
        runs = runs_of(cuts, self._n)
        return [self._shares.choices(device, runs[device :: self._devices]) for device in range(self._devices)]
