"""What stands around a call and decides over its numbers, carried from the thread of user code to where the pipeline runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from lightning_rotor.settings import Settings

_KINDS = ("cpu", "cuda")


class Surroundings:
    """Settings of torch, and autocast, which is a thread's own, at the moment when it is made.

    Attributes:
        dtypes: What of them may decide over dtypes; can be a key.
    """

    __slots__ = ("_autocast", "_settings", "dtypes")

    def __init__(self) -> None:
        self._settings = Settings()
        self._autocast = tuple(map(_autocast, _KINDS))
        self.dtypes = torch.get_default_dtype(), self._autocast

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which they stand again."""
        with ExitStack() as stack:
            stack.enter_context(self._settings.restored())
            for kind, wanted in zip(_KINDS, self._autocast, strict=True):
                if wanted != _autocast(kind):
                    enabled, dtype, caches = wanted
                    stack.enter_context(torch.autocast(kind, dtype, enabled, caches))
            yield


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
