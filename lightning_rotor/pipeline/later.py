"""A loss for torch's schedules where none is known yet: its backward asks for the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

Gradients: TypeAlias = Callable[[], Sequence[torch.Tensor | None]]


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.gradients()


def gradient_later(outputs: Sequence[torch.Tensor], gradients: Gradients) -> torch.Tensor:
    """A number whose gradients with respect to some outputs are found when they are needed.

    Args:
        outputs: Tensors with a graph.
        gradients: One for each; None is zero.
    """
    found: torch.Tensor = _Later.apply(gradients, *outputs)
    return found
