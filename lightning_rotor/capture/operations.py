"""Operations on tensors that a recording meets: how each becomes a node, and which of them none can hold."""

from __future__ import annotations

import enum
import operator
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from lightning_rotor.private.torch_names import OpOverload, OpOverloadPacket
from lightning_rotor.private.values import tree_leaves

CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), enum.Enum, slice),
    *(torch.dtype, torch.device, torch.memory_format, torch.Size, FunctionType, BuiltinFunctionType, type),
)
"""Types of arguments and values that a recording takes for granted."""


class UntraceableError(Exception):
    """The code of a module does what a recording cannot hold."""


def words(*lines: str) -> frozenset[str]:
    """Names, several to a line."""
    return frozenset(" ".join(lines).split())


# Not here: ``is_leaf``, ``grad_fn`` and the like, which differ between the recording and a call that runs by stages.
METADATA = words(
    "dtype device ndim layout requires_grad names itemsize nbytes is_cuda is_cpu is_xpu is_mps is_meta is_mkldnn",
    "is_xla is_hpu is_ipu is_mtia is_maia is_vulkan is_sparse is_sparse_csr is_quantized is_nested is_floating_point",
    "is_complex is_signed is_contiguous is_same_size is_conj is_neg is_inference is_tensor is_coalesced dim",
    "ndimension stride storage_offset element_size get_device dim_order result_type can_cast promote_types has_names",
    "__len__ __hash__ __dir__ _is_view",
)
"""Names of facts that all calls of the same shapes have in common. Reading one makes no node."""

SIZES = words("shape size numel nelement")
"""Names of functions that give sizes, see :mod:`lightning_rotor.capture.traced_numbers`."""

_MEMORY = "it asks for a tensor's memory"
_AUTOGRAD = "it asks what autograd knows about a tensor"
_GRADIENTS = "it computes or changes gradients by itself"
_HOOKS = "it sets a hook on a tensor"
REFUSED = {
    **dict.fromkeys(words("data_ptr const_data_ptr storage untyped_storage _typed_storage share_memory_"), _MEMORY),
    **dict.fromkeys(words("numpy __array__ __array_wrap__ __dlpack__ to_dlpack __cuda_array_interface__"), _MEMORY),
    **dict.fromkeys(words("grad_fn is_leaf _base _version _cdata output_nr retains_grad"), _AUTOGRAD),
    **dict.fromkeys(words("backward grad _grad retain_grad requires_grad_ detach_ set_"), _GRADIENTS),
    **dict.fromkeys(words("register_hook register_post_accumulate_grad_hook _backward_hooks"), _HOOKS),
}
"""Names of operations that no recording holds, each with the reason."""

_DIVISIONS = {"__div__": "__truediv__", "__idiv__": "__itruediv__", "__rdiv__": "__rtruediv__"}
"""Names that tensors have for division from Python 2, and those of today."""
_OPERATORS = {name: function for name, function in vars(operator).items() if name[:2] == "__" and callable(function)}


def name_of_function(function: Any) -> str:
    """Name of a function, method or property of a tensor."""
    name = getattr(function, "__name__", "")
    if name not in ("__get__", "__set__", "__delete__"):
        return str(name)
    # A property comes as the bound method of its descriptor, which is C's or Python's.
    descriptor = function.__self__
    getter = getattr(descriptor, "fget", None)
    return str(getattr(descriptor, "__name__", None) or getattr(getter, "__name__", ""))


def node_parts(function: Any, args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """Kind, target and positional arguments of the graph's node for a call that a ``TorchFunctionMode`` saw."""
    name = name_of_function(function)
    if getattr(function, "__name__", "") == "__get__":
        return "call_function", getattr, (args[0], name)
    is_method = bool(args) and getattr(torch.Tensor, name, None) is function
    if not is_method:
        return "call_function", function, args
    name = _DIVISIONS.get(name, name)
    if name in _OPERATORS:
        return "call_function", _OPERATORS[name], args
    # ``2 - x`` comes as x.__rsub__(2). As sub(2, x) it is Python's own operator again.
    forward_name = f"__{name[3:]}"
    if name.startswith("__r") and forward_name in _OPERATORS:
        return "call_function", _OPERATORS[forward_name], (args[1], args[0])
    if isinstance(args[0], torch.Tensor):
        return "call_method", name, args
    # A method of tensors, called on something else, as torch.Tensor.add(2, x).
    return "call_function", function, args


def is_torchs(function: Any) -> bool:
    """True if an operation is one of torch's own, so that equal values give equal results."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return str(function).startswith(("aten.", "aten::", "prims"))
    # Methods of C have no module of their own, and their type is a built-in one.
    module = getattr(function, "__module__", None) or getattr(type(function), "__module__", "")
    return str(module).partition(".")[0] in ("torch", "builtins", "_operator")


def require_recordable(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise ``UntraceableError`` if a recording cannot hold an operation."""
    name = name_of_function(function)
    if getattr(function, "__name__", "") in ("__set__", "__delete__"):
        raise UntraceableError(f"it assigns to the attribute {name!r} of a tensor")
    if name in REFUSED:
        raise UntraceableError(f"{REFUSED[name]} ({name})")
    if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
        raise UntraceableError(f"it draws random numbers from a torch.Generator of its own ({name})")
    if kwargs.get("out") is not None:
        raise UntraceableError(f"it gives {name} a tensor to write to (out=)")
