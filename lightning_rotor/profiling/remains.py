"""Tensors without values that user code has kept from a dry run, where no snapshot could put things back.

A real step that met one would go on without values, and train to other weights in silence::

    @lru_cache
    def table(n): return torch.arange(n) / n     a cache may forget: it is emptied
    class Memo: seen = {}                        what was there before is not known: an error
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_rotor.errors import ModelError
from lightning_rotor.private.fake_tensors import FakeTensor, FakeTensorMode
from lightning_rotor.stages.holders import CACHED

_DEEPEST = 4
"""Levels of containers in a cached result that are looked through."""


def drop_remains(mode: FakeTensorMode) -> None:
    """Let caches forget the tensors of a dry run's mode that are still there.

    Garbage must have been collected before. Raises ``ModelError`` if something else holds one of them.
    """
    remains = _alive(mode)
    if not remains:
        return
    with _thawed():
        _empty_caches_with(remains)
        del remains
        gc.collect()
        remains = _alive(mode)
        holders = _holders_of(remains)
    if remains:
        raise ModelError(
            f"the dry run of a step has left {len(remains)} tensors without values in {holders}, where "
            "nobody could put back what was there. Expected state that a step keeps in attributes of modules, or in "
            "globals and variables that their functions name. Name what is to be planned, RotorCallback(module=...): "
            "then there is no dry run"
        )


@contextmanager
def _thawed() -> Iterator[None]:
    """Context in which the garbage collector tells of objects that the user has frozen, too (``gc.freeze``)."""
    is_frozen = bool(gc.get_freeze_count())
    if is_frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            gc.freeze()


def _alive(mode: FakeTensorMode) -> list[torch.Tensor]:
    # By the type, for isinstance asks objects of users for their class.
    found: list[torch.Tensor] = []
    for thing in gc.get_objects():
        if issubclass(type(thing), FakeTensor) and thing.fake_mode is mode:
            found.append(thing)
    return found


def _empty_caches_with(remains: Sequence[torch.Tensor]) -> None:
    """Empty the caches of functools that hold one of these tensors."""
    ids = set(map(id, remains))
    for function in gc.get_objects():
        # It shows its results to the garbage collector alone.
        if type(function) is CACHED and _holds(function, ids):
            function.cache_clear()


def _holds(function: Any, ids: set[int]) -> bool:
    level = gc.get_referents(function)
    for _ in range(_DEEPEST):
        if any(id(thing) in ids for thing in level):
            return True
        containers = [thing for thing in level if type(thing) in (dict, list, tuple)]
        level = gc.get_referents(*containers)
    return False


def _holders_of(remains: Sequence[torch.Tensor]) -> str:
    """Types of the objects that hold these tensors, for a message."""
    kinds = []
    for tensor in remains:
        for holder in gc.get_referrers(tensor):
            if holder is not remains:
                kinds.append(type(holder).__name__)
    return ", ".join(f"a {kind}" for kind in dict.fromkeys(kinds) if kind != "frame") or "code of other languages"
