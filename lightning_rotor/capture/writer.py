"""The graph of a recording, as it is written: nodes for operations, arguments, sizes, and tensors in results."""

from __future__ import annotations

import dis
import operator
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from lightning_rotor.capture.graph_stage import (
    LINE,
    OF,
    REGION,
    SIZE,
    VALUED,
    Region,
    is_constant,
    longest,
    name_of,
    require_check,
)
from lightning_rotor.capture.operations import (
    CHANGES,
    CONSTANTS,
    DispatchCheck,
    ModuleCalls,
    UntraceableError,
    tensor_slots,
)
from lightning_rotor.capture.size_guards import ancestors
from lightning_rotor.private.torch_names import identity_of
from lightning_rotor.private.values import (
    attributes_of,
    bytes_of,
    flatten,
    plain_parts,
    storage_bytes_of,
    tensors_in,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from lightning_rotor.stages.snapshot import is_users

# ----------------------------------------------------------------------------------------------------
# Sizes that recorded code asks for: numbers that know their node, so that the recording holds for other sizes.
#
# batch = x.shape[0]               ─► getattr(x, "shape"), getitem(…, 0)
# x.view(batch * 2, -1)            ─► mul(…, 2), view(x, …, -1)
# if batch > self.longest: …       ─► a question: gt(…, longest) is False, and must be for other sizes as well
# math.sqrt(batch)                 ─► a question: the size is 8


class _Traced:
    """A number of the recorded code with the node that computes it. Using it adds nodes or questions to the graph."""

    notebook: GraphWriter
    node: fx.Node

    def pin(self) -> None:
        """Hold for this very number alone, as its further use is not recorded."""
        if self.notebook.check.listens:
            self.notebook.ask(operator.eq, self, plain(self), True)

    def __bool__(self) -> bool:
        return bool(operator.ne(self, 0))


def _computed(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def operate(self: _Traced, *others: Any) -> Any:
        if not all(isinstance(other, (int, float, complex)) for other in others):
            return NotImplemented
        return self.notebook.compute(function, *((*others, self) if swapped else (self, *others)))

    return operate


def _asked(function: Callable[..., Any]) -> Callable[..., Any]:
    def compare(self: _Traced, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        answer = function(plain(self), plain(other))
        if self.notebook.check.listens:
            self.notebook.ask(function, self, other, answer)
        return answer

    return compare


def _pinned(name: str) -> Callable[..., Any]:
    def read(self: _Traced, *others: Any) -> Any:
        self.pin()
        return getattr(plain(self), name)(*others)

    return read


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
    setattr(_Traced, f"__{_name}__", _computed(getattr(operator, _name)))
    setattr(_Traced, f"__r{_name}__", _computed(getattr(operator, _name), swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(_Traced, f"__{_name}__", _computed(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Traced, f"__{_name}__", _asked(getattr(operator, _name)))
for _name in ("float", "int", "hash", "round", "floor", "ceil", "trunc"):
    setattr(_Traced, f"__{_name}__", _pinned(f"__{_name}__"))


class Size(_Traced, int):
    """A size that the recorded code has asked for."""

    def __new__(cls, number: int, node: fx.Node, notebook: GraphWriter) -> Size:
        """The number as a size that a node computes."""
        self = int.__new__(cls, number)
        self.node, self.notebook = node, notebook
        return self

    def __reduce__(self) -> Any:
        return int, (int.__int__(self),)


class Number(_Traced):
    """A module's number, which may differ from call to call, or what was computed of it. It passes for an int or float.

    It is none, so that C code which wants one has to ask for it.
    """

    __class__ = property(lambda self: type(self.value))

    def __init__(self, value: float, node: fx.Node, notebook: GraphWriter) -> None:
        self.value, self.node, self.notebook = value, node, notebook

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return NotImplemented  # the mode that records takes it

    def __getattr__(self, name: str) -> Any:
        self.pin()
        return getattr(self.value, name)


for _name in ("index", "repr", "str", "format"):
    setattr(Number, f"__{_name}__", _pinned(f"__{_name}__"))


def plain(value: Any) -> Any:
    """A number, or what is in tuples, lists, dicts and slices, without nodes."""
    kind = type(value)
    if kind is Size:
        return int.__int__(value)
    if kind is Number:
        return value.value
    if kind in (tuple, list):
        return kind(map(plain, value))
    if kind is dict:
        return {plain(key): plain(entry) for key, entry in value.items()}
    if kind is slice:
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return torch.Size(map(plain, value)) if kind is torch.Size else value


# ------------------------------------ Which node of the graph a tensor is the value of, and which tensors share memory.


@dataclass(frozen=True, slots=True)
class OpMemory:
    """Memory of one operation.

    Attributes:
        made_bytes: A new storage that it returns.
        saved_bytes: Storages that autograd saves, without parameters, buffers and the chain's inputs.
        storages: Sizes of the storages under what it returns, by the first node that has each.
        pieces: Those of which it returns only a part.
        saved: Those of the saved storages that are under values of the graph.
        of_parameters: It returns memory of a parameter.
    """

    made_bytes: int
    saved_bytes: int
    storages: Mapping[fx.Node, int]
    pieces: frozenset[fx.Node]
    saved: frozenset[fx.Node]
    of_parameters: bool


class _Values:
    """Tensors and their nodes. It keeps no tensor alive: the forward decides how long they live.

    Attributes:
        saving: Bytes of the storages that autograd saves in the running operation.
        lasting: Storages of parameters and buffers.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[weakref.ref[torch.Tensor], fx.Node]] = {}
        # One changes when another that shares its memory is changed in place: for each the first of those that share.
        self._firsts: dict[fx.Node, fx.Node] = {}
        self._bytes: dict[fx.Node, tuple[int, int]] = {}  # of the tensor's memory, and of the tensor
        self._changes: defaultdict[fx.Node, set[fx.Node]] = defaultdict(set)  # in place, by the first that shares
        self._saved: dict[fx.Node, tuple[int, frozenset[fx.Node]]] = {}
        self.saving: dict[int | None, int] = {}
        self.lasting: Set[int | None] = frozenset()

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        """The newest node that the tensor is the value of."""
        # A tensor may have the address of one that is gone, or have been rebuilt around what C++ still held of it.
        reference, node = self._nodes.get(id(tensor), (None, None))
        return node if reference is not None and reference() is tensor else None

    def forget_tensors(self) -> None:
        """Let go of them: torch moves no parameter of a class of its own to which there is a weak reference."""
        self._nodes.clear()

    def first_of(self, node: fx.Node) -> fx.Node:
        """The first node that shares a node's memory."""
        return self._firsts.get(node, node)

    def put(self, tensor: torch.Tensor, node: fx.Node, made_from: Sequence[torch.Tensor] = ()) -> None:
        """Make the tensor the value of this node; it may be a view of one that it was made from."""
        storage = _storage(tensor)
        like = (
            self._firsts.get(self.node_of(other), node)  # type: ignore[arg-type]
            for other in made_from
            if other is tensor or (storage is not None and _storage(other) == storage)
        )
        self._firsts[node] = next(like, node)
        self._bytes[node] = 0 if storage is None else storage_bytes_of(tensor), bytes_of(tensor)
        self._nodes[id(tensor)] = weakref.ref(tensor), node

    def mark_changed(self, tensor: torch.Tensor, by: fx.Node) -> None:
        """Note that an operation in place has changed the tensor."""
        node = self.node_of(tensor)
        if node in self._firsts:
            self._changes[self._firsts[node]].add(by)

    def is_repeatable(self, nodes: Set[fx.Node]) -> bool:
        """True if these operations alone give what they gave: no other, and none on what was there, changed a value."""
        firsts = {self._firsts[node] for node in nodes if node in self._firsts}
        changed = [first for first in firsts if first in self._changes]
        return all(first.op not in _LASTING and self._changes[first] <= nodes for first in changed)

    def note_saved(self, tensor: torch.Tensor) -> None:
        """Note a tensor that autograd saves, which is dropped."""
        self.saving[_storage(tensor)] = storage_bytes_of(tensor)

    def settle_saved(self, node: fx.Node, tensors: Sequence[torch.Tensor]) -> None:
        """Take what was saved for that of an operation, which took and gave these tensors."""
        owners = {_storage(tensor): self._firsts[of] for tensor in tensors if (of := self.node_of(tensor)) is not None}
        counted = {
            storage: size
            for storage, size in self.saving.items()
            if storage not in self.lasting and (storage not in owners or owners[storage].op not in _LASTING)
        }
        known = frozenset(owners[storage] for storage in counted if storage in owners)
        self._saved[node] = sum(counted.values()), known
        self.saving.clear()

    def memory_of(self, node: fx.Node) -> OpMemory:
        """Memory of an operation."""
        first = self._firsts.get(node)
        size, shown = self._bytes.get(node, (0, 0))
        saved_bytes, saved = self._saved.get(node, (0, frozenset()))
        tensors = {each: self._bytes[each][0] for each in self._tensors_of(node)}
        storages = {self._firsts[each]: of for each, of in tensors.items() if self._firsts[each].op not in _LASTING}
        new = [each for each in tensors if self._firsts[each] is each and each not in node.all_input_nodes]
        unpacks = node.target is operator.getitem and node.args[0] not in self._firsts
        return OpMemory(
            made_bytes=0 if unpacks else sum(tensors[each] for each in new),
            saved_bytes=saved_bytes,
            storages=storages,
            pieces=frozenset(storages if shown < size else ()),
            saved=saved,
            of_parameters=first is not None and first.op == "get_attr" and _is_parameter(first),
        )

    def _tensors_of(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes of the tensors in a node's value: what a nesting was made of, or what comes out of it."""
        if node in self._firsts:
            yield node
            return
        yield from (used for used in node.all_input_nodes if used in self._firsts)
        for user in node.users:
            if user.target is operator.getitem:
                yield from self._tensors_of(user)


_LASTING = ("placeholder", "get_attr")
"""Kinds of nodes whose values are there anyway."""


def _is_parameter(node: fx.Node) -> bool:
    return not is_constant(node) and node.meta[OF][1] in node.meta[OF][0]._parameters


def _storage(tensor: torch.Tensor) -> int | None:
    # Both tensors are alive when this is compared, so the address is nobody else's.
    try:
        return identity_of(plain_parts(tensor)[0].untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors, fake ones
        return None


class GraphWriter:
    """Writes a graph. See also :class:`.Recording`.

    Attributes:
        values: Tensors with their nodes, and what operations save.
        asked: What code has asked of sizes, with the answers.
        valued: Values that code has seen, and what it has asked of numbers that depend on values.
        lengths: Of sequences that were packed, as a list.
        impure: By node whose value depends on more than the call's inputs, on what.
        region: Other settings than the call's that the code has chosen for now.
    """

    def __init__(self, calls: ModuleCalls, check: DispatchCheck) -> None:
        self.graph = fx.Graph()
        self.constants: list[torch.Tensor] = []
        self.asked: list[tuple[fx.Node, Any]] = []
        self.valued: list[tuple[fx.Node, Any]] = []
        self.lengths: list[tuple[fx.Node, Any]] = []
        self._packed: dict[fx.Node, fx.Node] = {}
        self.region: Region | None = None
        self._calls = calls
        self.check = check
        self._named: dict[int, tuple[torch.Tensor, str, Any]] = {}
        self._reads: dict[str, fx.Node] = {}
        self.values = _Values()
        self.impure: dict[fx.Node, str] = {}

    def begin(self, root: nn.Module, inputs: list[Any]) -> list[fx.Node]:
        """Placeholders for the inputs of a call, whose numbers become :class:`Number`.

        Parameters and buffers are those that the root has now.
        """
        self._root = root
        self._named = tensor_slots(root)
        self.values.lasting = {_storage(tensor) for tensor, *_ in self._named.values()}
        nodes = [self.node("placeholder", f"input_{index}", (), {}) for index in range(len(inputs))]
        for number, (value, node) in reversed(list(enumerate(zip(inputs, nodes, strict=True)))):
            if isinstance(value, torch.Tensor):
                self.values.put(value, node)
            else:
                node.meta[VALUED] = True
                inputs[number] = Number(value, node, self)
        return nodes

    def node(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """A new node of the module whose forward is running."""
        name = target if isinstance(target, str) else getattr(target, "__name__", "operation")
        node = self.graph.create_node(kind, target, args, kwargs, str(name).replace(".", "_"))
        node.meta["module"], node.meta[LINE] = self._calls.path, _users_line()
        if self.region is not None:
            node.meta[REGION] = self.region
        if kind == "call_module":
            node.meta[OF] = self._root.get_submodule(target)
        for used in node.all_input_nodes:
            if used in self.impure:
                self.impure[node] = self.impure[used]
        return node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor that an operation reads; ``UntraceableError`` if nobody has seen it being made."""
        owned, name, of = self._named.get(id(tensor), (None, "", None))
        if owned is not tensor:
            node = self.values.node_of(tensor)
            if node is not None:
                return node
            if not self.check.is_older(tensor):
                raise UntraceableError(
                    "it reads a tensor that was made where no recording sees it (kept by a module from its "
                    "forward, shared with NumPy, or made by code in C++)"
                )
            if tensor.requires_grad:
                raise UntraceableError("it computes with parameters that it keeps elsewhere than in attributes")
            name, of = f"_lightning_rotor_constant_{len(self.constants)}", tensor
            self.constants.append(tensor)
            self._named[id(tensor)] = tensor, name, of
        if name not in self._reads:
            self._reads[name] = self.node("get_attr", name, (), {})
            self._reads[name].meta[OF] = of
            if tensor.requires_grad:
                self.impure[self._reads[name]] = f"the parameter {name!r}, which learns"
            self.values.put(tensor, self._reads[name])
        return self._reads[name]

    def require_bare(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise ``UntraceableError`` if recorded code, or a module in it, has set Python attributes of tensors."""
        named = [tensor for tensor in tensors if attributes_of(tensor)]
        if any((node := self.values.node_of(tensor)) is None or node.op not in _LASTING for tensor in named):
            raise UntraceableError("it sets Python attributes of tensors, which the recorded operations do not set")

    # ---------------------------------------------------------------- sizes

    def sizes_of(self, tensor: torch.Tensor, value: Any, dim: int | None) -> Any:
        """What code sees as a tensor's shape, its size in a dimension, or its number of elements."""
        owner = self.values.node_of(tensor)
        if owner is None or owner.op == "get_attr":
            return value
        lengths = self._packed.get(self.values.first_of(owner))
        if lengths is not None:
            steps = self._size(tensor.shape[0], "call_function", longest, lengths)
            return torch.Size([steps]) if isinstance(value, torch.Size) else steps
        if dim is None and not isinstance(value, torch.Size):
            return self._size(value, "call_method", "numel", owner)
        shape = self._size_node("call_function", getattr, (owner, "shape"), tuple(tensor.shape))
        if dim is not None:
            return self._size(value, "call_function", operator.getitem, shape, dim % tensor.dim())
        sizes = (self._size(size, "call_function", operator.getitem, shape, n) for n, size in enumerate(value))
        return torch.Size(list(sizes))

    def compute(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Record arithmetic with sizes."""
        value = function(*map(plain, operands))
        if not self.check.listens:
            return value
        if any(type(operand) is Number for operand in operands) and type(value) in (int, float):
            node = self._size_node("call_function", function, tuple(map(self.encode, operands)), value)
            return Number(value, node, self)
        if type(value) is not int:
            for operand in operands:
                if type(operand) in (Size, Number):
                    operand.pin()
            return value
        return self._size(value, "call_function", function, *map(self.encode, operands))

    def ask(self, function: Callable[..., Any], left: Any, right: Any, answer: Any) -> None:
        """Record a question about sizes."""
        operands = self.encode(left), self.encode(right)
        node = self._size_node("call_function", function, operands, answer)
        if VALUED in node.meta:
            self.guard(node, answer, "a size")
        else:
            self.asked.append((node, answer))

    def _size(self, value: int, kind: str, target: Any, *args: Any) -> Size:
        return Size(value, self._size_node(kind, target, args, value), self)

    def _size_node(self, kind: str, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        node = self.node(kind, target, args, {})
        if target is longest or any(VALUED in used.meta for used in node.all_input_nodes):
            node.meta[VALUED] = True
            return node
        node.meta[SIZE] = value
        self.impure.pop(node, None)  # whatever is in a tensor, its sizes are these
        return node

    # ---------------------------------------------------------------- what operations take and give

    def encode(self, value: Any, *, exact: bool = False) -> Any:
        """Arguments with nodes for tensors. With ``exact``, a ``torch.Size`` stays one, which fx takes for a tuple."""
        kind = type(value)
        if kind in (Size, Number):
            return value.node if value.notebook is self else plain(value)
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if kind in (tuple, list):
            return kind(self.encode(entry, exact=exact) for entry in value)
        if kind is dict:
            return {key: self.encode(entry, exact=exact) for key, entry in value.items()}
        if kind is slice:
            return slice(self.encode(value.start), self.encode(value.stop), self.encode(value.step))
        if isinstance(value, nn.Module):
            raise _hidden(f"the module {kind.__name__} to a function, where its parameters are hidden")
        if kind is torch.Size:
            sizes = tuple(map(self.encode, value))
            return self.node("call_function", torch.Size, (sizes,), {}) if exact else sizes
        if _is_plain(value):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self.node("call_function", kind, tuple(self.encode(entry, exact=exact) for entry in value), {})
        leaves, spec = tree_flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            raise _hidden(f"{kind.__name__} to an operation, which may hold tensors or be another one next time")
        return self.node("call_function", tree_unflatten, (self.encode(leaves, exact=exact), spec), {})

    def encode_output(self, output: Any) -> Any:
        """The module's output with nodes in the place of tensors; ``UntraceableError`` if it may hide tensors."""
        for leaf in flatten(output)[0]:
            if not isinstance(leaf, torch.Tensor) and not _is_plain(leaf):
                raise UntraceableError(
                    f"it returns {type(leaf).__name__}, which may hold tensors where nobody can see them: "
                    "return tensors and plain values, or tuples, lists, dicts, dataclasses and attrs objects of "
                    "them (call a model of transformers with use_cache=False; register others with torch.utils._pytree)"
                )
        return self.encode(output, exact=True)

    def unpack(self, value: Any, node: fx.Node, read: Sequence[torch.Tensor], *, fresh_objects: bool = False) -> Any:
        """Give every tensor in an operation's result a node, with ``fresh_objects`` as an object of its own."""
        if isinstance(value, torch.Tensor):
            is_named = self._named.get(id(value), (None,))[0] is value
            if fresh_objects and (is_named or any(value is tensor for tensor in read)):
                value = value.view_as(value)
            elif is_named:
                return value  # a buffer that was changed in place: every stage reads it where it is
            self.values.put(value, node, read)
            return value
        if not tensors_in(value):
            return value
        if type(value) is dict or isinstance(value, (tuple, list)):
            entries, spec = tree_flatten(value, is_leaf=lambda each: each is not value)
        else:
            entries, spec = tree_flatten(value)
            node = self.node("call_function", tree_leaves, (node,), {})
        seen = list(entries)
        for number, key in enumerate(value if type(value) is dict else range(len(entries))):
            if tensors_in(entries[number]):
                piece = self.node("call_function", operator.getitem, (node, key), {})
                seen[number] = self.unpack(entries[number], piece, read, fresh_objects=fresh_objects)
        return value if all(map(operator.is_, seen, entries)) else tree_unflatten(seen, spec)

    # ---------------------------------------------------------------- what depends on more than the call's inputs

    def note_change(self, tensor: torch.Tensor, by: fx.Node) -> None:
        """Note a change in place; ``UntraceableError`` if the next call would find the tensor changed."""
        node = self.node_of(tensor)
        if is_constant(node):
            raise UntraceableError(CHANGES)
        self.values.mark_changed(tensor, by)

    def note_packed(self, batch_sizes: torch.Tensor, lengths: torch.Tensor) -> None:
        """Note that sequences of these lengths were packed."""
        node = self.node_of(lengths)
        self.require_computable(node, "the lengths of packed sequences")
        self._packed[self.node_of(batch_sizes)] = node
        self.lengths.append((self.node("call_method", "tolist", (node,), {}), lengths.tolist()))

    def guard(self, node: fx.Node, value: Any, what: str) -> None:
        """Remember a value that the code saw: one from a call's inputs alone, or one that is checked where it is."""
        try:
            self.require_computable(node, what)
        except UntraceableError:
            if name_of(node) != "__bool__" or not _raises_otherwise(value):
                raise
            place = "{}:{}".format(*node.meta[LINE])
            node.op, node.target, node.args = "call_function", require_check, (node.args[0], value, place)
        else:
            self.valued.append((node, value))

    def require_computable(self, node: fx.Node, what: str) -> None:
        """Raise ``UntraceableError`` if a node cannot be computed from a call's inputs alone."""
        if node in self.impure:
            raise UntraceableError(f"its course depends on {what}, which depends on {self.impure[node]}")
        if not self.values.is_repeatable(ancestors([node], sizes=False)):
            raise UntraceableError(f"its course depends on {what}, which was changed in place before")


def erase(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Remove nodes, what was computed for them alone, and pieces and sizes that nobody reads."""
    needed = ancestors(nodes, sizes=False)
    for node in reversed(list(graph.nodes)):
        pure = node in needed or node.target is operator.getitem or node.op == "get_attr"
        pure = pure or SIZE in node.meta or VALUED in node.meta
        if pure and not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def _hidden(what: str) -> UntraceableError:
    return UntraceableError(f"it hands {what}")


def _users_line() -> tuple[str, int]:
    """File and line of the user's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _raises_otherwise(answer: bool) -> bool:
    """True if the running code asks for a truth value to raise an error unless it is this one.

    That is ``assert`` and ``if …: raise``, as in constructors of ``torch.distributions``: Python jumps on the value,
    and the branch that it does not take leads to ``raise`` in a straight line.
    """
    frame, ours = sys._getframe(1), f"{__name__.partition('.')[0]}."
    while frame.f_globals.get("__name__", "").startswith(ours) and frame.f_back is not None:
        frame = frame.f_back
    code = [each for each in dis.get_instructions(frame.f_code) if each.opname != "TO_BOOL"]
    jump, *behind = [each for each in code if each.offset >= frame.f_lasti]
    if not jump.opname.startswith("POP_JUMP"):
        return False
    is_taken = ("TRUE" in jump.opname) is answer
    other = behind if is_taken else [each for each in code if each.offset >= jump.argval]
    turns = {dis.opname[number] for number in (*dis.hasjrel, *dis.hasjabs)} | {"RETURN_VALUE", "RETURN_CONST"}
    return any(each.opname == "RAISE_VARARGS" for each in takewhile(lambda each: each.opname not in turns, other))


def _is_plain(value: Any) -> bool:
    """True if an argument is the same whenever the code runs, and holds no tensor."""
    if isinstance(value, FunctionType):
        return not value.__closure__
    return isinstance(value, (*CONSTANTS, np.generic, np.ndarray))
