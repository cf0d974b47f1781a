"""Contents of containers, without asking their own methods.

A user's class may make entries anew whenever it is asked for them, refuse ``len()``, or lie. So the container of
Python's that it derives from is asked: ``list.__iter__(value)``.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

# OrderedDict before dict, which does not see its order.
_CONTAINERS: tuple[type, ...] = (tuple, list, OrderedDict, dict, set, frozenset, deque)


def _base_of(container: Any) -> Any:
    # By type(): isinstance asks an object for its class, and a proxy gives another.
    return next(base for base in _CONTAINERS if issubclass(type(container), base))


def length_of(container: Any) -> int:
    """Number of entries in a container of Python's, or of a class that derives from one."""
    return int(_base_of(container).__len__(container))


def entries_of(container: Any) -> list[Any]:
    """Entries of a container of Python's, or of a class that derives from one; keys of a dict."""
    return [*_base_of(container).__iter__(container)]


def items_of(entries: Any) -> Iterable[tuple[Any, Any]]:
    """Entries of a dict, in its order."""
    # dict.items does not see the order of an OrderedDict.
    if isinstance(entries, OrderedDict):
        return OrderedDict.items(entries)
    return dict.items(entries)


def same_entries(entries: Any, then: Mapping[Any, Any]) -> bool:
    """True if a dict holds the very objects that it held, in the same order."""
    if dict.__len__(entries) != len(then):
        return False
    for (key, value), (key_then, value_then) in zip(items_of(entries), then.items(), strict=True):
        if key is not key_then or value is not value_then:
            return False
    return True


def write_entries(entries: Any, then: Mapping[Any, Any]) -> None:
    """Let a dict hold these entries."""
    base = OrderedDict if isinstance(entries, OrderedDict) else dict
    # Emptied first, as the order of the entries counts too.
    base.clear(entries)
    base.update(entries, then)


def same_list(entries: Any, then: list[Any]) -> bool:
    """True if a list or deque holds the very objects that it held."""
    return length_of(entries) == len(then) and all(map(is_, entries_of(entries), then))


def write_list(entries: Any, then: list[Any]) -> None:
    """Let a list or deque hold these entries."""
    if isinstance(entries, list):
        list.__setitem__(entries, slice(None), then)
    else:
        deque.clear(entries)
        deque.extend(entries, then)


def same_set(entries: Any, then: set[Any]) -> bool:
    """True if a set holds the very objects that it held."""
    # By identity: entries may have an equality of their own.
    return set(map(id, entries_of(entries))) == set(map(id, then))


def write_set(entries: Any, then: set[Any]) -> None:
    """Let a set hold these entries."""
    set.clear(entries)
    set.update(entries, then)


def copy_of_bytes(value: Any) -> Any:
    """A copy of a bytearray, or of an array of Python's."""
    return _bytes_base(value).__getitem__(value, slice(None))


def same_bytes(now: Any, then: Any) -> bool:
    """True if a bytearray or array holds the numbers that it held."""
    return bytes(memoryview(now)) == bytes(memoryview(then))


def write_bytes(now: Any, then: Any) -> None:
    """Let a bytearray or array hold these numbers."""
    _bytes_base(now).__setitem__(now, slice(None), then)


def _bytes_base(value: Any) -> Any:
    return bytearray if isinstance(value, bytearray) else array
