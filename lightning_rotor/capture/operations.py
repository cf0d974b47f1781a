"""The operations that a recording meets, as nodes of a graph: how to spell them, and which of them it cannot hold."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lightning_rotor.capture.modules import UntraceableError, hides_code
from lightning_rotor.private.torch_names import OpOverload, OpOverloadPacket
from lightning_rotor.private.values import tree_leaves

METADATA = frozenset(
    name
    for line in (
        "dtype device ndim layout requires_grad names itemsize nbytes is_cuda is_cpu is_xpu is_mps is_meta is_mkldnn is_xla is_hpu",
        "is_ipu is_mtia is_maia is_vulkan is_sparse is_sparse_csr is_quantized is_nested is_floating_point is_complex is_signed is_contiguous",
        "is_same_size is_conj is_neg is_inference is_tensor is_coalesced dim ndimension stride storage_offset",
        "element_size get_device dim_order result_type can_cast promote_types has_names __len__ __hash__ __dir__ _is_view",
    )
    for name in line.split()
)
"""What a call of the same shapes has in common with this one. Reading it makes no node."""

SIZES = frozenset(("shape", "size", "numel", "nelement"))
"""What gives sizes, see :mod:`lightning_rotor.capture.sizes`."""

REFUSED = {
    name: reason
    for reason, line in (
        (
            "it asks for a tensor's memory",
            "data_ptr const_data_ptr storage untyped_storage _typed_storage share_memory_",
        ),
        (
            "it asks for a tensor's memory",
            "numpy __array__ __array_wrap__ __dlpack__ to_dlpack __cuda_array_interface__",
        ),
        ("it asks what autograd knows about a tensor", "grad_fn is_leaf _base _version _cdata output_nr retains_grad"),
        ("it computes or changes gradients by itself", "backward grad _grad retain_grad requires_grad_ detach_ set_"),
        ("it sets a hook on a tensor", "register_hook register_post_accumulate_grad_hook _backward_hooks"),
    )
    for name in line.split()
}
"""Names of what cannot be held, and why."""


def _operators(names: str, prefix: str = "") -> dict[str, Any]:
    """Python's functions for the methods of these names, ``__and__`` and ``__iadd__`` for instance."""
    return {f"__{prefix}{name}__": getattr(operator, f"__{prefix}{name}__") for name in names.split()}


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_IN_ORDER = {
    **_operators(_BINARY),
    **_operators(_BINARY, "i"),
    **_operators("eq ne lt le gt ge neg pos invert abs getitem setitem"),
    "__div__": operator.truediv,
    "__idiv__": operator.itruediv,
}
_SWAPPED = {
    **{f"__r{name}__": getattr(operator, f"__{name}__") for name in _BINARY.split()},
    "__rdiv__": operator.truediv,
}


def name_of(function: Any) -> str:
    """What a function, method or property of a tensor is called."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = function.__self__
        return str(getattr(owner, "__name__", None) or getattr(getattr(owner, "fget", None), "__name__", ""))
    return str(name)


def is_assignment(function: Any) -> bool:
    """True if it sets a property of a tensor, as in ``x.requires_grad = True``."""
    return getattr(function, "__name__", "") in ("__set__", "__delete__")


def spell(function: Any, args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """Kind, target and positional arguments of the node for a call that a ``TorchFunctionMode`` saw."""
    name = name_of(function)
    if getattr(function, "__name__", "") == "__get__":
        return "call_function", getattr, (args[0], name)
    if args and getattr(torch.Tensor, name, None) is function:
        if name in _IN_ORDER:
            return "call_function", _IN_ORDER[name], args
        if name in _SWAPPED:
            return "call_function", _SWAPPED[name], (args[1], args[0])
        if isinstance(args[0], torch.Tensor):
            return "call_method", name, args
    return "call_function", function, args


def is_torchs(function: Any) -> bool:
    """True if an operation is one of torch's own, so that equal values give equal results."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return str(function).startswith(("aten.", "aten::", "prims"))
    module = getattr(function, "__module__", None) or getattr(type(function), "__module__", "")
    return str(module).partition(".")[0] in ("torch", "builtins", "_operator")


def require_recordable(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that a recording can hold an operation.

    Raises:
        UntraceableError: It cannot.
    """
    name = name_of(function)
    if is_assignment(function):
        raise UntraceableError(f"it assigns to the attribute {name!r} of a tensor")
    if name in REFUSED:
        raise UntraceableError(f"{REFUSED[name]} ({name})")
    if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
        raise UntraceableError(f"it draws random numbers from a torch.Generator of its own ({name})")
    if kwargs.get("out") is not None:
        raise UntraceableError(f"it gives {name} a tensor to write to (out=)")


# ----------------------------------------------------------------------------------------------------
# Operations that look like one though they are Python code that does several, between which a plan could choose.


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
    """True if a module is torch's attention, and its code is what runs.

    In evaluation a kernel in C++ may run instead, if nothing asks for gradients.
    """
    return (
        type(module) is nn.MultiheadAttention
        and module.training
        and not any(hides_code(part) for part in module.modules())
    )


def body_of(function: FunctionType) -> Callable[..., Any]:
    """What one of these functions does once nobody else wants to handle the call.

    It begins with the question whether an argument, or a mode, would handle it as a whole. In this copy the answer is no.
    """
    names = {**function.__globals__, **dict.fromkeys(_GATES, _nobody)}
    body = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _nobody(*_: Any) -> bool:
    return False
