"""Whether a plan can rely on what a module says of itself: its inverse, and its fused backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_rotor.errors import InverseError
from lightning_rotor.invertible.check import check_inverse
from lightning_rotor.invertible.guard import precision_of, tolerance_of
from lightning_rotor.tensors import is_fake, tensors_in

_RTOL = 1e-4


@dataclass(frozen=True, slots=True)
class Objections:
    """Why not; empty if there is nothing against it.

    Attributes:
        inverse: Against its inverse.
        fused: Against its fused backward alone; empty, too, if it has none.
    """

    inverse: str = ""
    fused: str = ""


def try_inverse(module: nn.Module, value: Any, *, name: str) -> Objections:
    """Try a module's inverse and fused backward with its present parameters.

    Args:
        module: With an inverse.
        value: Its input, under the autocast that it runs in.
        name: Of the module, for messages.
    """
    if any(map(is_fake, tensors_in(value))):
        return Objections("it is only estimated, and whether its inverse is right shows with values")
    precision = max(map(precision_of, tensors_in(value)), key=tolerance_of)
    # Half the digits are half the digits of the inverse, too: what the guard allows there is allowed here.
    rtol = tolerance_of(precision) if precision in (torch.float16, torch.bfloat16) else _RTOL
    try:
        report = check_inverse(module, value, rtol=rtol, name=name)
    except InverseError as error:
        return Objections(str(error))
    if report.shares_memory:
        return Objections("it returns a view of its input, or of a part of it")
    if report.fused_agrees is False:
        return Objections(
            fused=f"its fused backward is not used: it differs from autograd's by {report.fused_error:.2g} of the largest element of a gradient"
        )
    return Objections()
