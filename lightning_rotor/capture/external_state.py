"""What recorded code reads outside of modules: globals, variables of enclosing functions, attributes of classes."""

import gc
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from lightning_rotor.capture.guards import Notes, Place
from lightning_rotor.private.torch_names import without_modes
from lightning_rotor.stages import snapshot as kinds
from lightning_rotor.stages.snapshot import globals_of, is_users, namespace_of


class Closures:
    """Variables of enclosing functions in users' functions, found by looking at all functions when first asked."""

    def __init__(self) -> None:
        self._found: dict[CodeType, list[tuple[Place, ...]]] | None = None

    def of(self, code: CodeType) -> Sequence[tuple[Place, ...]]:
        """For each function that has this code, its variables."""
        if self._found is None:
            self._found = defaultdict(list)
            for function in gc.get_objects():
                if type(function) is FunctionType and function.__closure__ and is_users(function.__code__.co_filename):
                    cells = zip(function.__closure__, function.__code__.co_freevars, strict=True)
                    self._found[function.__code__].append(tuple(Place(kinds.CELL, cell, name) for cell, name in cells))
        return self._found.get(code, ())


_COSTLY_TO_PAUSE = sys.version_info >= (3, 12)  # code that is profiled is rewritten when profiling starts or stops


class Surroundings:
    """Watches what code reads outside of modules; ``module_path`` is None for code that no recording holds."""

    def __init__(self, module_path: Callable[[], str | None], closures: Closures) -> None:
        self._module_path = module_path
        self._closures = closures
        self.notes = Notes()
        self._collecting = self._is_interrupted = False
        self._thread = threading.get_ident()
        self._known: set[tuple[CodeType, type]] = set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context of a recording. A profiler that follows Python's calls by the same means pauses for its time."""
        profiler: Any = sys.getprofile()
        # First and last, so that finalizers and others' callbacks of garbage collection are no code of the module's.
        gc.callbacks.insert(0, self._pause)
        gc.callbacks.append(self._go_on)
        if hasattr(profiler, "disable"):  # cProfile before Python 3.12, which Lightning's AdvancedProfiler uses
            profiler.disable()
        sys.setprofile(self._listen)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.callbacks.remove(self._pause)
            gc.callbacks.remove(self._go_on)
            if hasattr(profiler, "enable"):
                profiler.enable()
            else:
                sys.setprofile(profiler)

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

    # ---------------------------------------------------------------- while the code runs

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

    def _listen(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or self._collecting or not is_users(code.co_filename):
            return
        path = self._module_path()
        if path is None:
            return
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        kind: type = first if issubclass(type(first), type) else type(first)  # type: ignore[assignment]
        places: list[Place] = []
        if (code, kind) not in self._known:
            self._known.add((code, kind))
            places += _named(frame, kind)
        # A frame has the values of enclosing functions' variables and not their cells.
        for enclosing in self._closures.of(code) if code.co_freevars else ():
            if all(place.read() is frame.f_locals.get(place.name, kinds.ABSENT) for place in enclosing):
                places += enclosing
        with without_modes():  # looking at a tensor or a generator is none of the operations that are recorded
            for place in places:
                self.notes.take(place, path)


def _named(frame: FrameType, kind: type) -> Iterator[Place]:
    """Possible meanings of the names in code: globals, their entries, and entries of the first argument's class."""
    code, outside = frame.f_code, frame.f_globals
    # ``getattr(args, "scale", 1)`` names it, too.
    names = tuple(dict.fromkeys((*code.co_names, *(entry for entry in code.co_consts if type(entry) is str))))
    holders: list[Any] = [kind]
    for name in globals_of(code):
        if name in outside:
            yield Place(kinds.ENTRIES, outside, name)
            holders.append(outside[name])
    for holder in holders:
        yield from _entries_of_class(holder, names)


def _entries_of_class(holder: Any, names: tuple[str, ...]) -> Iterator[Place]:
    """The places under names in one of the user's modules, classes or objects."""
    if isinstance(holder, type):
        for kind in holder.__mro__:
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""  # a notebook has none
            if kind.__module__ != "builtins" and is_users(file):
                yield from (Place(kinds.CLASS_ENTRIES, kind, name) for name in names if name in vars(kind))
        return
    if isinstance(holder, ModuleType):
        if not is_users(getattr(holder, "__file__", None) or "<frozen "):
            return
    elif issubclass(type(holder), (torch.Tensor, torch.nn.Module)):
        return
    namespace = namespace_of(holder)
    if namespace is not None:
        yield from (Place(kinds.ENTRIES, namespace, name) for name in names if name in namespace)
