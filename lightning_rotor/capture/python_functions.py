"""Functions of torch that look like one operation, though they are Python code that does several.

A plan can choose between these. So the recorder runs a copy of their code, and sees the operations inside.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import nn

from lightning_rotor.capture.module_calls import hides_code

FUNCTIONS: frozenset[Any] = frozenset(
    {F.gumbel_softmax, F.local_response_norm, F.multi_head_attention_forward, F.normalize, F.softsign, F.tanhshrink}
)
"""Functions of torch, written in Python, that save more than one tensor for the backward."""

_GATES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
"""Names under which these functions ask whether an argument or a mode handles the call."""


def is_attention(module: nn.Module) -> bool:
    """True if a module is torch's attention and runs its own code."""
    # In evaluation it runs a kernel in C++ instead, in which no operation can be seen.
    if type(module) is not nn.MultiheadAttention or not module.training:
        return False
    return not any(map(hides_code, module.modules()))


def body_of(function: FunctionType) -> Callable[..., Any]:
    """A copy of one of torch's functions that skips the question whether an argument or a mode handles the call."""
    # The question would hand the call back to the recorder, for ever.
    # In a copy of its globals, as other code of torch's must go on asking.
    names = function.__globals__ | dict.fromkeys(_GATES, _never)
    body = FunctionType(
        function.__code__,
        names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _never(*_: object) -> bool:
    return False
