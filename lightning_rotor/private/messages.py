"""Messages between processes, as torch's dispatcher sees them, read in torch 2.11 to 2.15.

Whatever Python calls (``dist.all_reduce``, a method of a group, a functional collective, DTensor), an operator with a
process group among its arguments does it: ``c10d.allreduce_``, ``_c10d_functional.all_reduce``, ``c10d.send``. So does
SyncBatchNorm, and what an autograd function does in its backward. On tensors without values nothing is sent.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lightning_rotor.devices import TRAINING
from lightning_rotor.private.torch_names import (
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    packet_of,
    schema_of,
    written_by_message,
)
from lightning_rotor.private.values import tensors_in

_c10d: Any = dist.distributed_c10d
_GROUPS = ("process_group", "group_name")


@lru_cache(maxsize=4096)
def _place_of_group(func: OpOverload) -> tuple[int, str] | None:
    """Where an operator takes a process group; None for all that send nothing."""
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.name in _GROUPS:
            return place, argument.name
    return None


def members_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int]:
    """Ranks of the processes among which an operator exchanges a message; empty if it does not, or with nobody else."""
    place = _place_of_group(func) if isinstance(func, OpOverload) else None
    if place is None:
        return frozenset()
    group: Any = args[place[0]] if place[0] < len(args) else kwargs.get(place[1])
    if isinstance(group, str):
        group = _c10d._resolve_process_group(group)
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    members = frozenset(dist.get_process_group_ranks(group))
    return members if len(members) > 1 else frozenset()


class MessageWatch(TorchDispatchMode):
    """Sees the messages of the code that runs in it, also those of its backwards; ``members`` is one set a group.

    With ``marks``, tensors that a message was received in have a new version, as after any change in place: without,
    nothing tells that ``dist.all_reduce(x)`` has changed ``x``. It slows code down, so nothing is timed in it.
    """

    supports_higher_order_operators = True

    def __init__(self, *, marks: bool) -> None:
        super().__init__()
        self.members: set[frozenset[int]] = set()
        self._marks = marks

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(_has_insides(kind) for kind in types):
            return NotImplemented  # a DTensor's own handler exchanges messages, and this mode sees those, too
        kwargs = kwargs or {}
        if members := members_of(func, args, kwargs):
            self.members.add(members)
        result = func(*args, **kwargs)
        if members and self._marks:
            received = tensors_in(list(written_by_message(func, args)))
            torch.autograd.graph.increment_version([each for each in received if not each.is_inference()])
        return result


def _has_insides(kind: type) -> bool:
    """True for a class of tensors whose own handler computes with other tensors, which those without values are not."""
    handler = getattr(kind, "__torch_dispatch__", None)
    is_plain = handler is None or handler is torch._C._disabled_torch_dispatch_impl
    return not is_plain and not issubclass(kind, FakeTensor)


# -------------------------------------------------------------------- results that arrive later


def is_functional(function: Any) -> bool:
    """True for a functional collective, which returns before its result is there, and for what hands that on."""
    return isinstance(function, (OpOverload, OpOverloadPacket)) and "c10d_functional" in str(function)


@cache
def arrived(function: Any) -> Callable[..., Any]:
    """A functional collective that waits for its result, which is then a tensor like any other."""
    name = (packet_of(function) if isinstance(function, OpOverload) else function).__name__
    if name.startswith("_wrap_tensor"):  # into one that waits when it is used
        return lambda tensor: tensor

    def awaited(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for tensor in tensors_in(result):
            torch.ops._c10d_functional.wait_tensor(tensor.detach())
        return result

    awaited.__name__ = name
    return awaited


NOT_ARRIVED = (
    "it returns the result of a functional collective, which may not have arrived yet: expected it to wait, with "
    "result.wait()"
)
"""Why such a tensor can be no value between operations or stages."""


def is_on_its_way(tensor: torch.Tensor) -> bool:
    """True for what functional collectives hand out: a tensor that waits for a message when it is used."""
    return type(tensor).__name__ == "AsyncCollectiveTensor"


# -------------------------------------------------------------------- groups


def processes() -> int:
    """Number of processes that may exchange messages with this one, itself included."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


_known: WeakKeyDictionary[Any, dict[frozenset[int], Any]] = WeakKeyDictionary()


def group_beside(members: frozenset[int]) -> Any:
    """A group of these processes that takes tensors on the CPU, so that no device is waited for; only they make it.

    It waits for as long as the group of all processes does. There is one for each set of processes.
    """
    everyone = _c10d._get_default_group()
    known = _known.setdefault(everyone, {})
    if members not in known:
        ranks = sorted(members) if len(members) < dist.get_world_size() else None
        known[members] = dist.new_group(
            ranks, timeout=_patience_of(everyone), backend="gloo", use_local_synchronization=True
        )
    return known[members]


def _patience_of(group: Any) -> timedelta | None:
    """Time that members of a group wait for each other; None if it does not say."""
    for kind in reversed(TRAINING):
        with suppress(
            RuntimeError, AttributeError
        ):  # it has no backend for that kind of device, or one without options
            return group._get_backend(torch.device(kind)).options._timeout  # type: ignore[no-any-return]
    return None


@contextmanager
def copied_as_they_are() -> Iterator[None]:
    """Context in which ``copy.deepcopy`` takes groups of processes for what they are: names of something outside."""
    if not dist.is_available():
        yield
        return
    before = copyreg.dispatch_table.get(dist.ProcessGroup)
    copyreg.dispatch_table[dist.ProcessGroup] = lambda _: "itself"  # copy takes a string for "no copy is needed"
    try:
        yield
    finally:
        if before is None:
            del copyreg.dispatch_table[dist.ProcessGroup]
        else:
            copyreg.dispatch_table[dist.ProcessGroup] = before
