"""What the stages of a segment read and change besides making their output, and hooks that only look."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from operator import gt
from sys import getrefcount
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.private import torch_names as private
from lightning_rotor.private.sharding import units_in
from lightning_rotor.private.values import is_made_of_others, plain_parts, tensors_in
from lightning_rotor.stages.containers import length_of
from lightning_rotor.stages.known_layers import NORMALIZATIONS, has_own_code, is_plain_stock, runs_members_in_a_row
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.snapshot import SMALL_BYTES, Snapshot
from lightning_rotor.units import in_blocks

# ----------------------------------------------------------------------------------------------------
# Hooks that only look: what they do outside of Python (a line in a file) must not happen again in a recomputation.


class Observers:
    """Watches the hooks of some modules, or hooks that their own code may call, during one pass."""

    __slots__ = ("_modules", "_quiet", "_watched")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._watched: list[tuple[dict[int, Any], int, _Watched]] = []
        self._quiet: list[tuple[dict[int, Any], int]] = []

    def watch(self) -> None:
        """Begin to watch."""
        for module in (None, *self._modules):
            for table in private.hook_tables(module, private.HOOKS[:2]):
                for key, hook in [*table.items()]:
                    # A watch of a surrounding pass hears of it, too.
                    table[key] = watched = _Watched(hook, module)
                    self._watched.append((table, key, watched))

    def settle(self, before: Snapshot) -> None:
        """End the pass; ``before`` is what its code can reach, as it was."""
        for table, key, watched in self._watched:
            if table.get(key) is watched:  # else it is gone, or is another now
                table[key] = watched.hook
        quiet = [each for each in self._watched if not each[2].acted]
        acting = [watched.innermost for _, _, watched in self._watched if watched.acted]
        own_code = [module for module in self._modules if has_own_code(module)]
        if any(watched.kept for _, _, watched in self._watched):
            # Code around hooked modules may read what hooks keep, wherever that is: transformers collects hidden states
            # so. All hooks in there run again then, for the place in the collection counts as well.
            around = {below for module in own_code for below in module.modules() if below is not module}
            if any(watched.kept and watched.module in around for _, _, watched in self._watched):
                quiet = [each for each in quiet if each[2].module not in around]
        if quiet and (acting or own_code):
            shared = Snapshot((*own_code, *acting), hooks=False).owners & before.changed()
            quiet = [
                (table, key, watched)
                for table, key, watched in quiet
                if not (watched.marked or (shared and shared & Snapshot((watched.innermost,), hooks=False).owners))
            ]
        self._quiet = [(table, key) for table, key, _ in quiet]
        self._watched = []

    def leave_out(self) -> None:
        """Remove the hooks that only look. The caller puts all hooks back."""
        for table, key in self._quiet:
            table.pop(key, None)


class _Watched:
    """A hook, and what it has done.

    Attributes:
        acted: It has not only looked: it has returned or changed something.
        marked: It has set attributes of its module.
        kept: It has kept one of the tensors that it was given.
        module: The module whose hook it is; None for a hook of all modules.
    """

    __slots__ = ("acted", "hook", "kept", "marked", "module")

    def __init__(self, hook: Callable[..., Any], module: nn.Module | None) -> None:
        self.hook, self.module = hook, module
        self.acted = self.marked = self.kept = False

    @property
    def innermost(self) -> Callable[..., Any]:
        """The user's own hook."""
        hook = self.hook
        while isinstance(hook, _Watched):
            hook = hook.hook
        return hook

    def __call__(self, *given: Any) -> Any:
        """Call the hook."""
        before, marks = _looks_of(given), _marks_on(given[0])
        tensors = tensors_in(given)
        holders = list(map(getrefcount, tensors))
        hooks = private.hooks_for_saved_tensors()
        if hooks is None:
            result = self.hook(*given)
        else:
            pack, unpack = hooks

            def note(tensor: torch.Tensor) -> Any:
                self.acted = True
                return pack(tensor)

            with saved_tensors_hooks(note, unpack):
                result = self.hook(*given)
        self.acted = self.acted or result is not None or before != _looks_of(given)
        self.marked = self.marked or marks != _marks_on(given[0])
        self.kept = self.kept or any(map(gt, map(getrefcount, tensors), holders))
        return result


def _marks_on(module: nn.Module) -> list[tuple[str, int, int]]:
    """A value that changes if an attribute of the user's is set, or a container in one grows."""
    return [
        (name, id(value), length_of(value) if isinstance(value, (list, dict, set, deque)) else 0)
        for name, value in vars(module).items()
        if name not in private.STRUCTURE
    ]


def _looks_of(given: Iterable[Any]) -> list[Any]:
    """A value that changes if a tensor does."""
    return [
        (
            part.data_ptr() if part.layout is torch.strided else 0,
            0 if part.is_inference() else private.version_of(part),
            tensor.requires_grad,
        )
        for tensor in tensors_in(tuple(given))
        for part in (plain_parts(tensor) if is_made_of_others(tensor) else (tensor,))
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Statistic:
    """A buffer that training writes and never reads, with one ``scratch`` for all stages' replays to write to."""

    module: nn.Module
    name: str
    scratch: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SegmentState:
    """The state of some stages, by what a recomputation must do about it.

    Attributes:
        statistics: Buffers that are written to scratch.
        remembered: Modules whose buffers each first pass remembers.
        watched: Modules whose buffers must not change in a segment.
        attributed: Modules whose attributes, and all that their hooks can reach, each first pass remembers.
        layers: Torch's own modules, whose settings each first pass remembers.
        parametrized: Modules whose own parameters a replay reads; of ``buffered`` ones it reads the buffers.
        direct_reads: Tensors read without calling their module: who has them, and under which name.
        written: Parameters that a forward changes. Stages of such are never replayed.
        drawn: Kinds of global generators that they were seen to draw from.
    """

    statistics: tuple[Statistic, ...] = ()
    remembered: tuple[nn.Module, ...] = ()
    watched: tuple[nn.Module, ...] = ()
    attributed: tuple[nn.Module, ...] = ()
    layers: tuple[nn.Module, ...] = ()
    parametrized: tuple[nn.Module, ...] = ()
    buffered: tuple[nn.Module, ...] = ()
    direct_reads: tuple[tuple[nn.Module, str], ...] = ()
    written: tuple[nn.Parameter, ...] = ()
    drawn: tuple[str, ...] = ()
    root: tuple[nn.Module, str] | None = None

    def remembered_bytes(self, block_bytes: int) -> int:
        """Bytes that one first pass takes to remember them, from an allocator with blocks of this size."""
        return sum(_size(module, block_bytes) for module in self.remembered)

    def copied_bytes(self, block_bytes: int) -> int:
        """Bytes of copies of all that a forward may change, see ``planned.forward.BeforeForward``."""
        statistics = sum(in_blocks(each.scratch.nbytes, block_bytes) for each in self.statistics)
        return statistics + self.remembered_bytes(block_bytes)

    def __add__(self, other: SegmentState) -> SegmentState:
        names = [field.name for field in fields(self) if field.name != "root"]
        both = {name: tuple(dict.fromkeys((*getattr(self, name), *getattr(other, name)))) for name in names}
        # Buffers that only one stage reads may be updated by another.
        apart = _not_among(both["remembered"], both["buffered"], both["direct_reads"])
        both["buffered"], both["direct_reads"] = apart
        return SegmentState(**both, root=other.root if self.root is None else self.root)

    def spell(self, table: dict[str, Any], name: str) -> str:
        """The name of a tensor in messages."""
        modules = (*self.parametrized, *self.buffered, *self.remembered, *(owner for owner, _ in self.direct_reads))
        owner = next(each for each in modules if table is each._parameters or table is each._buffers)
        kind = "parameter" if table is owner._parameters else "buffer"
        root, prefix = (None, "") if self.root is None else self.root
        for path, module in root.named_modules() if root is not None else ():
            if module is owner:
                return f"{kind} {'.'.join(filter(None, (prefix, path, name)))!r}"
        return f"{kind} {name!r} of {type(owner).__name__}"


def state_of(
    stage: Stage, updating: Iterable[nn.Module], scratch: dict[tuple[nn.Module, str], Statistic]
) -> SegmentState:
    """The sorted state of a stage; ``updating`` modules change buffers, ``scratch`` is shared by stages and grows."""
    statistics: list[Statistic] = []
    remembered: list[nn.Module] = []
    watched: list[nn.Module] = []
    seen_updating = set(updating)
    modules, called = dict.fromkeys(module for _, module in stage.submodules()), list(stage.called_modules())
    # Torch's own code never reads running statistics in training. The user's may, as torch's own quantization does.
    read = {below for module in modules if _has_other_code(module) for below in module.modules()}
    read.update(owner for owner, name in stage.direct_reads() if name in owner._buffers)
    for module in modules:
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        if not buffers:
            continue
        if isinstance(module, NORMALIZATIONS) and is_plain_stock(module):
            if module in read:
                remembered.append(module)
                continue
            for name, buffer in buffers.items():
                if (module, name) not in scratch:
                    scratch[module, name] = Statistic(module, name, torch.empty_like(buffer))
                statistics.append(scratch[module, name])
        elif module in seen_updating or not (is_plain_stock(module) or _size(module) > SMALL_BYTES):
            remembered.append(module)
        elif not is_plain_stock(module):
            watched.append(module)
    # FSDP gives its units other parameters around each forward, the same ones in a recomputation.
    exchanged = {module for unit in units_in(stage.modules) for module in unit.module.modules()}
    buffered, direct_reads = _not_among(remembered, called, stage.direct_reads())
    return SegmentState(
        statistics=tuple(statistics),
        remembered=tuple(remembered),
        watched=tuple(watched),
        attributed=tuple(module for module in modules if not is_plain_stock(module)),
        layers=tuple(module for module in called if is_plain_stock(module)),
        parametrized=tuple(module for module in called if module._parameters and module not in exchanged),
        buffered=tuple(module for module in buffered if module._buffers),
        direct_reads=direct_reads,
    )


def _not_among(
    remembered: Collection[nn.Module], modules: Iterable[nn.Module], slots: Iterable[tuple[nn.Module, str]]
) -> tuple[tuple[nn.Module, ...], tuple[tuple[nn.Module, str], ...]]:
    """Modules and slots that are read as they are, each once: not those of buffers that are remembered."""
    known = set(remembered)
    others = ((owner, name) for owner, name in slots if not (name in owner._buffers and owner in known))
    return tuple(module for module in modules if module not in known), tuple(dict.fromkeys(others))


def _has_other_code(module: nn.Module) -> bool:
    """True if code runs in a module that is neither torch's nor ours, more than a row of its members."""
    is_row = isinstance(module, nn.Sequential) and runs_members_in_a_row(module) and "forward" not in module.__dict__
    return private.has_forward_hooks(module) or (has_own_code(module) and not is_row)


def _size(module: nn.Module, block_bytes: int = 1) -> int:
    sizes = {id(buffer): buffer.nbytes for buffer in module._buffers.values() if buffer is not None}
    return sum(in_blocks(size, block_bytes) for size in sizes.values())
