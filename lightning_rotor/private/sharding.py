"""FSDP2 units: modules whose parameters are spread over processes, and come together around each forward and backward.

What ``fully_shard(unit)`` adds to a unit, P being its parameters in one piece, and R its gradients on their way to
the shards::

    forward     gather: message P, then parameters P │ compute                    │ spread
    backward    gather: parameters P                 │ compute, gradients pile up │ spread, message R, gradient shards
    meanwhile   forward: the message of the unit before; backward: that of the next one, gradients of the one before

A recomputation finds a unit as its backward does, gathered, if the backward stands there. Any other unit that it runs
gathers again, and FSDP leaves it so until its own backward: :func:`left_as_found` spreads it, so that a long segment
takes no more than one unit.

FSDP has no public question for most of this, so that all answers are here, as read in torch 2.11 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from operator import add
from typing import Any

from torch import nn

from lightning_rotor.private.torch_names import backward_number
from lightning_rotor.private.undoing import undone


def units_below(module: nn.Module, kind: str = "FSDPModule") -> list[str]:
    """Names of the modules below a module that ``fully_shard`` was called on, or that are of another class of FSDP."""
    return [name for name, each in module.named_modules() if name and isinstance(each, _class(kind))]


def _class(name: str) -> Any:
    # Without FSDP having been imported nothing is of its classes, and importing takes a second.
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, ())


def units_in(modules: Iterable[nn.Module]) -> tuple[Unit, ...]:
    """The units among modules and what they hold, outer ones first."""
    kind = _class("FSDPModule")
    found = (each for module in modules for each in module.modules() if isinstance(each, kind)) if kind else ()
    return tuple(map(Unit, dict.fromkeys(found)))


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Bytes of units: gathered parameters (or their message), their gradients, the message with these, own shards."""

    gathered_bytes: int = 0
    gradient_bytes: int = 0
    reduced_bytes: int = 0
    shard_bytes: int = 0

    def __add__(self, other: UnitSizes) -> UnitSizes:
        return UnitSizes(*map(add, astuple(self), astuple(other)))


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
        return not all(group._reshard_after_forward for group in self._groups)

    @property
    def shares_hooks(self) -> bool:
        """True if it is one of several modules that were given to ``fully_shard`` as one unit."""
        return len(self.module._get_fsdp_state()._modules) > 1

    @property
    def sizes(self) -> UnitSizes:
        """Bytes of the unit's messages. Padding, included, makes all shards as large."""
        return sum((_sizes_of(group) for group in self._groups), UnitSizes())

    @property
    def _groups(self) -> list[Any]:
        """Its groups of parameters, several since torch 2.13."""
        state = self.module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        return [state._fsdp_param_group] * (state._fsdp_param_group is not None) if groups is None else groups

    @property
    def _orders(self) -> list[list[Any]]:
        """In which order forwards ran, by which backwards gather in advance: places of groups, and the shared lists."""
        shared = [getattr(each.comm_ctx, "post_forward_order", []) for each in self._groups]  # none before a forward
        return [*(each._post_forward_indices for each in self._groups), *shared]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context with its parameters in place. Its hooks take each forward for a recomputation: they convert types."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        was_whole, state = self.is_whole, self.module._get_fsdp_state()
        self.module.unshard()
        before, state._training_state = state._training_state, TrainingState.PRE_BACKWARD
        try:
            yield
        finally:
            state._training_state = before
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
    in_backward = backward_number() is not None
    spread = [unit for unit in units if not unit.is_whole] if in_backward else []
    yield  # a recomputation that stops early ends in an exception, in the very unit where the backward stands
    for unit in spread:
        unit.module.reshard()


@contextmanager
def as_found(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context of an attempt to run modules: what gathers in it is spread again at the end, also after an exception.

    A unit that stays whole up to its backward would else take itself for whole, with its parameters put back.
    """
    units = units_in(modules)
    states = [unit.module._get_fsdp_state() for unit in units]
    before = [
        (owner, owner._training_state) for owner in (*states, *(group for unit in units for group in unit._groups))
    ]
    roots = [(state._state_ctx, state._state_ctx.iter_forward_root) for state in states]
    spread = [unit for unit in units if not unit.is_whole]

    def put_back() -> None:
        for owner, training_state in before:
            owner._training_state = training_state
        for context, root in roots:
            context.iter_forward_root = root
        for unit in spread:
            if unit.is_whole:
                unit.module.reshard()

    with _unordered(units), undone(put_back):
        yield


@contextmanager
def unrecorded(module: nn.Module) -> Iterator[None]:
    """Context of forwards without a backward: FSDP would take them for the order in which backwards come."""
    with _unordered(units_in((module,))):
        yield


@contextmanager
def _unordered(units: tuple[Unit, ...]) -> Iterator[None]:
    before = {id(order): (order, list(order)) for unit in units for order in unit._orders}

    def put_back() -> None:
        for order in (order for unit in units for order in unit._orders):
            _, entries = before.get(id(order), (order, []))  # the first forward of all makes new ones
            order[:] = entries

    with undone(put_back):
        yield


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
        shard = int(parameter._sharded_param_data.numel())
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
