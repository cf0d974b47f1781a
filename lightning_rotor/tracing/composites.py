"""Operations that look like one though they are Python code that does several, between which a plan could choose.

``nn.MultiheadAttention`` and torch's function behind it, and functions that a library has hidden from traces with ``torch.fx.wrap`` (the
attention of torchvision's Swin), project, attend and project again, and save a tensor for the backward at each step. Traces and recordings
go through their code as through the user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import nn

from lightning_rotor.tracing.modules import hides_code

FUNCTIONS: frozenset[Any] = frozenset(
    {
        F.gumbel_softmax,
        F.local_response_norm,
        F.multi_head_attention_forward,
        F.normalize,
        F.softsign,
        F.tanhshrink,
    }
)
"""Functions of torch, written in Python, that save more than one tensor for the backward. The others are one operation in the end."""

_GATES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def is_attention(module: nn.Module) -> bool:
    """Whether a module is torch's attention, and its code is what runs.

    In evaluation a kernel in C++ may run instead, if nothing asks for gradients.
    """
    return (
        type(module) is nn.MultiheadAttention
        and module.training
        and not any(hides_code(part) for part in module.modules())
    )


def is_composite(function: Any) -> bool:
    """Whether a function is Python code that may do several things: one of torch's, or one that is not torch's."""
    return isinstance(function, FunctionType) and (
        function in FUNCTIONS or str(function.__module__).partition(".")[0] != "torch"
    )


def body_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a function does once nobody else wants to handle the call.

    Functions of torch begin with the question whether an argument, or a mode, would handle them as a whole. In this copy the answer is no; the
    operations inside ask for themselves.
    """
    if function not in FUNCTIONS:
        return function
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, **dict.fromkeys(_GATES, _nobody)}
    body = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _nobody(*_: Any) -> bool:
    return False
