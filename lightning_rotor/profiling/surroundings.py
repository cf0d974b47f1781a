"""What FSDP units in a stage cost beyond the stage.

A stage is measured with its units gathered all the time: by itself it must not communicate, for that would tell FSDP of forwards and
backwards that are none. What happens around its forward and backward is known from the sizes of the messages
(:mod:`lightning_rotor.stages.sharding` has a picture of it) and added here. What overlaps with the stages before and after it is not a stage's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from lightning_rotor.chain import Option, StageCost
from lightning_rotor.execution.recomputation import recomputed
from lightning_rotor.profiling.meters import Meter
from lightning_rotor.profiling.stage import StageMeasurement, typical
from lightning_rotor.stages.sharding import UnitSizes


def with_units(measurement: StageMeasurement, sizes: UnitSizes, gathering_seconds: float) -> StageMeasurement:
    """Add what units take and leave.

    Args:
        measurement: Of the stage with its units gathered.
        sizes: Of its units together: those inside of one unit count as if all were there at once.
        gathering_seconds: How long their parameters take to arrive.
    """
    if not sizes.gathered_bytes:
        return measurement
    return replace(
        measurement,
        cost=_with_units(measurement.cost, sizes, gathering_seconds),
    )


def _with_units(cost: StageCost, sizes: UnitSizes, seconds: float) -> StageCost:
    return replace(
        cost,
        discard_peak_bytes=cost.discard_peak_bytes + 2 * sizes.gathered_bytes,
        discard_seconds=cost.discard_seconds + seconds,
        options=tuple(_option(option, sizes, seconds) for option in cost.options),
    )


def _option(option: Option, sizes: UnitSizes, seconds: float) -> Option:
    gathered = sizes.gathered_bytes
    left_bytes = option.parameter_gradient_bytes - min(option.parameter_gradient_bytes, sizes.gradient_bytes)
    # Parameters and what was saved go when the gradients are complete, then these are copied into a message, whose shard comes back.
    sent_bytes = option.input_gradient_bytes + option.parameter_gradient_bytes + sizes.reduced_bytes
    sent_bytes += max(0, sizes.shard_bytes - sizes.gradient_bytes) - option.saved_bytes

    def backward(peak_bytes: int) -> int:
        return max(peak_bytes + gathered, sent_bytes)

    return replace(
        option,
        forward_peak_bytes=option.forward_peak_bytes + 2 * gathered,
        # The last stage of a segment is recomputed in its backward, which has gathered it already: there its replay takes no more.
        unpack_peak_bytes=option.unpack_peak_bytes + 2 * gathered,
        unpack_bytes=option.unpack_bytes + gathered,
        backward_peak_bytes=backward(option.backward_peak_bytes),
        backward_segment_peak_bytes=backward(option.backward_segment_peak_bytes),
        backward_held_peak_bytes=backward(option.backward_held_peak_bytes),
        backward_replayed_peak_bytes=None,
        accumulating=None,  # gradients pile up until they are sent, whatever is there from before
        parameter_gradient_bytes=left_bytes + sizes.shard_bytes,
        forward_seconds=option.forward_seconds + seconds,
        backward_seconds=option.backward_seconds + seconds,
    )


# ----------------------------------------------------------------------------------------------------
# What the other stages of a step do to the one that is timed, and what a segment costs the host among them.


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
