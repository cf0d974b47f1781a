"""Private names of torch, read in 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import Node

# -------------------------------------------------------------------- a running backward


def backward_number() -> int | None:
    """Number of the backward that runs in this thread, None outside of one.

    torch's own ``register_multi_grad_hook`` tells backwards apart by it; there is no public question.
    """
    number: int = torch._C._current_graph_task_id()
    return None if number == -1 else number


def backward_keeps_graph() -> bool:
    """True if the running backward was called with ``retain_graph=True``. Only the caller knows it otherwise."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def backward_reaches(node: Node) -> bool:
    """True if the running backward will execute a node of its graph. Public hooks tell it when it is too late."""
    return bool(torch._C._will_engine_execute_node(node))


def hooks_for_saved_tensors() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost hooks of ``torch.autograd.graph.saved_tensors_hooks``, which can be set but not read in public. None without any."""
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = torch._C._autograd._top_saved_tensors_default_hooks(
        True
    )
    return hooks or None


# -------------------------------------------------------------------- settings


def default_device() -> torch.device | None:
    """What ``torch.get_default_device()`` returns, None where nobody has set one. The public function takes 10 µs to say so."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


# How float32 is computed in effect (``"ieee"``, ``"tf32"``, ``"bf16"`` or ``"none"``), by backend and operation: what is set for the operation, its
# backend or torch as a whole; and what sets it for one of them. Public attributes lead there, but ``torch.backends.mkldnn.fp32_precision`` sets
# that of all backends. Without functions around them, since each recomputed segment asks eleven times.
float32_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
set_float32_precision: Callable[[str, str, str], Any] = torch._C._set_fp32_precision_setter


def attention_order() -> list[int]:
    """The kernels for attention, first choice first. ``sdpa_kernel(..., set_priority=True)`` sets it; nothing public reads it."""
    order: list[int] = torch._C._get_sdp_priority_order()
    return order


def set_attention_order(order: list[int]) -> None:
    """Set the order alone. ``sdpa_kernel`` can only do so together with which ones are allowed, and for a time."""
    torch._C._set_sdp_priority_order(order)


# -------------------------------------------------------------------- capture for another runtime


def is_captured() -> bool:
    """True while ``torch.jit.trace``, ``torch.export`` or an ONNX exporter takes the computation down.

    Public are ``torch.jit.is_tracing()``, which is about scripted code as well, and ``torch.compiler.is_exporting()``, which the compiler of
    torch < 2.13 takes for True in all that it captures. It reads the flag behind it as it is.
    """
    return bool(torch._C._get_tracing_state()) or bool(torch.compiler._is_exporting_flag)


# -------------------------------------------------------------------- what a symbolic trace stands in for, as module and name there

CHECK = (torch, "_check_with")
"""What ``torch._check`` and its kin call, with the error, the condition and a message. A symbol for a condition must become a bool before."""
DTYPE_OF_MASK = (F, "_none_or_dtype")
"""What ``multi_head_attention_forward`` asks for the dtype of a mask. It takes a symbol for something that is no mask."""
