"""Speeds of a pipeline's devices beside each other, from what each has measured of the same stages."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

# Ratio of durations up to which two devices count as equally fast: equal devices differ by so much.
_ALIKE = 1.15
# Least seconds of all stages: shorter ones end before a process is interrupted once.
_LEAST_SECONDS = 0.02


def speeds_beside_first(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Speeds of processes relative to the first one, from the durations of their stages."""
    if min(map(sum, seconds)) < _LEAST_SECONDS:
        return [1.0] * len(seconds)
    speeds = []
    for own in seconds:
        ratio = _middle_ratio(own, seconds[0])
        is_alike = 1 / _ALIKE < ratio < _ALIKE
        speeds.append(1.0 if is_alike else 1 / ratio)
    return speeds


def _middle_ratio(seconds: Sequence[float], first: Sequence[float]) -> float:
    """Median of ``seconds / first`` over stages, weighted by duration.

    A median, since a single stage that was interrupted would move a mean.
    """
    weighted_ratios = []
    for own, other in zip(seconds, first, strict=True):
        # Stages that take no time say nothing of a device.
        if own > 0 and other > 0:
            weighted_ratios.append((own / other, other))
    if not weighted_ratios:
        return 1.0
    weighted_ratios.sort()
    passed = list(accumulate(weight for _, weight in weighted_ratios))
    ratio, _ = weighted_ratios[bisect_left(passed, passed[-1] / 2)]
    return ratio
