"""What the other stages of a step do to the one that is timed, and what a segment costs the host among them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from lightning_rotor.profiling.meters import Meter
from lightning_rotor.profiling.timing import typical
from lightning_rotor.recomputation import recomputed

_OPERATIONS_PER_SECOND = 1e11
"""Of a processor's core, roughly."""
_SMALLEST, _LARGEST = 200, 512
_ROUNDS, _RUNS = 9, 2


class Interlude:
    """Stands for the rest of a step between two timed runs.

    A run that is repeated at once finds its code and data in the processor's caches, in a step it seldom does: a segment around next to
    nothing takes 0.3 ms of the host's time at once, and 0.7 ms after 1.2 ms of matrix products (one core of an EPYC). Plans would be made of
    too many short stages and segments. On other devices nothing happens: kernels wait in a queue there, and caches matter less.

    Args:
        device: On which stages are timed.
        seconds: What a stage takes, roughly.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        size = min(int((seconds * _OPERATIONS_PER_SECOND / 2) ** (1 / 3)), _LARGEST)
        runs = device.type == "cpu" and size >= _SMALLEST
        # NumPy's memory: for torch's allocator, measuring a stage takes no more than running it.
        arrays = np.ones((2 if runs else 0, size, size), np.float32)
        self._matrices = [*torch.from_numpy(arrays)]

    def __call__(self) -> None:
        """Let it pass."""
        if self._matrices:
            matrix, product = self._matrices
            torch.mm(matrix, matrix, out=product)


def segment_seconds(device: torch.device, meter: Meter, interlude: Interlude) -> float:
    """Host time of one segment around next to nothing, forward and backward, beyond what it runs."""
    tensor = torch.zeros(1, device=device, requires_grad=True)

    def inside(value: torch.Tensor) -> torch.Tensor:
        return value.tanh().tanh().tanh().tanh()

    def plain() -> torch.Tensor:
        with torch.no_grad():
            inside(tensor)
        return torch.tanh(inside(tensor))

    def run(forward: Callable[[], torch.Tensor]) -> float:
        seconds = 0.0
        for _ in range(_RUNS):
            interlude()
            start = meter.now()
            output = forward()
            seconds += meter.seconds_between(start, meter.now())
            interlude()
            start = meter.now()
            torch.autograd.grad(output, tensor)
            seconds += meter.seconds_between(start, meter.now())
        return seconds / _RUNS

    segmented = partial(recomputed, inside, draws_random=False)

    def with_segment() -> torch.Tensor:
        return torch.tanh(segmented(tensor))

    run(plain), run(with_segment)
    # In turns: what disturbs the machine disturbs both.
    runs = [(run(with_segment), run(plain)) for _ in range(_ROUNDS)]
    with_it, without = map(typical, zip(*runs, strict=True))
    return max(with_it - without, 0.0)
