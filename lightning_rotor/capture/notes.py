"""Values that recorded code finds outside of modules: noted when they are read, compared at each call, put back."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from torch import nn

from lightning_rotor.capture.copies import Copies, Same
from lightning_rotor.stages.holders import CLASS_ENTRIES, ENTRIES, OWN_THREAD, Kind
from lightning_rotor.stages.snapshot import Snapshot

_MOST_NAMES_COMPARED = 256
"""Names in a namespace that are compared at each call. Objects have fewer; of globals only the number is."""


class Place(NamedTuple):
    """A variable: an entry of a namespace or of a class, or the cell of a closure."""

    kind: Kind
    owner: Any
    name: str

    def read(self) -> Any:
        """The value, or a mark if there is none."""
        return self.kind.read(self.owner, self.name)


class _Noted:
    """The value at a place as it is now, and the path of the module whose code is about to read it."""

    __slots__ = ("_before", "_seen", "path", "place", "value")

    def __init__(self, place: Place, path: str) -> None:
        self.place = place
        self.path = path
        self.value = place.read()
        self._seen = Copies(objects=False).of(self.value)
        # Of an object, only the identity counts here: what it holds is noted at places of its own.
        followed = () if isinstance(self._seen, Same) else (self.value,)
        self._before = Snapshot(followed, hooks=False, objects=False)

    def holds(self, copies: Copies | None = None) -> bool:
        """True if the value is still the same; ``copies`` takes what it looks like."""
        copies = copies or Copies(objects=False)
        return bool(copies.of(self.place.read()) == self._seen)

    def is_changed(self) -> bool:
        """True if the value is another now, and not an object before and now, of which only the identity counts."""
        now = Copies(objects=False).of(self.place.read())
        are_objects = isinstance(now, Same) and isinstance(self._seen, Same)
        return now != self._seen and not are_objects

    def restore(self) -> None:
        """Put the value back, and what was in it."""
        self.place.kind.put(self.place.owner, {self.place.name: self.value})
        self._before.restore()


class Notes:
    """Values at places as they were. Refers to nothing of the recording for which they were taken.

    Attributes:
        names: Names that the recorded code mentions.
        names_all: The code computes names, so that it could mean any.
        names_of_others: Names of attributes in it of anything but the first argument of a function.
        entered: Modules whose methods have run.
    """

    def __init__(self) -> None:
        self._noted: dict[tuple[int, str], _Noted] = {}
        # What the quick comparison needs, once the slow one has found no change.
        self._copies: Copies | None = None
        self.names: Set[str] = frozenset()
        self.names_all = False
        self.names_of_others: Set[str] = frozenset()
        self.entered: Set[nn.Module] = frozenset()
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
        _, known_names = self._looked_up.setdefault(id(namespace), (namespace, set()))
        known_names.update(names)

    def changed(self) -> tuple[str, str] | None:
        """Path of a module and a variable that has changed since it was read, but for loggers and caches; or None."""
        for noted in self._noted.values():
            if noted.is_changed():
                return noted.path, noted.place.name
        return None

    def _tables(self) -> list[Any]:
        """The namespaces that count."""
        tables = list(map(_table_of, self._namespaces.values()))
        tables += [namespace for namespace, _ in self._looked_up.values()]
        return tables

    def _names_present(self) -> list[frozenset[str]]:
        """Of the names that count in each namespace, those that are there."""
        names: list[Set[str]] = [self.names] * len(self._namespaces)
        names += [looked_up for _, looked_up in self._looked_up.values()]
        present = []
        for table, counted in zip(self._tables(), names, strict=True):
            present.append(frozenset(table.keys() & counted))
        return present

    def settle(self) -> None:
        """Take the present values as the noted ones."""
        self._copies = None
        self._present = self._names_present()
        # What appeared since a namespace was met may be gone again later, as the result of a cached_property.
        for owner, present in zip(self._namespaces.values(), self._present, strict=False):
            if isinstance(owner, dict):
                for name in present:
                    self.take(Place(ENTRIES, owner, name), "")
        for key, noted in self._noted.items():
            if not noted.holds():
                self._noted[key] = _Noted(noted.place, noted.path)

    def holds(self) -> bool:
        """True if everything is as it was. This runs at every training call."""
        if self._copies is None or not self._copies.hold():
            copies = Copies(objects=False)
            # A global that did not exist, such as one that hides a built-in, may exist now.
            if self._names_present() != self._present:
                return False
            for noted in self._noted.values():
                if not noted.holds(copies):
                    return False
            # A thread local has other attributes in each thread, so that no table of it can be kept.
            of_threads = [owner for owner in self._namespaces.values() if isinstance(owner, threading.local)]
            small = [
                owner
                for owner in self._namespaces.values()
                if isinstance(owner, dict) and len(owner) <= _MOST_NAMES_COMPARED
            ]
            read = _reader([noted.place for noted in self._noted.values()], of_threads, small)
            copies.settle(read, self._tables())
            self._copies = copies
        return True

    def restore(self) -> None:
        """Put back what the code has changed: variables, what is in lists and dicts, random generators."""
        # What is unchanged is not written: a property or a metaclass of the user's could notice.
        for noted in self._noted.values():
            if not noted.holds():
                noted.restore()


def _table_of(owner: Any) -> Any:
    """The names of a namespace, a class or a thread local, with their values."""
    return owner if isinstance(owner, dict) else vars(owner)


def _reader(
    places: Iterable[Place],
    of_threads: Sequence[threading.local],
    namespaces_of_objects: Sequence[dict[str, Any]],
) -> Callable[[], tuple[Any, ...]]:
    """A function that reads all places at once, in as few calls of Python as can be; () if one is gone.

    Of thread locals it gives how many attributes this thread sees, of namespaces their names, too: where one goes and
    another comes, their number stays.
    """
    names: defaultdict[int, list[str]] = defaultdict(list)
    namespaces: dict[int, Any] = {}
    others: list[Callable[[], Any]] = [partial(_count_of_names, local) for local in of_threads]
    for place in places:
        if place.kind in (ENTRIES, CLASS_ENTRIES):
            # One call of C reads all names of a namespace.
            namespaces[id(place.owner)] = _table_of(place.owner)
            names[id(place.owner)].append(place.name)
        else:
            others.append(place.read)
    # An itemgetter gives a tuple if it is asked for two names at least.
    getters = []
    for key, namespace in namespaces.items():
        first_name = names[key][0]
        getters.append((itemgetter(*names[key], first_name), namespace))

    def read() -> tuple[Any, ...]:
        try:
            entries = [get(namespace) for get, namespace in getters]
        except KeyError:
            return ()
        names_now = chain.from_iterable(namespaces_of_objects)
        return *chain.from_iterable(entries), *[get() for get in others], *names_now

    return read


def _count_of_names(local: threading.local) -> int:
    return len(vars(local))
