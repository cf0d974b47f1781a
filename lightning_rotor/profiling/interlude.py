"""What the other stages of a step do to the one that is timed."""

from __future__ import annotations

import torch

_OPERATIONS_PER_SECOND = 1e11
"""Of a processor's core, roughly."""
_SMALLEST, _LARGEST = 200, 512


class Interlude:
    """Stands for the rest of a step between two timed runs.

    A run that is repeated at once finds its code and data in the processor's caches, in a step it seldom does: a segment around next to
    nothing takes 0.1 ms of the host's time by itself, and 0.7 ms after 1.2 ms of matrix products (one core of an EPYC with 2 MiB of L2
    cache). Plans would be made of too many short stages and segments. On other devices nothing happens: kernels wait in a queue there, and
    caches matter less.

    Args:
        device: On which stages are timed.
        seconds: What a stage takes, roughly.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        size = min(int((seconds * _OPERATIONS_PER_SECOND / 2) ** (1 / 3)), _LARGEST)
        self._matrix = torch.ones(size, size) if device.type == "cpu" and size >= _SMALLEST else None

    def __call__(self) -> None:
        """Let it pass."""
        if self._matrix is not None:
            with torch.no_grad():
                self._matrix.mm(self._matrix)
