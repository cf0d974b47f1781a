"""Things that hold values, each kind with how it is read, compared and put back.

A :class:`Kind` is a row of functions, not a class with subclasses: a snapshot keeps thousands of (kind, owner, content)
and runs through them at every recomputation.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import CellType, MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_rotor.private.values import attribute_of
from lightning_rotor.stages.containers import (
    same_bytes,
    same_entries,
    same_list,
    same_set,
    write_bytes,
    write_entries,
    write_list,
    write_set,
)

ABSENT = object()
"""In the place of a variable that has no value."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that never change."""
GENERATORS = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)
"""Types of random generators."""
CACHED = type(lru_cache(len))
"""The type of functions under ``functools.cache`` and ``lru_cache``."""
LIBRARIES = frozenset(
    ("torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_rotor",
     *sys.stdlib_module_names)
)  # fmt: skip
"""Packages whose own objects are not followed."""


def _nothing_in(_: Any) -> Iterable[Any]:
    return ()


class Kind(NamedTuple):
    """Functions for one kind of thing that holds values.

    Attributes:
        same: True if an owner (first) still holds a content (second).
        write: Let an owner hold a content.
        values: Values in a content, which are to be followed.
        read: The value that an owner has under a name.
    """

    same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], None]
    values: Callable[[Any], Iterable[Any]] = _nothing_in
    read: Callable[[Any, str], Any] = getattr

    def put(self, owner: Any, then: Any) -> None:
        """Let an owner hold a content again, if it holds anything else."""
        if not self.same(owner, then):
            self.write(owner, then)


def drop_names(namespace: dict[str, Any], then: Mapping[str, Any]) -> None:
    """Remove names that were not there."""
    # A list first, as a dict cannot be changed while it is walked through.
    for name in list(namespace):
        if name not in then:
            del namespace[name]


def _write_names(namespace: dict[str, Any], then: Mapping[str, Any]) -> None:
    """Set attributes one by one: another thread may look at them meanwhile, and their order does not matter."""
    drop_names(namespace, then)
    ENTRIES.write(namespace, then)


def _same_array(now: Any, then: Any) -> bool:
    # By bytes: NaN is unequal to itself. Not by methods of a subclass.
    return np.ndarray.tobytes(now) == np.ndarray.tobytes(then)


def _write_array(now: Any, then: Any) -> None:
    np.ndarray.__setitem__(now, ..., then)


DICT = Kind(same_entries, write_entries, dict.values)
NAMESPACE = Kind(same_entries, _write_names, dict.values)
"""All attributes of an object, in its ``__dict__``."""
TENSORS = Kind(same_entries, write_entries)
"""The parameters or buffers of a module, whose values count elsewhere."""
LIST = Kind(same_list, write_list, iter)
SET = Kind(same_set, write_set)
ARRAY = Kind(_same_array, _write_array)
BYTES = Kind(same_bytes, write_bytes)


def _by_name(
    read: Callable[[Any, str], Any],
    write: Callable[..., None],
    remove: Callable[..., None],
) -> Kind:
    """The kind of a thing of which some names count."""

    def same(owner: Any, then: Mapping[str, Any]) -> bool:
        # By identity: users' objects may compare as they like, or refuse.
        return all(read(owner, name) is value for name, value in then.items())

    def write_changed(owner: Any, then: Mapping[str, Any]) -> None:
        for name, value in then.items():
            # What is unchanged is not written: setting may be seen, or be refused.
            if read(owner, name) is value:
                continue
            if value is ABSENT:
                remove(owner, name)
            else:
                write(owner, name, value)

    return Kind(same, write_changed, dict.values, read)


def _leave(*_: Any) -> None:
    """Do nothing: there is no way to set such a thing back."""


def _read_entry(names: Mapping[str, Any], name: str) -> Any:
    return names.get(name, ABSENT)


def _read_class(kind: type, name: str) -> Any:
    # Not getattr, which finds the attributes of bases, too, and calls descriptors.
    return vars(kind).get(name, ABSENT)


def _read_attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, ABSENT)


def slot(owner: Any, name: str) -> Any:
    """The value of a slot; :data:`ABSENT` if it has none."""
    return attribute_of(owner, name, ABSENT)


def dict_of_thread(local: Any) -> dict[str, Any]:
    """The attributes that this thread sees in a ``threading.local``."""
    attributes: dict[str, Any] = vars(local)
    return attributes


def _read_local(local: Any, name: str) -> Any:
    return dict_of_thread(local).get(name, ABSENT)


def _write_local(local: Any, name: str, value: Any) -> None:
    dict_of_thread(local)[name] = value


def _remove_local(local: Any, name: str) -> None:
    dict_of_thread(local).pop(name)


def _read_variable(variable: Any, _: str) -> Any:
    # Not get(ABSENT), which would hide a default that the variable itself has.
    try:
        return variable.get()
    except LookupError:
        return ABSENT


def _write_variable(variable: Any, _: str, value: Any) -> None:
    variable.set(value)


def _read_referent(reference: Any, _: str) -> Any:
    return reference()


def _read_answer(ask: Callable[[], Any], _: str) -> Any:
    return ask()


def _read_cell(cell: CellType, _: str) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Not assigned yet.
        return ABSENT


def _write_cell(cell: CellType, _: str, value: Any) -> None:
    cell.cell_contents = value


def _remove_cell(cell: CellType, _: str) -> None:
    del cell.cell_contents


def _has_these_names(kind: type, names: frozenset[str]) -> bool:
    return len(vars(kind)) <= len(names) and vars(kind).keys() <= names


def _drop_class_names(kind: type, names: frozenset[str]) -> None:
    for name in vars(kind).keys() - names:
        # Python's own, such as __annotations__, come whenever somebody asks.
        if not name.startswith("__"):
            delattr(kind, name)


ENTRIES = _by_name(_read_entry, dict.__setitem__, dict.__delitem__)
"""Some entries of a namespace."""
CLASS_ENTRIES = _by_name(_read_class, setattr, delattr)
"""Some attributes of a class."""
CLASS_NAMES = Kind(_has_these_names, _drop_class_names)
"""Names of all attributes of a class. A new one may hide that of a class which it is made from."""
# Past the class's own __setattr__: that of a frozen dataclass refuses.
SLOTS = _by_name(slot, object.__setattr__, object.__delattr__)
ATTRIBUTE = _by_name(_read_attribute, setattr, delattr)
OWN_THREAD = _by_name(_read_local, _write_local, _remove_local)
"""Attributes of a ``threading.local``, which differ from thread to thread."""
VARIABLE = _by_name(_read_variable, _write_variable, _leave)
"""The present value of a context variable, which nobody can set back to none."""
REFERENT = _by_name(_read_referent, _leave, _leave)
"""The object that a weak reference refers to."""
ANSWER = _by_name(_read_answer, _leave, _leave)
"""The answer of a function that asks for a setting of the process."""
CELL = _by_name(_read_cell, _write_cell, _remove_cell)
"""The variable of a closure, whatever it is called."""


def namespace_of(holder: Any) -> dict[str, Any] | None:
    """The dict of an object's attributes, or None. Runs no code of the object's class."""
    try:
        namespace = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None
    # A class has a mappingproxy there, which is read in another way.
    return namespace if type(namespace) is dict else None


def slots_of(kind: type) -> list[str]:
    """Names of the slots of a class; none of a library's."""
    if kind.__module__.partition(".")[0] in LIBRARIES:
        return []
    # Not __slots__, in which private names are not spelled as they are looked up, and which may be used up.
    names = []
    for base in kind.__mro__:
        if base is object:
            continue
        for name, entry in vars(base).items():
            if type(entry) is MemberDescriptorType:
                names.append(name)
    return names
