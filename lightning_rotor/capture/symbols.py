"""A tracer that would rather leave a module opaque than bake in what may differ at the next call.

``torch.fx`` drops some things without a word: ``x += y`` becomes ``x = x + y``, a ``with torch.no_grad()`` around operations vanishes, the
backward of an ``autograd.Function`` is lost, random decisions are frozen. Here each of them is recorded, or it is an error; the module
whose forward it happened in then becomes one operation of the graph.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from lightning_rotor.capture.checks import Heap
from lightning_rotor.capture.external_state import Surroundings
from lightning_rotor.capture.inlining import (
    IS_TENSOR,
    Known,
    Samples,
    body_of,
    is_attention,
    is_composite,
    is_tensor,
    replaced,
    truthful_isinstance,
)
from lightning_rotor.capture.modules import BLOCKS, Call, ModuleCalls, UntraceableError, tensor_slots, tracing
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import tree_map_only
from lightning_rotor.stages.generators import GeneratorStates

# ----------------------------------------------------------------------------------------------------
# Symbols that stand for values in a trace, and record what is done to them.


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


# ----------------------------------------------------------------------------------------------------
# What has to be another while a forward runs on symbols, because ``torch.fx`` does not see it by itself.


@contextmanager
def patched() -> Iterator[None]:
    """Context in which the tracer sees autograd functions, assignments to buffers, and checks of sizes."""
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.autograd.Function, "apply", _applying))
        stack.enter_context(replaced(nn.Module, "__setattr__", _assigning))
        stack.enter_context(replaced(*private.CHECK, _checking))
        stack.enter_context(replaced(*private.DTYPE_OF_MASK, _telling_dtypes))
        yield


def _applying(original: Any) -> Any:
    """An ``autograd.Function`` takes a proxy for a plain object: its forward would be traced, and its backward be lost."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        function = original.__get__(None, cls)
        tracers = [value.tracer for value in (*args, *kwargs.values()) if isinstance(value, fx.Proxy)]
        if tracers:
            return tracers[0].create_proxy("call_function", function, args, kwargs)
        if _has_proxy(args, kwargs):
            raise UntraceableError("it hands tensors in containers to an autograd.Function")
        return function(*args, **kwargs)

    return classmethod(apply)


def _assigning(original: Any) -> Any:
    """``self.count += 1`` on a buffer: the operation is recorded, and the object stays the same."""

    def assign(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, fx.Proxy) and value.node.target in IN_PLACE:
            changed = value.node.args[0]
            slots = {**self._buffers, **self._parameters}
            if name in slots and isinstance(changed, fx.Node) and changed.op == "get_attr":
                owners: dict[str, tuple[nn.Module, str]] = getattr(value.tracer, "owners", {})
                owner, key = owners.get(str(changed.target), (None, ""))
                if owner is self and key == name:
                    return
        original(self, name, value)

    return assign


def _checking(original: Any) -> Any:
    """It wants a bool, which a symbol turns into where it can."""

    def check(error: Any, condition: Any, message: Any = None) -> None:
        original(error, bool(condition), message)

    return check


def _telling_dtypes(original: Any) -> Any:
    """It asks with isinstance whether a mask is a tensor, and then for its type."""

    def dtype_of(value: Any) -> Any:
        return value.dtype if isinstance(value, fx.Proxy) else original(value)

    return dtype_of


def _has_proxy(*values: Any) -> bool:
    found = False

    def look(value: Any) -> Any:
        nonlocal found
        found = found or isinstance(value, fx.Proxy)
        return value

    fx.node.map_aggregate(values, look)
    return found


# ----------------------------------------------------------------------------------------------------


CONSTANT = "_lightning_rotor_constant_"


class Tracer(fx.Tracer):
    """Traces one call of a module.

    Attributes:
        constants: Tensors that the forward made out of nothing, in the order of their ``get_attr`` nodes.
        owners: For each name of a ``get_attr`` node, the module that has the tensor and its name there.
        calls: Which modules became one operation, and which one's forward could not be traced.
        surroundings: What the code read outside of modules.

    Args:
        root: The module.
        call: Its arguments.
        opaque: Modules whose code was found to be untraceable.
        opaque_types: Types of which the same is taken for granted.
        not_whole: Modules that are traced through although they have an inverse.
        samples: Arguments of the composite operations that are traced through; without it they are one operation each.
    """

    proxy_buffer_attributes = True

    def __init__(
        self,
        root: nn.Module,
        call: Call,
        opaque: set[nn.Module],
        opaque_types: set[type],
        samples: Samples | None = None,
        *,
        heap: Heap,
        not_whole: Set[nn.Module] = frozenset(),
    ) -> None:
        super().__init__()
        self.constants: list[torch.Tensor] = []
        self.calls = ModuleCalls(root, opaque, opaque_types, not_whole)
        self._samples = samples
        self._known: Known | None = None
        self._call = call
        self._heap = heap
        self.owners, named = tensor_slots(root)
        self._tensor_names = {address: name for address, (_, name) in named.items()}
        self._examples = {name: tensor for tensor, name in named.values()}
        self.surroundings = Surroundings(lambda: self.calls.path, heap.closures)
        self._ambient = ambient()
        self._thread = threading.get_ident()

    def record(self, root: nn.Module) -> fx.Graph:
        """Trace the root's forward."""
        with patched(), truthful_isinstance(self._examples), self.surroundings.listening(), tracing():
            return self.trace(root)

    # ---------------------------------------------------------------- what fx asks

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A value of the graph."""
        if self._known is None:
            return Value(node, self)
        self._known.add(node)
        return Sampled(node, self)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Placeholders for the tensors alone: a proxy in the place of None would not be None."""
        inputs = [
            self.create_proxy("placeholder", f"input_{index}", (), {}) for index in range(len(self._call.tensors))
        ]
        args, kwargs = self._call.with_tensors([inputs[first] for first in self._call.firsts])

        def forward() -> Any:
            output = root_fn(self.root, *args, **kwargs)
            _require_known_containers(output)
            return output

        return forward, []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one operation."""
        return self.calls.is_opaque(m) or (type(m) not in BLOCKS and super().is_leaf_module(m, module_qualified_name))

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a call, or trace through it and see that it draws nothing."""
        if threading.get_ident() != self._thread:  # fx shows the calls of all threads
            return forward(*args, **kwargs)
        path = self.calls.path_of(m)
        with self.calls.inside(m):
            if self.is_leaf_module(m, path):
                if is_attention(m) and self._goes_inside():
                    return self._inside(forward, args, kwargs)
                self.calls.leaves.add(m)
                return self.create_proxy("call_module", path, args, kwargs)
            before = GeneratorStates()
            output = forward(*args, **kwargs)
            if not before.equals(GeneratorStates()):
                raise UntraceableError("it draws random numbers that do not depend on its input")
            return output

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Proxy:
        """Record an operation, or go through its code."""
        if kind == "call_function" and is_composite(target):
            if self._known is not None:
                return body_of(target)(*args, **kwargs)  # type: ignore[no-any-return]
            if self._goes_inside():
                return self._inside(body_of(target), args, kwargs)  # type: ignore[no-any-return]
        return super().create_proxy(kind, target, args, kwargs, *rest, **options)

    def create_node(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        """Record an operation with the module that it belongs to."""
        if kind not in ("placeholder", "get_attr", "output") and ambient() != self._ambient:
            raise UntraceableError(
                "it computes inside of a context (no_grad, autocast, torch's checkpoint), which a trace would lose"
            )
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.meta["module"] = self.calls.path
        node.meta[IS_TENSOR] = is_tensor(node, self.calls.modules)
        return node

    # ---------------------------------------------------------------- inside of composite operations

    def again(self, samples: Samples) -> Tracer:
        """A tracer for the same call that goes through the code of composite operations."""
        calls = self.calls
        return Tracer(calls.root, self._call, *calls.opaque, samples, heap=self._heap, not_whole=calls.not_whole)

    @property
    def failed(self) -> int | None:
        """Which composite operation could not be traced through."""
        return self._samples.failed if self._samples is not None else None

    def _goes_inside(self) -> bool:
        return self._known is None and self._samples is not None and self._samples.next_is_given()

    def _inside(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._samples is not None
        with self._samples.taken() as sample:
            self._known = Known(sample, (args, kwargs), self._tensor)
            sampled: dict[int, Sampled] = {}  # the same object where it was the same
            try:
                args, kwargs = tree_map_only(
                    fx.Proxy, lambda value: sampled.setdefault(id(value), Sampled(value.node, self)), (args, kwargs)
                )
                output = function(*args, **kwargs)
                self._known.erase_unused(self.graph, output)
                return output
            finally:
                self._known = None

    def _tensor(self, name: str) -> torch.Tensor:
        if name.startswith(CONSTANT):
            return self.constants[int(name[len(CONSTANT) :])]
        owner, key = self.owners[name]
        tensor: torch.Tensor = {**owner.__dict__, **owner._buffers, **owner._parameters}[key]
        return tensor

    def decide(self, node: fx.Node) -> Any:
        """What the code is about to depend on, from the sample; if it is about sizes, the graph will see that it still is so."""
        if self._known is None or node not in self._known:
            raise fx.proxy.TraceError("symbolically traced variables cannot be used as inputs to control flow")
        value = self._known[node]
        if self._known.is_of_sizes(node):
            same = self.create_proxy("call_function", operator.eq, (fx.Proxy(node, self), value), {})
            message = f"this call was traced for {node.name} = {value}, which depends on the sizes of its inputs"
            self.create_proxy("call_function", private.ASSERT, (same, message), {})
        return value

    def look(self, node: fx.Node, name: str) -> Any:
        """A type, from the sample."""
        if self._known is None or node not in self._known:
            raise fx.proxy.TraceError(f"the {name} of a value decides outside of the operation that made it")
        return getattr(self._known[node], name)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Take a decision, where it is known what a value looks like."""
        return bool(self.decide(obj.node))

    def create_arg(self, a: Any) -> Any:
        """What an operation reads: for tensors that are no values of the graph, by name."""
        if isinstance(a, torch.Tensor):
            name = self._tensor_names.get(id(a))
            if name is None:
                if a.requires_grad:
                    raise UntraceableError("it computes with parameters that it keeps elsewhere than in attributes")
                name = f"{CONSTANT}{len(self.constants)}"
                self._tensor_names[id(a)] = name
                self.constants.append(a)
            return self.create_node("get_attr", name, (), {})
        if isinstance(a, nn.Module):
            raise UntraceableError(
                f"it hands the module {type(a).__name__} to a function, where its parameters are hidden"
            )
        return super().create_arg(a)

    def _module_getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        name = self._tensor_names.get(id(attr_val)) if isinstance(attr_val, torch.Tensor) else None
        if name is None or threading.get_ident() != self._thread:
            return attr_val
        key = name if self._known is None else f"{name} {id(self._known)}"
        if key not in parameter_proxy_cache:
            parameter_proxy_cache[key] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[key]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Parameters and buffers are values of the graph, read anew by every stage."""
        return self._module_getattr(attr, attr_val, parameter_proxy_cache)


# -------------------------------------------------------------------- what surrounds an operation


def ambient() -> tuple[Any, ...]:
    """Settings that change what an operation computes or saves, and that code can switch for a few lines."""
    hooks = private.hooks_for_saved_tensors()
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        *((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")),
        None if not hooks else tuple(map(id, hooks)),
    )


# -------------------------------------------------------------------- what fx does not see by itself


def _require_known_containers(output: Any) -> None:
    """Refuse to return what fx would turn into a plain dict, list or tuple: ``ModelOutput`` of transformers, for instance."""
    kind = type(output)
    if not issubclass(kind, (dict, list, tuple)):
        return
    if kind not in (dict, list, tuple) and not hasattr(kind, "_fields"):
        raise UntraceableError(f"it returns {kind.__name__}, which a trace would not make again")
    for entry in output.values() if isinstance(output, dict) else output:
        _require_known_containers(entry)
