"""The runtime guard: a few elements of what is dropped, compared with what the inverse rebuilds."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable

import torch

from lightning_rotor.errors import InverseError, RotorWarning
from lightning_rotor.execution.nested_backward import Tensors
from lightning_rotor.private.autocast import autocast_dtypes
from lightning_rotor.stages.inverses import DRAWS

_SAMPLES = 8
"""Elements of each tensor that are compared."""
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""The largest error of a rebuilt input, relative to its largest element."""
LOW_PRECISION = (torch.float16, torch.bfloat16)
"""Types of numbers for which an error beyond the tolerance is a warning."""


class Guard:
    """Samples of tensors that are about to be dropped, taken under the autocast that ``name``, the module, runs in.

    The global random number generators are left alone. A comparison waits for the device.
    """

    def __init__(self, tensors: Tensors, *, name: str) -> None:
        self._name = name
        self._precision = precision_of(tensors)
        self._samples: list[torch.Tensor | None] = []
        for tensor in tensors:
            sample = None
            if tensor.is_floating_point() and tensor.numel():
                sample = _sample(tensor)
            self._samples.append(sample)

    def check(self, rebuilt: Tensors, *, draws_random: bool) -> None:
        """Raise InverseError where an error is beyond the tolerance, or warn if that is of a low precision."""
        for sample, tensor in zip(self._samples, rebuilt, strict=True):
            if sample is None:
                continue
            error, scale = _error_and_scale(sample, _sample(tensor))
            tolerance = tolerance_of(self._precision) * max(scale, 1.0)
            # Written so that a NaN is not accepted: it compares as false.
            if error <= tolerance:
                continue
            message = self._message(error, tolerance)
            if draws_random:
                message += f". {DRAWS}"
            # In 16 bits an error of a tenth may be what the type allows, and training goes on with it in plain mixed
            # precision, too.
            if self._precision not in LOW_PRECISION or not math.isfinite(error):
                raise InverseError(
                    message,
                    stage=self._name,
                    error=error,
                    tolerance=tolerance,
                )
            warnings.warn(message, RotorWarning, stacklevel=2)

    def _message(self, error: float, tolerance: float) -> str:
        excess = "is not finite"
        if math.isfinite(error):
            excess = f"is off by {error:.2g}"
        precision = str(self._precision).removeprefix("torch.")
        return (
            f"the input of {self._name!r} as rebuilt by its inverse {excess}: expected at most {tolerance:.2g} in "
            f"{precision}, judged by {_SAMPLES} elements that were noted before "
            "it was dropped. Bound what the inverse divides by (a smaller clamp), keep activations in float32 "
            "(autocast does) or float64, or run fewer modules in a row without their inputs"
        )


def precision_of(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The coarsest dtype in which a module computes that takes these tensors, autocast's among them."""
    floating = list(filter(torch.is_floating_point, tensors))
    dtypes = [torch.float64]
    dtypes += [tensor.dtype for tensor in floating]
    dtypes += autocast_dtypes(floating)
    return max(dtypes, key=tolerance_of)


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest error of a rebuilt input in some precision, relative to its largest element."""
    # A type that is not in the table, such as one of 8 bits, is no finer than the coarsest there.
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.bfloat16])


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the elements at fixed positions."""
    # A regular pattern may fall into few columns of a matrix, so into one half of a coupling. The generator is our own.
    size = tensor.numel()
    # The size is the seed, so that both samples of a tensor are of the same positions.
    generator = random.Random(size)
    positions = torch.tensor(generator.sample(range(size), min(_SAMPLES, size)))
    # Not through a flat view, which copies all of a channels-last tensor.
    at_least_1d = tensor.detach().reshape(tensor.shape or (1,))
    return at_least_1d[torch.unravel_index(positions, at_least_1d.shape)]


def _error_and_scale(sample: torch.Tensor, rebuilt: torch.Tensor) -> tuple[float, float]:
    """The largest difference and the largest element; where the sample itself is not finite, nothing is expected."""
    # In 64 bits, as the difference of two numbers of 16 bits may be beyond their range.
    expected = sample.double()
    received = rebuilt.double()
    is_finite = torch.isfinite(expected)
    error = torch.where(is_finite, (received - expected).abs(), 0.0).max()
    scale = torch.where(is_finite, expected.abs(), 0.0).max()
    # One wait for the device.
    error_number, scale_number = torch.stack((error, scale)).tolist()
    return error_number, scale_number
