"""What traced code reads outside of modules: globals, variables of enclosing functions, attributes of classes.

A trace holds what code computed from ``SCALE = 2``, or whether ``rng.random() < 0.1``, for ever. So while code is traced, whatever it could
read there is noted the moment before it runs::

    SCALE = 2                      a global that the code names
    args.scale, settings.depth     an entry of an object or of a Python module, if the code names both
    def make(table):               "table", a variable of an enclosing function
        class Net(nn.Module):
            width = 8              an attribute of the class, if the code names "width"

If one of them is another by the end, the code itself changes it (a counter, a random generator, a list of activations), and no trace can
hold it. If one is another at a later call, the trace does not hold for that call. Numbers, strings and lists and dicts of them count by value, random
generators by their state; of anything else (functions, loggers, caches) it only matters which object it is. What is read from files, clocks
and the environment is not noticed.
"""

from __future__ import annotations

import dis
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from lightning_rotor.private.torch_names import without_modes
from lightning_rotor.snapshot import is_users, namespace_of
from lightning_rotor.tracing.places import Closures, Notes, Place

_STAND_FOR_THEMSELVES = (torch.Tensor, torch.nn.Module)


# From then on, code that is profiled is rewritten when profiling starts or stops.
_COSTLY_TO_PAUSE = sys.version_info >= (3, 12)


class Surroundings:
    """Watches what code could read outside of modules.

    Args:
        module_path: Says at any moment which module's code runs; None if it is code that no trace holds.
        closures: Where variables of enclosing functions are.

    Attributes:
        notes: What was there when the code came to read it.
    """

    def __init__(self, module_path: Callable[[], str | None], closures: Closures) -> None:
        self._module_path = module_path
        self._closures = closures
        self.notes = Notes()
        self._collecting = self._is_interrupted = False
        self._thread = threading.get_ident()
        self._known: set[tuple[CodeType, type]] = set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context of a trace. A profiler that follows Python's calls by the same means pauses for its time."""
        profiler: Any = sys.getprofile()
        # First and last, so that what others do whenever garbage is collected, and finalizers, is no code of the module's.
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
        if event != "call" or self._collecting:
            return
        code = frame.f_code
        if not is_users(code.co_filename):
            return
        path = self._module_path()
        if path is None:
            return
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        kind: type = first if issubclass(type(first), type) else type(first)  # type: ignore[assignment]
        if (code, kind) not in self._known:
            self._known.add((code, kind))
            for place in _named(frame, kind):
                self._note(place, path)
        if code.co_freevars:
            for place in self._enclosing(frame):
                self._note(place, path)

    def _enclosing(self, frame: FrameType) -> Iterator[Place]:
        """Variables of enclosing functions. A frame has their values and not their cells, which are looked for among all functions."""
        for places in self._closures.of(frame.f_code):
            if all(place.shows(frame.f_locals) for place in places):
                yield from places

    def _note(self, place: Place, path: str) -> None:
        # Looking at a tensor or a generator is none of the operations that a trace listens to.
        with without_modes():
            self.notes.take(place, path)


def _named(frame: FrameType, kind: type) -> Iterator[Place]:
    """What the names in code may mean: globals, and entries of those and of the class of the first argument."""
    code, outside = frame.f_code, frame.f_globals
    # ``getattr(args, "scale", 1)`` names it, too.
    names = tuple(dict.fromkeys((*code.co_names, *(entry for entry in code.co_consts if type(entry) is str))))
    holders: list[Any] = [kind]
    for name in _globals_of(code):
        if name in outside:
            yield Place(outside, name)
            holders.append(outside[name])
    for holder in holders:
        yield from _entries(holder, names)


@lru_cache(maxsize=4096)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """Names that code looks up among globals. Names of attributes are not among them."""
    names = (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return tuple(dict.fromkeys(names))


def _entries(holder: Any, names: tuple[str, ...]) -> Iterator[Place]:
    """The places under names in one of the user's modules, classes or objects."""
    if isinstance(holder, type):
        for kind in holder.__mro__:
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""  # a notebook has none
            if kind.__module__ != "builtins" and is_users(file):
                yield from (Place(kind, name) for name in names if name in vars(kind))
        return
    if isinstance(holder, ModuleType):
        if not is_users(getattr(holder, "__file__", None) or "<frozen "):
            return
    elif issubclass(type(holder), _STAND_FOR_THEMSELVES):
        return
    namespace = namespace_of(holder)
    if namespace is not None:
        yield from (Place(namespace, name) for name in names if name in namespace)
