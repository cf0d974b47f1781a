"""What a prediction says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StatePrediction:
    """Memory that an optimizer will take.

    Attributes:
        bytes: The prediction.
        exact: It is what the allocator will show; otherwise an estimate.
        reason: How it was obtained, in a few words.
    """

    bytes: int
    exact: bool
    reason: str
