"""FSDP2 units: modules whose parameters are spread over processes, and come together around each forward and backward.

What ``fully_shard(unit)`` adds to a unit, P being its parameters in one piece, and R its gradients on their way to
the shards::

    forward     gather: message P, then parameters P │ compute                    │ spread
    backward    gather: parameters P                 │ compute, gradients pile up │ spread, message R, gradient shards
    meanwhile   forward: the message of the unit before; backward: that of the next one, gradients of the one before

A recomputation finds a unit as its backward does, gathered, if the backward stands there. Any other unit that it runs
gathers again, and FSDP leaves it so until its own backward: :func:`left_as_found` spreads it, so that a long segment
takes no more than one unit.

FSDP has no public question for most of this, so that all answers are here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_rotor.private import torch_names as private


def wrapped_by_fsdp1(module: nn.Module) -> list[str]:
    """Names of the modules below a module that ``FullyShardedDataParallel`` wraps."""
    return _names_of("FullyShardedDataParallel", module)


def units_below(module: nn.Module) -> list[str]:
    """Names of the modules below a module that ``fully_shard`` was called on, itself excluded."""
    return _names_of("FSDPModule", module)


def _names_of(kind: str, module: nn.Module) -> list[str]:
    # Without FSDP having been imported there are none, and importing takes a second.
    found = getattr(sys.modules.get("torch.distributed.fsdp"), kind, None)
    return [name for name, each in module.named_modules() if name and found is not None and isinstance(each, found)]


def units_in(modules: Iterable[nn.Module]) -> tuple[Unit, ...]:
    """The units among modules and what they hold, outer ones first."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return ()
    found = dict.fromkeys(each for module in modules for each in module.modules() if isinstance(each, kind))
    return tuple(map(Unit, found))


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Bytes of units: gathered parameters (or their message), their gradients, the message with these, own shards."""

    gathered_bytes: int = 0
    gradient_bytes: int = 0
    reduced_bytes: int = 0
    shard_bytes: int = 0

    def __add__(self, other: UnitSizes) -> UnitSizes:
        return UnitSizes(
            self.gathered_bytes + other.gathered_bytes,
            self.gradient_bytes + other.gradient_bytes,
            self.reduced_bytes + other.reduced_bytes,
            self.shard_bytes + other.shard_bytes,
        )


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that ``fully_shard`` was called on."""

    module: Any

    @property
    def is_whole(self) -> bool:
        """True if its parameters are gathered."""
        return all(group.is_unsharded for group in self._groups)

    @property
    def stays_whole(self) -> bool:
        """True if it is left gathered up to its backward, as the root and ``reshard_after_forward=False`` are."""
        return any(map(private.fsdp_stays_whole, self._groups))

    @property
    def shares_hooks(self) -> bool:
        """True if it is one of several modules that were given to ``fully_shard`` as one unit."""
        return len(private.fsdp_modules_of_unit(self.module)) > 1

    @property
    def sizes(self) -> UnitSizes:
        """Bytes of the unit's messages. Padding, included, makes all shards as large."""
        return sum((_sizes_of(group) for group in self._groups), UnitSizes())

    @property
    def _groups(self) -> list[Any]:
        return private.fsdp_groups(self.module)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context with its parameters in place. Its hooks take each forward for a recomputation: they convert types."""
        was_whole = self.is_whole
        self.module.unshard()
        try:
            with private.fsdp_before_backward(self.module):
                yield
        finally:
            if not was_whole:
                self.module.reshard()


@contextmanager
def gathered(units: Iterable[Unit]) -> Iterator[None]:
    """Run what is in units with their parameters in place all the time. All processes wait for each other first."""
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(unit.gathered())
        yield


@contextmanager
def left_as_found(units: Iterable[Unit]) -> Iterator[None]:
    """Spread again what a recomputation gathers, except where the backward stands: it needs the parameters next."""
    in_backward = private.backward_number() is not None
    spread = [unit for unit in units if not unit.is_whole] if in_backward else []
    yield  # a recomputation that stops early ends in an exception, in the very unit where the backward stands
    for unit in spread:
        unit.module.reshard()


@contextmanager
def unrecorded(module: nn.Module) -> Iterator[None]:
    """Context of forwards without a backward: FSDP would take them for the order in which backwards come."""
    groups = [group for unit in units_in((module,)) for group in unit._groups]
    orders = [order for group in groups for order in private.fsdp_order(group)]
    before = [list(order) for order in orders]
    try:
        yield
    finally:
        for order, entries in zip(orders, before, strict=True):
            order[:] = entries


def messages_bytes(module: nn.Module) -> int:
    """Most bytes that units leave behind for their neighbours to overlap with, and bytes that stay gathered."""
    units = [unit for unit in units_in((module,)) if not unit.is_whole]
    sizes = [unit.sizes for unit in units]
    passing = max((size.gathered_bytes for size in sizes), default=0) + max((s.reduced_bytes for s in sizes), default=0)
    return passing + sum(size.gathered_bytes for unit, size in zip(units, sizes, strict=True) if unit.stays_whole)


def _sizes_of(group: Any) -> UnitSizes:
    processes = getattr(group.mesh_info, "shard_mesh_size", 1)
    total = UnitSizes()
    for parameter in group.fsdp_params:
        shard = private.fsdp_shard_elements(parameter)
        original = parameter.sharded_param.dtype
        computed = getattr(parameter, "param_dtype", None) or original
        reduced = getattr(parameter, "reduce_dtype", None) or computed
        whole = shard * processes
        learns = parameter.sharded_param.requires_grad
        total += UnitSizes(
            whole * computed.itemsize,
            learns * whole * computed.itemsize,
            learns * whole * reduced.itemsize,
            learns * shard * original.itemsize,
        )
    return total
