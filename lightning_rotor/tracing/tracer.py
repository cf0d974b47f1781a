"""A tracer that would rather leave a module opaque than bake in what may differ at the next call.

``torch.fx`` drops some things without a word: ``x += y`` becomes ``x = x + y``, a ``with torch.no_grad()`` around operations vanishes, the
backward of an ``autograd.Function`` is lost, random decisions are frozen. Here each of them is recorded, or it is an error; the module
whose forward it happened in then becomes one operation of the graph.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import fx, nn

from lightning_rotor.generators import GeneratorStates
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.pytree import tree_map_only
from lightning_rotor.tracing.call import Call
from lightning_rotor.tracing.composites import body_of, is_attention, is_composite
from lightning_rotor.tracing.heap import Heap
from lightning_rotor.tracing.kinds import IS_TENSOR, is_tensor, truthful_isinstance
from lightning_rotor.tracing.modules import BLOCKS, ModuleCalls, UntraceableError, tensor_slots, tracing
from lightning_rotor.tracing.patches import patched
from lightning_rotor.tracing.proxies import Sampled, Value
from lightning_rotor.tracing.samples import Known, Samples
from lightning_rotor.tracing.surroundings import Surroundings

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
