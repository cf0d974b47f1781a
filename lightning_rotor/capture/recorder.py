"""A recording: the forward runs once, for real, and every operation on tensors becomes a node of a graph.

The code sees real tensors and goes its way. Types, devices and dimensions are the same for every call with inputs of
the same kind; sizes are nodes; guards know the answers where it asked sizes or values. A ``TorchFunctionMode`` sees the
operations::

    x = embed(ids)               ─► call_module embed          a layer of torch's, or code that cannot be recorded
    t = x.shape[1]               ─► getattr(embed, "shape"), getitem(…, 1)
    p = torch.arange(t)          ─► call_function arange(t)
    x = x + self.positions(p)    ─► call_module positions, call_method add
    if mask.all(): mask = None      (a guard: mask.all() is True)
    x[:, 0] = 0                  ─► call_function setitem(add, …)

What it cannot hold is an error; the module whose forward it happened in then becomes one operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from lightning_rotor.capture.graph_stage import (
    OF,
    UNSURE,
    Region,
    appearance_of,
    is_constant,
    name_of,
    require_as_recorded,
    total,
)
from lightning_rotor.capture.guards import AUTOCAST, Call, Notes, ambient, version_of
from lightning_rotor.capture.operations import (
    FUNCTIONS,
    METADATA,
    SIZES,
    DispatchCheck,
    ModuleCalls,
    UntraceableError,
    body_of,
    hides_code,
    is_attention,
    is_torchs,
    is_torchs_module,
    name_of_function,
    require_recordable,
    spell,
)
from lightning_rotor.capture.size_guards import OWN, SizeGuards, ancestors, first_difference
from lightning_rotor.capture.surroundings import Functions, Surroundings
from lightning_rotor.capture.writer import GraphWriter, OpMemory, erase, plain
from lightning_rotor.execution import passes
from lightning_rotor.execution.passes import repeating
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.messages import NOT_ARRIVED, arrived, is_functional, is_on_its_way
from lightning_rotor.private.sharding import units_in
from lightning_rotor.private.undoing import undone
from lightning_rotor.private.values import like, tensors_in, tree_leaves, watch_attributes, watch_containers
from lightning_rotor.stages.generators import GeneratorStates

# ----------------------------------------------------------------------------------------------------
# The recording.


_CONTAINERS = (
    *(nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
"""Modules of torch that are several layers."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """What one call of a module did.

    Attributes:
        memory: Of each operation.
        constants: Tensors that the forward made out of nothing.
        leaves: Modules that were one operation.
        notes: What the code read outside of modules.
    """

    graph: fx.Graph
    memory: Mapping[fx.Node, OpMemory]
    root: nn.Module
    constants: Sequence[torch.Tensor]
    leaves: Set[nn.Module]
    guards: SizeGuards
    notes: Notes

    @property
    def run_as_they_are(self) -> set[nn.Module]:
        """Modules whose code runs at each call, as their settings say then."""
        called = [node.meta[OF] for node in self.graph.nodes if node.op == "call_module"]
        return {below for leaf in (*self.leaves, *called) for below in leaf.modules()}

    def runs_the_same(self, other: Recording) -> bool:
        """True if another recording has the same operations on the same modules and tensors."""
        return not first_difference(self.graph, other.graph) and all(
            is_constant(mine) or mine.meta.get(OF) == theirs.meta.get(OF)
            for mine, theirs in zip(self.graph.nodes, other.graph.nodes, strict=True)
        )


class Recorder(TorchFunctionMode):
    """Records one call of a module, and knows what torch has computed and what the code read outside of modules.

    ``is_opaque`` says which modules are one operation; it takes the arguments of the call that is about to come, too.
    """

    def __init__(self, root: nn.Module, call: Call, is_opaque: Callable[..., bool], functions: Functions) -> None:
        super().__init__()
        self.calls = ModuleCalls(root)
        self.check = DispatchCheck()
        self._root, self._call, self._is_opaque = root, call, is_opaque
        self._writer = GraphWriter(self.calls, self.check)
        self._leaves: list[tuple[fx.Node, fx.Node, Any]] = []
        self.surroundings = Surroundings(root, lambda: None if self.check.inside else self.calls.path, functions)

    def record(self) -> Recording:
        """Run the root's forward on copies of the call's tensors, and return what it did."""
        copies = _copies(self._call.inputs)
        inputs = self._writer.begin(self._root, copies)
        first = len(copies) - len(self._call.attributes)
        attributes = dict(zip(self._call.attributes, copies[first:], strict=True))
        self.check.trust((*copies[:first], *self._root.buffers()))
        self.check.allow(tensors_in(copies[first:]))
        args, kwargs = self._call.with_tensors(copies)
        changed = watch_containers((args, kwargs))
        marked = watch_attributes(tensors_in(copies))
        del copies
        try:
            with (
                saved_tensors_hooks(self._note_saved, _gone),
                _shown_modules(self),
                private.uncompiled(),
                self.check,
                self,
                self.surroundings.listening(),
                repeating(False),  # what the code does in a real run must be seen
            ):
                self._ambient, self._states = ambient(), GeneratorStates()
                self._gradients = self._ambient[0]
                with _in_place(attributes):
                    del attributes
                    output = type(self._root).forward(self._root, *args, **kwargs)
                self._require_same_generators()
                if changed():
                    raise UntraceableError("it changes a container that it is called with: let it return a new one")
                self._writer.require_bare(tensors_in(output))
                if marked():
                    raise UntraceableError("it sets Python attributes of a tensor that it is called with")
                with self._aside():
                    self._writer.node("output", "output", (self._writer.encode_output(output),), {})
        finally:
            self.check.is_over = True
            self._writer.values.forget_tensors()
        writer, asked = self._writer, self._writer.asked
        behind = ancestors([node for node, _ in asked])
        for leaf, check, appearance in self._leaves:
            if leaf in behind:
                check.args = (leaf, appearance, True)
        # Packed sequences have sizes that depend on their lengths in ways of their own.
        packs = any(node.target is private.pack_sequences for node in behind)
        values = [*writer.valued, *(writer.lengths if packs else ())]
        totals = [writer.node("call_function", total, node.args, {}) for node, _ in writer.lengths]
        guards = SizeGuards(self._call.signature, inputs, asked, values, totals)
        erase(writer.graph, [*totals, *(node for node, _ in (*values, *writer.lengths, *asked))])
        notes = self.surroundings.notes
        memory = {node: writer.values.memory_of(node) for node in writer.graph.nodes}
        return Recording(writer.graph, memory, self._root, writer.constants, self.calls.leaves, guards, notes)

    def _note_saved(self, tensor: torch.Tensor) -> None:
        """Note a tensor that autograd saves, also outside of an operation that is seen (the user's own checkpoint)."""
        with self._aside():
            self._writer.values.note_saved(tensor)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Context of code that is one operation, without the mode: torch's fast paths ask whether there is one."""
        without_mode = private.without_function_mode() if private.function_modes()[-1:] == [self] else nullcontext()
        with self.check.aside(), self.surroundings.paused(), repeating(), without_mode:
            yield

    # ---------------------------------------------------------------- modules

    def _call_module(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if module not in self.calls and not self.check.was_there(module):
            # ``nn.CrossEntropyLoss()(logits, labels)``: it is made anew in each call
            return call(module, *args, **kwargs)
        path = self.calls.path_of(module)
        self._follow_ambient()
        with self.calls.inside(module):
            if not self._is_leaf(module, args, kwargs):
                output = call(module, *args, **kwargs)
                self._require_same_generators()
                return output
            self.calls.leaves.add(module)
            known = all(map(is_torchs_module, module.modules())) and not hides_code(module)
            run, what = partial(call, module), f"the output of {path!r}"
            output = self._operate("call_module", path, args, kwargs, run, own_code=what, known=known)
            if torch.is_autocast_cache_enabled():
                torch.clear_autocast_cache()  # it would hold a copy of every weight by the end
            return output

    def _is_leaf(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        with self._aside():
            if self._is_opaque(module, (args, kwargs)):
                return True
        return is_torchs_module(module) and type(module) not in _CONTAINERS and not is_attention(module)

    # ---------------------------------------------------------------- operations

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and record it."""
        function: Any = arrived(func) if is_functional(func) else func
        kwargs = kwargs or {}
        with self.surroundings.paused():
            name = name_of_function(function)
            if self.check.inside:
                return function(*args, **kwargs)
            if name in METADATA or name in SIZES or (name == "type" and len(args) == 1):
                return self._look(name, function, args, kwargs)
            if name == "_set_grad_enabled":  # what switches gradients without being seen is an autograd function
                self._follow_ambient()
                (self._gradients,) = args
            require_recordable(function, args, kwargs)
            if function not in FUNCTIONS:
                kind, target, positional = spell(function, args)
                own_code = "" if is_torchs(function) else f"{name}, which is not torch's own"
                run = partial(function, *plain(args), **plain(kwargs))
                return self._operate(kind, target, positional, kwargs, lambda *_, **__: run(), own_code=own_code)
        with self:
            return body_of(function)(*args, **kwargs)

    def _look(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer of an operation about a tensor that needs no values."""
        with self.check.aside():
            value = function(*plain(args), **plain(kwargs))
        is_length = name == "__len__"
        if not (args and isinstance(args[0], torch.Tensor)) or (name not in SIZES and not is_length):
            return value
        dim = 0 if is_length else plain((*args, *kwargs.values())[1]) if name == "size" and type(value) is int else None
        found = self._writer.sizes_of(args[0], value, dim)
        if is_length and found is not value:
            found.pin()  # Python takes the plain number
        return found

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
        with self._aside():
            if private.is_transformed():
                raise UntraceableError("it computes under a transform of torch.func (vmap, grad)")
            read = tensors_in((args, kwargs))
            if read or kind == "call_module":
                self._follow_ambient()
                encoded = self._writer.encode((args, kwargs), exact=bool(own_code))
            if own_code and not (known and kind == "call_module"):
                self._writer.require_bare(read)
            versions = [version_of(tensor) for tensor in read]
            self._require_same_generators()
            self.check.random = self.check.accumulates = self.check.reads_values = False
            self.check.in_module = kind == "call_module"
            self.check.in_unit = self.check.in_module and bool(units_in((self._root.get_submodule(target),)))
            self._writer.values.saving.clear()
            result = run(*plain(args), **plain(kwargs))
            if not read and kind != "call_module":
                if not tensors_in(result):
                    return result  # torch.set_grad_enabled and the like
                self._follow_ambient()
                encoded = self._writer.encode((args, kwargs), exact=bool(own_code))
            if any(map(is_on_its_way, tensors_in(result))):
                raise UntraceableError(NOT_ARRIVED)
            node = self._writer.node(kind, target, *encoded)
            if own_code or self.check.random:
                self._states = GeneratorStates()
                self._writer.impure.setdefault(node, own_code or "random numbers, as when a block is skipped at random")
            if kind != "call_module" and (own_code or self.check.random or self.check.accumulates):
                node.meta[UNSURE] = True
            for tensor, version in zip(read, versions, strict=True):
                if version_of(tensor) != version:
                    self._writer.note_change(tensor, node)
            node.meta[OWN] = bool(own_code) and not (known and kind == "call_module")
            if kind != "call_module":
                result = self._result_of(result, node, read)
                if target is private.pack_sequences:
                    self._writer.note_packed(result[1], args[1])
            else:
                if not known:
                    self._writer.require_bare(tensors_in(result))
                    seen = appearance_of(result, sizes=False)
                    check = self._writer.node("call_function", require_as_recorded, (node, seen, False), {})
                    self._leaves.append((node, check, appearance_of(result, sizes=True)))
                result = self._writer.unpack(result, node, read, fresh_objects=not known)
            self._writer.values.settle_saved(node, [*read, *tensors_in(result)])
            return result

    def _result_of(self, result: Any, node: fx.Node, read: Sequence[torch.Tensor]) -> Any:
        """The value that the code sees: tensors, or values out of them."""
        leaves = tree_leaves(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and leaf is not None]
        if not all(isinstance(value, (bool, int, float, complex, str)) for value in others):
            kind = type(others[0]).__name__
            raise UntraceableError(f"{name_of(node)} returns {kind}, which may hold values of tensors")
        if others and tensors:
            raise UntraceableError(f"{name_of(node)} returns tensors and values together")
        if tensors:
            output = self._writer.unpack(result, node, read)
            if self.check.reads_values:
                nodes = [self._writer.node_of(leaf) for leaf in tensors]
                for each, tensor in zip(nodes, tensors, strict=True):
                    shape = self._writer.node("call_function", getattr, (each, "shape"), {})
                    self._writer.guard(shape, tensor.shape, f"the size of what {name_of(node)} returns")
            return output
        if others:
            self._writer.guard(node, result, f"{name_of(node)} of a tensor")
        return result

    # ---------------------------------------------------------------- what must not differ at another call

    def _follow_ambient(self) -> None:
        """Tell the graph under which settings the next operation runs."""
        now, then = ambient(), self._ambient
        same = now[1:AUTOCAST], now[-1]
        if now[0] != self._gradients or same != (then[1:AUTOCAST], then[-1]):
            raise UntraceableError(
                "it computes inside of a context (inference_mode, torch's checkpoint, an autograd function, a choice "
                "of kernels), which a recording would lose"
            )
        changed = zip(("cpu", "cuda"), now[AUTOCAST:-1], then[AUTOCAST:-1], strict=True)
        autocast = tuple((device, *setting) for device, setting, before in changed if setting != before)
        self._writer.region = None if now == then else Region(now[0], autocast)

    def _require_same_generators(self) -> None:
        with self._aside():
            same = self._states.equals(GeneratorStates())
        if not same:
            raise UntraceableError(
                "it draws random numbers outside of torch's operations, as when a block is skipped at random, or seeds "
                "a generator"
            )


@contextmanager
def _in_place(attributes: Mapping[tuple[nn.Module, str], Any]) -> Iterator[None]:
    """Context in which modules have other values as attributes."""
    # In a row: a metric of torchmetrics has another hash whenever its values change.
    places = [(owner.__dict__, name, owner.__dict__[name], value) for (owner, name), value in attributes.items()]

    def put_back() -> None:
        for namespace, name, before, value in places:
            if namespace.get(name) is value:  # else the forward has set another
                namespace[name] = before

    with undone(put_back):
        for namespace, name, _, value in places:
            namespace[name] = value
        yield


_showing = threading.RLock()


@contextmanager
def _shown_modules(recorder: Recorder) -> Iterator[None]:
    """Show calls of modules and of autograd functions, which no mode sees; another thread that wants to waits."""
    thread = threading.get_ident()

    def is_plain() -> bool:
        return bool(recorder.check.inside) or threading.get_ident() != thread

    def shown_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_plain():
            return call_module(module, *args, **kwargs)
        return recorder._call_module(module, call_module, args, kwargs)

    def shown_init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        recorder.check.note_module(module)
        init(module, *args, **kwargs)

    def shown_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        target = apply.__get__(None, cls)
        if is_plain():
            return target(*args, **kwargs)
        # A reference that was kept from before (``f = Function.apply``) is not seen. There the operations inside are,
        # under no_grad.
        return recorder._operate("call_function", target, args, kwargs, target, own_code=f"{cls.__name__}.apply")

    replacements: tuple[tuple[Any, str, Any], ...] = (
        (nn.Module, "__call__", shown_call),
        (nn.Module, "__init__", shown_init),
        (torch.autograd.Function, "apply", classmethod(shown_apply)),
    )
    with _showing:
        originals = call_module, init, apply = [vars(owner)[name] for owner, name, _ in replacements]

        def put_back() -> None:
            for (owner, name, _), original in zip(replacements, originals, strict=True):
                setattr(owner, name, original)

        with undone(put_back):
            for owner, name, replacement in replacements:
                setattr(owner, name, replacement)
            yield


def require_unrecorded(what: str) -> None:
    """Raise ``UntraceableError`` if the running code is recorded."""
    if any(isinstance(mode, Recorder) and mode.check.listens for mode in private.function_modes()):
        raise UntraceableError(what)


def is_recomputing() -> bool:
    """True if the current forward repeats one that has already run, so that nothing should come of it.

    That is while a segment is recomputed in the backward, and while costs are measured. What modules and their hooks
    can reach in Python is put back by itself. Ask here before writing to a file or a server, which cannot be undone.
    A module that asks cannot be recorded: it is one stage.
    """
    require_unrecorded("it asks is_recomputing(), and what it does for the answer would not be recorded")
    return passes.is_recomputing()


# -------------------------------------------------------------------- small things


def _copies(values: Sequence[Any]) -> list[Any]:
    """Copies of tensors that a forward may change, one for each object; numbers as they are."""
    tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}
    made = {
        key: like(tensor.detach().requires_grad_(tensor.requires_grad).clone(), tensor)
        for key, tensor in tensors.items()
    }
    return [made.get(id(value), value) for value in values]


def _gone(_: None) -> torch.Tensor:
    raise UntraceableError("it computes gradients in its forward, which a recording cannot hold")
