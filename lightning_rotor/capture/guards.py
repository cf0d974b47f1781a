"""The conditions under which a recording holds for a call.

Sizes that the code asked for are nodes of the graph, so a recording may hold for other sizes in dimensions in which two
recordings of the same operations differ. That is found out once per new set of sizes: the questions about sizes are
computed again, on tensors without values. Questions about values are computed at each call. The recorded code itself
does not run any more, so whatever could have sent it another way must be noticed when it changes.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, repeat, zip_longest
from operator import attrgetter, is_, itemgetter
from struct import calcsize, pack
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from lightning_rotor.capture.graph_stage import (
    LINE,
    OF,
    REGION,
    SIZE,
    GraphSlice,
    Source,
    is_constant,
    look_of,
    spell_value,
)
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import same_bits
from lightning_rotor.stages.generators import generator_state
from lightning_rotor.stages.sequential import has_own_call, packed
from lightning_rotor.stages.snapshot import PLAIN, namespace_of

OWN = "own"
"""Where a node keeps whether it runs code that is not torch's, of which nobody knows what it does for other sizes."""
Question: TypeAlias = tuple[fx.Node, Any]
"""A node, and the value of it that the code saw."""
Signature: TypeAlias = tuple[tuple[tuple[int, ...], Any], ...]
"""For each tensor its shape, and all else about it that code can tell without looking at values."""


class Guards:
    """What one recording saw of sizes and of values.

    Attributes:
        asks_values: Values of inputs or buffers count.
        totals: Entries of the packed sequences in the call for which it was last found to hold.
        objection: Where the user's code decides otherwise for the sizes of the last call; empty if it does not.
    """

    def __init__(
        self,
        signature: Signature,
        inputs: Sequence[fx.Node],
        sizes: Sequence[Question],
        values: Sequence[Question],
        totals: Sequence[fx.Node] = (),
    ) -> None:
        nodes = list(inputs[0].graph.nodes) if inputs else []
        needed = ancestors([*totals, *(node for node, _ in values)], sizes=False)
        read = [node for node in nodes if SIZE in node.meta and node in needed]
        self._value_answers = [spell_value([value for _, value in values])]
        self._values = GraphSlice(
            [*inputs, *read], _operations(nodes, needed - set(read)), [[node for node, _ in values], list(totals)]
        )
        self.totals: tuple[int, ...] = ()
        self.objection = ""
        self.asks_values = any(node.op in ("placeholder", "get_attr") and not is_constant(node) for node in needed)
        self._asked = [node for node, _ in sizes]
        self._size_answers = [spell_value([value for _, value in sizes])]
        behind = ancestors([*self._asked, *read])
        self._sizes = GraphSlice(inputs, _operations(nodes, behind), [self._asked, read])
        self._own = next((node for node in nodes if node in behind and node.meta.get(OWN)), None)
        self._recorded = [signature]
        # For each signature for which it holds: the sizes that the questions about values read.
        self._read = {signature: tuple(node.meta[SIZE] for node in read)}

    def hold(self, signature: Signature, inputs: Sequence[Any]) -> bool:
        """True if a call with these inputs would see the same."""
        self.objection = ""
        if signature not in self._read and not self._holds_for_sizes(signature, inputs):
            return False
        if not self.asks_values:
            return True
        try:
            with torch.no_grad():
                found, totals = self._values(packed((*inputs, *self._read[signature])))
        except (RuntimeError, IndexError, ValueError):  # the forward itself will say it better
            return False
        self.totals = tuple(totals)
        return spell_value(found) in self._value_answers

    def _holds_for_sizes(self, signature: Signature, inputs: Sequence[Any]) -> bool:
        if not self._may_be(signature):
            return False
        if self._own is not None:
            self.objection = f"sizes depend on code that is not torch's, {line_of(self._own)}"
            return False
        found = self._sizes_on_meta(inputs, once=True)
        found = self._sizes_on_meta(inputs, once=False) if found is None else found
        if found is None:  # no rule for an operation, or sizes that do not go together
            return False
        answers, read = found
        if spell_value(answers) not in self._size_answers:
            others = zip(answers, self._size_answers[0][1], self._asked, strict=True)
            asked = next(node for answer, known, node in others if spell_value(answer) != known)
            self.objection = f"a size decides over what it does, {line_of(asked)}"
            return False
        self._read[signature] = tuple(read)
        return True

    def _sizes_on_meta(self, inputs: Sequence[Any], *, once: bool) -> Any:
        """What was asked of sizes, in a few microseconds an operation; None if an operation needs its own device."""
        try:
            with torch.no_grad(), _OnMeta(once=once):
                return self._sizes(packed([_on_meta(value) for value in inputs]))
        except Exception:
            return None

    def _may_be(self, signature: Signature) -> bool:
        """True if a signature differs from recorded ones of its kind only where these differ from each other."""
        recorded = [known for known in self._recorded if _kind(known) == _kind(signature)]
        known = [set(sizes) for sizes in zip(*map(_sizes_in, recorded), strict=True)]
        return bool(recorded) and all(
            len(sizes) > 1 or size in sizes for sizes, size in zip(known, _sizes_in(signature), strict=True)
        )

    def include(self, newer: Guards) -> None:
        """Hold also where the guards of a newer recording do, which has the same operations."""
        if not self._ask_the_same(newer):
            vars(self).update(vars(newer))
            return
        self._value_answers += [answer for answer in newer._value_answers if answer not in self._value_answers]
        self._size_answers += [answer for answer in newer._size_answers if answer not in self._size_answers]
        self._read.update(newer._read)
        self._recorded += newer._recorded

    def _ask_the_same(self, other: Guards) -> bool:
        return all(
            mine.operations == theirs.operations and mine.reads == theirs.reads
            for mine, theirs in ((self._values, other._values), (self._sizes, other._sizes))
        )


def _kind(signature: Signature) -> list[Any]:
    """All of a signature but the sizes."""
    return [(len(shape), rest) for shape, rest in signature]


def _sizes_in(signature: Signature) -> list[int]:
    return [size for shape, _ in signature for size in shape]


_RESHAPES_IN_PLACE = frozenset(
    f"{name}_" for name in ("as_strided", "resize", "resize_as", "set", "squeeze", "swapaxes", "swapdims", "t",
    "transpose", "unsqueeze")
)  # fmt: skip


_MOVES = ("cpu", "cuda")
"""Methods that put a tensor on a device."""
_DEVICE = re.compile(r"(cpu|cuda)(:\d+)?")


class _OnMeta(TorchFunctionMode):
    """Runs operations on the meta device, if ``once``, only once for equal arguments, such as those of equal layers."""

    def __init__(self, *, once: bool) -> None:
        super().__init__()
        self._once = once
        self._results: dict[Any, Any] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._once:
            return _run_on_meta(func, args, kwargs)
        if getattr(func, "__name__", "") in _RESHAPES_IN_PLACE:
            raise NotImplementedError  # the tensor may stand for others
        key = func, _look(args), _look(kwargs or {})
        if key not in self._results:
            self._results[key] = _run_on_meta(func, args, kwargs)
        return self._results[key]


def _run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    args, kwargs = fx.node.map_aggregate((args, kwargs or {}), _on_meta)
    with torch.device("meta"):
        return args[0].clone() if getattr(func, "__name__", "") in _MOVES else func(*args, **kwargs)


def _look(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_look, value))
    if isinstance(value, dict):
        return tuple((key, _look(entry)) for key, entry in value.items())
    return repr(value) if isinstance(value, slice) else (type(value), value)


def _on_meta(value: Any) -> Any:
    """What stands for an argument among tensors of the meta device, which have sizes and no values."""
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else value.detach().to("meta")
    if isinstance(value, torch.device) or (isinstance(value, str) and _DEVICE.fullmatch(value)):
        return torch.device("meta")
    return value


def _operations(nodes: Iterable[fx.Node], wanted: set[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node in wanted and node.op not in ("placeholder", "get_attr")]


def ancestors(nodes: Iterable[fx.Node], *, sizes: bool = True) -> set[fx.Node]:
    """The nodes and everything that they are computed from, also by way of sizes if ``sizes``."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes if sizes or SIZE not in node.meta else ())
    return found


# -------------------------------------------------------------------- Whether two recordings agree.


def line_of(node: fx.Node) -> str:
    """The user's line that did an operation."""
    return "at {}:{}".format(*node.meta[LINE])


def first_difference(left: fx.Graph, right: fx.Graph) -> tuple[fx.Node, ...]:
    """The first operation that two recordings do not share, in both, or in the one that has it; empty if they agree."""
    sources = Source(), Source()
    for mine, theirs in zip_longest(left.nodes, right.nodes):
        if mine is None or theirs is None or _said(mine, sources[0]) != _said(theirs, sources[1]):
            return tuple(node for node in (mine, theirs) if node is not None)
        if is_constant(mine) and not same_bits(mine.meta[OF], theirs.meta[OF]):
            return (mine,)
    return ()


def _said(node: fx.Node, source: Source) -> Any:
    """What an operation does, comparable between two recordings."""
    source.bound.clear()
    what = node.op, str(node.meta["module"]), node.target, node.args, node.kwargs, node.meta.get(REGION)
    text = source.spell(what)
    source.name(node)
    return text, list(map(look_of, source.bound.values()))


# -------------------------------------------------------------------- What values look like at one moment, comparable.


LONG = 1000
"""Entries of a list or dict that are looked at; of a longer one, it counts which object it is and how long."""


_FIXED = frozenset((bool, int, str, bytes, type(None), type, FunctionType, BuiltinFunctionType, ModuleType))
"""Types of values that only another value can be unequal to."""


class Same:
    """Compares by identity, and keeps the object alive so that no other one gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def version_of(tensor: torch.Tensor) -> int:
    """Number of changes in place."""
    return -1 if tensor.is_inference() else private.version_of(tensor)


class Copies:
    """Copies of values, equal while these stay the same, and a quick way to tell that nothing in them has changed.

    Lists and dicts are followed four levels deep, and configuration objects one level if ``objects``.
    """

    def __init__(self, *, objects: bool = True) -> None:
        self._follows_objects = objects
        self._rows: dict[int, Any] = {}
        self._tables: dict[int, dict[Any, Any]] = {}
        self._others: dict[int, Any] = {}

    def of(self, value: Any, depth: int = 4) -> Any:
        """The copy of a value."""
        kind = type(value)
        if kind in PLAIN:
            return kind, repr(value) if kind is float else value
        if isinstance(value, _FILLED) and depth and len(value) <= LONG:
            (self._tables if isinstance(value, dict) else self._rows)[id(value)] = value  # type: ignore[assignment]
            # Not the methods of a class of the user's, which may make its entries anew whenever they are asked for.
            entries = (*dict.keys(value), *dict.values(value)) if isinstance(value, dict) else tuple(value)
            kinds = tuple(map(type, entries))
            if _FIXED.issuperset(kinds):
                return kind, kinds, entries
            return kind, tuple(self.of(entry, depth - 1) for entry in entries)
        state = _state_of(value)
        if state is not None:
            self._others[id(value)] = value
            return Same(value), state
        follows = self._follows_objects and depth and not isinstance(value, (nn.Module, type))
        namespace = namespace_of(value) if follows else None
        if namespace is None:
            return Same(value)
        if kind not in _FIXED:
            self._tables[id(namespace)] = namespace
        return Same(value), tuple((key, entry) for key, entry in namespace.items() if type(entry) in PLAIN)

    def settle(self, read: Callable[[], Iterable[Any]], sized: Iterable[dict[str, Any]] = ()) -> None:
        """Take the values for what they are from now on, with what ``read`` gives, and the lengths of ``sized``."""
        self._read, self._sized = read, (*sized, *self._rows.values())
        self._lengths, self._seen = list(map(len, self._sized)), Objects(self._now())
        self._states = list(map(_state_of, self._others.values()))

    def hold(self) -> bool:
        """True if surely nothing has changed since; another object that is equal is a change."""
        if list(map(len, self._sized)) != self._lengths or not self._seen.are(self._now()):
            return False
        return list(map(_state_of, self._others.values())) == self._states

    def _now(self) -> tuple[Any, ...]:
        rows, tables = self._rows.values(), self._tables.values()
        return (*self._read(), *chain(*rows), *chain(*tables), *chain.from_iterable(map(dict.values, tables)))


_FILLED = (list, tuple, dict, set, deque)


def _state_of(value: Any) -> Any:
    """Version of a tensor, length of a list or dict, state of a random generator; None for all else."""
    if isinstance(value, torch.Tensor):
        return version_of(value)
    return len(value) if isinstance(value, _FILLED) else generator_state(value)


_STRUCTURE = (set(nn.Module().__dict__) - {"training"}) | {"_lightning_rotor", "forward"}
_forward_of = attrgetter("forward")


class Watch:
    """What modules look like at one moment. Hooks and ``forward`` of ``root`` run outside of the recording.

    With ``tensors``, also which tensors the parameters and buffers are. Stages read them anew at each call, and take
    attributes in ``inputs`` like arguments.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Iterable[nn.Module],
        *,
        tensors: bool = False,
        outside: Callable[[], bool] = lambda: True,
        inputs: Collection[tuple[nn.Module, str]] = (),
    ) -> None:
        self._root = root
        # What a scripted module has is not Python's.
        self._modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        self._inputs = frozenset(inputs)
        self._tensors, self._outside = tensors, outside
        self._seen = [self._look(module, Copies()) for module in self._modules]
        self._copies: Copies | None = None

    def holds(self) -> bool:
        """True if everything still looks the same. This runs at every training call."""
        if self._copies is None or not self._copies.hold():
            copies = Copies()
            if self.changed(copies=copies) is not None:
                return False
            # As many attributes as before, and the known ones among them: none is new.
            copies.settle(_parts_of(self._modules), map(vars, self._modules))
            self._copies = copies
        return self._outside()

    def changed_numbers(self) -> list[tuple[nn.Module, str]]:
        """Attributes that hold another number of the same type now."""
        return [
            (module, name)
            for module, (_, _, _, attributes, *_) in zip(self._modules, self._seen, strict=True)
            for name, then in attributes.items()
            for now in [module.__dict__.get(name)]
            if type(now) in (int, float)
            and isinstance(then, tuple)
            and then[0] is type(now)
            and Copies().of(now) != then
        ]

    def changed(self, besides: Collection[nn.Module] = (), copies: Copies | None = None) -> nn.Module | None:
        """The first module that looks different now, not counting some; ``copies`` takes what it looks like."""
        copies = copies or Copies()
        for module, seen in zip(self._modules, self._seen, strict=True):
            if module not in besides and self._look(module, copies) != seen:
                return module
        return None

    def _look(self, module: nn.Module, copies: Copies) -> Any:
        return (
            type(module),
            Same(type(module).forward),
            module is self._root or has_own_call(module),
            {
                name: (type if (module, name) in self._inputs else copies.of)(module.__dict__[name])
                for name in _own_names(module)
            },
            {key: Same(child) for key, child in module._modules.items()},
            *(
                {key: Same(tensor) if self._tensors else tensor is None for key, tensor in tensors.items()}
                for tensors in (module._parameters, module._buffers)
            ),
        )


def _own_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the attributes that are neither torch's nor ours."""
    # Lightning keeps its trainer and bookkeeping of hooks in private attributes.
    hidden = any(kind.__name__ == "LightningModule" for kind in type(module).__mro__)
    return tuple(name for name in module.__dict__ if name not in _STRUCTURE and not (hidden and name.startswith("_")))


class Objects:
    """A great many objects in a row, kept alive so that no other one gets an address of theirs."""

    __slots__ = ("_addresses", "_objects")

    def __init__(self, objects: tuple[Any, ...]) -> None:
        self._objects, self._addresses = objects, _addresses_of(objects)

    def are(self, others: tuple[Any, ...]) -> bool:
        """True if the others are the same objects in the same order."""
        return bool(_addresses_of(others) == self._addresses)


def _entries_of(objects: tuple[Any, ...]) -> bytes:
    """The entries of a tuple as CPython keeps them. Comparing two of these is fifty times as fast as ``is``."""
    return ctypes.string_at(id(objects) + tuple.__basicsize__, calcsize("P") * len(objects))


_some = None, "", sys
_is_known = sys.implementation.name == "cpython" and _entries_of(_some) == pack("3P", *map(id, _some))
_addresses_of: Callable[[tuple[Any, ...]], Any] = _entries_of if _is_known else lambda objects: list(map(id, objects))


def _parts_of(modules: Sequence[nn.Module]) -> Callable[[], tuple[Any, ...]]:
    """A function that gives what modules are made of: attributes, children, hooks, and whether there are tensors."""
    attributes = list(map(vars, modules))
    children = [own["_modules"] for own in attributes]
    tensors = [own[name] for own in attributes for name in ("_parameters", "_buffers")]
    hooks = [own[name] for own in attributes for name in private.HOOKS]
    more = ("_modules", "_parameters", "_buffers", *private.HOOKS)
    reads = [itemgetter(*_own_names(module), *more) for module in modules]

    def read() -> tuple[Any, ...]:
        try:
            values = [read(own) for read, own in zip(reads, attributes, strict=True)]
        except KeyError:  # one is gone
            return ()
        kinds = list(map(type, modules))
        return (
            *(*kinds, *map(_forward_of, kinds), private.any_hooks_of_all(), *filter(None, hooks)),
            *chain.from_iterable(chain(values, children, tensors)),
            *chain.from_iterable(map(dict.values, children)),
            *map(is_, chain.from_iterable(map(dict.values, tensors)), repeat(None)),
        )

    return read
