"""What recorded code can get hold of outside of modules, wherever it is held, and how deep it lies.

A function is recorded once and runs no more, so whatever it could read must be what it was. Known is which functions
ran, and which names stand in their code. From all that holds values for a function, these names are followed::

    globals            }                      ┌─► entries of lists, tuples, dicts ──┐
    enclosing functions│                      │                                     │
    default arguments  ├─► a value ───────────┼─► what partial and methods hold ────┤──► a value ──► …
    class of ``self``  │                      │                                     │
    attributes of self }                      └─► attributes that the code names ───┘

There is no depth behind which nothing is seen. A name that the code computes (``getattr(config, key)``) could be any,
so then all attributes of objects are followed. Entries of containers are compared by value, objects by what they are.
What is too large to be compared at each call is refused.
"""

from __future__ import annotations

import dis
import enum
import gc
import logging
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from types import (
    BuiltinMethodType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, TypeAlias
from weakref import ReferenceType

import numpy as np
import torch
from torch import nn

from lightning_rotor.capture.guards import FILLED, MOST_COMPARED, MOST_COMPARED_BYTES, VIEWS, Notes, Place, contents_of
from lightning_rotor.capture.operations import UntraceableError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.undoing import undone
from lightning_rotor.private.values import attributes_of
from lightning_rotor.stages import snapshot as kinds
from lightning_rotor.stages.snapshot import (
    PLAIN,
    globals_of,
    is_users,
    is_users_class,
    length_of,
    namespace_of,
    slots_of,
)

Functions: TypeAlias = Callable[[], Mapping[CodeType, Sequence[FunctionType]]]
_MOST_VALUES = 20_000


def functions() -> Mapping[CodeType, Sequence[FunctionType]]:
    """Users' functions with variables of enclosing ones, or defaults, by their code. It looks at all, which is slow."""
    found: defaultdict[CodeType, list[FunctionType]] = defaultdict(list)
    for function in gc.get_objects():
        if type(function) is not FunctionType or not is_users(function.__code__.co_filename):
            continue
        if function.__closure__ or function.__defaults__ or function.__kwdefaults__:
            found[function.__code__].append(function)
    return found


# ----------------------------------------------------------------------------------------------------
# Names in code.


@lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """Names of attributes and globals in code, and its strings: ``getattr(args, "scale", 1)`` names one, too."""
    return frozenset(code.co_names) | frozenset(_strings_in(code.co_consts))


def _strings_in(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if type(constant) is str:
            yield from constant.split(".") if "." in constant else (constant,)  # attrgetter("model.scale")
        elif type(constant) in (tuple, frozenset):
            yield from _strings_in(constant)


@lru_cache(maxsize=4096)
def _names_of_others(code: CodeType) -> frozenset[str]:
    """Names of attributes in code that it reads of anything but its first argument, which is mostly ``self``."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    own = code.co_varnames[:1] if code.co_argcount else ()
    found = {
        str(step.argval)
        for before, step in pairwise(steps)
        if step.opname == "LOAD_ATTR" and not (before.opname.startswith("LOAD_FAST") and before.argval in own)
    }
    return frozenset(found) | (frozenset(_strings_in(code.co_consts)) if "getattr" in code.co_names else frozenset())


_WHOLE = frozenset(("vars", "__dict__", "asdict", "astuple", "fields", "__getattribute__", "eval", "exec", "locals"))
"""What reads attributes without their names."""


@lru_cache(maxsize=4096)
def _reads_whole_objects(code: CodeType) -> bool:
    """True if code takes objects apart without naming their attributes."""
    return not _WHOLE.isdisjoint(code.co_names) or any(
        step.opname == "MATCH_CLASS" for step in dis.get_instructions(code)
    )


@lru_cache(maxsize=4096)
def _names_attribute(code: CodeType, position: int) -> bool:
    """True if the call of ``getattr`` at this place in code names the attribute there."""
    steps = [
        step
        for step in dis.get_instructions(code)
        if step.opname not in ("CACHE", "PRECALL") and step.offset <= position
    ]
    if not steps[-1].opname.startswith("CALL") or steps[-1].arg not in (2, 3):
        return False
    name = steps[-2:-1] if steps[-1].arg == 2 else steps[-3:-2] if steps[-2].opname.startswith("LOAD") else []
    return bool(name) and name[0].opname == "LOAD_CONST" and type(name[0].argval) is str


# ----------------------------------------------------------------------------------------------------
# What holds values under names.


@dataclass(slots=True, eq=False)
class _Holder:
    """Something with values under names.

    ``level`` is 0 for a table of a recorded module and 1 for an object in one: these are compared by :class:`.Watch`,
    except for what is in an object's containers. ``is_object`` if code that computes names may read all;
    ``hides_names`` if only other code than the user's knows them.
    """

    kind: kinds.Kind
    owner: Any
    where: str
    path: str
    level: int = 2
    is_object: bool = False
    hides_names: bool = False

    def names(self) -> Set[str]:
        """All names."""
        if self.kind in (kinds.VARIABLE, kinds.REFERENT):
            return {"its value"}
        if self.kind is kinds.SLOTS:
            return set(slots_of(type(self.owner)))
        if self.kind is kinds.OWN_THREAD:
            return kinds.dict_of_thread(self.owner).keys()
        found: Set[str] = (self.owner if isinstance(self.owner, dict) else vars(self.owner)).keys()
        return found


class Reach:
    """Values that code can get hold of by the names that it mentions. ``notes`` take each place, and who reads it."""

    def __init__(self, root: nn.Module, notes: Notes) -> None:
        self._inside = set(root.modules())
        self._notes = notes
        self._names: set[str] = set()
        self._wholly = False
        self._holders: list[_Holder] = []
        self._seen: dict[int, Any] = {}
        self._looked_into: set[nn.Module] = set()
        # Values to be looked at, with the path of who reads them, where they are, and the level of what they are in.
        self._pending: list[tuple[Any, str, str, int]] = []
        self._is_following = False

    def learn(self, names: frozenset[str], *, wholly: bool = False) -> None:
        """Follow these names from now on, from all that was found already as well."""
        new = names - self._names
        self._names |= new
        self._notes.names = self._names
        if wholly and not self._wholly:
            self._wholly = True
            for holder in [each for each in self._holders if each.is_object]:
                self._look(holder, holder.names())
        if new:
            for holder in [*self._holders]:
                self._look(holder, holder.names() & new)

    def read(self, place: Place, path: str, where: str = "") -> None:
        """Note a place that code reads, and follow its value."""
        value = place.read()
        self._notes.take(place, path)
        self.follow(value, path, where or place.name)

    def look_into(self, module: nn.Module, path: str) -> None:
        """Follow what a module of the recorded one has in attributes, which themselves are compared elsewhere."""
        if module in self._looked_into or isinstance(module, torch.jit.ScriptModule):
            return
        self._looked_into.add(module)
        for table in (module.__dict__, module._parameters, module._buffers):
            self._add(_Holder(kinds.ENTRIES, table, "self", path, level=0))

    def follow(self, value: Any, path: str, where: str, level: int = 2) -> None:
        """Look at a value, and at all that can be reached from it."""
        self._pending.append((value, path, where, level))
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
        if type(value) in PLAIN or id(value) in self._seen:
            return
        if isinstance(value, nn.Module) and value in self._inside:
            return
        if len(self._seen) > _MOST_VALUES:
            raise UntraceableError(f"it can read more than {_MOST_VALUES} values outside of modules, through {where!r}")
        self._seen[id(value)] = value
        _require_comparable(value, where)
        inside = level if isinstance(value, FILLED) else 2
        self._pending += [(entry, path, f"{where}[…]", inside) for entry in _parts_of(value)]
        for holder in _holders_of(value, where, path):
            if level == 0 and holder.is_object:
                holder.level = 1
            self._add(holder)

    def _add(self, holder: _Holder) -> None:
        self._holders.append(holder)
        if holder.level == 2:
            self._notes.watch(holder.kind, holder.owner)
        names = holder.names()
        reads_all = holder.hides_names or (self._wholly and holder.is_object)
        self._look(holder, names if reads_all else names & self._names)

    def _look(self, holder: _Holder, names: Iterable[str]) -> None:
        for name in [*names]:
            place = Place(holder.kind, holder.owner, name)
            value, where = place.read(), f"{holder.where}.{name}"
            is_compared = holder.level == 0 or (holder.level == 1 and not isinstance(value, FILLED))
            if is_compared or (holder.kind is kinds.CLASS_ENTRIES and _is_code(name, value)):
                self.follow(value, holder.path, where, holder.level)
            else:
                self.read(place, holder.path, where)


_CODE = (
    *(FunctionType, property, staticmethod, classmethod, cached_property),
    *(GetSetDescriptorType, MemberDescriptorType, WrapperDescriptorType),
)
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
    else:
        return
    raise UntraceableError(
        f"it can read {where}, {what}, which cannot be compared at each call: keep it in a tensor, or read it in a "
        "submodule"
    )


def _parts_of(value: Any) -> Iterable[Any]:
    """What is in a container or a callable."""
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
            return () if isinstance(value.__self__, ModuleType) else (value.__self__,)
        case partial():
            return value.func, *value.args, value.keywords
    return ()


_HIDES_NAMES = ("collections", "weakref", "enum", "types")
"""Modules of Python whose classes keep what they hold under names that only their own code knows."""


def _holders_of(value: Any, where: str, path: str) -> Iterator[_Holder]:
    """What holds values under names in a value."""

    def holder(kind: kinds.Kind, owner: Any, **more: bool) -> _Holder:
        return _Holder(kind, owner, where, path, **more)

    match value:
        case type():
            yield from (holder(kinds.CLASS_ENTRIES, base) for base in value.__mro__ if is_users_class(base))
            return
        case ModuleType():
            if is_users(getattr(value, "__file__", None) or "<frozen "):
                yield holder(kinds.ENTRIES, vars(value))
            return
        case torch.jit.ScriptModule() | logging.Logger():  # a logger's caches change whenever a level is set
            return
        case nn.Module():
            tables = (value.__dict__, value._parameters, value._buffers, value._modules)
            yield from (holder(kinds.ENTRIES, table) for table in tables)
        case torch.Tensor():
            if attributes := attributes_of(value):
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
            return
        case _:
            hides = isinstance(value, enum.Enum) or type(value).__module__.partition(".")[0] in _HIDES_NAMES
            if (namespace := namespace_of(value)) is not None:
                yield holder(kinds.ENTRIES, namespace, is_object=True, hides_names=hides)
            if slots_of(type(value)):
                yield holder(kinds.SLOTS, value, is_object=True)
    yield from _holders_of(type(value), where, path)


# ----------------------------------------------------------------------------------------------------
# Which code runs.


_ENVIRONMENT = frozenset(("environ", "getenv"))
"""What gives variables of the process, which Python's own code reads."""

_COSTLY_TO_PAUSE = sys.version_info >= (3, 12)  # code that is profiled is rewritten when profiling starts or stops


class Surroundings:
    """Watches what code reads outside of modules; ``module_path`` is None for code that no recording holds.

    ``written_by`` is the path of the first module whose code printed or wrote to a file.
    """

    def __init__(self, root: nn.Module, module_path: Callable[[], str | None], functions: Functions) -> None:
        self._root, self._module_path, self._functions = root, module_path, functions
        self._modules = set(root.modules())
        self.notes = Notes()
        self._reach = Reach(root, self.notes)
        self.written_by: str | None = None
        self._collecting = self._is_interrupted = False
        self._thread = threading.get_ident()
        self._known: set[tuple[CodeType, type]] = set()
        self._read_functions: set[FunctionType] = set()
        self._read_of_others: set[str] = set()

    def note_layers(self, layers: Iterable[nn.Module]) -> None:
        """Note what code around them has read of layers that run as they are, besides calling them."""
        for layer in layers:
            if layer in self._modules and not isinstance(layer, torch.jit.ScriptModule):
                for name in self._read_of_others & layer.__dict__.keys() - private.STRUCTURE:
                    place = Place(kinds.ENTRIES, layer.__dict__, name)
                    self._reach.read(place, "", f"{type(layer).__name__}.{name}")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context of a recording. A profiler that follows Python's calls by the same means pauses for its time."""
        profiler: Any = sys.getprofile()

        def stop() -> None:
            sys.setprofile(None)
            gc.callbacks[:] = [each for each in gc.callbacks if each not in (self._pause, self._go_on)]
            if hasattr(profiler, "enable"):
                profiler.enable()
            else:
                sys.setprofile(profiler)

        with undone(stop):
            # First and last, so that finalizers and others' callbacks of the collector are no code of the module's.
            gc.callbacks.insert(0, self._pause)
            gc.callbacks.append(self._go_on)
            if hasattr(profiler, "disable"):  # cProfile before Python 3.12, which Lightning's AdvancedProfiler uses
                profiler.disable()
            sys.setprofile(self._listen)
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context of code that is not the module's. It runs several times as fast."""
        if _COSTLY_TO_PAUSE or sys.getprofile() != self._listen:
            yield
            return
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(self._listen)

    def _pause(self, phase: str, _: Any) -> None:
        if phase == "start" and threading.get_ident() == self._thread:
            self._collecting = True
            self._is_interrupted = sys.getprofile() == self._listen

    def _go_on(self, phase: str, _: Any) -> None:
        if phase == "stop" and threading.get_ident() == self._thread:
            self._collecting = False
            if self._is_interrupted and sys.getprofile() != self._listen:
                # A cProfile.Profile that was never disabled takes away whatever profiles, should it be garbage.
                sys.setprofile(self._listen)

    # ---------------------------------------------------------------- while the code runs

    def _listen(self, frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if event == "c_call" and not self._collecting:
            if called is print or called.__name__ == "write":
                self.written_by = self._module_path() if self.written_by is None else self.written_by
            elif called is getattr and is_users(code.co_filename) and not _names_attribute(code, frame.f_lasti):
                self._read_wholly()
            return
        if event != "call" or self._collecting or not is_users(code.co_filename):
            return
        path = self._module_path()
        if path is None:
            return
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        kind: type = first if issubclass(type(first), type) else type(first)  # type: ignore[assignment]
        is_new = (code, kind) not in self._known
        self._known.add((code, kind))
        with private.without_modes():  # looking at a tensor or a generator is none of the operations that are recorded
            if is_new:
                self._read_code(frame, kind, path)
            if isinstance(first, nn.Module) and first in self._modules:
                self._reach.look_into(first, path)
            for function in self._functions().get(code, ()):
                if function not in self._read_functions and _is_running(function, frame):
                    self._read_functions.add(function)
                    self._read_function(function, path)

    def _read_wholly(self) -> None:
        """Follow all attributes of objects: a name is computed that could be any."""
        if self._module_path() is not None:
            with private.without_modes():
                self._reach.learn(frozenset(), wholly=True)

    def _read_code(self, frame: FrameType, kind: type, path: str) -> None:
        """Follow what the names in code may mean: globals, and attributes of the first argument's class."""
        code, outside = frame.f_code, frame.f_globals
        self._reach.learn(_names_in(code), wholly=_reads_whole_objects(code))
        self._read_of_others |= _names_of_others(code)
        self.notes.look_up(outside, globals_of(code))
        for name in globals_of(code):
            if name in outside:
                self._reach.read(Place(kinds.ENTRIES, outside, name), path)
        for base in filter(is_users_class, kind.__mro__):
            for name in _names_in(code) & vars(base).keys():
                self._reach.read(Place(kinds.CLASS_ENTRIES, base, name), path, f"{kind.__name__}.{name}")
        self._reach.follow(kind, path, kind.__name__)
        if not _ENVIRONMENT.isdisjoint(code.co_names):
            self._reach.read(Place(kinds.ENTRIES, vars(os.environ), "_data"), path, "os.environ")

    def _read_function(self, function: FunctionType, path: str) -> None:
        """Follow what a function holds: variables of enclosing functions, defaults, attributes."""
        names = function.__code__.co_freevars
        for cell, name in zip(function.__closure__ or (), names, strict=True):
            self._reach.read(Place(kinds.CELL, cell, name), path)
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self._reach.read(Place(kinds.ATTRIBUTE, function, name), path, f"{function.__name__}.{name}")
        self._reach.follow(function, path, function.__name__)


def _is_running(function: FunctionType, frame: FrameType) -> bool:
    """True if a frame could be one of this function, with the variables of enclosing functions that it has."""
    # A frame has the values of these variables and not their cells.
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return function.__globals__ is frame.f_globals and all(
        kinds.CELL.read(cell, "") is frame.f_locals.get(name, kinds.ABSENT) for name, cell in cells
    )
