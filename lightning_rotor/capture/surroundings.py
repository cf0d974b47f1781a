"""The functions that run while a module is recorded, and what each of them could read outside of modules.

A function is recorded once and runs no more, so whatever it could read must be what it was. Known is which functions
ran, and which names stand in their code. From all that holds values for a function, these names are followed::

    globals            }                      ┌─► entries of lists, tuples, dicts ──┐
    enclosing functions│                      │                                     │
    default arguments  ├─► a value ───────────┼─► what partial and methods hold ────┤──► a value ──► …
    class of ``self``  │                      │                                     │
    attributes of self }                      └─► attributes that the code names ───┘

How far, is in ``reach``. Python's profiler tells which functions run: it hears of every call in this thread, where a
tracer hears of every line, and ``sys.monitoring`` came with Python 3.12 alone.
"""

from __future__ import annotations

import builtins
import gc
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import resolve_name
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.capture.memoized import StandIns
from lightning_rotor.capture.names_in_code import (
    imports_in,
    names_attribute,
    names_in,
    names_of_others,
    reads_whole_objects,
)
from lightning_rotor.capture.notes import Notes, Place
from lightning_rotor.capture.reach import Reach
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.undoing import undone
from lightning_rotor.stages.holders import ABSENT, ATTRIBUTE, CELL, CLASS_ENTRIES, ENTRIES
from lightning_rotor.stages.user_code import globals_of, is_own_file, is_users, is_users_class

Functions: TypeAlias = Callable[[], Mapping[CodeType, Sequence[FunctionType]]]
"""Gives :func:`functions`, or what it gave the last time."""


def functions() -> Mapping[CodeType, Sequence[FunctionType]]:
    """Users' functions with variables of enclosing ones, or defaults, by their code. It looks at all, which is slow."""
    by_code: defaultdict[CodeType, list[FunctionType]] = defaultdict(list)
    # A frame does not know its function, and only the function has defaults and cells. The collector knows all
    # functions, except for those that ``gc.freeze`` has put aside.
    for function in gc.get_objects():
        if type(function) is not FunctionType or not is_users(function.__code__.co_filename):
            continue
        if function.__closure__ or function.__defaults__ or function.__kwdefaults__:
            by_code[function.__code__].append(function)
    return by_code


_ENVIRONMENT = frozenset(("environ", "environb", "getenv", "getenvb", "expandvars"))
"""Names by which variables of the process are read, in Python's own code."""

_BUILT_IN = frozenset(dir(builtins))
"""Names that Python itself has put there."""

_COSTLY_TO_PAUSE = sys.version_info >= (3, 12)
"""True where code that is profiled is rewritten when profiling starts or stops."""


class Surroundings:
    """Watches what code reads outside of modules; ``module_path`` is None for code that no recording holds.

    Attributes:
        notes: The values that it could read.
        written_by: Path of the first module whose code printed, or opened or wrote a file.
    """

    def __init__(
        self,
        root: nn.Module,
        module_path: Callable[[], str | None],
        functions: Functions,
    ) -> None:
        self._root = root
        self._module_path = module_path
        self._functions = functions
        self._modules = set(root.modules())
        self.notes = Notes()
        self._stand_ins = StandIns()
        self._reach = Reach(root, self.notes, self._stand_ins)
        self.written_by: str | None = None
        # True while the collector of garbage runs, and finalizers of others with it.
        self._collecting = False
        # True if the collector has interrupted the listening.
        self._was_listening = False
        self._thread = threading.get_ident()
        self._read_codes: set[tuple[CodeType, type]] = set()
        self._read_functions: set[FunctionType] = set()
        self._read_of_others: set[str] = set()
        # Modules by their names that code of the user's imports where it needs them, and paths.
        self._imported: list[tuple[str, str]] = []
        self.notes.names_of_others = self._read_of_others

    def note_layers(self, layers: Iterable[nn.Module]) -> None:
        """Note what code around them has read of layers that run as they are, besides calling them."""
        for layer in layers:
            if layer not in self._modules or isinstance(layer, torch.jit.ScriptModule):
                continue
            own_names = layer.__dict__.keys() - private.STRUCTURE
            for name in self._read_of_others & own_names:
                place = Place(ENTRIES, layer.__dict__, name)
                self._reach.read(place, "", f"{type(layer).__name__}.{name}")

    def note_cached(self) -> None:
        """Note what came with the run: results under ``functools.cache``, and modules that were imported."""
        self._reach.follow_caches()
        self._follow_imported()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context of a recording. A profiler that follows Python's calls by the same means pauses for its time."""
        profiler: Any = sys.getprofile()

        def stop() -> None:
            sys.setprofile(None)
            gc.callbacks[:] = [
                callback
                for callback in gc.callbacks
                if callback not in (self._collection_begins, self._collection_ends)
            ]
            if hasattr(profiler, "enable"):
                profiler.enable()
            else:
                sys.setprofile(profiler)

        with undone(stop), self._stand_ins.standing():
            # First and last, so that finalizers and others' callbacks of the collector are no code of the module's.
            # The one that ends a pause comes first: to make a bound method may start the collector, and a pause that
            # begins before anybody hears of its end would last for the whole recording, in which nothing is noted.
            gc.callbacks.append(self._collection_ends)
            gc.callbacks.insert(0, self._collection_begins)
            # cProfile before Python 3.12, which Lightning's AdvancedProfiler uses.
            if hasattr(profiler, "disable"):
                profiler.disable()
            sys.setprofile(self._listen)
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context of code that is not the module's. It runs several times as fast."""
        # Inside of another pause, or with another profiler, there is nothing to pause.
        if _COSTLY_TO_PAUSE or sys.getprofile() != self._listen:
            yield
            return
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(self._listen)

    def _collection_begins(self, phase: str, _: Any) -> None:
        """Stop listening when the collector of garbage starts."""
        if phase == "start" and threading.get_ident() == self._thread:
            self._collecting = True
            self._was_listening = sys.getprofile() == self._listen

    def _collection_ends(self, phase: str, _: Any) -> None:
        """Listen again when the collector has stopped."""
        if phase == "stop" and threading.get_ident() == self._thread:
            self._collecting = False
            if self._was_listening and sys.getprofile() != self._listen:
                # A cProfile.Profile that was never disabled takes away whatever profiles, should it be garbage.
                sys.setprofile(self._listen)

    def _listen(self, frame: FrameType, event: str, called: Any) -> None:
        """Hear of a call; Python calls this, see ``sys.setprofile``."""
        if self._collecting:
            return
        if event == "c_call":
            self._note_built_in(frame, called)
        elif event == "call" and is_users(frame.f_code.co_filename) and not _is_ours(frame):
            path = self._module_path()
            if path is not None:
                self._note_call(frame, path)

    def _note_built_in(self, frame: FrameType, called: Any) -> None:
        """Note a call of a function in C: it writes, it opens a file, or it reads an attribute."""
        # A recording would neither print again nor look at what is in a file by then. Most loggers end in a call of
        # ``write``, too. Python opens files by itself, for the lines that a warning shows and for imports.
        opens = called is open and _opens_for_user(frame)
        if opens or called is print or called.__name__ == "write":
            if self.written_by is None:
                self.written_by = self._module_path()
            return
        code = frame.f_code
        if called is getattr and is_users(code.co_filename) and not names_attribute(code, frame.f_lasti):
            self._read_wholly()

    def _note_call(self, frame: FrameType, path: str) -> None:
        """Note what a function of the user's can read."""
        code = frame.f_code
        # One function may run as a method of several classes, whose attributes differ.
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        kind: type = first if issubclass(type(first), type) else type(first)  # type: ignore[assignment]
        is_new = (code, kind) not in self._read_codes
        self._read_codes.add((code, kind))
        # Looking at a tensor or a generator is none of the operations that are recorded.
        with private.without_modes():
            if is_new:
                self._read_code(frame, kind, path)
            if isinstance(first, nn.Module) and first in self._modules:
                self._reach.look_into(first, path)
            for function in self._functions().get(code, ()):
                if function not in self._read_functions and _may_be_running(function, frame):
                    self._read_functions.add(function)
                    self._read_function(function, path)

    def _read_wholly(self) -> None:
        """Follow all attributes of objects: a name is computed that could be any."""
        if self._module_path() is not None:
            with private.without_modes():
                self._reach.learn(frozenset(), wholly=True)

    def _read_code(self, frame: FrameType, kind: type, path: str) -> None:
        """Follow what the names in code may mean: globals, and attributes of the first argument's class."""
        code = frame.f_code
        outside = frame.f_globals
        self._reach.learn(names_in(code), wholly=reads_whole_objects(code))
        self._read_of_others |= names_of_others(code)
        names: Iterable[str] = globals_of(code)
        self.notes.look_up(outside, names)
        # Installed packages import in functions all the time, and would lead to all that they consist of.
        is_own = is_own_file(code.co_filename)
        if is_own and "globals" in names:
            # It may look up any, by a name that nobody knows.
            names = [*outside]
        for name in names:
            if name in outside:
                self._reach.read(Place(ENTRIES, outside, name), path)
            elif name in vars(builtins) and name not in _BUILT_IN:
                self._reach.read(Place(ENTRIES, vars(builtins), name), path)
        for name in imports_in(code) if is_own else ():
            # A name of no module may be any text.
            with suppress(ImportError):
                self._imported.append((resolve_name(name, outside.get("__package__")), path))
        self._follow_imported()
        for base in filter(is_users_class, kind.__mro__):
            for name in names_in(code) & vars(base).keys():
                self._reach.read(Place(CLASS_ENTRIES, base, name), path, f"{kind.__name__}.{name}")
        self._reach.follow(kind, path, kind.__name__)
        # Python's own code reads the dict in os.environ, under a name that no code of the user's mentions.
        if not _ENVIRONMENT.isdisjoint(code.co_names):
            self._reach.read(Place(ENTRIES, vars(os.environ), "_data"), path, "os.environ")

    def _follow_imported(self) -> None:
        """Follow the modules that are there by now, and the packages in which they lie."""
        missing = []
        for name, path in self._imported:
            if name in sys.modules:
                for module in (sys.modules[name], sys.modules.get(name.partition(".")[0])):
                    self._reach.follow(module, path, name)
            else:
                missing.append((name, path))
        self._imported = missing

    def _read_function(self, function: FunctionType, path: str) -> None:
        """Follow what a function holds: variables of enclosing functions, defaults, attributes."""
        names = function.__code__.co_freevars
        for cell, name in zip(function.__closure__ or (), names, strict=True):
            self._reach.read(Place(CELL, cell, name), path)
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self._reach.read(Place(ATTRIBUTE, function, name), path, f"{function.__name__}.{name}")
        self._reach.follow(function, path, function.__name__)


def _opens_for_user(frame: FrameType) -> bool:
    """True if code of the user's opens a file, itself or through ``pathlib``."""
    return is_users(frame.f_code.co_filename) or frame.f_globals.get("__name__", "").startswith("pathlib")


def _is_ours(frame: FrameType) -> bool:
    """True for code that Python writes for a dataclass of this package, in a file of no name."""
    name = frame.f_globals.get("__name__")
    return type(name) is str and name.startswith("lightning_rotor.")


def _may_be_running(function: FunctionType, frame: FrameType) -> bool:
    """True if a frame could be one of this function, with the variables of enclosing functions that it has.

    The caller has compared their code.
    """
    if function.__globals__ is not frame.f_globals:
        return False
    # A frame has the values of these variables and not their cells.
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if CELL.read(cell, "") is not frame.f_locals.get(name, ABSENT):
            return False
    return True
