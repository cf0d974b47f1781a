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
from importlib import import_module
from operator import add
from typing import Any

import torch
from torch import nn

from lightning_rotor.private.torch_names import backward_number
from lightning_rotor.private.undoing import undone


def is_dtensor(tensor: torch.Tensor) -> bool:
    """True for a DTensor, of which each process of a mesh has a part."""
    # By an attribute: the class is behind an import of torch.distributed.
    return hasattr(tensor, "device_mesh")


def units_below(module: nn.Module, kind: str = "FSDPModule") -> list[str]:
    """Names of the modules below a module that ``fully_shard`` was called on, or that are of another class of FSDP."""
    classes = _class(kind)
    return [name for name, submodule in module.named_modules() if name and isinstance(submodule, classes)]


def _class(name: str) -> Any:
    """A class of FSDP, or an empty tuple, which ``isinstance`` takes for no class."""
    # Without FSDP having been imported nothing is of its classes, and importing takes a second.
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, ())


def units_in(modules: Iterable[nn.Module]) -> tuple[Unit, ...]:
    """The units among modules and what they hold, outer ones first."""
    kind = _class("FSDPModule")
    # This is asked at every call, and mostly there is no FSDP.
    if not kind:
        return ()
    # A dict in the place of a set that keeps its order: modules may hold each other.
    sharded: dict[nn.Module, None] = {}
    for module in modules:
        for submodule in module.modules():
            if isinstance(submodule, kind):
                sharded[submodule] = None
    return tuple(map(Unit, sharded))


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Bytes of units.

    Attributes:
        gathered_bytes: Parameters in one piece, or the message that brings them.
        gradient_bytes: Gradients of these.
        reduced_bytes: The message that takes gradients to the shards.
        shard_bytes: Gradients of this process's shards.
    """

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
        total = UnitSizes()
        for group in self._groups:
            total += _sizes_of(group)
        return total

    @property
    def _groups(self) -> list[Any]:
        """Its groups of parameters, several since torch 2.13."""
        state = self.module._get_fsdp_state()
        groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
        if groups is not None:
            return groups
        group = state._fsdp_param_group
        return [] if group is None else [group]

    @property
    def _orders(self) -> list[list[Any]]:
        """Lists of the order in which forwards ran, by which backwards gather in advance.

        Each group has its places in the order, and all groups share the list of groups.
        """
        orders = [group._post_forward_indices for group in self._groups]
        for group in self._groups:
            # There is none before the first forward.
            orders.append(getattr(group.comm_ctx, "post_forward_order", []))
        return orders

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context with its parameters in place. Its hooks take each forward for a recomputation: they convert types."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        was_whole = self.is_whole
        state = self.module._get_fsdp_state()
        self.module.unshard()
        before = state._training_state
        state._training_state = TrainingState.PRE_BACKWARD
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
    # Without a backward that runs, this is no recomputation, and FSDP spreads its units by itself.
    spread: list[Unit] = []
    if backward_number() is not None:
        spread = [unit for unit in units if not unit.is_whole]
    # A recomputation that stops early ends in an exception, in the very unit where the backward stands. So there is no
    # ``finally`` here.
    yield
    for unit in spread:
        unit.module.reshard()


@contextmanager
def as_found(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context of an attempt to run modules: what gathers in it is spread again at the end, also after an exception.

    A unit that stays whole up to its backward would else take itself for whole, with its parameters put back.
    """
    units = units_in(modules)
    states = [unit.module._get_fsdp_state() for unit in units]
    groups = []
    for unit in units:
        groups += unit._groups
    # Both have a state: of where the unit is in its forward or backward.
    before = [(owner, owner._training_state) for owner in (*states, *groups)]
    # The first unit that runs takes itself for the root of the step's forward, and stays it until a backward ends.
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
        try:
            yield
        except BaseException:
            forget_masks()
            raise


def forget_masks() -> None:
    """Let torch make new masks for tables whose rows are spread over processes (``RowwiseParallel`` of an embedding).

    An embedding leaves its mask for the sum behind it, in a placement that torch keeps for all such calls. A run that
    ends in between leaves it for ever, and the next call would end in "MaskBuffer has been materialized with
    conflicting data".
    """
    # Else nothing is of its classes.
    if "torch.distributed.tensor" in sys.modules:
        import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()


@contextmanager
def unrecorded(module: nn.Module) -> Iterator[None]:
    """Context of forwards without a backward: FSDP would take them for the order in which backwards come."""
    with _unordered(units_in((module,))):
        yield


@contextmanager
def _unordered(units: tuple[Unit, ...]) -> Iterator[None]:
    """Context behind which the orders of forwards are what they were."""
    # With the lists, which keep their ids from being used again.
    before = {id(order): (order, list(order)) for order in _orders_of(units)}

    def put_back() -> None:
        for order in _orders_of(units):
            # The first forward of all makes new ones.
            _, entries = before.get(id(order), (order, []))
            order[:] = entries

    with undone(put_back):
        yield


def _orders_of(units: tuple[Unit, ...]) -> list[list[Any]]:
    orders = []
    for unit in units:
        orders += unit._orders
    return orders


def messages_bytes(module: nn.Module) -> int:
    """Most bytes that units leave behind for their neighbours to overlap with, and bytes that stay gathered."""
    # The message of one unit's parameters and that of another one's gradients may be on their way at once.
    largest_gathered = largest_reduced = staying = 0
    for unit in units_in((module,)):
        # Its parameters are there already, and need no message.
        if unit.is_whole:
            continue
        sizes = unit.sizes
        largest_gathered = max(largest_gathered, sizes.gathered_bytes)
        largest_reduced = max(largest_reduced, sizes.reduced_bytes)
        if unit.stays_whole:
            staying += sizes.gathered_bytes
    return largest_gathered + largest_reduced + staying


def _sizes_of(group: Any) -> UnitSizes:
    """Bytes of a group of parameters. Its shards are padded to one size."""
    # A group that only replicates (DDP by fully_shard) has no such size.
    processes = getattr(group.mesh_info, "shard_mesh_size", 1)
    total = UnitSizes()
    for parameter in group.fsdp_params:
        shard = int(parameter._sharded_param_data.numel())
        original = parameter.sharded_param.dtype
        # Types of a mixed precision policy, None without one.
        computed = getattr(parameter, "param_dtype", None) or original
        reduced = getattr(parameter, "reduce_dtype", None) or computed
        whole = shard * processes
        learns = parameter.sharded_param.requires_grad
        total += UnitSizes(
            gathered_bytes=whole * computed.itemsize,
            gradient_bytes=learns * whole * computed.itemsize,
            reduced_bytes=learns * whole * reduced.itemsize,
            shard_bytes=learns * shard * original.itemsize,
        )
    return total
