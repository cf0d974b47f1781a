"""Modes, transforms and captures around the running code, and settings that torch shows nowhere in public."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Modes below autograd are documented under this name in torch's notes on extending it.
__all__ = [
    "TorchDispatchMode",
    "attention_order",
    "default_device",
    "float32_precision",
    "function_modes",
    "is_captured",
    "is_transformed",
    "no_dispatch",
    "set_attention_order",
    "set_float32_precision",
    "without_function_mode",
    "without_modes",
]


def default_device() -> torch.device | None:
    """The default device, None where nobody has set one, for which ``torch.get_default_device()`` takes 10 µs."""
    if torch._C._len_torch_function_stack():
        return torch.get_default_device()
    return None


# How float32 is computed in effect, by backend and operation, and what sets it for one of them. Public attributes lead
# there, but ``torch.backends.mkldnn.fp32_precision`` sets that of all backends.
float32_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
set_float32_precision: Callable[[str, str, str], Any] = torch._C._set_fp32_precision_setter


attention_order: Callable[[], list[int]] = torch._C._get_sdp_priority_order
"""The kernels for attention, first choice first. ``sdpa_kernel`` sets them; nothing public reads them."""
set_attention_order: Callable[[list[int]], Any] = torch._C._set_sdp_priority_order
"""Set the order alone. ``sdpa_kernel`` can only do so together with which ones are allowed, and for a time."""


def is_captured() -> bool:
    """True while ``torch.jit.trace``, ``torch.export`` or an ONNX exporter takes the computation down.

    Public are ``torch.jit.is_tracing()``, also True for scripted code, and ``torch.compiler.is_exporting()``, which the
    compiler of torch < 2.13 takes for True in all that it captures.
    """
    return bool(torch._C._get_tracing_state()) or bool(torch.compiler._is_exporting_flag)


function_modes: Callable[[], list[TorchFunctionMode]] = torch.overrides._get_current_function_mode_stack
"""The modes that see calls of torch's functions, innermost last. Modes can be entered in public, but not looked at."""
without_function_mode: Callable[[], AbstractContextManager[Any]] = torch.overrides._pop_mode_temporarily
"""Context without the innermost such mode. A mode steps aside in its own handler, and nowhere else in public."""


@contextmanager
def without_modes() -> Iterator[None]:
    """Context in which no mode and no subclass of tensors sees anything, for looking at a tensor unseen."""
    # The first for subclasses and function modes, the second for modes below autograd.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def is_transformed() -> bool:
    """True inside of ``torch.func``'s transforms (vmap, grad), which say so nowhere in public."""
    return torch._C._functorch.peek_interpreter_stack() is not None
