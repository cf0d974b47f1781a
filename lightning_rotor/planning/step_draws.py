"""Steps whose size is a draw: layers skipped at random, experts, lengths inside of data."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from lightning_rotor.planning.plan import Plan

# Peaks under the same plans that differ by less, as a share of them, are equal. With several processes, threads keep
# what they have sent for a moment, longer in one step than in another.
_UNLIKE, _UNLIKE_BY_THREADS = 0.003, 0.1
# After so many steps that have not exceeded all before, half as many are measured; at least one in so many.
_CALM_STEPS, _MOST_APART = 64, 64
# Sets of plans.
_MOST_FOLLOWED = 64
# Draws that leave so many times their spread free are not looked for. On a GPU no two steps of a convolutional network
# have the same peak, and watching all of them took 2 ms of 10.
_ROOM = 8


@dataclass(frozen=True, slots=True)
class _Peaks:
    """The lowest and the highest peak of steps under the same plans, in bytes.

    It holds the plans themselves, since numbers of objects that are gone are given to others.
    """

    plans: tuple[Plan, ...]
    least_bytes: int
    most_bytes: int


class Draws:
    """Knows steps whose peaks differ under the same plans.

    One measurement says little of those, so all of them are measured, until none has taken more than all before for
    long; then every second one, and so on.
    """

    def __init__(self) -> None:
        self._peaks: dict[tuple[Any, ...], _Peaks] = {}
        self._calm_steps = 0
        self._leave_room = False
        self.are_seen = False

    @property
    def spread_bytes(self) -> int:
        """Bytes by which steps under the same plans have differed: a draw may take so much more than all before."""
        if not self.are_seen:
            return 0
        return max((peaks.most_bytes - peaks.least_bytes for peaks in self._peaks.values()), default=0)

    def is_due(self, number: int) -> bool:
        """True if the step of this number is to be measured."""
        if not self.are_seen or self._leave_room:
            return False
        apart = min(1 << (self._calm_steps // _CALM_STEPS), _MOST_APART)
        return number % apart == 0

    def learn(
        self,
        plans: Iterable[Plan],
        peak_bytes: int,
        limit_bytes: int,
        *,
        sizes: Hashable = None,
        processes: int = 1,
    ) -> None:
        """A step under plans has had a peak; of other ``sizes``, another one is no draw."""
        unlike = _UNLIKE if processes == 1 else _UNLIKE_BY_THREADS
        unique = {id(plan): plan for plan in plans}
        key = (*sorted(unique), sizes)
        before = self._peaks.pop(key, None) or _Peaks((), peak_bytes, peak_bytes)
        is_alike = (1 - unlike) * before.most_bytes <= peak_bytes <= (1 + unlike) * before.least_bytes
        self.are_seen = self.are_seen or not is_alike
        has_grown = peak_bytes > limit_bytes or peak_bytes > before.most_bytes * (1 + unlike)
        self._calm_steps = 0 if has_grown else self._calm_steps + 1
        least_bytes, most_bytes = min(peak_bytes, before.least_bytes), max(peak_bytes, before.most_bytes)
        self._peaks[key] = _Peaks(tuple(unique.values()), least_bytes, most_bytes)
        for oldest in list(self._peaks)[:-_MOST_FOLLOWED]:
            del self._peaks[oldest]
        highest_bytes = max(peaks.most_bytes for peaks in self._peaks.values())
        self._leave_room = highest_bytes + _ROOM * self.spread_bytes <= limit_bytes


_FIRST_SAMPLE, _SAMPLES_APART = 8, 1024


def is_sample_step(number: int) -> bool:
    """True of steps that are measured in any case, 8, 16, 32 …: some optimizers, data and models grow as they go on."""
    is_power_of_two = number.bit_count() == 1
    return number % _SAMPLES_APART == 0 or (number >= _FIRST_SAMPLE and is_power_of_two)
