"""Modules that can rebuild their input from their output, and training them without their inputs."""

from lightning_rotor.errors import InverseError
from lightning_rotor.invertible.check import InverseReport, check_inverse
from lightning_rotor.invertible.guard import Guard
from lightning_rotor.invertible.protocol import Invertible, Reversible, has_fused_backward, is_invertible

__all__ = [
    "Guard",
    "InverseError",
    "InverseReport",
    "Invertible",
    "Reversible",
    "check_inverse",
    "has_fused_backward",
    "is_invertible",
]
