"""A module that nobody has seen run waits for its first call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_rotor.execution.passes import is_recomputing
from lightning_rotor.planned.attachment import inactive
from lightning_rotor.planned.forward import NO_GRAPH
from lightning_rotor.private.torch_names import outside_of_graphs
from lightning_rotor.private.values import tensors_in


class UnseenForward:
    """Stands in the place of the forward of a module that nobody has seen run, until the first step calls it.

    Args:
        found: Told of the first call that trains, before it runs. It may put another forward in this one's place.
    """

    active = True
    compiled = None

    def __init__(self, found: Callable[[], None]) -> None:
        self._found = found

    def __reduce__(self) -> tuple[Any, ...]:
        return inactive, ()

    @partial(outside_of_graphs, reason=NO_GRAPH)
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of the module."""
        trains = module.training and torch.is_grad_enabled() and not is_recomputing()
        if not trains or not _needs_gradients(module, args, kwargs):
            return type(module).forward(module, *args, **kwargs)
        self._found()
        return module.forward(*args, **kwargs)


def _needs_gradients(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if autograd may keep something of a call."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        return True
    return any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
