"""A recording: the forward runs once, for real, and every operation that it does on tensors becomes a node of a graph.

``torch.fx`` runs code on symbols, which stops at the first ``if x.shape[1] > self.longest``. Here the code sees real tensors and goes its
way. What it saw of them besides their values (shapes, types, devices) is the same for every call with inputs of the same kind; where it
looked at values, a guard computes for each call whether it would see them again.

A ``TorchFunctionMode`` sees the operations::

    x = embed(ids)               ─► call_module embed          a layer of torch's, or code that cannot be recorded: runs as it is
    t = x.shape[1]                  (no node: 128)
    p = torch.arange(t)          ─► call_function arange(128)
    x = x + self.positions(p)    ─► call_module positions, call_method add
    if mask.all(): mask = None      (a guard: mask.all() is True)
    x[:, 0] = 0                  ─► call_function setitem(add, …)

Whatever it could not hold is an error; the module whose forward it happened in then becomes one operation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from lightning_rotor.capture.checks import Heap, Witness
from lightning_rotor.capture.external_state import Surroundings
from lightning_rotor.capture.guards import Guards, ancestors, appearance_of, require_as_recorded
from lightning_rotor.capture.inlining import FUNCTIONS, body_of, is_attention, replaced
from lightning_rotor.capture.modules import (
    BLOCKS,
    Call,
    ModuleCalls,
    UntraceableError,
    hides_code,
    is_torchs_module,
    tracing,
)
from lightning_rotor.capture.symbols import ambient
from lightning_rotor.capture.watched import version_of
from lightning_rotor.capture.writer import GraphWriter, is_constant
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.torch_names import OpOverload, OpOverloadPacket
from lightning_rotor.private.values import tensors_in, tree_leaves
from lightning_rotor.stages.generators import GeneratorStates

# ----------------------------------------------------------------------------------------------------
# The operations that a recording meets, as nodes of a graph: how to spell them, and which of them it cannot hold.


METADATA = frozenset(
    name
    for line in (
        "shape dtype device ndim layout requires_grad names itemsize nbytes is_cuda is_cpu is_xpu is_mps is_meta is_mkldnn is_xla is_hpu",
        "is_ipu is_mtia is_maia is_vulkan is_sparse is_sparse_csr is_quantized is_nested is_floating_point is_complex is_signed is_contiguous",
        "is_same_size is_conj is_neg is_inference is_tensor is_coalesced size dim ndimension numel nelement stride storage_offset",
        "element_size get_device dim_order result_type can_cast promote_types has_names __len__ __hash__ __dir__ _is_view",
    )
    for name in line.split()
)
"""What a call of the same shapes has in common with this one. Reading it makes no node."""

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
    """Whether it sets a property of a tensor, as in ``x.requires_grad = True``."""
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
    """Whether an operation is one of torch's own, so that equal values give equal results."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return str(function).startswith(("aten.", "aten::", "prims"))
    module = getattr(function, "__module__", None) or getattr(type(function), "__module__", "")
    return str(module).partition(".")[0] in ("torch", "builtins", "_operator")


# ----------------------------------------------------------------------------------------------------


_CONTAINERS = (nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, *BLOCKS)
_RANDOM = "random numbers, as when a block is skipped at random"


class Recorder:
    """Records one call of a module.

    Attributes:
        calls: Which modules became one operation, and which one's forward could not be recorded.
        surroundings: What the code read outside of modules.
        guards: What the recording takes for granted about the values of inputs; None if nothing.
    """

    def __init__(
        self,
        root: nn.Module,
        call: Call,
        opaque: set[nn.Module],
        opaque_types: set[type],
        *,
        heap: Heap,
        not_whole: Set[nn.Module] = frozenset(),
    ) -> None:
        self.calls = ModuleCalls(root, opaque, opaque_types, not_whole)
        self.guards: Guards | None = None
        self._root, self._call = root, call
        self._seen: list[tuple[fx.Node, Any]] = []
        self._witness = Witness(heap)
        self._writer = GraphWriter(self.calls, self._witness)
        self._mode = _Mode(self)
        self.surroundings = Surroundings(lambda: None if self._witness.inside else self.calls.path, heap.closures)

    @property
    def constants(self) -> list[torch.Tensor]:
        """Tensors that the forward made out of nothing, in the order of their ``get_attr`` nodes."""
        return self._writer.constants

    @property
    def owners(self) -> dict[str, tuple[nn.Module, str]]:
        """For each name of a ``get_attr`` node, the module that has the tensor and its name there."""
        return self._writer.owners

    def allow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Modules that are one operation may change these, which are put back after the recording."""
        self._witness.allow(tensors)

    def record(self, root: nn.Module) -> fx.Graph:
        """Run the root's forward on copies of the call's tensors, and return what it did."""
        copies = _copies(self._call.tensors)
        self._witness.trust((*copies, *root.buffers()))
        inputs = self._writer.begin(root, copies)
        args, kwargs = self._call.with_tensors(copies)
        del copies
        with saved_tensors_hooks(_dropped, _gone), self._listening():
            self._ambient, self._states = ambient(), GeneratorStates()
            output = type(root).forward(root, *args, **kwargs)
            self._require_same_generators()
            with self._aside():
                self._writer.node("output", "output", (self._writer.encode_output(output),), {})
        self._settle_guards(inputs)
        return self._writer.graph

    @contextmanager
    def _listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._shown_modules())
            stack.enter_context(self._witness)
            stack.enter_context(self._mode)
            stack.enter_context(self.surroundings.listening())
            stack.enter_context(tracing())
            yield

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Context of code that is one operation. The mode steps aside, for torch's fast paths ask whether there is one."""
        with self._witness.aside(), self.surroundings.paused(), tracing(False), ExitStack() as stack:
            if private.function_mode() is self._mode:
                stack.enter_context(private.without_function_mode())
            yield

    # ---------------------------------------------------------------- modules

    @contextmanager
    def _shown_modules(self) -> Iterator[None]:
        """Show calls of modules and of autograd functions, which no mode sees."""

        def showing_calls(call_module: Callable[..., Any]) -> Callable[..., Any]:
            def shown_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if self._witness.inside:
                    return call_module(module, *args, **kwargs)
                return self._call_module(module, call_module, args, kwargs)

            return shown_call

        def showing_apply(apply: Any) -> Any:
            def shown_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
                target = apply.__get__(None, cls)
                if self._witness.inside:
                    return target(*args, **kwargs)
                # A reference that was kept from before (``f = Function.apply``) is not seen. There the operations inside are, under no_grad.
                return self._operate("call_function", target, args, kwargs, target, own_code=f"{cls.__name__}.apply")

            return classmethod(shown_apply)

        def showing_init(init: Callable[..., None]) -> Callable[..., None]:
            def shown_init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
                self._witness.note_module(module)
                init(module, *args, **kwargs)

            return shown_init

        with (
            replaced(nn.Module, "__call__", showing_calls),
            replaced(nn.Module, "__init__", showing_init),
            replaced(torch.autograd.Function, "apply", showing_apply),
        ):
            yield

    def _call_module(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if module not in self.calls and not self._witness.was_there(module):
            # ``nn.CrossEntropyLoss()(logits, labels)``: it is made anew in each call
            return call(module, *args, **kwargs)
        path = self.calls.path_of(module)
        self._require_ambient()
        with self.calls.inside(module):
            if self._is_leaf(module):
                self.calls.leaves.add(module)
                return self._run_leaf(path, module, call, args, kwargs)
            output = call(module, *args, **kwargs)
            self._require_same_generators()
            return output

    def _is_leaf(self, module: nn.Module) -> bool:
        if self.calls.is_opaque(module):
            return True
        return is_torchs_module(module) and type(module) not in _CONTAINERS and not is_attention(module)

    def _run_leaf(
        self, path: str, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        known = is_torchs_module(module) and not hides_code(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            return call(module, *args, **kwargs)

        output = self._operate("call_module", path, args, kwargs, run, own_code=f"the output of {path!r}", known=known)
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()  # it would hold a copy of every weight by the end
        return output

    # ---------------------------------------------------------------- operations

    def operate(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that the mode has seen, and record it."""
        with self.surroundings.paused():
            name = name_of(function)
            if self._witness.inside or name in METADATA or (name == "type" and len(args) == 1):
                with self._witness.aside():
                    return function(*args, **kwargs)
            _require_recordable(function, args, kwargs)
            if function not in FUNCTIONS:
                kind, target, positional = spell(function, args)
                own_code = "" if is_torchs(function) else f"{name}, which is not torch's own"
                return self._operate(
                    kind, target, positional, kwargs, lambda *_, **__: function(*args, **kwargs), own_code=own_code
                )
        with self._mode:
            return body_of(function)(*args, **kwargs)

    def _operate(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any],
        *,
        own_code: str,
        known: bool = True,
    ) -> Any:
        witness = self._witness
        with self._aside():
            if private.is_transformed():
                raise UntraceableError("it computes under a transform of torch.func (vmap, grad)")
            read = tensors_in((args, kwargs))
            if read or kind == "call_module":
                self._require_ambient()
                encoded = self._writer.encode((args, kwargs), exact=bool(own_code))
            versions = [version_of(tensor) for tensor in read]
            self._require_same_generators()
            witness.random = witness.reads_values = False
            witness.in_module = kind == "call_module"
            result = run(*args, **kwargs)
            if not read and kind != "call_module":
                if not tensors_in(result):
                    return result  # torch.set_grad_enabled and the like
                self._require_ambient()
                encoded = self._writer.encode((args, kwargs), exact=bool(own_code))
            node = self._writer.node(kind, target, *encoded)
            if own_code or witness.random:
                self._states = GeneratorStates()
                self._writer.mark_impure(node, own_code or _RANDOM)
            for tensor, version in zip(read, versions, strict=True):
                if version_of(tensor) != version:
                    self._writer.note_change(tensor)
            if kind == "call_module":
                if not known:
                    self._writer.node("call_function", require_as_recorded, (node, appearance_of(result)), {})
                return self._writer.unpack(result, node, read, fresh_objects=not known)
            return self._result_of(result, node, read)

    def _result_of(self, result: Any, node: fx.Node, read: Sequence[torch.Tensor]) -> Any:
        """What the code gets to see: tensors, or values out of them."""
        leaves = tree_leaves(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and leaf is not None]
        if not all(isinstance(leaf, (bool, int, float, complex, str)) for leaf in others):
            raise UntraceableError(
                f"{_label(node)} returns {type(others[0]).__name__}, which may hold values of tensors"
            )
        if tensors:
            if others:
                raise UntraceableError(f"{_label(node)} returns tensors and values together")
            output = self._writer.unpack(result, node, read)
            if self._witness.reads_values:
                shapes = [
                    self._writer.node("call_function", getattr, (self._writer.node_of(leaf), "shape"), {})
                    for leaf in tensors
                ]
                for shape, tensor in zip(shapes, tensors, strict=True):
                    self._guard(shape, tensor.shape, f"the size of what {_label(node)} returns")
            return output
        if others:
            self._guard(node, result, f"{_label(node)} of a tensor")
        return result

    # ---------------------------------------------------------------- what must not differ at another call

    def _require_ambient(self) -> None:
        if ambient() != self._ambient:
            raise UntraceableError(
                "it computes inside of a context (no_grad, autocast, torch's checkpoint), which a recording would lose"
            )

    def _require_same_generators(self) -> None:
        with self._aside():
            same = self._states.equals(GeneratorStates())
        if not same:
            raise UntraceableError(
                "it draws random numbers outside of torch's operations, as when a block is skipped at random, or seeds a generator"
            )

    def _guard(self, node: fx.Node, value: Any, what: str) -> None:
        """Remember a value that the code saw, if it can be computed from a call's inputs alone."""
        self._writer.require_computable(node, what)
        self._seen.append((node, value))

    def _settle_guards(self, inputs: Sequence[fx.Node]) -> None:
        """Take what only guards need out of the graph."""
        asked = [node for node, _ in self._seen]
        if not all(is_constant(node) for node in _sources(asked)):
            self.guards = Guards(
                inputs,
                asked,
                [value for _, value in self._seen],
                root=self._root,
                owners=self.owners,
                constants=self.constants,
            )
        self._writer.erase(asked)


class _Mode(TorchFunctionMode):
    """Hands every operation to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._recorder.operate(func, args, kwargs or {})


# -------------------------------------------------------------------- small things


def _require_recordable(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = name_of(function)
    if is_assignment(function):
        raise UntraceableError(f"it assigns to the attribute {name!r} of a tensor")
    if name in REFUSED:
        raise UntraceableError(f"{REFUSED[name]} ({name})")
    if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
        raise UntraceableError(f"it draws random numbers from a torch.Generator of its own ({name})")
    if kwargs.get("out") is not None:
        raise UntraceableError(f"it gives {name} a tensor to write to (out=)")


def _label(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _sources(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    return [node for node in ancestors(nodes) if node.op in ("placeholder", "get_attr")]


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that a forward may change; one for each object."""
    made: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad).clone()
    return [made[id(tensor)] for tensor in tensors]


def _dropped(tensor: torch.Tensor) -> None:
    return None


def _gone(_: None) -> torch.Tensor:
    raise UntraceableError("it computes gradients in its forward, which a recording cannot hold")
