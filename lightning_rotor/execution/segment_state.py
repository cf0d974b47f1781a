"""The state that stages of a segment read and change besides making their output."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from itertools import filterfalse
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.private import torch_names as private
from lightning_rotor.private.sharding import units_in
from lightning_rotor.stages.known_layers import NORMALIZATIONS, has_own_code, is_plain_stock, runs_members_in_a_row
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.snapshot import SMALL_BYTES
from lightning_rotor.units import in_blocks

_OwnedName: TypeAlias = tuple[nn.Module, str]
"""A module and the name of one of its parameters, buffers or attributes."""


@dataclass(frozen=True, slots=True, eq=False)
class Statistic:
    """A buffer that training writes and never reads, with one ``scratch`` for all stages' replays to write to."""

    module: nn.Module
    name: str
    scratch: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SegmentState:
    """The state of some stages, by what a recomputation must do about it (the rules are in ``passes``).

    Attributes:
        statistics: Buffers that are written to scratch (rule 3).
        remembered: Modules whose buffers each first pass remembers (rule 4).
        watched: Modules whose buffers must not change in a segment (rule 5).
        attributed: Modules whose attributes, and all that their hooks can reach, each first pass remembers (rule 6).
        layers: Torch's own modules, whose settings each first pass remembers (rule 9).
        parametrized: Modules whose own parameters a replay reads (rule 2); of ``buffered`` ones it reads the buffers.
        direct_reads: Tensors read without calling their module: who has them, and under which name.
        written: Parameters that a forward changes. Stages of such are never replayed.
        drawn: Kinds of global generators that they were seen to draw from (rule 7).
        root: For messages, the user's module and the name before the paths in it.
    """

    statistics: tuple[Statistic, ...] = ()
    remembered: tuple[nn.Module, ...] = ()
    watched: tuple[nn.Module, ...] = ()
    attributed: tuple[nn.Module, ...] = ()
    layers: tuple[nn.Module, ...] = ()
    parametrized: tuple[nn.Module, ...] = ()
    buffered: tuple[nn.Module, ...] = ()
    direct_reads: tuple[_OwnedName, ...] = ()
    written: tuple[nn.Parameter, ...] = ()
    drawn: tuple[str, ...] = ()
    root: tuple[nn.Module, str] | None = None

    def remembered_bytes(self, block_bytes: int) -> int:
        """Bytes that one first pass takes to remember them, from an allocator with blocks of this size."""
        return sum([_buffer_bytes(module, block_bytes) for module in self.remembered])

    def copied_bytes(self, block_bytes: int) -> int:
        """Bytes of copies of all that a forward may change, one block a type, see ``planned.out_of_memory``."""
        # Scratch is as large as the statistic that it stands for.
        changing = [statistic.scratch for statistic in self.statistics]
        for module in self.remembered:
            changing += _buffers(module)
        sizes: dict[torch.dtype, int] = {}
        for buffer in changing:
            size_bytes = sizes.get(buffer.dtype, 0)
            sizes[buffer.dtype] = size_bytes + buffer.nbytes
        return sum(in_blocks(size_bytes, block_bytes) for size_bytes in sizes.values())

    def __add__(self, other: SegmentState) -> SegmentState:
        both: dict[str, Any] = {}
        for field in fields(self):
            if field.name == "root":
                continue
            entries = [*getattr(self, field.name), *getattr(other, field.name)]
            # Each once, in order: a module that two stages share is remembered once.
            both[field.name] = tuple(dict.fromkeys(entries))
        # Buffers that only one stage reads may be updated by another.
        both["buffered"], both["direct_reads"] = _read_as_they_are(
            both["remembered"],
            both["buffered"],
            both["direct_reads"],
        )
        both["root"] = other.root if self.root is None else self.root
        return SegmentState(**both)

    def name_of_tensor(self, table: dict[str, Any], name: str) -> str:
        """Name of a tensor in messages, such as ``parameter 'blocks.0.weight'``."""
        kind, owner = self._owner_of(table)
        named_modules: Iterable[tuple[str, nn.Module]] = ()
        prefix = ""
        if self.root is not None:
            root, prefix = self.root
            named_modules = root.named_modules()
        for path, module in named_modules:
            if module is owner:
                words = filter(None, (prefix, path, name))
                return f"{kind} {'.'.join(words)!r}"
        # A module that the code reads without having it, or a stage that nobody has named.
        return f"{kind} {name!r} of {type(owner).__name__}"

    def _owner_of(self, table: dict[str, Any]) -> tuple[str, nn.Module]:
        """The kind of a table, and the module that it belongs to."""
        modules = [*self.parametrized, *self.buffered, *self.remembered]
        modules += [owner for owner, _ in self.direct_reads]
        # By identity: tables of two modules are equal if both are empty.
        for module in modules:
            if table is module._parameters:
                return "parameter", module
            if table is module._buffers:
                return "buffer", module
        raise LookupError("the table of none of the modules")


def state_of(stage: Stage, updating: Iterable[nn.Module], scratch: dict[_OwnedName, Statistic]) -> SegmentState:
    """The sorted state of a stage; ``updating`` modules change buffers, ``scratch`` is shared by stages and grows."""
    statistics: list[Statistic] = []
    remembered: list[nn.Module] = []
    watched: list[nn.Module] = []
    seen_updating = set(updating)
    modules = dict.fromkeys(module for _, module in stage.submodules())
    called = list(stage.called_modules())
    read = _with_buffers_read(stage, modules)
    for module in modules:
        is_stock = is_plain_stock(module)
        # A buffer may be None: normalization without running statistics.
        if not _buffers(module):
            continue
        if isinstance(module, NORMALIZATIONS) and is_stock:
            if module in read:
                # Rule 4 in the place of rule 3.
                remembered.append(module)
            else:
                statistics += _statistics_of(module, scratch)
        elif module in seen_updating:
            remembered.append(module)
        elif not is_stock:
            # Code of the user's may update buffers another time. Remembering small ones costs nothing.
            if _buffer_bytes(module) <= SMALL_BYTES:
                remembered.append(module)
            else:
                watched.append(module)
    # FSDP gives its units other parameters around each forward, the same ones in a recomputation.
    exchanged: set[nn.Module] = set()
    for unit in units_in(stage.modules):
        exchanged.update(unit.module.modules())
    parametrized = [module for module in called if module._parameters and module not in exchanged]
    buffered, direct_reads = _read_as_they_are(remembered, called, stage.direct_reads())
    return SegmentState(
        statistics=tuple(statistics),
        remembered=tuple(remembered),
        watched=tuple(watched),
        attributed=tuple(filterfalse(is_plain_stock, modules)),
        layers=tuple(filter(is_plain_stock, called)),
        parametrized=tuple(parametrized),
        buffered=tuple(filter(_has_buffers, buffered)),
        direct_reads=direct_reads,
    )


def _statistics_of(module: nn.Module, scratch: dict[_OwnedName, Statistic]) -> list[Statistic]:
    """The statistics of a normalization, with scratch that all stages share."""
    statistics = []
    for name, buffer in module._buffers.items():
        if buffer is None:
            continue
        # Nobody reads scratch, so replays of all stages may write to the same.
        if (module, name) not in scratch:
            scratch[module, name] = Statistic(module, name, torch.empty_like(buffer))
        statistics.append(scratch[module, name])
    return statistics


def _has_buffers(module: nn.Module) -> bool:
    return bool(module._buffers)


def _with_buffers_read(stage: Stage, modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Modules whose buffers code around them may read."""
    # Torch's own code never reads running statistics in training. The user's may, as torch's own quantization does.
    read: set[nn.Module] = set()
    for module in filter(_runs_other_code, modules):
        read.update(module.modules())
    read.update(owner for owner, name in stage.direct_reads() if name in owner._buffers)
    return read


def _read_as_they_are(
    remembered: Collection[nn.Module], modules: Iterable[nn.Module], slots: Iterable[_OwnedName]
) -> tuple[tuple[nn.Module, ...], tuple[_OwnedName, ...]]:
    """Modules and slots that a replay reads as they are, each once: not those of buffers that are remembered."""
    copied = set(remembered)
    # In the place of a set that keeps its order.
    read: dict[_OwnedName, None] = {}
    for owner, name in slots:
        if name not in owner._buffers or owner not in copied:
            read[owner, name] = None
    read_as_they_are = [module for module in modules if module not in copied]
    return tuple(read_as_they_are), tuple(read)


def _runs_other_code(module: nn.Module) -> bool:
    """True if code runs in a module that is neither torch's nor ours, more than a row of its members."""
    if private.has_forward_hooks(module):
        return True
    if not has_own_code(module):
        return False
    # A subclass of nn.Sequential that adds nothing, unless somebody has replaced the forward of this one.
    is_row = isinstance(module, nn.Sequential) and runs_members_in_a_row(module)
    return not is_row or "forward" in module.__dict__


def _buffer_bytes(module: nn.Module, block_bytes: int = 1) -> int:
    """Bytes of a module's buffers, each tensor once."""
    return sum(in_blocks(buffer.nbytes, block_bytes) for buffer in _buffers(module))


def _buffers(module: nn.Module) -> list[torch.Tensor]:
    """A module's own buffers, each once."""
    buffers: dict[int, torch.Tensor] = {}
    for buffer in module._buffers.values():
        if buffer is not None:
            buffers[id(buffer)] = buffer
    return list(buffers.values())
