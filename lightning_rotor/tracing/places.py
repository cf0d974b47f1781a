"""Places outside of modules where code finds values, and what these values look like at one moment."""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import fx

from lightning_rotor.generators import generator_state
from lightning_rotor.snapshot import Snapshot
from lightning_rotor.tracing.appearance import LONG, PLAIN, frozen

_CONTAINERS = (list, dict, set, deque)
_FIXED = frozenset((*PLAIN, FunctionType, BuiltinFunctionType, ModuleType, type))
_ABSENT = object()


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """An entry of a namespace or of a class, or the cell of a closure.

    Attributes:
        owner: Where the value is.
        name: What code calls it.
    """

    owner: dict[str, Any] | CellType | type
    name: str

    @property
    def key(self) -> tuple[int, str]:
        """Equal for the same place."""
        return id(self.owner), "" if isinstance(self.owner, CellType) else self.name

    @property
    def namespace(self) -> Mapping[str, Any] | None:
        """Where the value is an entry, if it is not in a cell."""
        if isinstance(self.owner, CellType):
            return None
        return vars(self.owner) if isinstance(self.owner, type) else self.owner

    def shows(self, variables: dict[str, Any]) -> bool:
        """Whether a frame's variables have the value."""
        return self.read() is variables.get(self.name, _ABSENT)

    def read(self) -> Any:
        """The value, or something that is no other value."""
        if self.namespace is not None:
            return self.namespace.get(self.name, _ABSENT)
        try:
            return self.owner.cell_contents  # type: ignore[union-attr]
        except ValueError:  # not assigned yet
            return _ABSENT

    def write(self, value: Any) -> None:
        """Put another value there."""
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, type):
            setattr(self.owner, self.name, value)
        else:
            self.owner[self.name] = value


class Noted:
    """The value at a place as it is now."""

    __slots__ = ("_before", "_entries", "_namespace", "_seen", "_value", "place")

    def __init__(self, place: Place) -> None:
        self.place, self._namespace = place, place.namespace
        self._value = place.read()
        self._entries = _entries(self._value)
        # What is one object for ever, or equal to itself, need not be looked at again as long as it is the same.
        self._seen = None if _is_fixed(self._value) else _appearance(self._value)
        self._before = None if _is_fixed(self._value) else Snapshot((self._value,), hooks=False, objects=False)

    def holds(self) -> bool:
        """Whether the value is still the same."""
        # This runs for every place at every training call.
        value = self.place.read() if self._namespace is None else self._namespace.get(self.place.name, _ABSENT)
        if value is self._value:
            if self._seen is None:
                return True
            if self._entries is not None:
                now = _entries(value)
                if now is not None and len(now) == len(self._entries) and all(map(is_, now, self._entries)):
                    return True
        return bool(_appearance(value) == (_appearance(self._value) if self._seen is None else self._seen))

    @property
    def has_value(self) -> bool:
        """Whether something else than another object without a value of its own was there, or is now."""
        return not (_is_object(self._value) and _is_object(self.place.read()))

    def has(self, kind: type) -> bool:
        """Whether the value is of this kind now, or holds one that is."""
        pending = [self.place.read()]
        for _ in range(LONG):
            if not pending:
                break
            value = pending.pop()
            if issubclass(type(value), kind):
                return True
            if issubclass(type(value), (*_CONTAINERS, tuple)):
                pending.extend(dict.values(value) if issubclass(type(value), dict) else value)
        return False

    def restore(self) -> None:
        """Put the value back, and what was in it."""
        if self.place.read() is not self._value:
            self.place.write(self._value)
        if self._before is not None:
            self._before.restore()


class Notes:
    """Values at places as they were. Refers to nothing of the trace for which they were taken."""

    def __init__(self) -> None:
        self._noted: dict[tuple[int, str], tuple[Noted, str]] = {}

    def take(self, place: Place, module_path: str) -> None:
        """Note what is at a place, unless it was noted before, and whose code is about to read it."""
        if place.key not in self._noted:
            self._noted[place.key] = Noted(place), module_path

    def changed(self) -> tuple[str, str] | None:
        """Path of a module and the name of a variable that is another since the module's code read it, or None.

        It is nobody's business that code has put another object in the place of a logger or a cache.
        """
        for noted, path in self._noted.values():
            if not noted.holds() and noted.has_value:
                return path, noted.place.name
        return None

    def hold_symbols(self) -> bool:
        """Whether the code has left values of a trace there, in a cache for instance."""
        return any(noted.has(fx.Proxy) for noted, _ in self._noted.values() if not noted.holds())

    def settle(self) -> None:
        """Take for granted what is there now."""
        self._noted = {
            key: (noted if noted.holds() else Noted(noted.place), path) for key, (noted, path) in self._noted.items()
        }

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return all(noted.holds() for noted, _ in self._noted.values())

    def restore(self) -> None:
        """Put back what the code has changed: variables, what is in lists and dicts, random generators."""
        for noted, _ in self._noted.values():
            if not noted.holds():
                noted.restore()


class Closures:
    """The variables of enclosing functions that functions use. Looks for all functions once, when it is first asked.

    Args:
        wanted: Says of a file whether functions in it count.
        expected: No other code will be asked for; None if that is not known.

    Attributes:
        asked: The code that was asked for, by address: equal code may be another function's.
        misled: Whether other code was asked for than expected.
    """

    def __init__(self, wanted: Callable[[str], bool], expected: Sequence[CodeType] | None = None) -> None:
        self.asked: dict[int, CodeType] = {}
        self.misled = False
        self._wanted = wanted
        self._expected = None if expected is None else {id(code): code for code in expected}
        self._found: dict[int, list[tuple[Place, ...]]] | None = None

    def of(self, code: CodeType) -> Sequence[tuple[Place, ...]]:
        """For each function that has this code, its variables."""
        self.asked[id(code)] = code
        self.misled = self.misled or (self._expected is not None and id(code) not in self._expected)
        if self._found is None:
            self._found = defaultdict(list)
            for function in self._functions():
                if function.__closure__ and self._wanted(function.__code__.co_filename):
                    cells = zip(function.__closure__, function.__code__.co_freevars, strict=True)
                    self._found[id(function.__code__)].append(tuple(Place(cell, name) for cell, name in cells))
        return self._found.get(id(code), ())

    def _functions(self) -> list[FunctionType]:
        # Who refers to a few objects is found in half the time that it takes to list all.
        some = gc.get_objects() if self._expected is None else gc.get_referrers(*self._expected.values())
        return [thing for thing in some if type(thing) is FunctionType]

    def forget(self) -> None:
        """Keep no function's variables alive."""
        self._found = None


def _is_fixed(value: Any) -> bool:
    return type(value) in PLAIN or _is_object(value)


def _is_object(value: Any) -> bool:
    """Whether all that counts about a value is which object it is."""
    kind = type(value)
    if kind in PLAIN or issubclass(kind, (*_CONTAINERS, tuple, torch.Tensor)):
        return False
    return generator_state(value) is None


def _appearance(value: Any) -> Any:
    return frozen(value, objects=False)


def _entries(value: Any) -> tuple[Any, ...] | None:
    """What is in a list, tuple, or dict, if it can only be replaced and not changed."""
    kind = type(value)
    if kind is dict:
        entries = (*value, *value.values())
    elif kind in (list, tuple):
        entries = tuple(value)
    else:
        return None
    return entries if len(entries) <= LONG and all(type(entry) in _FIXED for entry in entries) else None
