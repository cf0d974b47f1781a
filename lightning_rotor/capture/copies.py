"""Values as they look at one moment, comparable with what they are later.

Comparing goes in two steps. The quick one asks whether the very same objects are still everywhere; it takes
microseconds and is mostly the last. Where another object stands, the slow one compares what the values look like.
"""

from __future__ import annotations

import gc
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from functools import partial
from itertools import chain
from mmap import mmap
from queue import SimpleQueue
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_rotor.private import python_names
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.python_names import addresses_of
from lightning_rotor.stages.containers import entries_of, length_of
from lightning_rotor.stages.generators import generator_state
from lightning_rotor.stages.holders import GENERATORS, PLAIN, namespace_of, slot, slots_of

_FIXED = frozenset((bool, int, str, bytes, type(None), type, FunctionType, BuiltinFunctionType, ModuleType))
"""Types of values that only another value can be unequal to."""
FILLED = (list, tuple, dict, set, frozenset, deque)
"""Containers, whose entries are compared, not the containers."""
VIEWS = (MappingProxyType, KeysView, ValuesView, ItemsView)
"""Objects that show the entries of another container, to which they refer."""
BYTES = (bytearray, array, memoryview, mmap, *python_names.C_DATA)
"""Types of values whose bytes are all that they are. Numbers that processes share are of ctypes."""
IN_C = (*BYTES, SimpleQueue, *python_names.SEMAPHORES)
"""Types of values that may change, and show it by no attribute or entry."""
MOST_COMPARED = 20_000
"""Entries of a container that are compared at each call."""
MOST_COMPARED_BYTES = 1024**2
"""Bytes of an array that are compared at each call."""


class Same:
    """Compares by identity, and keeps the object alive so that no other one gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Objects:
    """A great many objects in a row, kept alive so that no other one gets an address of theirs."""

    __slots__ = ("_addresses", "_objects")

    def __init__(self, objects: tuple[Any, ...]) -> None:
        self._objects = objects
        self._addresses = addresses_of(objects)

    def are(self, others: tuple[Any, ...]) -> bool:
        """True if the others are the same objects in the same order."""
        return bool(addresses_of(others) == self._addresses)


class Copies:
    """Copies of values, equal while these stay the same, and a quick way to tell that nothing in them has changed.

    Containers are followed to the end, and objects one level if ``objects``. What lies deeper in objects, and is read,
    is among :class:`~lightning_rotor.capture.notes.Notes`.
    """

    def __init__(self, *, objects: bool = True) -> None:
        self._follows_objects = objects
        # Copies of containers by id, so that one in itself comes to an end.
        self._made: dict[int, Any] = {}
        # By id, the values that the quick comparison looks into:
        # Containers of Python's own classes.
        self._rows: dict[int, Any] = {}
        # Containers of a class of the user's.
        self._users: dict[int, Any] = {}
        # Dicts, whose values count as well.
        self._tables: dict[int, dict[Any, Any]] = {}
        # Values with a state: tensors, arrays, generators, slots.
        self._others: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """The copy of a value."""
        kind = type(value)
        plain = plain_value(value)
        if plain is not None:
            return plain
        # Of a longer container the length is its state, see below.
        if issubclass(kind, FILLED) and length_of(value) <= MOST_COMPARED:
            return self._of_container(value)
        if issubclass(kind, partial):
            return kind, self.of(value.func), self.of(value.args), self.of(value.keywords)
        if issubclass(kind, VIEWS):
            return kind, tuple(map(self.of, gc.get_referents(value)))
        state = _state_of(value)
        if state is not None:
            self._others[id(value)] = value
            return Same(value), state
        # Modules and classes have guards of their own.
        if not self._follows_objects or issubclass(kind, (nn.Module, type)):
            return Same(value)
        return self._of_object(value)

    def _of_container(self, container: Any) -> Any:
        kind, key = type(container), id(container)
        # Also for a container that is held in two places, so that both are compared once.
        if key in self._made:
            return self._made[key]
        # A mark that says which container it is, for one that is inside of itself.
        self._made[key] = kind, len(self._made)
        entries = contents_of(container)
        if issubclass(kind, dict):
            self._tables[key] = container
            # A table is read as a dict, which does not see the order of this one.
            if issubclass(kind, OrderedDict):
                self._users[key] = container
        elif kind in FILLED:
            self._rows[key] = container
        else:
            self._users[key] = container
        kinds = tuple(map(type, entries))
        copy: Any
        if _FIXED.issuperset(kinds):
            # Most long lists are numbers or names: their types are compared beside them, for 1 equals True.
            copy = kind, kinds, entries
        else:
            copy = kind, tuple(map(self.of, entries))
        self._made[key] = copy
        return copy

    def _of_object(self, value: Any) -> Any:
        kind = type(value)
        namespace = namespace_of(value) or {}
        # Slots are no dict that could be read in one go.
        if slots_of(kind):
            self._others[id(value)] = value
        if namespace and kind not in _FIXED:
            self._tables[id(namespace)] = namespace
        attributes = tuple((name, _entry(entry)) for name, entry in namespace.items())
        return Same(value), _slots_in(value), attributes

    def settle(
        self,
        read: Callable[[], Iterable[Any]],
        sized: Iterable[dict[str, Any]] = (),
    ) -> None:
        """Take the values for what they are from now on, with what ``read`` gives, and the lengths of ``sized``."""
        self._read = read
        self._sized = (*sized, *self._rows.values())
        self._lengths = self._lengths_now()
        self._seen = Objects(self._now())
        self._states = list(map(_state_or_slots, self._others.values()))

    def hold(self) -> bool:
        """True if surely nothing has changed since; another object that is equal is a change."""
        # Lengths first: two lists that trade an entry have the same row of objects.
        if self._lengths_now() != self._lengths or not self._seen.are(self._now()):
            return False
        return list(map(_state_or_slots, self._others.values())) == self._states

    def _now(self) -> tuple[Any, ...]:
        """All objects that are read, and those in containers, in one flat row."""
        rows = self._rows.values()
        tables = self._tables.values()
        keys = chain.from_iterable(map(dict.keys, tables))
        values = chain.from_iterable(map(dict.values, tables))
        users = chain.from_iterable(map(entries_of, self._users.values()))
        return (*self._read(), *chain(*rows), *keys, *values, *users)

    def _lengths_now(self) -> list[int]:
        return [*map(len, self._sized), *map(length_of, self._users.values())]


def version_of(tensor: torch.Tensor) -> int:
    """Number of changes in place; -1 in inference mode, where nobody counts."""
    return -1 if tensor.is_inference() else private.version_of(tensor)


def plain_value(value: Any) -> Any:
    """The type and a value that never changes, as a pair to compare; no pair but None for any other value."""
    kind = type(value)
    if kind is float or kind is complex:
        # NaN is unequal to itself, and -0.0 equals 0.0.
        return kind, repr(value)
    if kind in PLAIN:
        return kind, value
    if issubclass(kind, np.generic):
        return kind, value.tobytes()
    return None


def _entry(value: Any) -> Any:
    """An attribute of an object, comparable: of what may change, which one it is."""
    return plain_value(value) or Same(value)


def _slots_in(value: Any) -> Any:
    return tuple(_entry(slot(value, name)) for name in slots_of(type(value)))


def contents_of(container: Any) -> tuple[Any, ...]:
    """Entries of a container; of a dict, keys come before values."""
    # Not the methods of a class of the user's, which may make its entries anew whenever they are asked for.
    values = dict.values(container) if issubclass(type(container), dict) else ()
    return *entries_of(container), *values


def _state_of(value: Any) -> Any:
    """Version of a tensor that does not learn, length of a list, bytes of an array, state of a generator, else None."""
    # An object may refuse to be asked for its class.
    kind = type(value)
    if issubclass(kind, nn.Parameter):
        return "learns"  # in every step, and recordings that ask for its values are refused
    if issubclass(kind, torch.Tensor):
        return version_of(value)
    # Bytes of an array of objects are addresses, which say nothing of what the objects hold.
    is_array = issubclass(kind, np.ndarray) and not value.dtype.hasobject
    if is_array and value.nbytes <= MOST_COMPARED_BYTES:
        # Past the class's own method: a masked array computes there, and its constant refuses.
        return value.shape, value.dtype.str, np.ndarray.tobytes(value)
    if issubclass(kind, BYTES):
        return memoryview(value).tobytes()
    if issubclass(kind, SimpleQueue):
        # Nobody can look at its entries but the garbage collector.
        rows = [held for held in gc.get_referents(value) if type(held) is list]
        return tuple([id(entry) for row in rows for entry in row]), value.qsize()
    if kind in python_names.SEMAPHORES:
        return python_names.value_of_semaphore(value)
    if issubclass(kind, FILLED):
        return length_of(value)
    return generator_state(value) if issubclass(kind, GENERATORS) else None


def _state_or_slots(value: Any) -> Any:
    state = _state_of(value)
    return _slots_in(value) if state is None else state
