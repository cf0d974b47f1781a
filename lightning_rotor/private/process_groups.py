"""Groups of processes, as ``torch.distributed`` keeps them, read in torch 2.11 to 2.15."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lightning_rotor.devices import TRAINING

_c10d: Any = dist.distributed_c10d

_groups: WeakKeyDictionary[Any, dict[frozenset[int], Any]] = WeakKeyDictionary()
"""By the group of all processes, the groups beside it by their members. They end with it."""


def processes() -> int:
    """Number of processes that may exchange messages with this one, itself included."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def group_named(name: str) -> Any:
    """A group by the name under which operators take it."""
    return _c10d._resolve_process_group(name)


def group_beside(members: frozenset[int]) -> Any:
    """A group of these processes that takes tensors on the CPU, so that no device is waited for; only they make it.

    It waits for as long as the group of all processes does. There is one for each set of processes.
    """
    everyone = _c10d._get_default_group()
    groups = _groups.setdefault(everyone, {})
    if members not in groups:
        ranks = None
        if len(members) < dist.get_world_size():
            ranks = sorted(members)
        # Without the last argument, processes that are not in the group would have to make it, too.
        groups[members] = dist.new_group(
            ranks,
            timeout=_patience_of(everyone),
            backend="gloo",
            use_local_synchronization=True,
        )
    return groups[members]


def _patience_of(group: Any) -> timedelta | None:
    """Time that members of a group wait for each other; None if it does not say."""
    # The device's backend first, by which training waits.
    for kind in reversed(TRAINING):
        # It has no backend for that kind of device, or one without options.
        with suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(kind)).options._timeout  # type: ignore[no-any-return]
    return None


@contextmanager
def copied_as_they_are() -> Iterator[None]:
    """Context in which ``copy.deepcopy`` takes groups of processes for what they are: names of something outside."""
    if not dist.is_available():
        yield
        return
    # A group is an object of C++ that deepcopy cannot pickle. What is in this table, deepcopy asks before.
    before = copyreg.dispatch_table.get(dist.ProcessGroup)
    copyreg.dispatch_table[dist.ProcessGroup] = _needs_no_copy
    try:
        yield
    finally:
        if before is None:
            del copyreg.dispatch_table[dist.ProcessGroup]
        else:
            copyreg.dispatch_table[dist.ProcessGroup] = before


def _needs_no_copy(_: Any) -> str:
    # ``copy`` takes any string for "no copy is needed".
    return "itself"
