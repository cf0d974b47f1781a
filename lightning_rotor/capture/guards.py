"""The conditions under which a recording holds for a call, but for what it asked of sizes and values.

The recorded code does not run any more, so whatever could have sent it another way must be noticed when it changes: the
call's plain arguments, attributes of modules, and what their code reads outside of them. All of this is asked at every
training call, in a few microseconds.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import threading
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Collection, ItemsView, Iterable, KeysView, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, contains, itemgetter
from struct import calcsize, pack
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lightning_rotor.capture.operations import CONSTANTS
from lightning_rotor.capture.size_guards import SizeGuards
from lightning_rotor.errors import ModelError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import (
    TreeSpec,
    attributes_of,
    flatten,
    keystr,
    leaves_by_path,
    tree_unflatten,
)
from lightning_rotor.stages.generators import generator_state
from lightning_rotor.stages.sequential import has_own_call, packed
from lightning_rotor.stages.snapshot import (
    CLASS_ENTRIES,
    ENTRIES,
    GENERATORS,
    OWN_THREAD,
    PLAIN,
    Kind,
    Snapshot,
    entries_of,
    length_of,
    namespace_of,
    slot,
    slots_of,
)

# ----------------------------------------------------------------------------------------------------
# One call of a module: which of its arguments are tensors, and which a recording takes for granted.


_SIMPLE = frozenset((torch.Tensor, nn.Parameter, bool, int, float, str, type(None)))


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of a call as they were given, flattened. Leaves that are no tensors are baked into a recording.

    ``key`` is equal for calls that one recording could serve: the structure, and leaves without tensors. ``inputs`` are
    the tensors, and behind them ``attributes`` of modules that may be others at each call: tensors and numbers.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    key: Any
    leaves: tuple[Any, ...]
    attributes: tuple[tuple[nn.Module, str], ...]
    _spec: TreeSpec | None
    _keywords: tuple[str, ...]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        attributes: tuple[tuple[nn.Module, str], ...] = (),
    ) -> Call:
        """Flatten arguments; ``ModelError`` if one may hide tensors. This runs at every training call."""
        flat, spec, structure = [*args, *kwargs.values()], None, ""
        if not _SIMPLE.issuperset(map(type, flat)):
            flat, spec = flatten((tuple(args), dict(kwargs)))
            structure = str(spec)
        more = [owner.__dict__.get(name) for owner, name in attributes]
        inputs = (*[leaf for leaf in flat if isinstance(leaf, torch.Tensor)], *more)
        key = (len(args), *kwargs), structure, tuple(map(_spelled, flat))
        leaves = tuple([None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat])
        call = cls(module, inputs, key, leaves, attributes, spec, tuple(kwargs))
        for number, leaf in enumerate(leaves if spec is not None else ()):
            if not isinstance(leaf, CONSTANTS):
                raise ModelError(
                    f"the forward of {type(module).__name__} takes {type(leaf).__name__} as "
                    f"{call._paths()[number]}: expected tensors and plain values, or tuples, lists, "
                    "dicts, dataclasses and attrs objects of them (register others with torch.utils._pytree)"
                )
        return call

    def _paths(self) -> list[str]:
        """The argument that each leaf is in, and the place in it; ``TypeError`` if the forward takes no such call."""
        args, kwargs = self._unflatten(list(range(len(self.leaves))))
        arguments = inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs).arguments
        found = leaves_by_path(dict(list(arguments.items())[1:]))
        named = {number: f"{getattr(path[0], 'key', None)!r}{keystr(path[1:])}" for path, number in found}
        return [named[number] for number in range(len(self.leaves))]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in messages; ``TypeError`` if the forward takes no such call."""
        kinds = zip(self._paths(), self.key[-1], strict=True)
        named = [f"input {path}" for path, kind in kinds if kind is torch.Tensor]
        paths = {module: path for path, module in self.module.named_modules()}
        found = (f"{paths[owner]}.{name}" if paths[owner] else name for owner, name in self.attributes)
        return (*named, *(f"attribute {path!r}" for path in found))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the inputs."""
        return [value for value in self.inputs if isinstance(value, torch.Tensor)]

    @property
    def signature(self) -> Any:
        """Shapes, and what else code can tell of tensors without values, besides dimensions, types and devices."""
        return tuple([(tuple(tensor.shape), (_layout(tensor), tensor.requires_grad)) for tensor in self.tensors])

    def with_tensors(self, replacements: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, as they were given, with other values in the place of the tensors."""
        pending = iter(replacements)
        kinds = zip(self.key[-1], self.leaves, strict=True)
        return self._unflatten([next(pending) if kind is torch.Tensor else leaf for kind, leaf in kinds])

    def _unflatten(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._spec is not None:
            args, kwargs = tree_unflatten(leaves, self._spec)
            return args, kwargs
        positional = len(leaves) - len(self._keywords)
        return tuple(leaves[:positional]), dict(zip(self._keywords, leaves[positional:], strict=True))


def firsts_of(values: Sequence[Any]) -> tuple[int, ...]:
    """For each value, the number of the first one that is the same object."""
    addresses = [id(value) for value in values]
    return tuple(map(addresses.index, addresses))


def _spelled(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.Tensor
    return type(leaf), float.__repr__(leaf) if isinstance(leaf, float) else repr(leaf) if type(leaf) is slice else leaf


def _layout(tensor: torch.Tensor) -> Any:
    """A value that is equal for tensors of other sizes with the same memory layout."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.layout
    return True if tensor.is_contiguous() else tensor.stride()


AUTOCAST = 8
"""Where autocast's settings begin in :func:`ambient`."""


def ambient() -> tuple[Any, ...]:
    """Settings that change what an operation computes or saves, and that code can switch for a few lines."""
    hooks = private.hooks_for_saved_tensors()
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        *((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")),
        None if not hooks else tuple(map(id, hooks)),
    )


# -------------------------------------------------------------------- What values look like at one moment, comparable.


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

    Containers are followed to the end, and objects one level if ``objects``. What lies deeper in objects, and is read,
    is among :class:`Notes`.
    """

    def __init__(self, *, objects: bool = True) -> None:
        self._follows_objects = objects
        self._found: dict[int, Any] = {}  # copies of containers, so that one in itself comes to an end
        self._rows: dict[int, Any] = {}
        self._users: dict[int, Any] = {}  # rows of a class of the user's
        self._tables: dict[int, dict[Any, Any]] = {}
        self._others: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """The copy of a value."""
        kind, plain = type(value), _plain(value)
        if plain is not None:
            return plain
        if issubclass(kind, FILLED) and length_of(value) <= MOST_COMPARED:
            if id(value) in self._found:
                return self._found[id(value)]
            self._found[id(value)] = kind, len(self._found)
            entries = contents_of(value)
            if issubclass(kind, dict):
                self._tables[id(value)] = value
            elif kind in FILLED:
                self._rows[id(value)] = value
            else:
                self._users[id(value)] = value
            kinds = tuple(map(type, entries))
            copy = (kind, kinds, entries) if _FIXED.issuperset(kinds) else (kind, tuple(map(self.of, entries)))
            self._found[id(value)] = copy
            return copy
        if issubclass(kind, partial):
            return kind, self.of(value.func), self.of(value.args), self.of(value.keywords)
        if issubclass(kind, VIEWS):
            return kind, tuple(map(self.of, gc.get_referents(value)))
        state = _state_of(value)
        if state is not None:
            self._others[id(value)] = value
            return Same(value), state
        if not self._follows_objects or issubclass(kind, (nn.Module, type)):
            return Same(value)
        namespace = namespace_of(value) or {}
        if slots_of(kind):
            self._others[id(value)] = value
        if namespace and kind not in _FIXED:
            self._tables[id(namespace)] = namespace
        return Same(value), _slots_in(value), tuple((key, _entry(entry)) for key, entry in namespace.items())

    def settle(self, read: Callable[[], Iterable[Any]], sized: Iterable[dict[str, Any]] = ()) -> None:
        """Take the values for what they are from now on, with what ``read`` gives, and the lengths of ``sized``."""
        self._read, self._sized = read, (*sized, *self._rows.values())
        self._lengths, self._seen = self._lengths_now(), Objects(self._now())
        self._states = list(map(_state_or_slots, self._others.values()))

    def hold(self) -> bool:
        """True if surely nothing has changed since; another object that is equal is a change."""
        if self._lengths_now() != self._lengths or not self._seen.are(self._now()):
            return False
        return list(map(_state_or_slots, self._others.values())) == self._states

    def _now(self) -> tuple[Any, ...]:
        rows, tables = self._rows.values(), self._tables.values()
        keys, values = chain.from_iterable(map(dict.keys, tables)), chain.from_iterable(map(dict.values, tables))
        users = chain.from_iterable(map(entries_of, self._users.values()))
        return (*self._read(), *chain(*rows), *keys, *values, *users)

    def _lengths_now(self) -> list[int]:
        return [*map(len, self._sized), *map(length_of, self._users.values())]


def _plain(value: Any) -> Any:
    """A value that never changes, comparable; None for any other."""
    kind = type(value)
    if kind in PLAIN:
        return kind, repr(value) if kind is float else value
    return (kind, value.tobytes()) if issubclass(kind, np.generic) else None


def _entry(value: Any) -> Any:
    """An attribute of an object, comparable: of what may change, which one it is."""
    return _plain(value) or Same(value)


def _slots_in(value: Any) -> Any:
    return tuple(_entry(slot(value, name)) for name in slots_of(type(value)))


FILLED = (list, tuple, dict, set, frozenset, deque)
"""Containers, whose entries are compared, not the containers."""
VIEWS = (MappingProxyType, KeysView, ValuesView, ItemsView)
"""What shows the entries of another container, to which it refers."""
MOST_COMPARED, MOST_COMPARED_BYTES = 20_000, 1024**2
"""Entries of a container, and bytes of an array, that are compared at each call."""


def contents_of(container: Any) -> tuple[Any, ...]:
    """Entries of a container; of a dict, keys come before values."""
    # Not the methods of a class of the user's, which may make its entries anew whenever they are asked for.
    values = dict.values(container) if issubclass(type(container), dict) else ()
    return *entries_of(container), *values


def _state_of(value: Any) -> Any:
    """Version of a tensor, length of a long list, bytes of an array, state of a generator; None for all else."""
    kind = type(value)  # an object may refuse to be asked for its class
    if issubclass(kind, torch.Tensor):
        return version_of(value)
    if issubclass(kind, np.ndarray) and value.nbytes <= MOST_COMPARED_BYTES and not value.dtype.hasobject:
        return value.shape, value.dtype.str, value.tobytes()
    if issubclass(kind, (bytearray, array)):
        return bytes(value)
    if issubclass(kind, FILLED):
        return length_of(value)
    return generator_state(value) if issubclass(kind, GENERATORS) else None


def _state_or_slots(value: Any) -> Any:
    state = _state_of(value)
    return _slots_in(value) if state is None else state


_STRUCTURE = (set(nn.Module().__dict__) - {"training"}) | {"_lightning_rotor", "forward"}
_forward_of = attrgetter("forward")


class Watch:
    """What modules look like at one moment. Hooks and ``forward`` of ``root`` run outside of the recording.

    With ``tensors``, also which tensors the parameters and buffers are. Stages read them anew at each call, so else
    only their shapes, types and layouts count. Attributes in ``inputs`` they take like arguments.
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
        self.modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        self._inputs = frozenset(inputs)
        self._tensors, self._outside = tensors, outside
        self._seen = [self._look(module, Copies()) for module in self.modules]
        self._copies: Copies | None = None
        self._slots = [table for each in self.modules for table in (each._parameters, each._buffers) if table]
        self._shapes = self._shapes_now()

    def holds(self) -> bool:
        """True if everything still looks the same. This runs at every training call."""
        if self._copies is None or not self._copies.hold() or self._shapes_now() != self._shapes:
            copies = Copies()
            if self.changed(copies=copies) is not None:
                return False
            # As many attributes as before, and the known ones among them: none is new.
            copies.settle(*_parts_of(self.modules))
            self._copies = copies
        return self._outside()

    def _shapes_now(self) -> list[torch.Size]:
        slots: Iterable[torch.Tensor | None] = chain.from_iterable(table.values() for table in self._slots)
        return [tensor.shape for tensor in slots if tensor is not None]

    def changed_numbers(self) -> list[tuple[nn.Module, str]]:
        """Attributes that hold another number of the same type now."""
        return [
            (module, name)
            for module, (_, _, _, attributes, *_) in zip(self.modules, self._seen, strict=True)
            for name, then in attributes.items()
            if type(now := module.__dict__.get(name)) in (int, float)
            and isinstance(then, tuple)
            and then[0] is type(now)
            and _plain(now) != then
        ]

    def changed(self, besides: Collection[nn.Module] = (), copies: Copies | None = None) -> nn.Module | None:
        """The first module that looks different now, not counting some; ``copies`` takes what it looks like."""
        copies, pairs = copies or Copies(), zip(self.modules, self._seen, strict=True)
        return next((each for each, seen in pairs if each not in besides and self._look(each, copies) != seen), None)

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
                {key: Same(tensor) if self._tensors else _seen_in_slot(tensor) for key, tensor in tensors.items()}
                for tensors in (module._parameters, module._buffers)
            ),
        )


def _seen_in_slot(tensor: torch.Tensor | None) -> Any:
    """What code can tell of a parameter or buffer without its values, but for its device, which pipelines change."""
    return None if tensor is None else (tensor.shape, tensor.dtype, _layout(tensor))


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


def _parts_of(modules: Sequence[nn.Module]) -> tuple[Callable[[], tuple[Any, ...]], list[dict[str, Any]]]:
    """A function that gives what modules are made of, and the dicts whose lengths say whether anything was added."""
    attributes = list(map(vars, modules))
    tables = [own[name] for own in attributes for name in ("_modules", "_parameters", "_buffers")]
    filled = [table for table in tables if table]
    hooks = [own[name] for own in attributes for name in private.HOOKS]
    more = ("_modules", "_parameters", "_buffers", *private.HOOKS)
    reads = [itemgetter(*_own_names(module), *more) for module in modules]
    forwards = dict.fromkeys(map(type, modules))

    def read() -> tuple[Any, ...]:
        try:
            values = [read(own) for read, own in zip(reads, attributes, strict=True)]
        except KeyError:  # one is gone
            return ()
        return (
            *(*map(type, modules), *map(_forward_of, forwards), private.any_hooks_of_all(), *filter(None, hooks)),
            *chain.from_iterable(chain(values, filled)),
            *chain.from_iterable(map(dict.values, filled)),
        )

    return read, [*attributes, *tables]


# --------------------------------------------- Whether a module is still what it was at the last step, in microseconds.


_tables_in = itemgetter("_modules", *private.HOOKS[:2], "_parameters")
_learns, _dtype = attrgetter("requires_grad"), attrgetter("dtype")


class ModuleFacts:
    """Children, modes, hooks and parameters of a module at any depth; no values of tensors, no other attributes.

    Of modules in ``besides``, which are watched, parameters alone.
    """

    def __init__(self, root: nn.Module, besides: Collection[nn.Module] = ()) -> None:
        watched = set(besides)
        self._modules = tuple(module for module in root.modules() if module not in watched)
        self._slots = [module._parameters for module in watched if module._parameters]
        self._parameters = tuple(root.parameters())
        self._attributes = list(map(vars, self._modules))
        self._objects = Objects(self._now())

    def holds(self) -> bool:
        """True if all of it is as it was. False if that cannot be told so quickly."""
        now = self._now()
        return bool(now) and self._objects.are(now)

    def _now(self) -> tuple[Any, ...]:
        """All of it in one flat row, to compare object by object."""
        try:
            tables = list(filter(None, chain.from_iterable(map(_tables_in, self._attributes))))
            return (
                *(*map(type, self._modules), *map(contains, self._attributes, repeat("forward"))),
                *map(dict.get, self._attributes, repeat("training")),  # a compiled module asks the one inside for it
                *(*map(_learns, self._parameters), *map(_dtype, self._parameters)),
                *(*tables, *chain.from_iterable(tables), *chain.from_iterable(map(dict.values, tables))),
                *chain.from_iterable(map(dict.values, self._slots)),
            )
        except (KeyError, TypeError):  # a scripted module keeps its children and parameters elsewhere
            return ()


# ----------------------------------------------------------------------------------------------------
# Values that code finds outside of modules.


class Place(NamedTuple):
    """A variable: an entry of a namespace or of a class, or the cell of a closure."""

    kind: Kind
    owner: Any
    name: str

    def read(self) -> Any:
        """The value, or a mark if there is none."""
        return self.kind.read(self.owner, self.name)


def _names_seen_in(local: threading.local) -> int:
    return len(vars(local))


def _readers(places: Iterable[Place], of_threads: Iterable[Any]) -> Callable[[], tuple[Any, ...]]:
    """What reads all places at once, as quick as it gets; () if one is gone. Of locals, how much this thread sees."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    namespaces: dict[int, Any] = {}
    others: list[Callable[[], Any]] = [partial(_names_seen_in, local) for local in of_threads]
    for place in places:
        if place.kind in (ENTRIES, CLASS_ENTRIES):
            namespaces[id(place.owner)] = place.owner if place.kind is ENTRIES else vars(place.owner)
            names[id(place.owner)].append(place.name)
        else:
            others.append(place.read)
    # An itemgetter gives a tuple if it is asked for two names at least.
    readers = [(itemgetter(*names[key], names[key][0]), namespace) for key, namespace in namespaces.items()]

    def read() -> tuple[Any, ...]:
        try:
            return *chain.from_iterable([get(namespace) for get, namespace in readers]), *[get() for get in others]
        except KeyError:
            return ()

    return read


class _Noted:
    """The value at a place as it is now, and the path of the module whose code is about to read it."""

    __slots__ = ("_before", "_seen", "path", "place", "value")

    def __init__(self, place: Place, path: str) -> None:
        self.place, self.path, self.value = place, path, place.read()
        self._seen = Copies(objects=False).of(self.value)
        followed = () if isinstance(self._seen, Same) else (self.value,)
        self._before = Snapshot(followed, hooks=False, objects=False)

    def holds(self, copies: Copies | None = None) -> bool:
        """True if the value is still the same; ``copies`` takes what it looks like."""
        return bool((copies or Copies(objects=False)).of(self.place.read()) == self._seen)

    def is_changed(self) -> bool:
        """True if the value is another now, and not an object before and now, of which only the identity counts."""
        now = Copies(objects=False).of(self.place.read())
        return now != self._seen and not (isinstance(now, Same) and isinstance(self._seen, Same))

    def restore(self) -> None:
        """Put the value back, and what was in it."""
        self.place.kind.put(self.place.owner, {self.place.name: self.value})
        self._before.restore()


class Notes:
    """Values at places as they were. Refers to nothing of the recording for which they were taken."""

    def __init__(self) -> None:
        self._noted: dict[tuple[int, str], _Noted] = {}
        self._copies: Copies | None = None
        self.names: Set[str] = frozenset()  # that the code mentions
        # Namespaces in which there must be no other of these names, or of those that are looked up there.
        self._namespaces: dict[int, Any] = {}
        self._looked_up: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._present: list[frozenset[str]] = []

    def take(self, place: Place, module_path: str) -> None:
        """Note what is at a place, unless it was noted before, and whose code is about to read it."""
        key = id(place.owner), place.name
        if key not in self._noted:
            self._copies = None
            self._noted[key] = _Noted(place, module_path)

    def watch(self, kind: Kind, owner: Any) -> None:
        """Note something in which more of the names could appear."""
        if kind in (ENTRIES, CLASS_ENTRIES, OWN_THREAD):
            self._namespaces[id(owner)] = owner

    def look_up(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        """Note names that code looks up among globals, some of which may not be there."""
        self._looked_up.setdefault(id(namespace), (namespace, set()))[1].update(names)

    def changed(self) -> tuple[str, str] | None:
        """Path of a module and a variable that has changed since it was read, but for loggers and caches; or None."""
        return next(((each.path, each.place.name) for each in self._noted.values() if each.is_changed()), None)

    def _tables(self) -> list[Any]:
        """The namespaces that count."""
        owners = [owner if isinstance(owner, dict) else vars(owner) for owner in self._namespaces.values()]
        return [*owners, *(namespace for namespace, _ in self._looked_up.values())]

    def _names_present(self) -> list[frozenset[str]]:
        """Of the names that count in each namespace, those that are there."""
        names = [*repeat(self.names, len(self._namespaces)), *(names for _, names in self._looked_up.values())]
        return [frozenset(table.keys() & those) for table, those in zip(self._tables(), names, strict=True)]

    def settle(self) -> None:
        """Take the present values as the noted ones."""
        self._copies, self._present = None, self._names_present()
        for key, noted in self._noted.items():
            if not noted.holds():
                self._noted[key] = _Noted(noted.place, noted.path)

    def holds(self) -> bool:
        """True if everything is as it was. This runs at every training call."""
        if self._copies is None or not self._copies.hold():
            copies = Copies(objects=False)
            if self._names_present() != self._present:
                return False
            if not all(noted.holds(copies) for noted in self._noted.values()):
                return False
            of_threads = [owner for owner in self._namespaces.values() if isinstance(owner, threading.local)]
            read = _readers((noted.place for noted in self._noted.values()), of_threads)
            copies.settle(read, self._tables())
            self._copies = copies
        return True

    def restore(self) -> None:
        """Put back what the code has changed: variables, what is in lists and dicts, random generators."""
        for noted in self._noted.values():
            if not noted.holds():
                noted.restore()


# ----------------------------------------------------------------------------------------------------
# All of it for one recording.


class CallGuards:
    """Say whether a recording holds for a call, and what its chain takes then.

    It does not hold if another plain argument differs, the module has noticeably changed, or the forward would read
    other values out of tensors. Sizes may differ in dimensions recorded with two sizes.

    Args:
        call: The recorded one.
        watch: What modules looked like.
        sizes: What was asked of sizes and values.
        reads: Numbers of the inputs that the chain takes.
    """

    def __init__(self, call: Call, watch: Watch, sizes: SizeGuards, *, reads: Sequence[int]) -> None:
        self.module, self.attributes, self.watch = call.module, call.attributes, watch
        self._key, self._sizes, self._reads = _key(call), sizes, reads

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The chain's input for a call, or None if the recording does not hold for it."""
        call = self.call(args, kwargs)
        if not self.are_like(call):
            return None
        signature = call.signature
        holds = signature in self._sizes.settled or self._sizes.hold(signature, call.inputs)
        return self.take(call) if holds else None

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """A call of the module, with the attributes that are inputs."""
        return Call.of(self.module, args, kwargs, self.attributes)

    def are_like(self, call: Call) -> bool:
        """True if a call differs at most in sizes and values, and the module is what it was."""
        return bool(_key(call) == self._key) and self.watch.holds()

    def fit(self, call: Call) -> bool:
        """True if a call differs at most in sizes and values, whatever the module is now."""
        return bool((self._key, self.attributes) == (_key(call), call.attributes))

    def take(self, call: Call) -> Any:
        """The chain's input for a call for which the recording is known to hold: the tensors that it reads."""
        return packed([call.inputs[number] for number in self._reads])


def _key(call: Call) -> Any:
    # Code may ask whether two tensors are one, and whether autocast is on. Hooks on saved tensors are autograd's.
    kinds = tuple([_seen_as_input(each) if isinstance(each, torch.Tensor) else type(each) for each in call.inputs])
    return call.key, firsts_of(call.tensors), ambient()[:-1], kinds


def _seen_as_input(tensor: torch.Tensor) -> Any:
    """What code can tell of an input besides sizes and values."""
    attributes = attributes_of(tensor)
    own = Copies().of(attributes) if attributes else None
    return type(tensor), tensor.dim(), tensor.dtype, tensor.device, own
