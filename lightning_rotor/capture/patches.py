"""Functions that are others in one thread for a while, though all threads find them at the same place.

A forward that is recorded is shown by what runs instead of ``nn.Module.__call__`` and the like. Threads that load data or serve another
model meanwhile get the originals::

    nn.Module.__call__ ─► dispatch ─┬─► the replacement, in the thread that records
                                    └─► the original, in any other
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ClassMethodDescriptorType
from typing import Any

_CLASS_METHODS = (classmethod, ClassMethodDescriptorType)
_lock = threading.Lock()


class _Shared:
    """A function that some threads have replaced."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.users = 0
        self.mine = threading.local()

    @property
    def current(self) -> Any:
        """What this thread finds."""
        return getattr(self.mine, "function", self.original)

    def dispatch(self) -> Any:
        """What stands in the function's place."""

        def function(*args: Any, **kwargs: Any) -> Any:
            return self.current(*args, **kwargs)

        def class_method(cls: type, *args: Any, **kwargs: Any) -> Any:
            return self.current.__get__(None, cls)(*args, **kwargs)

        return classmethod(class_method) if type(self.original) in _CLASS_METHODS else function


_replaced: dict[tuple[int, str], _Shared] = {}


@contextmanager
def replaced(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which this thread finds another function in a module or class.

    Args:
        owner: The module or class.
        name: Of the function or class method there.
        replacement: Makes the other one, of the same kind, from what this thread finds now.
    """
    key = id(owner), name
    with _lock:
        if key not in _replaced:
            _replaced[key] = _Shared(vars(owner)[name])
            setattr(owner, name, _replaced[key].dispatch())
        shared = _replaced[key]
        shared.users += 1
    before = shared.current
    shared.mine.function = replacement(before)
    try:
        yield
    finally:
        shared.mine.function = before
        with _lock:
            shared.users -= 1
            if not shared.users:
                setattr(owner, name, _replaced.pop(key).original)
