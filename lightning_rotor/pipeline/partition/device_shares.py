"""Several pipeline stages on one device, which share its memory.

How fast one of them is depends on what the others leave, so runs of stages do not cost anything by themselves. Each stage gets a share of
what its device has beside weights, gradients and buffers, in proportion to what it would hold in all its micro-batches in flight if nothing
were recomputed. The shares are added as if all stages were at their worst at once, which they never are; so they are stretched as far as the
device's simulated peak allows.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_rotor.pipeline.partition.in_flight import keep_all, sub_chain
from lightning_rotor.pipeline.partition.problem import Costs, Problem, StageChoice
from lightning_rotor.pipeline.simulator import device_peak_bytes

# How much further shares are stretched, at most, and in how many steps.
_MOST_STRETCH, _STRETCHES = 4.0, 5


class DeviceShares:
    """Plans for all stages of a device.

    Args:
        problem: With several pipeline stages per device.
        costs: Of the problem.
    """

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self._problem, self._costs = problem, costs
        self._known: dict[object, tuple[StageChoice, ...] | None] = {}

    def choices(self, device: int, runs: list[tuple[int, int]]) -> tuple[StageChoice, ...] | None:
        """The fastest plans of a device's stages that were found to fit together, or None if none did."""
        key = device, tuple(runs)
        if key not in self._known:
            self._known[key] = self._share_out(device, runs)
        return self._known[key]

    def _share_out(self, device: int, runs: list[tuple[int, int]]) -> tuple[StageChoice, ...] | None:
        """The fastest plans of a device's stages for which the shares can be stretched."""
        memory = self._problem.devices[device].memory_bytes
        places = list(range(device, self._problem.stages, len(self._problem.devices)))
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
        places = range(device, self._problem.stages, len(self._problem.devices))
        return device_peak_bytes(
            self._problem.order[device],
            {place: choice.load for place, choice in zip(places, choices, strict=True)},
            micro_batches=self._problem.micro_batches,
            gradients_exist=self._problem.gradients_exist,
            lingering=self._problem.lingering[device] if self._problem.lingering else (),
            results_bytes=self._problem.results_bytes,
        )


def _shares(memory: int, static: list[int], wants: list[int], stretch: float) -> list[int]:
    """What each stage of a device may use: what it always holds, and its part of the rest."""
    free = max(memory - sum(static), 0)
    return [
        always + int(stretch * free * want / max(sum(wants), 1)) for always, want in zip(static, wants, strict=True)
    ]
