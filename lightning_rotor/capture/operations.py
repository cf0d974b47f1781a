"""What a recording meets: submodules, of which some become one operation, and operations; which it cannot hold."""

from __future__ import annotations

import enum
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_rotor.errors import InverseError
from lightning_rotor.private.lightning_names import TRAINERS
from lightning_rotor.private.torch_names import (
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    is_compiler_wrapper,
    packet_of,
    schema_of,
    written_arguments,
)
from lightning_rotor.private.values import address_of, tensors_in, tree_leaves
from lightning_rotor.stages.generators import draws
from lightning_rotor.stages.sequential import has_own_call, is_invertible, runs_members_in_a_row

CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), enum.Enum, slice),
    *(torch.dtype, torch.device, torch.memory_format, torch.Size, FunctionType, BuiltinFunctionType, type),
)
"""Types of arguments and values that a recording takes for granted."""


class UntraceableError(Exception):
    """The code of a module does what a recording cannot hold."""


class ModuleCalls:
    """Follows the calls of submodules while a module is recorded.

    Attributes:
        leaves: Those that were one operation.
        culprit: The innermost module that could not be recorded.
    """

    def __init__(self, root: nn.Module) -> None:
        self.leaves: set[nn.Module] = set()
        self.culprit: nn.Module | None = None
        self._paths: dict[nn.Module, str] = {module: path for path, module in root.named_modules()}
        self._running = [""]

    @property
    def path(self) -> str:
        """Where the module is whose forward is running; empty for the root."""
        return self._running[-1]

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._paths

    def path_of(self, module: nn.Module) -> str:
        """The path of a called module; ``UntraceableError`` if it is no submodule."""
        path = self._paths.get(module)
        if path is None:
            kind = type(module).__name__
            raise UntraceableError(f"{kind} is called but is no submodule, so its parameters are hidden")
        return path

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Context of a submodule's call."""
        self._running.append(self._paths[module])
        try:
            yield
        except InverseError as error:
            if error.stage != type(module).__name__:  # a module inside has said where it is
                raise
            raise error.located(self._paths[module]) from error
        except Exception:
            if self.culprit is None and module not in self.leaves:
                self.culprit = module
            raise
        finally:
            self._running.pop()


def hides_code(module: nn.Module) -> bool:
    """True if calling a module does more than its code says, or its code is not Python's."""
    return (
        has_own_call(module)
        or "parametrizations" in module._modules
        or isinstance(module, torch.jit.ScriptModule)
        or is_compiler_wrapper(module)
    )


def is_invertible_as_a_whole(module: nn.Module) -> bool:
    """True if a module has an inverse, and is no row of modules, each of which may have one of its own."""
    return is_invertible(module) and not (isinstance(module, nn.Sequential) and runs_members_in_a_row(module))


def is_torchs_module(module: nn.Module) -> bool:
    """True if a module's class is torch's own."""
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))


def tensor_slots(root: nn.Module) -> dict[int, tuple[torch.Tensor, str, Any]]:
    """Parameters and buffers by address: their first names, and the module and the name in it."""
    slots: dict[int, tuple[torch.Tensor, str, Any]] = {}
    for path, module in root.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                slots.setdefault(id(tensor), (tensor, f"{path}.{key}" if path else key, (module, key)))
    return slots


def tensor_attributes(root: nn.Module) -> tuple[tuple[nn.Module, str], ...]:
    """Attributes that hold a tensor which is no parameter or buffer: the module, and the name in it."""
    slots = tensor_slots(root)
    return tuple(
        (module, name)
        for module in root.modules()
        for name, value in module.__dict__.items()
        if type(value) is torch.Tensor and id(value) not in slots
    )


class _Hidden:
    """Stands in for a Trainer, whose answers change in every step."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UntraceableError(
            f"it asks the Trainer for {name!r} (as self.global_step, self.current_epoch and self.log do), which is "
            "another in every step"
        )


def hide_trainers(module: nn.Module, is_opaque: Callable[..., bool]) -> None:
    """Put an object without answers in the place of Trainers, for a recording. The caller puts them back."""
    attributes: dict[str, Any] = module.__dict__
    attributes.update({name: _Hidden() for name in TRAINERS if attributes.get(name) is not None})
    for child in module.children():
        if not is_opaque(child):
            hide_trainers(child, is_opaque)


# ----------------------------------------------------------------------------------------------------
# Operations.


def words(*lines: str) -> frozenset[str]:
    """Names, several to a line."""
    return frozenset(" ".join(lines).split())


METADATA = words(
    "dtype device ndim layout requires_grad names itemsize nbytes is_cuda is_cpu is_xpu is_mps is_meta is_mkldnn",
    "is_xla is_hpu is_ipu is_mtia is_maia is_vulkan is_sparse is_sparse_csr is_quantized is_nested is_floating_point",
    "is_complex is_signed is_contiguous is_same_size is_conj is_neg is_inference is_tensor is_coalesced dim",
    "ndimension stride storage_offset element_size get_device dim_order result_type can_cast promote_types has_names",
    "__len__ __hash__ __dir__ _is_view",
)
"""What a call of the same shapes has in common with this one. Reading it makes no node."""

SIZES = words("shape size numel nelement")
"""What gives sizes, see :mod:`lightning_rotor.capture.writer`."""

_MEMORY, _AUTOGRAD = "it asks for a tensor's memory", "it asks what autograd knows about a tensor"
REFUSED = {
    **dict.fromkeys(words("data_ptr const_data_ptr storage untyped_storage _typed_storage share_memory_"), _MEMORY),
    **dict.fromkeys(words("numpy __array__ __array_wrap__ __dlpack__ to_dlpack __cuda_array_interface__"), _MEMORY),
    **dict.fromkeys(words("grad_fn is_leaf _base _version _cdata output_nr retains_grad"), _AUTOGRAD),
    **dict.fromkeys(
        words("backward grad _grad retain_grad requires_grad_ detach_ set_"),
        "it computes or changes gradients by itself",
    ),
    **dict.fromkeys(
        words("register_hook register_post_accumulate_grad_hook _backward_hooks"), "it sets a hook on a tensor"
    ),
}
"""Names of what cannot be held, and why."""


_DIVISIONS = {"__div__": "__truediv__", "__idiv__": "__itruediv__", "__rdiv__": "__rtruediv__"}
"""What older names of operators are called today."""
_OPERATORS = {name: function for name, function in vars(operator).items() if name[:2] == "__" and callable(function)}


def name_of_function(function: Any) -> str:
    """Name of a function, method or property of a tensor."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = function.__self__
        return str(getattr(owner, "__name__", None) or getattr(getattr(owner, "fget", None), "__name__", ""))
    return str(name)


def spell(function: Any, args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """Kind, target and positional arguments of the node for a call that a ``TorchFunctionMode`` saw."""
    name = name_of_function(function)
    if getattr(function, "__name__", "") == "__get__":
        return "call_function", getattr, (args[0], name)
    if args and getattr(torch.Tensor, name, None) is function:
        name = _DIVISIONS.get(name, name)
        if name in _OPERATORS:
            return "call_function", _OPERATORS[name], args
        if name.startswith("__r") and f"__{name[3:]}" in _OPERATORS:
            return "call_function", _OPERATORS[f"__{name[3:]}"], (args[1], args[0])
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


# ----------------------------------------------------------------------------------------------------
# Operations that look like one though they are Python code that does several, between which a plan could choose.


FUNCTIONS: frozenset[Any] = frozenset(
    {F.gumbel_softmax, F.local_response_norm, F.multi_head_attention_forward, F.normalize, F.softsign, F.tanhshrink}
)
"""Functions of torch, written in Python, that save more than one tensor for the backward."""

_GATES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def is_attention(module: nn.Module) -> bool:
    """True if a module is torch's attention and runs its own code, and not a kernel in C++ as in evaluation."""
    return (
        type(module) is nn.MultiheadAttention
        and module.training
        and not any(hides_code(part) for part in module.modules())
    )


def body_of(function: FunctionType) -> Callable[..., Any]:
    """A copy of one of torch's functions that skips the question whether an argument or a mode handles the call."""
    names = {**function.__globals__, **dict.fromkeys(_GATES, lambda *_: False)}
    body = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


# ----------------------------------------------------------------------------------------------------
# What torch computes below Python: code in C++ and scripted functions, which bypass the mode that records.


CHANGES = (
    "it changes a parameter, or another tensor that is no buffer and was there before, or made without any input, in "
    "place"
)
"""Why a forward cannot run again."""


class DispatchCheck(TorchDispatchMode):
    """Sees every operation that torch computes. Flags say what was seen since they were last set to False.

    Attributes:
        inside: How many recorded operations, or modules that are one, are running.
        random: An operation has drawn random numbers; ``accumulates``: one may give other bits when it runs again.
        reads_values: An operation has read values that decide over sizes.
        in_unit: It holds FSDP units, which gather their parameters into memory that was there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0
        self.random = self.accumulates = self.reads_values = False
        self.in_module = self.in_unit = self.is_over = False
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._made: set[StorageWeakRef] = set()
        self._undoable: set[StorageWeakRef] = set()

    @property
    def listens(self) -> bool:
        """True while the recorded code runs, and no operation of it."""
        return not self.inside and not self.is_over

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of an operation that is recorded."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def note_module(self, module: nn.Module) -> None:
        """Note that a module is being made."""
        self._modules[id(module)] = weakref.ref(module)

    def was_there(self, module: nn.Module) -> bool:
        """True if a module is older than the recording."""
        made = self._modules.get(id(module))
        return made is None or made() is not module

    def is_older(self, tensor: torch.Tensor) -> bool:
        """True if no operation of the recording has made a tensor's memory."""
        return not _memories([tensor]) & self._made

    def trust(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the recording change these tensors in place, as they were made for it."""
        self._made.update(_memories(tensors))

    def allow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let modules that are one operation change these; they are put back after the recording."""
        self._undoable.update(_memories(tensors))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at an operation, and run it."""
        kwargs = kwargs or {}
        from_host = func is torch.ops.aten.lift_fresh.default
        if not self.inside:
            if not from_host:
                raise UntraceableError(
                    f"it computes {func} in a way that no recording sees (C++ code, torch.jit.script)"
                )
            with self.aside():
                return func(*args, **kwargs)
        self.random = self.random or draws(func, args, kwargs)
        self.accumulates = self.accumulates or packet_of(func).__name__.rstrip("_") in _ACCUMULATING
        self.reads_values = self.reads_values or _reads_values(func, args)
        if not self.in_unit:
            allowed = self._made | self._undoable if self.in_module else self._made
            if not all(_memories(tensors_in(value)) <= allowed for value in written_arguments(func, args, kwargs)):
                raise UntraceableError(CHANGES)
        result = func(*args, **kwargs)
        if from_host:
            self.trust([result])
        elif _makes_memory(func):
            read = _memories(tensors_in((args, kwargs)))  # aten::_unsafe_view says it makes some
            self._made.update(_memories(tensors_in(result)) - read)
        return result


_ACCUMULATING = words(
    "bincount cumsum cumprod histc index_add index_put _index_put_impl _unsafe_index_put index_reduce kthvalue median",
    "put scatter_add scatter_reduce",
)
"""Operations that add up in any order, on some device, or choose among equals."""


def _memories(tensors: Iterable[torch.Tensor]) -> set[StorageWeakRef]:
    """Keys of the memory under tensors, unequal for any other memory, that keep none alive."""
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if _has_memory(tensor)}


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return bool(address_of(tensor))
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return False


@lru_cache(maxsize=4096)
def _makes_memory(func: Any) -> bool:
    """True if an operation returns nothing that it was given."""
    return not schema_of(func).is_mutable and all(value.alias_info is None for value in schema_of(func).returns)


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """True if values of tensors decide over sizes, or are handed to the host."""
    if func in _INDEXING:  # by numbers: as many as there are
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor)
