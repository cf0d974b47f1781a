"""A tracer that would rather leave a module opaque than bake in what may differ at the next call.

``torch.fx`` drops some things without a word: ``x += y`` becomes ``x = x + y``, a ``with torch.no_grad()`` around operations vanishes, the
backward of an ``autograd.Function`` is lost, random decisions are frozen. Here each of them is recorded, or it is an error; the module
whose forward it happened in then becomes one operation of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from lightning_rotor.generators import GeneratorStates
from lightning_rotor.tracing.call import Call
from lightning_rotor.tracing.kinds import IS_TENSOR, is_tensor, truthful_isinstance
from lightning_rotor.tracing.modules import BLOCKS, ModuleCalls, UntraceableError, tensor_slots
from lightning_rotor.tracing.places import Closures
from lightning_rotor.tracing.surroundings import Surroundings

CONSTANT = "_lightning_rotor_constant_"


class _Value(fx.Proxy):
    """A proxy that knows operations in place, which fx turns into others, and has no attributes that a tensor has not."""

    def __getattr__(self, name: str) -> Any:
        if not hasattr(torch.Tensor, name) and self.node.meta.get(IS_TENSOR):
            raise AttributeError(f"a tensor has no attribute {name!r}")
        return super().__getattr__(name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


def _in_place(function: Callable[..., Any]) -> Callable[[_Value, Any], Any]:
    def operate(self: _Value, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return operate


IN_PLACE = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
)  # fmt: skip
for _function in IN_PLACE:
    setattr(_Value, f"__{_function.__name__}__", _in_place(_function))


class Tracer(fx.Tracer):
    """Traces one call of a module.

    Attributes:
        constants: Tensors that the forward made out of nothing, in the order of their ``get_attr`` nodes.
        owners: For each name of a ``get_attr`` node, the module that has the tensor and its name there.
        calls: Which modules became one operation, and which one's forward could not be traced.
        surroundings: What the code read outside of modules.
    """

    proxy_buffer_attributes = True

    def __init__(
        self, root: nn.Module, call: Call, opaque: set[nn.Module], opaque_types: set[type], *, closures: Closures
    ) -> None:
        super().__init__()
        self.constants: list[torch.Tensor] = []
        self.calls = ModuleCalls(root, opaque, opaque_types)
        self._call = call
        self.owners, named = tensor_slots(root)
        self._tensor_names = {address: name for address, (_, name) in named.items()}
        self._examples = {name: tensor for tensor, name in named.values()}
        self.surroundings = Surroundings(lambda: self.calls.path, closures)
        self._ambient = ambient()

    def record(self, root: nn.Module) -> fx.Graph:
        """Trace the root's forward."""
        with _patched(), truthful_isinstance(self._examples), self.surroundings.listening():
            return self.trace(root)

    # ---------------------------------------------------------------- what fx asks

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A value of the graph."""
        return _Value(node, self)

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
        path = self.calls.path_of(m)
        with self.calls.inside(m):
            if self.is_leaf_module(m, path):
                self.calls.leaves.add(m)
                return self.create_proxy("call_module", path, args, kwargs)
            before = GeneratorStates()
            output = forward(*args, **kwargs)
            if not before.equals(GeneratorStates()):
                raise UntraceableError("it draws random numbers that do not depend on its input")
            return output

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
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Parameters and buffers are values of the graph, read anew by every stage."""
        return self._module_getattr(attr, attr_val, parameter_proxy_cache)


# -------------------------------------------------------------------- what surrounds an operation


def ambient() -> tuple[Any, ...]:
    """Settings that change what an operation computes or saves, and that code can switch for a few lines."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
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


def _has_proxy(*values: Any) -> bool:
    found = False

    def look(value: Any) -> Any:
        nonlocal found
        found = found or isinstance(value, fx.Proxy)
        return value

    fx.node.map_aggregate(values, look)
    return found


@contextmanager
def _patched() -> Iterator[None]:
    """Show autograd functions and assignments to buffers to the tracer.

    An ``autograd.Function`` takes a proxy for a plain object: its forward would be traced, and its backward be lost.
    """
    function = torch.autograd.Function
    original_apply, original_setattr = function.__dict__["apply"], nn.Module.__setattr__
    functorch = getattr(torch.autograd.function, "_functorch", None)
    original_unwrap = functorch.utils.unwrap_dead_wrappers if functorch is not None else None

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        tracers = [value.tracer for value in (*args, *kwargs.values()) if isinstance(value, fx.Proxy)]
        if tracers:
            return tracers[0].create_proxy("call_function", original_apply.__get__(None, cls), args, kwargs)
        if _has_proxy(args, kwargs):
            raise UntraceableError("it hands tensors in containers to an autograd.Function")
        return original_apply.__get__(None, cls)(*args, **kwargs)

    def unwrap(args: Any) -> Any:
        # Reached with proxies when code kept ``f = Function.apply`` from before the patch.
        if _has_proxy(args):
            raise UntraceableError("it calls an autograd.Function through a reference that the tracer cannot see")
        return original_unwrap(args)  # type: ignore[misc]

    def assign(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, fx.Proxy) and value.node.target in IN_PLACE:
            changed = value.node.args[0]
            slots = {**self._buffers, **self._parameters}
            if name in slots and isinstance(changed, fx.Node) and changed.op == "get_attr":
                owners: dict[str, tuple[nn.Module, str]] = getattr(value.tracer, "owners", {})
                owner, key = owners.get(str(changed.target), (None, ""))
                if owner is self and key == name:
                    return  # ``self.count += 1``: the operation is recorded, and the object stays the same
        original_setattr(self, name, value)

    function.apply = classmethod(apply)
    nn.Module.__setattr__ = assign  # type: ignore[method-assign]
    if functorch is not None:
        functorch.utils.unwrap_dead_wrappers = unwrap
    try:
        yield
    finally:
        function.apply = original_apply
        nn.Module.__setattr__ = original_setattr  # type: ignore[method-assign]
        if functorch is not None:
            functorch.utils.unwrap_dead_wrappers = original_unwrap
