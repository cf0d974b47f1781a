"""How often to time a run, and what to take for its duration."""

from __future__ import annotations

from collections.abc import Sequence

_ENOUGH_SECONDS = 0.5
"""Long enough for the noise of a busy machine to even out within one run."""
_SHORT_SECONDS = 0.01
"""So little that a single interruption by another process decides what a few runs take."""
_MORE = 3


def is_enough(seconds: Sequence[float], repeats: int) -> bool:
    """Whether runs that took so long have been timed often enough.

    Args:
        seconds: Of each run so far.
        repeats: How often to time one; less often where runs are so long that noise does not matter, and more often where they are so
            short that little else does.
    """
    total = sum(seconds)
    return total >= _ENOUGH_SECONDS or len(seconds) >= (repeats if total >= _SHORT_SECONDS else _MORE * repeats)


def typical(seconds: Sequence[float]) -> float:
    """The duration of a run that was timed several times: the middle of the faster half, for interruptions never make one faster."""
    return max(sorted(seconds)[len(seconds) // 4], 0.0)
