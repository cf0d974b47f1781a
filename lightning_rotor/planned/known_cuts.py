"""The ways in which one module was cut into stages, each for other calls, and what plans depend on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_rotor.capture.cuts import WAYS, GraphCut, SequentialCut, sequentialize
from lightning_rotor.errors import ModelError, RotorWarning
from lightning_rotor.private.torch_names import HOOKS
from lightning_rotor.private.values import require_tensors, tensors_in
from lightning_rotor.profiling.reference import require_same
from lightning_rotor.stages.sequential import is_plain_stock
from lightning_rotor.stages.sharding import unrecorded

# ----------------------------------------------------------------------------------------------------
# Whether a module is still what it was at the last step, in microseconds.


_TABLES = ("_modules", *HOOKS[:2], "_parameters")
_entries_in = itemgetter("training", *_TABLES[:-1])
_parameters_in = itemgetter(_TABLES[-1])
_learning = attrgetter("requires_grad", "dtype")


class ModuleFacts:
    """What a module and all below it look like at one moment.

    Args:
        root: Its children, modes, hooks and parameters count, at any depth; values of parameters, buffers and other
            attributes do not.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = tuple(root.modules())
        self._parameters = tuple(root.parameters())
        self._attributes = [vars(module) for module in self._modules]
        # A scripted module keeps its children and parameters elsewhere.
        self._readable = all(_is_readable(attributes) for attributes in self._attributes)
        if self._readable:
            self._owners = list(map(_parameters_in, self._attributes))
            self._tables = [attributes[name] for attributes in self._attributes for name in _TABLES]
            self._full = [table for table in self._tables if table]
            self._entries = list(chain.from_iterable(map(dict.values, self._full)))
            self._seen = self._look()

    def holds(self) -> bool:
        """Whether all of it is as it was. False if that cannot be told so quickly."""
        return (
            self._readable
            # Dicts of tensors, and tensors, are no more to be compared with == than other tensors are.
            and all(map(is_, map(_parameters_in, self._attributes), self._owners))
            and self._look() == self._seen
            and all(map(is_, chain.from_iterable(map(dict.values, self._full)), self._entries))
        )

    def _look(self) -> Any:
        return (
            list(map(len, self._tables)),
            list(map(type, self._modules)),
            list(map(_entries_in, self._attributes)),
            list(map(contains, self._attributes, repeat("forward"))),
            list(map(_learning, self._parameters)),
        )


def _is_readable(attributes: dict[str, Any]) -> bool:
    return "training" in attributes and all(isinstance(attributes.get(name), dict) for name in _TABLES)


# ----------------------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)

_MANY_CUTS = 12


@dataclass(frozen=True, slots=True)
class Modes:
    """Which modules train (dropout may be switched off), which parameters learn, and their types.

    Hashed once: there are many.
    """

    training: tuple[bool, ...]
    learning: tuple[tuple[bool, torch.dtype], ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.training, self.learning)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Signature:
    """What a plan is made for.

    Attributes:
        shapes: Of the tensors that the chain takes.
        kinds: For each of them, type, device, and whether it requires a gradient.
        cut: The stages.
        autocast: For the CPU and for CUDA, whether it is on, and its type.
        modes: Of the modules and parameters.
    """

    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[torch.dtype, torch.device, bool], ...]
    cut: SequentialCut | GraphCut
    autocast: tuple[tuple[bool, torch.dtype], ...]
    modes: Modes

    @property
    def device(self) -> torch.device:
        """Where the chain runs."""
        return self.kinds[0][1]

    @property
    def family(self) -> Any:
        """Equal for signatures that differ in the sizes of tensors alone."""
        names = tuple(stage.name for stage in self.cut.stages)
        return self.cut.way, names, tuple(map(len, self.shapes)), self.kinds, self.autocast, self.modes

    @property
    def plain(self) -> Any:
        """All but the cut, in plain types."""
        return self.shapes, self.kinds, (self.autocast, self.modes.training, self.modes.learning)

    def same_but_shapes(self, other: Signature) -> bool:
        """Whether both are of one family."""
        return self.modes == other.modes and self.kinds == other.kinds and self.family == other.family


class KnownCuts:
    """Cuts of one module, those used last at the end.

    Args:
        module: Is cut when a call is of a new kind.
        most: So many are kept.
        on_cut: Called before the module is cut, which may run it.
    """

    def __init__(self, module: nn.Module, *, most: int, on_cut: Callable[[], None] = lambda: None) -> None:
        self._module = module
        self._on_cut = on_cut
        self._most = most
        self._cuts: list[SequentialCut | GraphCut] = []
        self._made = 0
        self._submodules: tuple[nn.Module, ...] | None = None
        self._stock: tuple[bool, ...] = ()
        self._facts: ModuleFacts | None = None
        self._modes: Modes | None = None

    @property
    def made(self) -> int:
        """How often the module was cut."""
        return self._made

    def __contains__(self, cut: SequentialCut | GraphCut) -> bool:
        return cut in self._cuts

    def forget(self) -> None:
        """Cut anew at the next call."""
        self._cuts.clear()

    def follow_changes(self) -> bool:
        """Start afresh if a module was replaced at any depth, or if one got hooks. Whether that is so."""
        if self._facts is not None and self._facts.holds():
            return False
        self._facts, self._modes = ModuleFacts(self._module), None
        submodules = tuple(self._module.modules())[1:]  # without the module itself, whose forward may be ours
        stock = tuple(map(is_plain_stock, submodules))
        if submodules == self._submodules and stock == self._stock:
            return False
        self._submodules, self._stock = submodules, stock
        self.forget()
        return True

    def known(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[SequentialCut | GraphCut, Any]]:
        """Cuts that hold for a call, with their input; those used last come first."""
        for cut in reversed(self._cuts):
            value = cut.bind(args, kwargs)
            if value is not None:
                yield cut, value

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[SequentialCut | GraphCut, Any]:
        """The stages for a call and their input; the module is cut now if it must be.

        Raises:
            ModelError: It can be no chain.
            SampleError: The call holds no tensor.
        """
        require_tensors(args[0] if len(args) == 1 and not kwargs else (args, kwargs))
        for cut, value in self.known(args, kwargs):
            self._cuts.remove(cut)
            self._cuts.append(cut)
            return cut, value
        self._require_initialized()
        self._on_cut()
        with unrecorded(self._module):
            cut = sequentialize(self._module, args, kwargs, known=self._cuts)
            if cut not in self._cuts and isinstance(cut, GraphCut):
                require_same(self._module, cut, args, kwargs)
        if cut not in self._cuts:
            _log.info(
                "%s becomes %d stages %s%s",
                type(self._module).__name__,
                len(cut.stages),
                WAYS[cut.way],
                "".join(f"; not {WAYS[way]}: {reason}" for way, reason in getattr(cut, "reasons", {}).items()),
            )
            self._take(cut)
        value = cut.bind(args, kwargs)
        if value is None:
            raise ModelError(
                f"{type(self._module).__name__} changes whenever its forward runs, so no trace of it holds: expected "
                "attributes that stay the "
                "same from call to call"
            )
        return cut, value

    def signature(self, cut: SequentialCut | GraphCut, value: Any) -> Signature:
        """Of a call that was bound."""
        tensors = tensors_in(value)
        if self._modes is None:
            self._modes = Modes(
                tuple(module.training for module in self._submodules or ()),
                tuple((parameter.requires_grad, parameter.dtype) for parameter in self._module.parameters()),
            )
        return Signature(
            tuple(tuple(tensor.shape) for tensor in tensors),
            tuple((tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors),
            cut,
            tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")),
            self._modes,
        )

    def _require_initialized(self) -> None:
        lazy = [
            name for name, parameter in self._module.named_parameters() if isinstance(parameter, UninitializedParameter)
        ]
        if lazy:
            raise ModelError(
                f"parameter {lazy[0]!r} of a lazy module has no shape yet: expected an initialized model. Run a "
                "batch through it first"
            )

    def _take(self, cut: SequentialCut | GraphCut) -> None:
        """Remember a cut, and drop those of layers that are gone."""
        present = set(self._module.modules())
        kept = [known for known in self._cuts if isinstance(known, GraphCut) and known.lives_in(present)]
        self._cuts = [*kept[max(len(kept) + 1 - self._most, 0) :], cut]
        self._made += 1
        if self._made == _MANY_CUTS:
            self._warn_of_many()

    def _warn_of_many(self) -> None:
        message = (
            f"{type(self._module).__name__} was recorded {_MANY_CUTS} times, because an argument that is no tensor, an "
            "attribute or a value that its forward could read, or a size that decides over its operations, keeps "
            "changing: expected only values of tensors to differ from step to step. Pad to a few lengths, or raise "
            "max_plans so that recordings are kept"
        )
        warnings.warn(message, RotorWarning, stacklevel=2)
