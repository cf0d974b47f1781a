"""Symbols that stand for values in a trace, and record what is done to them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lightning_rotor.tracing.kinds import IS_TENSOR
from lightning_rotor.tracing.modules import UntraceableError

if TYPE_CHECKING:
    from lightning_rotor.tracing.tracer import Tracer


class Value(fx.Proxy):
    """A proxy that knows operations in place, which fx turns into others, and has no attributes that a tensor has not."""

    def __getattr__(self, name: str) -> Any:
        if not hasattr(torch.Tensor, name) and self.node.meta.get(IS_TENSOR):
            raise AttributeError(f"a tensor has no attribute {name!r}")
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(torch.Tensor, name):
            raise UntraceableError(f"it sets {name!r} of a tensor")
        super().__setattr__(name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


def _in_place(function: Callable[..., Any]) -> Callable[[Value, Any], Any]:
    def operate(self: Value, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return operate


IN_PLACE = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
)  # fmt: skip
for _function in IN_PLACE:
    setattr(Value, f"__{_function.__name__}__", _in_place(_function))


class Sampled(Value):
    """A value inside of a composite operation, where it is known what it looks like."""

    tracer: Tracer

    def __getattr__(self, name: str) -> Any:
        return self.tracer.look(self.node, name) if name in _TYPES else super().__getattr__(name)

    def __int__(self) -> int:
        return int(self.tracer.decide(self.node))

    def __index__(self) -> int:
        return operator.index(self.tracer.decide(self.node))

    def __float__(self) -> float:
        return float(self.tracer.decide(self.node))

    def __len__(self) -> int:
        return len(self.tracer.decide(self.node))


# What some functions want as it is.
_TYPES = ("dtype", "device", "layout")
