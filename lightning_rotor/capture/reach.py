"""Values that recorded code can get hold of by the names that it mentions, wherever they are held.

There is no depth behind which nothing is seen. A name that the code computes (``getattr(config, key)``) could be any,
so then all attributes of objects are followed. Entries of containers are compared by value, objects by what they are.
A value that is too large to be compared at each call is refused.
"""

from __future__ import annotations

import enum
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Set
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from types import (
    BuiltinMethodType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any
from weakref import ProxyTypes, ReferenceType

import numpy as np
import torch
from torch import nn

from lightning_rotor.capture.copies import BYTES, FILLED, IN_C, MOST_COMPARED, MOST_COMPARED_BYTES, VIEWS, contents_of
from lightning_rotor.capture.memoized import Memoized, StandIns
from lightning_rotor.capture.notes import Notes, Place
from lightning_rotor.capture.operations import UntraceableError
from lightning_rotor.private.values import attributes_of
from lightning_rotor.stages import holders as kinds
from lightning_rotor.stages.containers import length_of
from lightning_rotor.stages.holders import CACHED, PLAIN, namespace_of, slots_of
from lightning_rotor.stages.user_code import is_users, is_users_class

_MOST_VALUES = 20_000
_TABLE, _IN_TABLE, _OUTSIDE = 0, 1, 2
"""Levels: a table of a recorded module, an object in one, and everything else."""
_COMPARED_ALONE = (*FILLED, *IN_C)
"""Types whose values count by what is in them, which one look at an object that holds them does not show."""


@dataclass(slots=True, eq=False)
class _Holder:
    """An owner of values under names.

    Attributes:
        where: How messages call it.
        path: Path of the module whose code can reach it.
        level: ``_TABLE`` and ``_IN_TABLE`` are compared by :class:`~lightning_rotor.capture.watch.Watch`, except for
            what is in an object's containers, or in C.
        is_object: Code that computes names may read all of its attributes.
        hides_names: Only other code than the user's knows its names.
    """

    kind: kinds.Kind
    owner: Any
    where: str
    path: str
    level: int = _OUTSIDE
    is_object: bool = False
    hides_names: bool = False

    def names(self) -> Set[str]:
        """All names."""
        if self.kind in (kinds.VARIABLE, kinds.REFERENT, kinds.CELL):
            return {"its value"}
        if self.kind is kinds.SLOTS:
            return set(slots_of(type(self.owner)))
        if self.kind is kinds.OWN_THREAD:
            return kinds.dict_of_thread(self.owner).keys()
        namespace: dict[str, Any] = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        return namespace.keys()


class Reach:
    """Values that code can get hold of by the names that it mentions. ``notes`` take each place, and who reads it."""

    def __init__(self, root: nn.Module, notes: Notes, stand_ins: StandIns | None = None) -> None:
        self._inside = set(root.modules())
        self._notes = notes
        self._stand_ins = stand_ins or StandIns()
        self._names: set[str] = set()
        # A name was computed, so that all names count.
        self._wholly = False
        self._holders: list[_Holder] = []
        self._looked_into: set[nn.Module] = set()
        # By id, kept alive so that no other value gets it.
        self._seen: dict[int, Any] = {}
        # Value, path, where, level.
        self._pending: list[tuple[Any, str, str, int]] = []
        self._is_following = False
        # Functions under functools.cache, path, where.
        self._cached: list[tuple[Any, str, str]] = []
        # The sets themselves, which grow with what is learned.
        notes.names = self._names
        notes.entered = self._looked_into

    def learn(self, names: frozenset[str], *, wholly: bool) -> None:
        """Note names that code mentions, ``wholly`` if it could name anything."""
        new = names - self._names
        self._names |= new
        if wholly and not self._wholly:
            self._wholly = self._notes.names_all = True
            objects = [holder for holder in self._holders if holder.is_object]
            for holder in objects:
                self._look(holder, holder.names())
        for name in new & _QUESTIONS.keys():
            self.read(Place(kinds.ANSWER, _QUESTIONS[name], name), "")
        # Objects that were met before may have attributes of these names.
        if new:
            for holder in [*self._holders]:
                self._look(holder, holder.names() & new)

    def read(self, place: Place, path: str, where: str = "") -> None:
        """Note a place that code reads, and follow its value."""
        value = place.read()
        if isinstance(value, Memoized):
            return  # read before, when the function was still there
        self._notes.take(place, path)
        self.follow(value, path, where or place.name)
        self._stand_ins.stand_in_at(place)

    def follow_caches(self) -> None:
        """Follow results that functions have cached since they were met, as a recording may call them first."""
        for function, path, where in self._cached:
            for result in _parts_of(function):
                self.follow(result, path, f"{where}()")

    def look_into(self, module: nn.Module, path: str) -> None:
        """Follow what a module of the recorded one has in attributes, which themselves are compared elsewhere."""
        if module in self._looked_into or isinstance(module, torch.jit.ScriptModule):
            return
        self._looked_into.add(module)
        for table in (module.__dict__, module._parameters, module._buffers):
            self._add(_Holder(kinds.ENTRIES, table, "self", path, level=_TABLE))

    def follow(self, value: Any, path: str, where: str, level: int = _OUTSIDE) -> None:
        """Look at a value, and at all that can be reached from it."""
        self._pending.append((value, path, where, level))
        # A loop in the place of recursion, as chains of objects may be longer than Python's stack.
        if self._is_following:
            return
        self._is_following = True
        try:
            while self._pending:
                self._follow(*self._pending.pop())
        finally:
            self._is_following = False
            self._pending.clear()

    def _follow(self, value: Any, path: str, where: str, level: int) -> None:
        if type(value) in ProxyTypes:
            # It passes every question on, and so what it is asked here must be asked of what it stands for.
            try:
                value = value.__reduce__.__self__
            except ReferenceError:
                return
        if isinstance(value, Memoized):
            value = value.function
        if type(value) in PLAIN or id(value) in self._seen:
            return
        # Modules of the recorded one are compared by Watch.
        if isinstance(value, nn.Module) and value in self._inside:
            return
        if len(self._seen) > _MOST_VALUES:
            raise UntraceableError(f"it can read more than {_MOST_VALUES} values outside of modules, through {where!r}")
        self._seen[id(value)] = value
        _require_comparable(value, where)
        if isinstance(value, CACHED):
            self._cached.append((value, path, where))
        if isinstance(value, attrgetter):
            # It was given names where it was made, in code that may run no more.
            made: Any = value.__reduce__()
            self.learn(frozenset(name for names in made[1] for name in names.split(".")), wholly=False)
        # Watch compares containers to the end, and objects one level deep.
        level_inside = level if isinstance(value, FILLED) else _OUTSIDE
        self._pending += [(entry, path, f"{where}[…]", level_inside) for entry in _parts_of(value)]
        for holder in _holders_of(value, where, path):
            if level == _TABLE and holder.is_object:
                holder.level = _IN_TABLE
            self._add(holder)

    def _add(self, holder: _Holder) -> None:
        self._holders.append(holder)
        if holder.level == _OUTSIDE:
            self._notes.watch(holder.kind, holder.owner)
        names = holder.names()
        reads_all = holder.hides_names or (self._wholly and holder.is_object)
        self._look(holder, names if reads_all else names & self._names)

    def _look(self, holder: _Holder, names: Iterable[str]) -> None:
        for name in [*names]:
            place = Place(holder.kind, holder.owner, name)
            value = place.read()
            where = f"{holder.where}.{name}"
            is_in_object = holder.level == _IN_TABLE and not isinstance(value, _COMPARED_ALONE)
            is_compared = holder.level == _TABLE or is_in_object
            is_method = holder.kind is kinds.CLASS_ENTRIES and _is_code(name, value)
            if is_method and isinstance(value, _REPLACEABLE):
                # Another one may be put there. What it reads is noted when it runs.
                self._notes.take(place, holder.path)
            if is_compared or is_method:
                self.follow(value, holder.path, where, holder.level)
            else:
                self.read(place, holder.path, where)


_REPLACEABLE = (FunctionType, property, staticmethod, classmethod, cached_property)
_CODE = (*_REPLACEABLE, GetSetDescriptorType, MemberDescriptorType, WrapperDescriptorType)
_OF_CLASSES = frozenset(("__class__", "__module__", "__doc__", "__qualname__", "__annotations__", "__slots__"))


def _is_code(name: str, value: Any) -> bool:
    """True for an attribute of a class that is no data. Methods that run are noted by whose code names them."""
    return isinstance(value, _CODE) or name in _OF_CLASSES


def _require_comparable(value: Any, where: str) -> None:
    """Raise ``UntraceableError`` if a value takes too long to compare at each call."""
    if isinstance(value, FILLED) and length_of(value) > MOST_COMPARED:
        what = f"more than {MOST_COMPARED} entries"
    elif isinstance(value, np.ndarray) and (value.nbytes > MOST_COMPARED_BYTES or value.dtype.hasobject):
        what = f"an array of {value.nbytes} bytes of {value.dtype}"
    elif isinstance(value, BYTES) and _bytes_in(value) > MOST_COMPARED_BYTES:
        what = f"{_bytes_in(value)} bytes of {type(value).__name__}"
    else:
        return
    raise UntraceableError(
        f"it can read {where}, {what}, which cannot be compared at each call: keep it in a tensor, or read it in a "
        "submodule"
    )


def _bytes_in(value: Any) -> int:
    return memoryview(value).nbytes


def _parts_of(value: Any) -> Iterable[Any]:
    """Values in a container, or bound to a callable."""
    if isinstance(value, (set, frozenset)):
        # Registers of classes are sets, of which code asks who is in it: transformers has one of 60.
        return [entry for entry in contents_of(value) if not isinstance(entry, type)]
    if isinstance(value, FILLED):
        return contents_of(value)
    if isinstance(value, VIEWS):
        return gc.get_referents(value)
    match value:
        case MethodType():
            return value.__self__, value.__func__
        case BuiltinMethodType():
            # A built-in function has its module there.
            if isinstance(value.__self__, ModuleType):
                return ()
            return (value.__self__,)
        case staticmethod() | classmethod():
            return (value.__func__,)
        case property():
            return (value.fget,)
        case cached_property():
            return (value.func,)
        case partial():
            return value.func, *value.args, value.keywords
        case _ if isinstance(value, CACHED):
            return _cached_by(value)
    return ()


def _cached_by(function: Any) -> Iterator[Any]:
    """Results that a function returns again, which it alone holds, and their keys."""
    for held in gc.get_referents(function):
        if isinstance(held, dict):
            yield from contents_of(held)
        elif not isinstance(held, type):
            yield held


_HIDES_NAMES = (
    *("collections", "weakref", "_weakrefset", "functools", "enum", "types"),
    *("threading", "multiprocessing", "queue", "asyncio", "configparser", "string"),
    *("torch.optim.lr_scheduler", "torch.optim.swa_utils", "torch.utils.data.", "torch.distributions."),
)
"""Modules of Python and torch whose classes keep what they hold under names that only their own code knows."""

_QUESTIONS: dict[str, Callable[[], Any]] = {
    "argv": lambda: tuple(sys.argv),
    "allow_tf32": lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
    "benchmark": lambda: torch.backends.cudnn.benchmark,
    "cwd": os.getcwd,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "get_num_threads": torch.get_num_threads,
    "getcwd": os.getcwd,
    "getrecursionlimit": sys.getrecursionlimit,
    "initial_seed": torch.initial_seed,
}
"""Functions that ask for a setting of the process, by the names under which code asks."""


def _is_users_module(module: ModuleType) -> bool:
    """True for a module that a user has written, or has made without a file."""
    # Parts of an extension, such as torch._C._nn, have no file of their own. That of their package tells.
    package = sys.modules.get(module.__name__.partition(".")[0], module)
    file = getattr(module, "__file__", None) or getattr(package, "__file__", None)
    if file is None:
        return module.__name__ not in sys.builtin_module_names
    return is_users(file)


def _holders_of(value: Any, where: str, path: str) -> Iterator[_Holder]:
    """The owners of values under names that a value is or has."""

    def holder(
        kind: kinds.Kind,
        owner: Any,
        *,
        is_object: bool = False,
        hides_names: bool = False,
    ) -> _Holder:
        return _Holder(kind, owner, where, path, is_object=is_object, hides_names=hides_names)

    match value:
        case type():
            # Attributes of a class are those of its metaclass, too.
            metaclass: type = type(value)
            for base in (*value.__mro__, *metaclass.__mro__):
                if is_users_class(base):
                    yield holder(kinds.CLASS_ENTRIES, base)
            return
        case ModuleType():
            if _is_users_module(value):
                yield holder(kinds.ENTRIES, vars(value))
            return
        # A logger's caches change whenever a level is set.
        case torch.jit.ScriptModule() | logging.Logger():
            return
        case nn.Module():
            for table in (value.__dict__, value._parameters, value._buffers, value._modules):
                yield holder(kinds.ENTRIES, table)
        case torch.Tensor():
            attributes = attributes_of(value)
            if attributes:
                yield holder(kinds.ENTRIES, attributes)
            return
        case threading.local():
            yield holder(kinds.OWN_THREAD, value, is_object=True)
        case ContextVar():
            yield holder(kinds.VARIABLE, value, hides_names=True)
        case ReferenceType():
            yield holder(kinds.REFERENT, value, hides_names=True)
        case FunctionType():
            if value.__dict__:
                yield holder(kinds.ENTRIES, value.__dict__)
            # Variables around code of the user's are noted when it runs. Nobody follows other code, such as that of
            # functools.singledispatch, which keeps its functions there.
            if not is_users(value.__code__.co_filename):
                for cell in value.__closure__ or ():
                    yield holder(kinds.CELL, cell, hides_names=True)
            return
        case _:
            hides_names = type(value).__module__.startswith(_HIDES_NAMES) or isinstance(value, enum.Enum)
            namespace = namespace_of(value)
            if namespace is not None:
                yield holder(kinds.ENTRIES, namespace, is_object=True, hides_names=hides_names)
            if slots_of(type(value)):
                yield holder(kinds.SLOTS, value, is_object=True)
    yield from _holders_of(type(value), where, path)
