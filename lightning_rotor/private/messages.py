"""Messages between processes, as torch's dispatcher sees them, read in torch 2.11 to 2.15.

Whatever Python calls (``dist.all_reduce``, a method of a group, a functional collective, DTensor), an operator with a
process group among its arguments does it: ``c10d.allreduce_``, ``_c10d_functional.all_reduce``, ``c10d.send``. So does
SyncBatchNorm, and what an autograd function does in its backward. On tensors without values nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_rotor.private.fake_tensors import FakeTensor
from lightning_rotor.private.modes import TorchDispatchMode
from lightning_rotor.private.operators import OpOverload, schema_of, written_by_message
from lightning_rotor.private.process_groups import group_named
from lightning_rotor.private.values import tensors_in

_GROUPS = ("process_group", "group_name")
"""Names that arguments for process groups have in schemas."""


class _GroupArgument(NamedTuple):
    """The argument of an operator that is a process group: by place or by name."""

    place: int
    name: str


@lru_cache(maxsize=4096)
def _group_argument_of(func: OpOverload) -> _GroupArgument | None:
    """The argument in which an operator takes a process group; None for all that send nothing."""
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.name in _GROUPS:
            return _GroupArgument(place, argument.name)
    return None


def members_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int]:
    """Ranks of the processes among which an operator exchanges a message; empty if it does not, or with nobody else."""
    argument = None
    if isinstance(func, OpOverload):
        argument = _group_argument_of(func)
    if argument is None:
        return frozenset()
    if argument.place < len(args):
        group: Any = args[argument.place]
    else:
        group = kwargs.get(argument.name)
    # Functional collectives name their group, those of c10d hold it in an object of C++.
    if isinstance(group, str):
        group = group_named(group)
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    members = frozenset(dist.get_process_group_ranks(group))
    return members if len(members) > 1 else frozenset()


class MessageWatch(TorchDispatchMode):
    """Sees the messages of the code that runs in it, also those of its backwards; ``members`` is one set a group.

    With ``marks``, tensors that a message was received in have a new version, as after any change in place: without,
    nothing tells that ``dist.all_reduce(x)`` has changed ``x``. It slows code down, so nothing is timed in it.
    """

    # Else torch raises an error where the mode meets one, such as flex_attention's.
    supports_higher_order_operators = True

    def __init__(self, *, marks: bool) -> None:
        super().__init__()
        self.members: set[frozenset[int]] = set()
        self._marks = marks

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if types and any(_has_insides(kind) for kind in types):
            # A DTensor's own handler exchanges messages, and this mode sees those, too.
            return NotImplemented
        kwargs = kwargs or {}
        members = members_of(func, args, kwargs)
        if members:
            self.members.add(members)
        result = func(*args, **kwargs)
        if members and self._marks:
            received = tensors_in(list(written_by_message(func, args)))
            # Tensors of inference mode have no version.
            marked = [tensor for tensor in received if not tensor.is_inference()]
            torch.autograd.graph.increment_version(marked)
        return result


def _has_insides(kind: type) -> bool:
    """True for a class of tensors whose own handler computes with other tensors, which those without values are not."""
    handler = getattr(kind, "__torch_dispatch__", None)
    is_plain = handler is None or handler is torch._C._disabled_torch_dispatch_impl
    return not is_plain and not issubclass(kind, FakeTensor)
