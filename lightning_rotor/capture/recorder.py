"""The forward runs once, for real, and every operation on tensors becomes a node of a graph.

The code sees real tensors and goes its way. Types, devices and dimensions are the same for every call with inputs of
the same kind; sizes are nodes; guards know the answers where it asked sizes or values. A ``TorchFunctionMode`` sees the
operations::

    x = embed(ids)               ─► call_module embed          a layer of torch's, or code that cannot be recorded
    t = x.shape[1]               ─► getattr(embed, "shape"), getitem(…, 1)
    p = torch.arange(t)          ─► call_function arange(t)
    x = x + self.positions(p)    ─► call_module positions, call_method add
    if mask.all(): mask = None      (a guard: mask.all() is True)
    x[:, 0] = 0                  ─► call_function setitem(add, …)

A forward that this cannot hold is an error; the module whose forward it happened in then becomes one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from lightning_rotor.capture.ambient import Ambient, ambient
from lightning_rotor.capture.call import Call
from lightning_rotor.capture.copies import version_of
from lightning_rotor.capture.dispatch_check import DispatchCheck, OperationSeen
from lightning_rotor.capture.module_calls import ModuleCalls, Slot, hides_code, is_torchs_module
from lightning_rotor.capture.node_facts import BOUND, OWN, UNSURE, Region, name_of, total
from lightning_rotor.capture.operations import (
    METADATA,
    SIZES,
    UntraceableError,
    is_torchs,
    name_of_function,
    node_parts,
    require_recordable,
)
from lightning_rotor.capture.python_functions import FUNCTIONS, body_of, is_attention
from lightning_rotor.capture.recorded_checks import appearance_of
from lightning_rotor.capture.recording import Recording
from lightning_rotor.capture.saved_in_code import SavedInCode, SavedTensor
from lightning_rotor.capture.shown_calls import shown_calls
from lightning_rotor.capture.size_guards import SizeGuards, ancestors
from lightning_rotor.capture.surroundings import Functions, Surroundings
from lightning_rotor.capture.traced_numbers import plain
from lightning_rotor.capture.writer import GraphWriter, erase
from lightning_rotor.execution import passes
from lightning_rotor.execution.passes import repeating
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.functional_collectives import NOT_ARRIVED, arrived, is_functional, is_on_its_way, wait_for
from lightning_rotor.private.sharding import is_dtensor, units_in
from lightning_rotor.private.undoing import undone
from lightning_rotor.private.values import (
    like,
    other_layout,
    tensors_in,
    tree_leaves,
    watch_attributes,
    watch_containers,
)
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.submodules import submodule_of

_CONTAINERS = (
    *(nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
"""Modules of torch that are several layers."""


class _Operation:
    """A call that becomes one node.

    Not a dataclass: Python would write its ``__init__``, in a file of no name, and the surroundings would take that for
    code of the user's that runs in the recording.

    Attributes:
        kind: ``"call_module"``, ``"call_method"`` or ``"call_function"``; ``target`` and arguments are the node's.
        run: Does it. Its arguments may be in another order: ``2 - x`` is the node sub(2, x).
        origin: The source of its result in messages, if that is code or a module; empty for torch's functions.
        is_torchs: All code in it is torch's, so that one knows what it does for other sizes.
    """

    __slots__ = ("args", "is_torchs", "kind", "kwargs", "origin", "run", "target")

    def __init__(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: partial[Any],
        origin: str,
        *,
        is_torchs: bool,
    ) -> None:
        self.kind = kind
        self.target = target
        self.args = args
        self.kwargs = kwargs
        self.run = run
        self.origin = origin
        self.is_torchs = is_torchs

    @property
    def is_module(self) -> bool:
        """True if it is the call of a module."""
        return self.kind == "call_module"


class Recorder(TorchFunctionMode):
    """Records one call of a module.

    ``is_opaque`` says which modules are one operation; it takes the arguments of the call that is about to come, too.
    """

    # Settings around the call.
    _ambient: Ambient
    # After the last operation that may have drawn.
    _states: GeneratorStates
    # True if gradients are to be recorded, as far as the code was seen to switch them.
    _gradients: bool

    def __init__(
        self,
        root: nn.Module,
        call: Call,
        is_opaque: Callable[..., bool],
        functions: Functions,
    ) -> None:
        super().__init__()
        self.calls = ModuleCalls(root)
        # Function modes see calls of torch's Python interface. C++ code passes the dispatcher alone.
        self.check = DispatchCheck()
        self._root = root
        self._call = call
        self._is_opaque = is_opaque
        self._saved_in_code = SavedInCode()
        self._writer = GraphWriter(self.calls, self.check)
        # Calls of the user's own code, with what it returned: without sizes, and with them.
        self._unknown_leaves: list[tuple[fx.Node, Any, Any]] = []
        # No method of this object: in a cycle, tensors that it knows would wait for Python's garbage collector.
        module_path = partial(_path_of_recorded_code, self.check, self.calls)
        self.surroundings = Surroundings(root, module_path, functions)

    def record(self) -> Recording:
        """Run the root's forward on copies of the call's tensors, and return its operations."""
        copies = _copies(self._call.inputs)
        inputs = self._writer.begin(self._root, copies)
        self.calls.note_tensors()
        # The call lists its attributes behind its arguments.
        first_attribute = len(copies) - len(self._call.attributes)
        attributes = dict(zip(self._call.attributes, copies[first_attribute:], strict=True))
        # Both were copied for this run, so the forward may change them in place, as in training.
        self.check.trust((*copies[:first_attribute], *self._root.buffers()))
        self.check.allow(tensors_in(copies[first_attribute:]))
        args, kwargs = self._call.with_tensors(copies)
        containers_changed = watch_containers((args, kwargs))
        attributes_set = watch_attributes(tensors_in(copies))
        # The forward decides how long its tensors live, as in training: nothing else holds them from here on.
        del copies
        try:
            with (
                # Saved tensors are counted and dropped: a recording takes no more memory than a forward without
                # gradients. Code that is one operation has them while it runs.
                saved_tensors_hooks(self._note_saved, self._saved_in_code.get),
                shown_calls(self),
                # Compiled code would run as one operation that no mode sees into, or compile anew because of the modes.
                private.uncompiled(),
                # The check before the recorder: torch asks function modes first, whatever the order here.
                self.check,
                self,
                self.surroundings.listening(),
                # What the code does in a real run must be seen.
                repeating(False),
            ):
                self._ambient = ambient()
                self._states = GeneratorStates()
                self._gradients = self._ambient.gradients
                with _standing_in(attributes):
                    del attributes
                    # Not by calling the root: its hooks, and a forward in its attributes, run around the plan.
                    output = type(self._root).forward(self._root, *args, **kwargs)
                self._require_same_generators()
                # No operation of the graph would change it, and the caller would miss that.
                if containers_changed():
                    raise UntraceableError("it changes a container that it is called with: let it return a new one")
                self._writer.require_bare(tensors_in(output))
                if attributes_set():
                    raise UntraceableError("it sets Python attributes of a tensor that it is called with")
                # Flattening an output runs code of the user's classes, which is no operation of the forward.
                with self._aside():
                    self._writer.node("output", "output", (self._writer.encode_output(output),), {})
        finally:
            # Sizes that the forward has kept would go on writing nodes into a finished graph.
            self.check.is_over = True
            self._writer.values.forget_tensors()
        return self._finished(inputs)

    def _finished(self, inputs: Sequence[fx.Node]) -> Recording:
        """The recording, once the forward has returned."""
        writer = self._writer
        sizes_asked = self._writer.asked
        behind = ancestors([node for node, _ in sizes_asked])
        for leaf, without_sizes, with_sizes in self._unknown_leaves:
            # Where a size that the code asked for comes out of unknown code, this must return that very size.
            if leaf in behind:
                writer.check_output(leaf, with_sizes, sizes=True)
            else:
                writer.check_output(leaf, without_sizes, sizes=False)
        values_seen = list(writer.valued)
        if any(node.target is private.pack_sequences for node in behind):
            # Packed sequences have sizes that depend on their lengths in ways of their own.
            values_seen += writer.lengths
        # A plan is also made for the entries of packed sequences, a number that no shape of an input tells.
        totals = []
        for lengths, _ in writer.lengths:
            totals.append(writer.node("call_function", total, lengths.args, {}))
        # Guards copy the nodes of all questions, so that these can be erased: they would be computed in every step.
        guards = SizeGuards(self._call.signature, inputs, sizes_asked, values_seen, totals)
        questions = [node for node, _ in (*values_seen, *writer.lengths, *sizes_asked)]
        erase(writer.graph, [*totals, *questions])
        return Recording(
            graph=writer.graph,
            memory={node: writer.values.memory_of(node) for node in writer.graph.nodes},
            root=self._root,
            constants=writer.constants,
            leaves=self.calls.leaves,
            guards=guards,
            notes=self.surroundings.notes,
        )

    def _note_saved(self, tensor: torch.Tensor) -> SavedTensor:
        """Note a tensor that autograd saves, also outside of an operation that is seen (a checkpoint of the user's)."""
        # A transform of torch.func shows its wrappers here, too, which have no memory.
        if not private.is_transformed():
            with self._aside():
                self._writer.values.note_saved(tensor)
        return self._saved_in_code.save(tensor)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Context of code that is one operation, without the mode."""
        # Torch's fast paths ask whether there is a mode, and are not taken under one.
        is_innermost = private.function_modes()[-1:] == [self]
        without_mode = private.without_function_mode() if is_innermost else nullcontext()
        with self.check.aside(), self.surroundings.paused(), repeating(), without_mode:
            yield

    def call_module(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module, as one operation or by its recorded code."""
        # A module that was there before and is no submodule has parameters that nobody sees: path_of refuses it.
        if module not in self.calls and not self.check.was_there(module):
            # ``nn.CrossEntropyLoss()(logits, labels)``: it is made anew in each call
            return call(module, *args, **kwargs)
        path = self.calls.path_of(module)
        if private.shares_weights(module):
            # The context is no operation: each recorded call would compute a weight of its own, with other rounding.
            raise UntraceableError(
                "it computes parametrized weights once for several calls (torch.nn.utils.parametrize.cached())"
            )
        self._follow_ambient()
        with self.calls.inside(module):
            if not self._is_leaf(module, args, kwargs):
                output = call(module, *args, **kwargs)
                # At the end of each module, so that the innermost one that draws is blamed.
                self._require_same_generators()
                return output
            self.calls.leaves.add(module)
            operation = _Operation(
                kind="call_module",
                target=path,
                args=args,
                kwargs=kwargs,
                run=partial(call, module, *plain(args), **plain(kwargs)),
                origin=f"the output of {path!r}",
                is_torchs=all(map(is_torchs_module, module.modules())) and not hides_code(module),
            )
            output = self._operate(operation)
            if torch.is_autocast_cache_enabled():
                # The cache would hold a copy of every weight by the end of the recording.
                torch.clear_autocast_cache()
            return output

    def call_function(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        own_code: str,
    ) -> Any:
        """Call the ``apply`` of an autograd function, which is the user's code of this name."""
        operation = _Operation(
            kind="call_function",
            target=function,
            args=args,
            kwargs=kwargs,
            run=partial(function, *plain(args), **plain(kwargs)),
            origin=own_code,
            # Its forward and backward are the user's, whatever they are made of.
            is_torchs=False,
        )
        return self._operate(operation)

    def _is_leaf(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """True if a module is one operation."""
        # It may try the module's inverse, which is no operation of the forward.
        with self._aside():
            is_opaque = self._is_opaque(module, (args, kwargs))
        # A call in a graph would run with what the module holds then.
        if not self.calls.has_its_tensors(module):
            if is_opaque:
                raise UntraceableError("it lends a module other parameters (torch.func.functional_call)")
            return False
        if is_opaque:
            return True
        # A layer of torch's is one operation for a plan, whatever it calls. But for those inside of which a plan can
        # choose: containers, and attention, which holds several tensors for its backward.
        has_inside = type(module) in _CONTAINERS or is_attention(module)
        return is_torchs_module(module) and not has_inside

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and record it."""
        # A functional collective returns before its message has arrived. In a graph, it is one operation that waits.
        function: Any = arrived(func) if is_functional(func) else func
        kwargs = kwargs or {}
        with self.surroundings.paused():
            name = name_of_function(function)
            # A recorded operation runs. What it calls is no operation of its own.
            if self.check.inside:
                return function(*args, **kwargs)
            # ``x.type()`` asks for the type, ``x.type(torch.half)`` converts.
            asks_type = name == "type" and len(args) == 1
            if name in METADATA or name in SIZES or asks_type:
                return self._look(name, function, args, kwargs)
            if name == "_set_grad_enabled":
                # What switches gradients without being seen here is an autograd function.
                self._follow_ambient()
                (self._gradients,) = args
            require_recordable(function, args, kwargs)
            if function not in FUNCTIONS:
                return self._operate(self._operation(function, args, kwargs))
        # Python code of torch's: a copy of it runs under this mode again, so that what it does is seen.
        with self:
            return body_of(function)(*args, **kwargs)

    @staticmethod
    def _operation(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Operation:
        """The operation of a call that the mode saw."""
        kind, target, positional = node_parts(function, args)
        is_known = is_torchs(function)
        origin = ""
        if not is_known:
            origin = f"{name_of_function(function)}, which is not torch's own"
        return _Operation(
            kind=kind,
            target=target,
            args=positional,
            kwargs=kwargs,
            # The plain numbers: a kernel that gets a recorded size would ask for its value, and so pin it.
            run=partial(function, *plain(args), **plain(kwargs)),
            origin=origin,
            is_torchs=is_known,
        )

    def _look(
        self,
        name: str,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Answer of an operation about a tensor that needs no values."""
        with self.check.aside():
            value = function(*plain(args), **plain(kwargs))
        is_length = name == "__len__"
        # ``torch.result_type(2, x)`` begins with a number, and is about types.
        is_about_tensor = bool(args) and isinstance(args[0], torch.Tensor)
        is_size = name in SIZES or is_length
        if not is_about_tensor or not is_size:
            return value
        # ``x.shape`` and ``x.size()`` give all dimensions, ``len(x)`` and ``x.size(1)`` one.
        dim = None
        if is_length:
            dim = 0
        elif name == "size" and type(value) is int:
            dim = plain((*args, *kwargs.values())[1])
        size = self._writer.sizes_of(args[0], value, dim)
        if is_length and size is not value:
            # Python takes the plain number of what __len__ returns.
            size.pin()
        return size

    def _operate(self, operation: _Operation) -> Any:
        """Run an operation, write its node, and return the result that the code is to see.

        The order counts. Arguments become nodes before the operation may change them in place; generators are compared
        before it may draw; its node stands before the nodes of what comes out of it; and what autograd saved is counted
        last, when all tensors around it have their nodes.
        """
        with self._aside():
            # Under vmap and grad, tensors are wrappers that an operation of the graph would not get.
            if private.is_transformed():
                raise UntraceableError("it computes under a transform of torch.func (vmap, grad)")
            read = tensors_in((operation.args, operation.kwargs))
            # An operation that takes no tensor may return none, and is not one for the graph then.
            is_certain = bool(read) or operation.is_module
            encoded = self._encoded(operation) if is_certain else None
            # Code of the user's could read attributes of tensors, which operations of a graph do not set.
            if not operation.is_torchs:
                self._writer.require_bare(read)
            versions = list(map(version_of, read))
            self._require_same_generators()
            self._writer.values.saving.clear()
            given = operation.run.args, operation.run.keywords
            containers_changed = None if operation.is_torchs else watch_containers(given)
            in_code = nullcontext() if operation.is_torchs else self._saved_in_code.running()
            with self._watching(operation) as seen, in_code:
                result = operation.run()
            # In a graph it gets containers of its own, so that the code around it would miss what it wrote.
            if containers_changed is not None and containers_changed():
                raise UntraceableError("it changes a container that it is called with: let it return a new one")
            if encoded is None:
                if not tensors_in(result):
                    # torch.set_grad_enabled and the like.
                    return result
                encoded = self._encoded(operation)
            on_its_way = any(map(is_on_its_way, tensors_in(result)))
            # A module under tensor parallelism returns one such tensor, and nothing else.
            if on_its_way and not (operation.is_module and isinstance(result, torch.Tensor)):
                raise UntraceableError(NOT_ARRIVED)
            node = self._writer.node(operation.kind, operation.target, *encoded)
            node.meta[OWN] = not operation.is_torchs
            self._note_sources(node, operation, seen)
            self._note_changes(node, read, versions)
            if operation.is_module:
                result = self._output_of_module(result, node, read, is_torchs=operation.is_torchs)
            else:
                result = self._result_of_function(result, node, read, seen)
                if operation.target is private.pack_sequences:
                    self._writer.note_packed(result[1], operation.args[1])
            self._writer.values.settle_saved(node, [*read, *tensors_in(result)])
            self._note_bound(result)
        # Values between operations have memory that can be counted, so the message is waited for at once. The code
        # would wait for it when it uses the tensor, mostly in its next operation.
        if not on_its_way:
            return result
        waits = _Operation("call_function", wait_for, (result,), {}, partial(wait_for, result), "", is_torchs=True)
        return self._operate(waits)

    def _note_bound(self, result: Any) -> None:
        """Mark the nodes of results that no stage can hand to another."""
        for tensor in tensors_in(result):
            if is_dtensor(tensor) or other_layout([tensor]):
                node = self._writer.values.node_of(tensor)
                if node is not None:
                    node.meta[BOUND] = True

    def _encoded(self, operation: _Operation) -> Any:
        """Arguments of the node for an operation, under the settings of this moment."""
        self._follow_ambient()
        # Code that is not torch's may ask whether a shape is a torch.Size.
        return self._writer.encode((operation.args, operation.kwargs), exact=bool(operation.origin))

    @contextmanager
    def _watching(self, operation: _Operation) -> Iterator[OperationSeen]:
        """Context in which an operation runs; yields what torch computes in it."""
        in_unit = False
        if operation.is_module:
            module = submodule_of(self._root, operation.target)
            in_unit = bool(units_in((module,)))
        with self.check.watching(in_module=operation.is_module, in_unit=in_unit) as seen:
            yield seen

    def _note_sources(self, node: fx.Node, operation: _Operation, seen: OperationSeen) -> None:
        """Note what a result depends on besides the arguments, and whether it may be another next time."""
        if operation.origin or seen.draws:
            # Draws of operations are their own business. From here on, other ones count again.
            self._states = GeneratorStates()
            source = operation.origin or "random numbers, as when a block is skipped at random"
            self._writer.impure.setdefault(node, source)
        # A stage names its modules, which the profiler looks at. Of functions it knows this mark alone.
        if not operation.is_module and (operation.origin or seen.draws or seen.accumulates):
            node.meta[UNSURE] = True

    def _note_changes(
        self,
        node: fx.Node,
        read: Sequence[torch.Tensor],
        versions: Sequence[int],
    ) -> None:
        """Note which arguments an operation has changed in place."""
        # By versions, for names say little: ``F.relu(x, inplace=True)``, and whatever code of the user's does.
        for tensor, version in zip(read, versions, strict=True):
            if version_of(tensor) != version:
                self._writer.note_change(tensor, node)

    def _output_of_module(
        self,
        output: Any,
        node: fx.Node,
        read: Sequence[torch.Tensor],
        *,
        is_torchs: bool,
    ) -> Any:
        """The output of a module that is one operation, as the code sees it."""
        if not is_torchs:
            self._writer.require_bare(tensors_in(output))
            # Which of the two is checked at each call is known at the end, when all questions have been asked.
            without_sizes = appearance_of(output, sizes=False)
            with_sizes = appearance_of(output, sizes=True)
            self._unknown_leaves.append((node, without_sizes, with_sizes))
        return self._writer.unpack(output, node, read, fresh_objects=not is_torchs)

    def _result_of_function(
        self,
        result: Any,
        node: fx.Node,
        read: Sequence[torch.Tensor],
        seen: OperationSeen,
    ) -> Any:
        """The value that the code sees: tensors, or values out of them."""
        # A value is a question, whose answer must be the same at the next call. An object that may hold values, such as
        # an iterator, cannot be compared.
        tensors: list[torch.Tensor] = []
        others: list[Any] = []
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
            elif leaf is not None:
                others.append(leaf)
        if not all(isinstance(value, (bool, int, float, complex, str)) for value in others):
            kind = type(others[0]).__name__
            raise UntraceableError(f"{name_of(node)} returns {kind}, which may hold values of tensors")
        if others and tensors:
            raise UntraceableError(f"{name_of(node)} returns tensors and values together")
        if others:
            self._writer.guard(node, result, f"{name_of(node)} of a tensor")
        if not tensors:
            return result
        output = self._writer.unpack(result, node, read)
        if seen.reads_values:
            # Their sizes are values out of tensors: ``x[mask]``, ``nonzero``.
            for tensor in tensors:
                made = self._writer.node_of(tensor)
                shape = self._writer.node("call_function", getattr, (made, "shape"), {})
                self._writer.guard(shape, tensor.shape, f"the size of what {name_of(node)} returns")
        return output

    def _follow_ambient(self) -> None:
        """Tell the graph under which settings the next operation runs; ``UntraceableError`` if it cannot set these."""
        now, base = ambient(), self._ambient
        # torch.no_grad and torch.autocast are regions of the graph. Nothing else around an operation is kept with it.
        is_followed = now.gradients == self._gradients
        if not is_followed or (now.kernels, now.hooks) != (base.kernels, base.hooks):
            raise UntraceableError(
                "it computes inside of a context (inference_mode, torch's checkpoint, an autograd function, a choice "
                "of kernels), which a recording would lose"
            )
        self._writer.region = None
        if now != base:
            self._writer.region = Region(now.gradients, now.autocast_changes(base))

    def _require_same_generators(self) -> None:
        # Reading a state makes tensors, which are no operations of the forward.
        with self._aside():
            same = self._states.equals(GeneratorStates())
        if not same:
            raise UntraceableError(
                "it draws random numbers outside of torch's operations, as when a block is skipped at random, or seeds "
                "a generator"
            )


@contextmanager
def _standing_in(attributes: Mapping[Slot, Any]) -> Iterator[None]:
    """Context in which modules have copies of their attributes, which have nodes: what the code reads is an input."""
    # A list, and no dict by module: a metric of torchmetrics has another hash whenever its values change.
    places = []
    for (owner, name), stand_in in attributes.items():
        namespace = owner.__dict__
        places.append((namespace, name, namespace[name], stand_in))

    def put_back() -> None:
        for namespace, name, before, value in places:
            # Where the forward has set another value, that stays.
            if namespace.get(name) is value:
                namespace[name] = before

    with undone(put_back):
        for namespace, name, _, value in places:
            namespace[name] = value
        yield


def require_unrecorded(what: str) -> None:
    """Raise ``UntraceableError`` if the running code is recorded."""
    for mode in private.function_modes():
        # A recorder that is not listening runs an operation, whose code runs again at every call.
        if isinstance(mode, Recorder) and mode.check.listens:
            raise UntraceableError(what)


def is_recomputing() -> bool:
    """True if the current forward repeats one that has already run, so that nothing should come of it.

    That is while a segment is recomputed in the backward, and while costs are measured. What modules and their hooks
    can reach in Python is put back by itself. Ask here before writing to a file or a server, which cannot be undone.
    A module that asks cannot be recorded: it is one stage.
    """
    require_unrecorded("it asks is_recomputing(), and what it does for the answer would not be recorded")
    return passes.is_recomputing()


def _path_of_recorded_code(check: DispatchCheck, calls: ModuleCalls) -> str | None:
    """Path of the module whose forward is running; None inside of an operation."""
    return None if check.inside else calls.path


def _copies(values: Sequence[Any]) -> list[Any]:
    """Copies of tensors that a forward may change, one for each object; numbers as they are."""
    copies: dict[int, torch.Tensor] = {}
    for value in values:
        if isinstance(value, torch.Tensor) and id(value) not in copies:
            # The clone of a leaf is none, so that the forward may change it in place.
            copy = value.detach().requires_grad_(value.requires_grad).clone()
            copies[id(value)] = like(copy, value)
    return [copies.get(id(value), value) for value in values]
