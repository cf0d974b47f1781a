"""Calls of ``torch.utils.checkpoint`` by the user's code, as they happen."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch.utils.checkpoint

from lightning_rotor.private.undoing import undone

_REPLACED = ("_CheckpointFrame", "CheckpointFunction")
"""Names of what ``torch.utils.checkpoint`` makes, or applies, in a call: the first without, the second with
``use_reentrant``."""


class _Watch(NamedTuple):
    """A thread that wants to know of its calls, and the ``use_reentrant`` of those so far."""

    thread: int
    seen: set[bool]


# One replacement serves all threads: of two, the one that ends first would put back what the other had replaced.
_watches: list[_Watch] = []
_changing = threading.Lock()


@contextmanager
def noticed_checkpoints() -> Iterator[set[bool]]:
    """Context that yields the ``use_reentrant`` of each call of ``torch.utils.checkpoint`` by this thread in it.

    The function is imported by name everywhere, so what it calls is replaced. The only public trace is that a call
    saves nothing. The last of all threads to leave puts the originals back.
    """
    module = cast("Any", torch.utils.checkpoint)
    watch = _Watch(threading.get_ident(), set())

    def stop() -> None:
        with _changing:
            # By identity: watches of one thread may be equal.
            _watches[:] = [other for other in _watches if other is not watch]
            if _watches:
                return
            for name in _REPLACED:
                replaced = getattr(module, name)
                if isinstance(replaced, _Noticed):
                    setattr(module, name, replaced.original)

    with undone(stop):
        with _changing:
            # A second watch would wrap what the first has put there.
            if not _watches:
                module._CheckpointFrame = _Noticed(False, module._CheckpointFrame)
                module.CheckpointFunction = _Noticed(True, module.CheckpointFunction)
            _watches.append(watch)
        yield watch.seen


class _Noticed:
    """A class that torch's checkpoint makes, or applies, and by which a call of it is noticed."""

    def __init__(self, reentrant: bool, original: Any) -> None:
        self.original = original
        self._reentrant = reentrant

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self.original(*args, **kwargs)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self.original.apply(*args, **kwargs)

    def _note(self) -> None:
        # A checkpoint in another thread is none of this watch's model.
        for watch in _watches:
            if watch.thread == threading.get_ident():
                watch.seen.add(self._reentrant)
