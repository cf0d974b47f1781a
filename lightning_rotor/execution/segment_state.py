"""What a forward changes besides making its output, and how a recomputation neither sees nor repeats it.

A second forward would count a batch twice in running statistics and start from other values than the first pass did:

==================================  ===================================================================================
torch's normalization, training     never reads its running statistics: a replay writes to scratch buffers, unless code
                                    around it may read them
other modules seen to update their  the first pass remembers the earlier values, and a replay works on a copy of them
buffers; small ones of user code
large buffers of user code          are watched: the first update in a segment is refused, for the earlier value is gone
attributes of user code, and what   are set to what the first pass saw, and back afterwards, with all that lists, dicts
its hooks can reach                 and objects hold (``stages.snapshot``); so are Python's and NumPy's generators
hooks that only look                are not called again (:class:`Observers`)
torch's settings, and those of its  are those of the first pass: default dtype, allowed kernels, modes, probabilities;
layers                              hooks that came later are not called
parameters, and buffers that the    are the first pass's own tensors, even under functional_call, unchanged and with
first pass does not update          their ``requires_grad``; those of FSDP units come and go with the units' hooks
==================================  ===================================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.private import torch_names as private
from lightning_rotor.private.sharding import units_in
from lightning_rotor.private.values import tensors_in
from lightning_rotor.stages.sequential import (
    NORMALIZATIONS,
    Stage,
    has_own_code,
    is_plain_stock,
    runs_members_in_a_row,
)
from lightning_rotor.stages.snapshot import SMALL_BYTES, Snapshot
from lightning_rotor.stages.state import GeneratorStates, LayerSettings, Settings, Slot, TensorsRead
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
        for table in (
            table for module in (None, *self._modules) for table in private.hook_tables(module, private.HOOKS[:2])
        ):
            for key, hook in [*table.items()]:
                # A watch of a surrounding pass hears of it, too.
                table[key] = watched = _Watched(hook)
                self._watched.append((table, key, watched))

    def settle(self, before: Snapshot) -> None:
        """End the pass; ``before`` is what its code can reach, as it was."""
        for table, key, watched in self._watched:
            if table.get(key) is watched:  # else it is gone, or is another now
                table[key] = watched.hook
        quiet = [each for each in self._watched if not each[2].acted]
        self._quiet = [(table, key) for table, key, _ in quiet]
        acting = [watched.innermost for _, _, watched in self._watched if watched.acted]
        own_code = [module for module in self._modules if has_own_code(module)]
        if quiet and (acting or own_code):
            again = Snapshot((*own_code, *acting), hooks=False)
            shared = again.owners & before.changed()
            self._quiet = [
                (table, key)
                for table, key, watched in quiet
                if not (watched.marked or (shared and shared & Snapshot((watched.innermost,), hooks=False).owners))
            ]
        self._watched = []

    def leave_out(self) -> None:
        """Remove the hooks that only look. The caller puts all hooks back."""
        for table, key in self._quiet:
            table.pop(key, None)
        # A recomputation ends with an error where it has all that it needs, which no hook should hear of.
        for module in (None, *self._modules):
            for table in private.hook_tables(module, private.ALWAYS_CALLED):
                table.clear()


class _Watched:
    """A hook, whether it has ``acted`` (not only looked), and whether it has ``marked`` attributes of its module."""

    __slots__ = ("acted", "hook", "marked")

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.acted = self.marked = False

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
        return result


def _marks_on(module: nn.Module) -> list[tuple[str, int, int]]:
    """A value that changes if an attribute of the user's is set, or a container in one grows."""
    return [
        (name, id(value), len(value) if isinstance(value, (list, dict, set, deque)) else 0)
        for name, value in vars(module).items()
        if name not in private.STRUCTURE
    ]


def _looks_of(given: Iterable[Any]) -> list[Any]:
    """A value that changes if a tensor does."""
    return [
        (
            tensor.data_ptr() if tensor.layout is torch.strided else 0,
            0 if tensor.is_inference() else private.version_of(tensor),
            tensor.requires_grad,
        )
        for tensor in tensors_in(tuple(given))
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
        remembered = set(both["remembered"])
        both["buffered"] = tuple(module for module in both["buffered"] if module not in remembered)
        both["direct_reads"] = tuple(
            (module, name)
            for module, name in both["direct_reads"]
            if not (name in module._buffers and module in remembered)
        )
        return SegmentState(**both, root=other.root if self.root is None else self.root)

    def tensors_read(self, more: Iterable[Slot] = ()) -> TensorsRead:
        """Parameters and buffers that a replay reads as they are now, and others."""
        return TensorsRead((*self._slots(), *more), self.spell)

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

    def _slots(self) -> Iterator[Slot]:
        for module in self.parametrized:
            for name, parameter in module._parameters.items():
                yield module._parameters, name, parameter
        for module in self.buffered:
            # In training, normalization does not read its statistics.
            if not (module.training and isinstance(module, NORMALIZATIONS)):
                for name, buffer in module._buffers.items():
                    yield module._buffers, name, buffer
        for module, name in self.direct_reads:
            for table in (module._parameters, module._buffers):  # attributes are not followed
                if name in table:
                    yield table, name, table[name]


def state_of(
    stage: Stage, updating: Iterable[nn.Module], scratch: dict[tuple[nn.Module, str], Statistic]
) -> SegmentState:
    """The sorted state of a stage; ``updating`` modules change buffers, ``scratch`` is shared by stages and grows."""
    statistics: list[Statistic] = []
    remembered: list[nn.Module] = []
    watched: list[nn.Module] = []
    seen_updating = set(updating)
    # Torch's own code never reads running statistics in training. The user's may, as torch's own quantization does.
    read = {below for _, module in stage.submodules() if _has_other_code(module) for below in module.modules()}
    read.update(owner for owner, name in stage.direct_reads() if name in owner._buffers)
    for _, module in stage.submodules():
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
    modules = [module for _, module in stage.submodules()]
    attributed = [module for module in modules if not is_plain_stock(module)]
    # FSDP gives its units other parameters around each forward, the same ones in a recomputation.
    exchanged = {module for unit in units_in(stage.modules) for module in unit.module.modules()}
    called = list(stage.called_modules())
    parametrized = [module for module in called if module._parameters and module not in exchanged]
    buffered = [module for module in called if module._buffers and module not in remembered]
    direct_reads = [
        (owner, name) for owner, name in stage.direct_reads() if not (owner in remembered and name in owner._buffers)
    ]
    return SegmentState(
        tuple(statistics),
        tuple(dict.fromkeys(remembered)),
        tuple(dict.fromkeys(watched)),
        tuple(dict.fromkeys(attributed)),
        tuple(module for module in called if is_plain_stock(module)),
        tuple(parametrized),
        tuple(buffered),
        tuple(dict.fromkeys(direct_reads)),
    )


def _has_other_code(module: nn.Module) -> bool:
    """True if code runs in a module that is neither torch's nor ours, more than a row of its members."""
    is_row = isinstance(module, nn.Sequential) and runs_members_in_a_row(module) and "forward" not in module.__dict__
    return private.has_forward_hooks(module) or (has_own_code(module) and not is_row)


class FirstPass:
    """A forward that will be repeated: what it must remember for that, and what it could not undo, which it refuses."""

    def __init__(self, state: SegmentState) -> None:
        self.state = state
        self.values: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.generators: GeneratorStates | None = None
        self.read = TensorsRead((), state.spell)
        self._before: Snapshot | None = None
        self._observers = Observers(state.attributed)
        self._settings = Settings()
        self._layers = LayerSettings(())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the forward."""
        copies: dict[int, torch.Tensor] = {}
        self.values = [
            (module, name, copies.setdefault(id(buffer), buffer.detach().clone()))
            for module, name, buffer in buffers_of(self.state.remembered)
        ]
        if self.state.attributed or private.any_hooks_of_all():
            self._before = Snapshot(self.state.attributed, small_bytes=SMALL_BYTES)
            self._observers.watch()
        self.generators = GeneratorStates(torchs=False) if self.state.attributed else None
        self._layers = LayerSettings(self.state.layers)
        self.read = self.state.tensors_read()
        try:
            yield
        finally:
            if self._before is not None:
                self._observers.settle(self._before)
        if self._before is not None:
            self._before.require_undoable()
        self.read.require_untouched()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Context of a forward that repeats this one: it sees the state that this one saw, and changes none."""
        self.read.require_unchanged()
        with ExitStack() as stack:
            for settings in (self._settings, self._layers, self.read):
                stack.enter_context(settings.restored())
            if self.generators is not None:
                stack.callback(GeneratorStates(torchs=False).restore)
                self.generators.restore()
            if self._before is not None:
                stack.callback(self._before.again().restore)
                self._before.lend()
                self._observers.leave_out()
            stack.enter_context(standing_in(self._loans()))
            yield

    def _loans(self) -> Iterator[Slot]:
        """What stands in tables of parameters and buffers during a replay."""
        # FSDP1 has moved its own out of the way, and into plain attributes.
        yield from (slot for slot in self.read.slots if slot[1] in slot[0])
        for statistic in self.state.statistics:
            if statistic.module.training:
                yield statistic.module._buffers, statistic.name, statistic.scratch
        copies: dict[int, torch.Tensor] = {}
        for module, name, value in self.values:
            # A copy of the copy: with retain_graph there is another replay after this one.
            yield module._buffers, name, copies.setdefault(id(value), value.clone())


@contextmanager
def standing_in(loans: Iterable[Slot]) -> Iterator[None]:
    """Context in which other tensors stand in tables of parameters and buffers."""
    owners: list[Slot] = []
    try:
        for table, name, loan in loans:
            if table[name] is not loan:
                owners.append((table, name, table[name]))
                table[name] = loan
        yield
    finally:
        # Last in, first out: what was lent twice gets its first owner back.
        for table, name, owner in reversed(owners):
            table[name] = owner


def buffers_of(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """The modules' own buffers, with who has them and the names."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


def _size(module: nn.Module, block_bytes: int = 1) -> int:
    sizes = {id(buffer): buffer.nbytes for buffer in module._buffers.values() if buffer is not None}
    return sum(in_blocks(size, block_bytes) for size in sizes.values())
