"""Functional collectives: messages whose results arrive later, read in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lightning_rotor.private.operators import OpOverload, OpOverloadPacket, packet_of
from lightning_rotor.private.values import tensors_in

NOT_ARRIVED = (
    "it returns the result of a functional collective, which may not have arrived yet: expected it to wait, with "
    "result.wait()"
)
"""Why such a tensor can be no value between operations or stages."""


def is_functional(function: Any) -> bool:
    """True for a functional collective, which returns before its result is there, and for what hands that on."""
    return isinstance(function, (OpOverload, OpOverloadPacket)) and "c10d_functional" in str(function)


@cache
def arrived(function: Any) -> Callable[..., Any]:
    """A functional collective that waits for its result, which is then a tensor like any other."""
    packet = packet_of(function) if isinstance(function, OpOverload) else function
    name = packet.__name__
    # It wraps a result into a tensor that waits when it is used.
    if name.startswith("_wrap_tensor"):
        return _itself

    def awaited(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for tensor in tensors_in(result):
            torch.ops._c10d_functional.wait_tensor(tensor.detach())
        return result

    # Messages, and the names of nodes in a graph, ask for it.
    awaited.__name__ = name
    return awaited


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def is_on_its_way(tensor: Any) -> bool:
    """True for what functional collectives hand out: a tensor that waits for a message when it is used."""
    # By name: the class is behind an import of torch.distributed.
    return type(tensor).__name__ == "AsyncCollectiveTensor"


def wait_for(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that one on its way stands for, once its message has arrived; gradients go back through it."""
    waited: torch.Tensor = _Arrival.apply(tensor)
    return waited


def waited_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments, with those on their way replaced by what has arrived."""
    # Asked at each call. Nothing is looked for in containers: modules under tensor parallelism return single tensors.
    if not any(map(is_on_its_way, args)) and not any(map(is_on_its_way, kwargs.values())):
        return args, kwargs
    return tuple(map(_waited, args)), {name: _waited(value) for name, value in kwargs.items()}


def _waited(value: Any) -> Any:
    return wait_for(value) if is_on_its_way(value) else value


class _Arrival(torch.autograd.Function):
    """Waits. The tensor's own ``wait()`` cuts it off its graph, and what else waits makes a copy of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        waited: torch.Tensor = tensor.wait() if is_on_its_way(tensor) else tensor.view_as(tensor)
        return waited

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]
