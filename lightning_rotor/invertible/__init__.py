"""Modules that can rebuild their input from their output, and training them without their inputs.

::

    blocks = InvertibleSequential(*(AdditiveCoupling(branch(), branch()) for _ in range(256)))
    check_inverse(blocks[0], x)
    y = invertible_checkpoint(blocks, x)      # holds y; a plain call holds hundreds of activations

``layers`` has the modules and ``invertible_checkpoint``, ``check`` tries an inverse on one input. The runs themselves
are in :mod:`lightning_rotor.execution.inversion`. ``docs/invertible.md`` is the guide.
"""

from lightning_rotor.errors import InverseError
from lightning_rotor.execution.drift_guard import Guard
from lightning_rotor.invertible.check import InverseReport, check_inverse
from lightning_rotor.invertible.layers import (
    AdditiveCoupling,
    AffineCoupling,
    InvertibleConvolution,
    InvertibleSequential,
    invertible_checkpoint,
    reverse,
)
from lightning_rotor.stages.inverses import Invertible, Reversible, has_fused_backward, is_invertible

__all__ = [
    "AdditiveCoupling",
    "AffineCoupling",
    "Guard",
    "InverseError",
    "InverseReport",
    "Invertible",
    "InvertibleConvolution",
    "InvertibleSequential",
    "Reversible",
    "check_inverse",
    "has_fused_backward",
    "invertible_checkpoint",
    "is_invertible",
    "reverse",
]
