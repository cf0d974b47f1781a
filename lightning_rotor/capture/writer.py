"""The graph of a recording, as it is written: nodes for operations, arguments, sizes, and tensors in results."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from lightning_rotor.capture.dispatch_check import CHANGES, DispatchCheck
from lightning_rotor.capture.module_calls import ModuleCalls, tensor_slots
from lightning_rotor.capture.node_facts import LINE, OF, REGION, SIZE, VALUED, Region, is_constant, longest, name_of
from lightning_rotor.capture.operations import CONSTANTS, UntraceableError
from lightning_rotor.capture.recorded_checks import require_as_recorded, require_check
from lightning_rotor.capture.size_guards import ancestors
from lightning_rotor.capture.traced_numbers import Number, Size, plain
from lightning_rotor.capture.value_memory import LASTING, ValueMemory, storage_of
from lightning_rotor.private.python_names import raises_otherwise
from lightning_rotor.private.values import (
    attributes_of,
    flatten,
    is_plain_container,
    is_users_named_tuple,
    tensors_in,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from lightning_rotor.stages.submodules import submodule_of
from lightning_rotor.stages.user_code import is_users


class GraphWriter:
    """Writes a graph. See also :class:`~lightning_rotor.capture.recording.Recording`.

    Attributes:
        values: Tensors with their nodes, and what operations save.
        asked: Questions that code has asked about sizes, with the answers.
        valued: Values that code has seen, and what it has asked of numbers that depend on values.
        lengths: Lengths of sequences that were packed, each as a list.
        impure: By node whose value depends on more than the call's inputs, on what.
        region: Other settings than the call's that the code has chosen for now.
    """

    def __init__(self, calls: ModuleCalls, check: DispatchCheck) -> None:
        self.graph = fx.Graph()
        self.constants: list[torch.Tensor] = []
        self.asked: list[tuple[fx.Node, Any]] = []
        self.valued: list[tuple[fx.Node, Any]] = []
        self.lengths: list[tuple[fx.Node, Any]] = []
        # For the node of each packed sequence's batch sizes, the node of its lengths.
        self._packed: dict[fx.Node, fx.Node] = {}
        self.region: Region | None = None
        self._calls = calls
        self.check = check
        # Tensors that every stage reads where they are.
        self._named: dict[int, tuple[torch.Tensor, str, Any]] = {}
        # One node for each of them, however often the forward reads it.
        self._reads: dict[str, fx.Node] = {}
        self.values = ValueMemory()
        self.impure: dict[fx.Node, str] = {}

    def begin(self, root: nn.Module, inputs: list[Any]) -> list[fx.Node]:
        """Placeholders for the inputs of a call, whose numbers become :class:`Number`.

        Parameters and buffers are those that the root has now.
        """
        self._root = root
        self._named = tensor_slots(root)
        self.values.lasting = {storage_of(tensor) for tensor, *_ in self._named.values()}
        nodes = []
        for index in range(len(inputs)):
            nodes.append(self.node("placeholder", f"input_{index}", (), {}))
        # Backwards, so that of several arguments that are one tensor the first has it.
        for index in reversed(range(len(inputs))):
            value, node = inputs[index], nodes[index]
            if isinstance(value, torch.Tensor):
                self.values.put(value, node)
            else:
                node.meta[VALUED] = True
                inputs[index] = Number(value, node, self)
        return nodes

    def node(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> fx.Node:
        """A new node of the module whose forward is running."""
        name = target
        if not isinstance(target, str):
            name = getattr(target, "__name__", "operation")
        # The name is for who prints the graph. fx makes it unique, and wants an identifier.
        node = self.graph.create_node(kind, target, args, kwargs, str(name).replace(".", "_"))
        # Stages are named after the module, messages name the line.
        node.meta["module"], node.meta[LINE] = self._calls.path, _users_line()
        if self.region is not None:
            node.meta[REGION] = self.region
        if kind == "call_module":
            node.meta[OF] = submodule_of(self._root, target)
        # What is computed from a value that may be another next time may be another, too.
        for used in node.all_input_nodes:
            if used in self.impure:
                self.impure[node] = self.impure[used]
        return node

    def check_output(self, leaf: fx.Node, appearance: Any, *, sizes: bool) -> None:
        """Require, right behind code that runs as it is, that it returns what it returned in the recording."""
        with self.graph.inserting_after(leaf):
            check = self.graph.call_function(require_as_recorded, (leaf, appearance, sizes))
        # In the same module and region, so that the check neither names a stage nor ends a block of settings.
        for key in ("module", LINE, REGION):
            if key in leaf.meta:
                check.meta[key] = leaf.meta[key]

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor that an operation reads; ``UntraceableError`` if nobody has seen it being made."""
        named, name, source = self._named.get(id(tensor), (None, "", None))
        # An id is used again once its tensor is gone.
        if named is not tensor:
            node = self.values.node_of(tensor)
            if node is not None:
                return node
            name, source = self._constant(tensor)
        if name not in self._reads:
            node = self.node("get_attr", name, (), {})
            node.meta[OF] = source
            # Values of buffers can be asked again before each call. Those of parameters change with every step, so that
            # a recording would hold once.
            if tensor.requires_grad:
                self.impure[node] = f"the parameter {name!r}, which learns"
            self._reads[name] = node
            self.values.put(tensor, node)
        return self._reads[name]

    def _constant(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """The name of a new constant, and itself; ``UntraceableError`` if the tensor is none."""
        # A tensor that the forward has made in an operation has a node. Without one, an operation hid that it made it.
        if not self.check.is_older(tensor):
            raise UntraceableError(
                "it reads a tensor that was made where no recording sees it (kept by a module from its "
                "forward, shared with NumPy, or made by code in C++)"
            )
        # As a constant, it would be missing among the parameters of its stage.
        if tensor.requires_grad:
            raise UntraceableError("it computes with parameters that it keeps elsewhere than in attributes")
        name = f"_lightning_rotor_constant_{len(self.constants)}"
        self.constants.append(tensor)
        self._named[id(tensor)] = tensor, name, tensor
        return name, tensor

    def require_bare(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise ``UntraceableError`` if recorded code, or a module in it, has set Python attributes of tensors."""
        for tensor in filter(attributes_of, tensors):
            node = self.values.node_of(tensor)
            # Inputs come with their attributes, which guards compare.
            if node is None or node.op not in LASTING:
                raise UntraceableError("it sets Python attributes of tensors, which the recorded operations do not set")

    def sizes_of(self, tensor: torch.Tensor, value: Any, dim: int | None) -> Any:
        """A tensor's shape, its size in a dimension, or its number of elements, as code sees it.

        ``value`` is the plain one.
        """
        owner = self.values.node_of(tensor)
        # Shapes of parameters, buffers and constants are compared by Watch, and plain numbers here.
        if owner is None or owner.op == "get_attr":
            return value
        is_shape = isinstance(value, torch.Size)
        # Of batch sizes of packed sequences, there are as many as the longest sequence has steps.
        lengths = self._packed.get(self.values.memory_owner(owner))
        if lengths is not None:
            steps = self._size(tensor.shape[0], "call_function", longest, lengths)
            return torch.Size([steps]) if is_shape else steps
        if dim is None and not is_shape:
            return self._size(value, "call_method", "numel", owner)
        shape = self._size_node("call_function", getattr, (owner, "shape"), tuple(tensor.shape))
        if dim is not None:
            # Not from the end, so that x.shape[-1] and x.shape[2] are one question.
            place = dim % tensor.dim()
            return self._size(value, "call_function", operator.getitem, shape, place)
        sizes = []
        for place, size in enumerate(value):
            sizes.append(self._size(size, "call_function", operator.getitem, shape, place))
        return torch.Size(sizes)

    def compute(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Record arithmetic with sizes."""
        value = function(*map(plain, operands))
        # An operation computes with it, which does so again at every call.
        if not self.check.listens:
            return value
        has_number = any(type(operand) is Number for operand in operands)
        if has_number and type(value) in (int, float):
            encoded = tuple(map(self.encode, operands))
            node = self._size_node("call_function", function, encoded, value)
            return Number(value, node, self)
        # ``rows / 2`` is a float, which tensors take as a plain number: it holds for this size alone.
        if type(value) is not int:
            for operand in operands:
                if type(operand) in (Size, Number):
                    operand.pin()
            return value
        return self._size(value, "call_function", function, *map(self.encode, operands))

    def ask(self, function: Callable[..., Any], left: Any, right: Any, answer: Any) -> None:
        """Record a question about numbers: sizes, or numbers that modules have as attributes."""
        operands = self.encode(left), self.encode(right)
        node = self._size_node("call_function", function, operands, answer)
        # Questions about sizes are asked once for each new set of sizes, those about values (lengths of packed
        # sequences, a module's numbers) at every call.
        if VALUED in node.meta:
            self.guard(node, answer, "a size")
        else:
            self.asked.append((node, answer))

    def _size(self, value: int, kind: str, target: Any, *args: Any) -> Size:
        return Size(value, self._size_node(kind, target, args, value), self)

    def _size_node(self, kind: str, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        node = self.node(kind, target, args, {})
        reads_values = target is longest or any(VALUED in used.meta for used in node.all_input_nodes)
        if reads_values:
            node.meta[VALUED] = True
            return node
        node.meta[SIZE] = value
        # Whatever is in a tensor, its sizes are these.
        self.impure.pop(node, None)
        return node

    def encode(self, value: Any, *, exact: bool = False) -> Any:
        """Arguments with nodes for tensors. With ``exact``, a ``torch.Size`` stays one, which fx takes for a tuple."""
        kind = type(value)
        if kind in (Size, Number):
            # A number of another recording is a plain one here.
            return value.node if value.notebook is self else plain(value)
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if kind in (tuple, list):
            return kind(self.encode(entry, exact=exact) for entry in value)
        if kind is dict:
            return {key: self.encode(entry, exact=exact) for key, entry in value.items()}
        if kind is slice:
            return slice(self.encode(value.start), self.encode(value.stop), self.encode(value.step))
        # The function would call it where no call is seen.
        if isinstance(value, nn.Module):
            raise _hidden(f"the module {kind.__name__} to a function, where its parameters are hidden")
        if kind is torch.Size:
            # Its sizes may be recorded ones, so that it is made anew at each call.
            sizes = tuple(map(self.encode, value))
            if exact:
                return self.node("call_function", torch.Size, (sizes,), {})
            return sizes
        if _is_plain(value):
            return value
        # A named tuple takes its entries one by one, where other tuples take them in a row.
        if isinstance(value, tuple) and hasattr(value, "_fields") and not is_users_named_tuple(value):
            entries = tuple(self.encode(entry, exact=exact) for entry in value)
            return self.node("call_function", kind, entries, {})
        # A container that torch's pytree knows is put together again from its leaves.
        leaves, spec = tree_flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            raise _hidden(f"{kind.__name__} to an operation, which may hold tensors or be another one next time")
        return self.node("call_function", tree_unflatten, (self.encode(leaves, exact=exact), spec), {})

    def encode_output(self, output: Any) -> Any:
        """The module's output with nodes in the place of tensors; ``UntraceableError`` if it may hide tensors."""
        leaves, _ = flatten(output)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) and not _is_plain(leaf):
                raise UntraceableError(
                    f"it returns {type(leaf).__name__}, which may hold tensors where nobody can see them: "
                    "return tensors and plain values, or tuples, lists, dicts, dataclasses and plain objects of "
                    "them (call a model of transformers with use_cache=False; register others with torch.utils._pytree)"
                )
        return self.encode(output, exact=True)

    def unpack(
        self,
        value: Any,
        node: fx.Node,
        read: Sequence[torch.Tensor],
        *,
        fresh_objects: bool = False,
    ) -> Any:
        """Give every tensor in an operation's result a node, with ``fresh_objects`` as an object of its own."""
        if isinstance(value, torch.Tensor):
            return self._unpack_tensor(value, node, read, fresh_objects=fresh_objects)
        if not tensors_in(value):
            return value
        # By its id: torch's function for it is in a cycle, in which the container's tensors, and all that they were
        # computed from, would wait for Python's garbage collector.
        whole = id(value)
        keys: Sequence[Any]
        if type(value) is dict:
            entries, spec = tree_flatten(value, is_leaf=lambda part: id(part) != whole)
            keys = list(value)
        elif is_plain_container(value):
            entries, spec = tree_flatten(value, is_leaf=lambda part: id(part) != whole)
            keys = range(len(entries))
        else:
            # Other containers have no operation that takes an entry out: the graph flattens them first.
            entries, spec = tree_flatten(value)
            keys = range(len(entries))
            node = self.node("call_function", tree_leaves, (node,), {})
        seen = list(entries)
        for number, key in enumerate(keys):
            entry = entries[number]
            if tensors_in(entry):
                piece = self.node("call_function", operator.getitem, (node, key), {})
                seen[number] = self.unpack(entry, piece, read, fresh_objects=fresh_objects)
        # The code may keep the very container, or compare it by identity.
        if all(map(operator.is_, seen, entries)):
            return value
        return tree_unflatten(seen, spec)

    def _unpack_tensor(
        self,
        tensor: torch.Tensor,
        node: fx.Node,
        read: Sequence[torch.Tensor],
        *,
        fresh_objects: bool,
    ) -> torch.Tensor:
        named, *_ = self._named.get(id(tensor), (None,))
        is_named = named is tensor
        is_argument = any(tensor is argument for argument in read)
        # One object is the value of one node. A module that hands its input through would take the input's.
        if fresh_objects and (is_named or is_argument):
            tensor = tensor.view_as(tensor)
        elif is_named:
            # A buffer that was changed in place: every stage reads it where it is.
            return tensor
        self.values.put(tensor, node, read)
        return tensor

    def note_change(self, tensor: torch.Tensor, by: fx.Node) -> None:
        """Note a change in place; ``UntraceableError`` if the next call would find the tensor changed."""
        node = self.node_of(tensor)
        # A constant is made once, by the recording. The next call would find it changed.
        if is_constant(node):
            raise UntraceableError(CHANGES)
        self.values.mark_changed(tensor, by)

    def note_packed(self, batch_sizes: torch.Tensor, lengths: torch.Tensor) -> None:
        """Note that sequences of these lengths were packed."""
        node = self.node_of(lengths)
        # Lengths decide over the sizes of what is packed, so they must be known before a plan runs.
        self.require_computable(node, "the lengths of packed sequences")
        self._packed[self.node_of(batch_sizes)] = node
        question = self.node("call_method", "tolist", (node,), {})
        self.lengths.append((question, lengths.tolist()))

    def guard(self, node: fx.Node, value: Any, what: str) -> None:
        """Remember a value on which the code may have branched, as a condition of the recording.

        It must follow from a call's inputs alone, or be what an ``assert`` asks, whose node becomes a check. Else the
        forward is refused (``UntraceableError``), which ``attempts`` hears.
        """
        try:
            self.require_computable(node, what)
        except UntraceableError:
            is_truth = name_of(node) == "__bool__"
            if not is_truth or not raises_otherwise(_running_frame(), value):
                raise
            # ``assert x.isfinite().all()``: nobody sees the answer but the assert, so its node becomes the check.
            place = "{}:{}".format(*node.meta[LINE])
            node.op = "call_function"
            node.target = require_check
            node.args = (node.args[0], value, place)
        else:
            self.valued.append((node, value))

    def require_computable(self, node: fx.Node, what: str) -> None:
        """Raise ``UntraceableError`` if a node cannot be computed from a call's inputs alone."""
        if node in self.impure:
            raise UntraceableError(f"its course depends on {what}, which depends on {self.impure[node]}")
        if not self.values.is_repeatable(ancestors([node], sizes=False)):
            raise UntraceableError(f"its course depends on {what}, which was changed in place before")


def erase(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Remove nodes, what was computed for them alone, and pieces and sizes that nobody reads.

    Other operations without users stay: they may change something in place.
    """
    # What a size was computed from is no part of the question: sizes go by themselves, below.
    behind = ancestors(nodes, sizes=False)
    # From the end, so that what was read by erased nodes alone goes as well.
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        is_piece = node.target is operator.getitem or node.op == "get_attr"
        is_number = SIZE in node.meta or VALUED in node.meta
        # Neither changes anything in place, so that nobody misses one without readers.
        if node in behind or is_piece or is_number:
            graph.erase_node(node)


def _hidden(what: str) -> UntraceableError:
    return UntraceableError(f"it hands {what}")


def _users_line() -> tuple[str, int]:
    """File and line of the user's code that is running."""
    frame = sys._getframe(1)
    # Between the line and here are frames of torch's modules and of this package.
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _running_frame() -> FrameType:
    """The frame of the code that called into this package."""
    frame = sys._getframe(1)
    ours = f"{__name__.partition('.')[0]}."
    while frame.f_globals.get("__name__", "").startswith(ours) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_plain(value: Any) -> bool:
    """True if an argument is the same whenever the code runs, and holds no tensor."""
    # A function with variables of an enclosing one may hold tensors in them.
    if isinstance(value, FunctionType):
        return not value.__closure__
    return isinstance(value, (*CONSTANTS, np.generic, np.ndarray))
