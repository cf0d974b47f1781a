"""The runtime guard: a few elements of what is dropped, compared with what the inverse rebuilds.

Inverses lose digits: a rounding error each, which grows where a scale is large, and adds up along a run of modules. How far a rebuilt input may
be off depends on the precision that the module computes in, which under autocast is autocast's:

=========  =========  ==============================================================================================
precision  tolerance  beyond it
=========  =========  ==============================================================================================
float64    1e-8       :class:`~lightning_rotor.errors.InverseError`
float32    1e-3       :class:`~lightning_rotor.errors.InverseError`
float16    3e-2       :class:`~lightning_rotor.errors.RotorWarning`: such drift is what this precision has; its user may
                      have chosen it
bfloat16   1e-1       the same
=========  =========  ==============================================================================================

Tolerances are relative to the largest of the sampled elements, with at least 1 in its place: an input near zero is rebuilt as a difference
of larger numbers. A value that is not finite, where the input's was, is an error in every precision.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from lightning_rotor.errors import InverseError, RotorWarning
from lightning_rotor.invertible.protocol import DRAWS

SAMPLES = 8
"""Elements of each tensor that are compared."""

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """Samples of tensors that are about to be dropped.

    Positions are fixed, and the global random number generators are left alone. A few bytes on the device; a comparison there waits for it.

    Attributes:
        name: Of the module that will rebuild the tensors.
        samples: Of each tensor; None for what holds no floating-point numbers.
        precision: What the module computes in.
    """

    name: str
    samples: tuple[torch.Tensor | None, ...]
    precision: torch.dtype

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], *, name: str) -> Guard:
        """Sample some tensors.

        Args:
            tensors: The input of a module, under the autocast that the module runs in.
            name: Of the module.
        """
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        coarsest = max((precision_of(tensor) for tensor in floating), key=tolerance_of, default=torch.float64)
        return cls(name, tuple(_sample(tensor) if tensor.is_floating_point() else None for tensor in tensors), coarsest)

    def check(self, rebuilt: Sequence[torch.Tensor], *, draws_random: bool = False) -> float:
        """Compare what the inverse rebuilt.

        Args:
            rebuilt: As many tensors as were sampled, with their shapes.
            draws_random: The module draws random numbers, which the message then names as a possible reason.
        Returns:
            The largest error in the samples.
        Raises:
            InverseError: It is beyond the tolerance of float32 or float64, or not finite.
        Warns:
            RotorWarning: It is beyond the tolerance of float16 or bfloat16.
        """
        errors = [
            _error_and_scale(sample, _sample(tensor))
            for sample, tensor in zip(self.samples, rebuilt, strict=True)
            if sample is not None and sample.numel()
        ]
        for error, scale in errors:
            tolerance = tolerance_of(self.precision) * max(scale, 1.0)
            if not math.isfinite(error) or (error > tolerance and self.precision not in _LOW_PRECISION):
                message = self._message(error, tolerance, draws_random=draws_random)
                raise InverseError(message, stage=self.name, error=error, tolerance=tolerance)
            if error > tolerance:
                message = self._message(error, tolerance, draws_random=draws_random)
                warnings.warn(message, RotorWarning, stacklevel=2)
        return max((error for error, _ in errors), default=0.0)

    def _message(self, error: float, tolerance: float, *, draws_random: bool) -> str:
        found = "is not finite" if not math.isfinite(error) else f"is off by {error:.2g}"
        remedy = (
            "Keep activations in float32 (autocast does), or run fewer modules in a row without their inputs"
            if self.precision in _LOW_PRECISION
            else "Bound what the inverse divides by (a smaller clamp), use float64, or run fewer modules in a row without their inputs"
        )
        return (
            f"the input of {self.name!r} as rebuilt by its inverse {found}: expected at most {tolerance:.2g} in {_short(self.precision)}, "
            f"judged by {SAMPLES} elements that were noted before it was dropped. {remedy}{f'. {DRAWS}' * draws_random}"
        )


def precision_of(tensor: torch.Tensor) -> torch.dtype:
    """What a module computes in if it takes this tensor: its dtype, or autocast's if that is coarser."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return max(tensor.dtype, torch.get_autocast_dtype(kind), key=tolerance_of)
    return tensor.dtype


def tolerance_of(dtype: torch.dtype) -> float:
    """What a rebuilt input may be off by in some precision, relative to its largest element."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.bfloat16])


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements at fixed positions; a tensor of its own."""
    # Not through a flat view: one of a channels-last tensor is a copy of all of it.
    places = [torch.tensor(place) for place in _places(tensor.shape)]
    detached = tensor.detach()
    return detached[tuple(places)] if places else detached.clone().reshape(min(SAMPLES, tensor.numel()))


@lru_cache(maxsize=256)
def _places(shape: torch.Size) -> tuple[tuple[int, ...], ...]:
    """Where to look, by dimension."""
    # Any regular pattern may fall into few columns of a matrix, that is, into one half of a coupling. The generator is our own.
    size = shape.numel()
    numbers = random.Random(size).sample(range(size), min(SAMPLES, size))
    return tuple(zip(*(_place(number, shape) for number in numbers), strict=True))


def _place(number: int, shape: torch.Size) -> tuple[int, ...]:
    place: list[int] = []
    for size in reversed(shape):
        number, rest = divmod(number, size)
        place.append(rest)
    return tuple(reversed(place))


def _error_and_scale(sample: torch.Tensor, rebuilt: torch.Tensor) -> tuple[float, float]:
    """The largest difference and the largest element; where the sample itself is not finite, nothing is expected."""
    expected, found = sample.double(), rebuilt.double()
    known = torch.isfinite(expected)
    numbers = torch.stack(
        [
            torch.where(known, (found - expected).abs(), 0.0).max(),
            torch.where(known, expected.abs(), 0.0).max(),
        ]
    )
    error, scale = numbers.tolist()  # one wait for the device
    return error, scale


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
