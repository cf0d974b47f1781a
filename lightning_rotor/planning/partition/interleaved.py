r"""Cuts for the interleaved schedule, where stages of one device share its memory.

Device ``d`` of ``D`` has the pipeline stages ``d, d + D, d + 2D, ...``. How fast one of them is depends on what the others
leave, so runs of stages no longer cost anything by themselves. Each stage gets a share of what its device has beside weights,
gradients and buffers, in proportion to what it would hold in all its micro-batches in flight if nothing were recomputed. The
shares are added as if all stages were at their worst at once, which they never are; so they are stretched as far as the device's
simulated peak allows.

The cuts start where parts take about the same time, and then move, one at a time by ever smaller steps, as long as the simulated
step gets faster. With few possibilities all are tried instead, and the best is optimal for these shares. The bound says what no cuts
can beat: each device's part of the work, and one passage of a micro-batch through everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np

from lightning_rotor.pipeline_simulator import device_peak_bytes
from lightning_rotor.planning.partition.balance import runs_of
from lightning_rotor.planning.partition.in_flight import keep_all
from lightning_rotor.planning.partition.problem import Costs, Problem, Reals, StageChoice
from lightning_rotor.planning.partition.search import Cuts, Found
from lightning_rotor.planning.partition.sub_chains import sub_chain

# So many partitions are tried one by one.
_MOST_TRIED = 400
# Simulated actions before the cuts stay where they are.
_MOST_ACTIONS = 3_000_000
# How much further shares are stretched, at most, and in how many steps.
_MOST_STRETCH, _STRETCHES = 4.0, 5
_SAME = 1e-9


class InterleavedSearch:
    """Cuts one chain for the interleaved schedule.

    Args:
        problem: With several pipeline stages per device.
        costs: Of the problem.
    """

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self._problem, self._costs = problem, costs
        self._n, self._stages, self._devices = len(problem.chain), problem.stages, len(problem.devices)
        self._judged: dict[Cuts, tuple[tuple[int, float], tuple[StageChoice, ...]]] = {}
        self._on_device: dict[object, tuple[StageChoice, ...] | None] = {}
        self._actions = sum(map(len, problem.order))

    def run(self) -> Found | None:
        """The best cuts, or None if none was found that fits."""
        if math.comb(self._n - 1, self._stages - 1) <= _MOST_TRIED:
            for middle in combinations(range(1, self._n), self._stages - 1):
                self.judge((0, *middle))
        else:
            self._move(self._start())
        cuts, ((misfits, seconds), choices) = min(self._judged.items(), key=lambda item: item[1][0])
        return None if misfits else Found(cuts, choices, seconds, min(self._bound(), seconds))

    def only(self, cuts: Cuts) -> Found | None:
        """These cuts, whatever others would take."""
        misfits, seconds = self.judge(cuts)
        return None if misfits else Found(cuts, self._judged[cuts][1], seconds, 0.0)

    def judge(self, cuts: Cuts) -> tuple[int, float]:
        """How many devices have too little memory for these cuts, and the seconds of a step if none has."""
        if cuts not in self._judged:
            runs = runs_of(cuts, self._n)
            found = [self._choose(device, runs[device :: self._devices]) for device in range(self._devices)]
            misfits, choices = sum(each is None for each in found), []
            seconds = math.inf
            if not misfits:
                choices = [on_device[round] for round in range(len(found[0] or ())) for on_device in found if on_device]
                loads = [choice.load for choice in choices]
                seconds = self._problem.step_seconds(loads)
            self._judged[cuts] = (misfits, seconds), tuple(choices)
        return self._judged[cuts][0]

    # ---------------------------------------------------------------- the memory of one device

    def _choose(self, device: int, runs: list[tuple[int, int]]) -> tuple[StageChoice, ...] | None:
        key = device, tuple(runs)
        if key not in self._on_device:
            self._on_device[key] = self._share_out(device, runs)
        return self._on_device[key]

    def _share_out(self, device: int, runs: list[tuple[int, int]]) -> tuple[StageChoice, ...] | None:
        """The fastest plans of a device's stages for which the shares can be stretched."""
        memory = self._problem.devices[device].memory_bytes
        places = list(range(device, self._stages, self._devices))
        if memory is None or self._problem.recompute != "rotor":
            found = self._planned(places, runs, [None] * len(runs))
            return found if found is None or memory is None or self._peak(device, found) <= memory else None
        static = [
            self._costs.static_bytes(place, *run) + self._costs.gradient_bytes(*run)
            for place, run in zip(places, runs, strict=True)
        ]
        wants = [
            keep_all(sub_chain(self._problem.chain, *run), self._problem.in_flight[place]).bytes
            for place, run in zip(places, runs, strict=True)
        ]
        best = self._planned(places, runs, _shares(memory, static, wants, 1.0))
        if best is None:  # somebody needs more than in proportion
            static = [self._costs.least_bytes(place, *run) for place, run in zip(places, runs, strict=True)]
            best = self._planned(places, runs, _shares(memory, static, wants, 1.0))
        if best is None:
            return None
        low, high = 1.0, _MOST_STRETCH
        if self._peak(device, best) > memory:  # what lingers needs room as well
            static = [self._costs.least_bytes(place, *run) for place, run in zip(places, runs, strict=True)]
            best = self._planned(places, runs, static)
            if best is None or self._peak(device, best) > memory:
                return None
            low, high = 0.0, 1.0
        for _ in range(_STRETCHES):
            stretch = (low + high) / 2
            found = self._planned(places, runs, _shares(memory, static, wants, stretch))
            if found is not None and self._peak(device, found) <= memory:
                best, low = found, stretch
            else:
                high = stretch
        return best

    def _planned(
        self, places: list[int], runs: list[tuple[int, int]], shares: Sequence[int | None]
    ) -> tuple[StageChoice, ...] | None:
        found = []
        for place, run, share in zip(places, runs, shares, strict=True):
            choice = self._costs.choice(place, *run, share)
            if choice is None:
                return None
            found.append(choice)
        return tuple(found)

    def _peak(self, device: int, choices: tuple[StageChoice, ...]) -> int:
        places = range(device, self._stages, self._devices)
        return device_peak_bytes(
            self._problem.order[device],
            {place: choice.load for place, choice in zip(places, choices, strict=True)},
            micro_batches=self._problem.micro_batches,
            gradients_exist=self._problem.gradients_exist,
            lingering=self._problem.lingering[device] if self._problem.lingering else (),
            results_bytes=self._problem.results_bytes,
        )

    # ---------------------------------------------------------------- where the cuts go

    def _seconds_before(self) -> Reals:
        """Of all stages of the chain before each one, without recomputation."""
        seconds = [
            min(each.forward_seconds + each.backward_seconds for each in stage.options) for stage in self._problem.chain
        ]
        before: Reals = np.concatenate(([0.0], np.cumsum(seconds)))
        return before

    def _start(self) -> Cuts:
        """Parts of about the same duration, at the speed of their devices."""
        before = self._seconds_before()
        speeds = np.array([self._problem.device_of(stage).speed for stage in range(self._stages)])
        marks = np.cumsum(speeds)[:-1] / speeds.sum() * before[-1]
        cuts = [0]
        for stage, mark in enumerate(marks.tolist(), 1):
            nearest = int(np.abs(before - mark).argmin())
            cuts.append(min(max(nearest, cuts[-1] + 1), self._n - (self._stages - stage)))
        return tuple(cuts)

    def _move(self, cuts: Cuts) -> None:
        """Hill climbing."""
        best = self.judge(cuts)
        step = max(self._n // self._stages // 2, 1)
        while step:
            before = best
            for moved in self._moves(cuts, step):
                if len(self._judged) * self._actions > _MOST_ACTIONS:
                    return
                found = self.judge(moved)
                if found[0] < best[0] or (found[0] == best[0] and found[1] < best[1] * (1 - _SAME)):
                    cuts, best = moved, found
                    break
            if best == before:
                step //= 2

    def _moves(self, cuts: Cuts, step: int) -> Iterator[Cuts]:
        """One cut moved, or a cut and all behind it."""
        for stage in range(1, self._stages):
            for by in (step, -step):
                alone = (*cuts[:stage], cuts[stage] + by, *cuts[stage + 1 :])
                together = (*cuts[:stage], *(cut + by for cut in cuts[stage:]))
                for moved in (alone, together):
                    if moved[-1] < self._n and all(left < right for left, right in pairwise(moved)):
                        yield moved

    def _bound(self) -> float:
        m, total = self._problem.micro_batches, float(self._seconds_before()[-1])
        speeds = [device.speed for device in self._problem.devices]
        return max(m * total / sum(speeds), total / max(speeds))


def _shares(memory: int, static: list[int], wants: list[int], stretch: float) -> list[int]:
    """What each stage of a device may use: what it always holds, and its part of the rest."""
    free = max(memory - sum(static), 0)
    return [
        always + int(stretch * free * want / max(sum(wants), 1)) for always, want in zip(static, wants, strict=True)
    ]
