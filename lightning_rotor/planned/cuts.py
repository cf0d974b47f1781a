"""The ways in which one module was cut into stages, each for other calls, and what a plan for a call depends on."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.capture.module_facts import ModuleFacts
from lightning_rotor.capture.sequentialize import WAYS, SequentialCut, sequentialize
from lightning_rotor.capture.watch import Watch
from lightning_rotor.errors import ModelError, RotorWarning
from lightning_rotor.private.autocast import autocast_state
from lightning_rotor.private.sharding import unrecorded
from lightning_rotor.private.torch_names import shares_weights
from lightning_rotor.private.values import require_tensors, tensors_in
from lightning_rotor.profiling.dry_run import require_same, undrawn
from lightning_rotor.profiling.ranks import ALONE, Ranks
from lightning_rotor.stages.known_layers import is_plain_stock
from lightning_rotor.stages.other_threads import leaving_alone

_log = logging.getLogger(__name__)
_MANY_CUTS = 12
Modes: TypeAlias = tuple[tuple[bool, ...], tuple[tuple[bool, torch.dtype], ...]]


@dataclass(frozen=True, slots=True)
class Signature:
    """What a plan is made for."""

    shapes: tuple[tuple[int, ...], ...]  # of the tensors that the chain takes; behind them, entries of packed sequences
    kinds: tuple[tuple[torch.dtype, torch.device, bool], ...]  # for each tensor, with whether a gradient is due
    cut: SequentialCut | GraphCut
    autocast: tuple[tuple[bool, torch.dtype], ...]  # for the CPU and for CUDA, whether it is on, and its type
    modes: Modes  # which modules train (dropout may be off), which parameters learn, and their types

    @property
    def has_totals(self) -> bool:
        """True if it counts the entries of packed sequences, which are values."""
        return len(self.shapes) > len(self.kinds)

    @property
    def device(self) -> torch.device:
        """Where the chain runs."""
        return self.kinds[0][1]

    @property
    def family(self) -> Any:
        """Equal for signatures that differ in the sizes of tensors alone."""
        names = tuple(stage.name for stage in self.cut.stages)
        return self.modes, self.kinds, self.autocast, self.cut.way, tuple(map(len, self.shapes)), names

    @property
    def size(self) -> int:
        """Elements of all tensors together."""
        return sum(map(math.prod, self.shapes))


class KnownCuts:
    """Cuts of one module, those used last at the end, at most ``most``. ``on_cut`` is called before a cut runs it.

    ``facts`` are what the module was at the last call. Where ``ranks`` are together, cutting runs the module equally
    often on all, whatever cuts they know.
    """

    def __init__(
        self, module: nn.Module, *, most: int, on_cut: Callable[[], None] = lambda: None, ranks: Ranks = ALONE
    ) -> None:
        self._module, self._ranks = module, ranks
        self._on_cut = on_cut
        self._most = most
        self._cuts: list[SequentialCut | GraphCut] = []
        self.made = self._recorded = 0  # times that the module was cut, and that it was recorded for that
        self._submodules: tuple[nn.Module, ...] | None = None
        self._stock: tuple[bool, ...] = ()
        self.facts: ModuleFacts | None = None
        self._besides: tuple[Watch, ModuleFacts] | None = None
        self._modes: Modes | None = None

    def __contains__(self, cut: SequentialCut | GraphCut) -> bool:
        return cut in self._cuts

    def forget(self) -> None:
        """Cut anew at the next call."""
        self._cuts.clear()

    def forget_those_for(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Cut anew at the next call like this one."""
        self._cuts = [cut for cut in self._cuts if cut.bind(args, kwargs) is None]

    def follow_changes(self) -> bool:
        """Start afresh if a module was replaced at any depth, or one got hooks. True if so."""
        if self.facts is not None and self.facts.holds():
            return False
        self.facts, self._besides, self._modes = ModuleFacts(self._module), None, None
        submodules = tuple(self._module.modules())[1:]  # without the module itself, whose forward may be ours
        stock = tuple(map(is_plain_stock, submodules))
        if submodules == self._submodules and stock == self._stock:
            return False
        self._submodules, self._stock = submodules, stock
        self.forget()
        return True

    def facts_besides(self, cut: SequentialCut | GraphCut) -> ModuleFacts | None:
        """What must be as at the last call, besides what a cut looks at itself."""
        if not isinstance(cut, GraphCut) or self.facts is None:
            return self.facts
        watch = cut.guards.watch
        if self._besides is None or self._besides[0] is not watch:
            self._besides = watch, ModuleFacts(self._module, watch.modules)
        return self._besides[1]

    def known(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[SequentialCut | GraphCut, Any]]:
        """Cuts that hold for a call, with their input; those used last come first."""
        for cut in reversed(self._cuts):
            value = cut.bind(args, kwargs)
            if value is not None:
                yield cut, value

    def known_signature(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Signature | None:
        """Signature of a call, or None if the module must be cut for it."""
        return next((self.signature(cut, value) for cut, value in self.known(args, kwargs)), None)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[SequentialCut | GraphCut, Any]:
        """The stages for a call and their input; the module is cut now if it must be.

        Raises ``ModelError`` if it can be no chain, ``SampleError`` if the call holds no tensor.
        """
        name = type(self._module).__name__
        if shares_weights(self._module):
            raise ModelError(
                f"{name} is called inside of torch.nn.utils.parametrize.cached(), which "
                "computes a parametrized weight once for several calls: expected each call to compute its own, as its "
                "recomputation does. Call it outside of that context"
            )
        for cut, value in self.known(args, kwargs):
            self._cuts.remove(cut)
            self._cuts.append(cut)
            return cut, value
        require_tensors(args[0] if len(args) == 1 and not kwargs else (args, kwargs))
        self._require_initialized()
        self._on_cut()
        # Where messages were seen before, processes with other threads must not run it once more than the rest.
        others = frozenset[str]() if self._ranks.together else undrawn(self._module, args, kwargs)
        with self._ranks.watching(), unrecorded(self._module), leaving_alone(others):
            cut = self._cut(args, kwargs)
        if cut not in self._cuts:
            not_taken = "".join(f"; not {WAYS[way]}: {reason}" for way, reason in cut.reasons.items())
            _log.info("%s becomes %d stages %s%s", name, len(cut.stages), WAYS[cut.way], not_taken)
            self._take(cut)
        self._recorded += 1
        if self._recorded == _MANY_CUTS:
            self._warn_of_many(cut.anew)
        if anew := cut.anew:
            _log.info("%s was recorded anew: %s", name, anew)
        value = cut.bind(args, kwargs)
        if value is None:
            raise ModelError(
                f"{name} changes whenever its forward runs, so no trace of it holds: expected "
                "attributes that stay the same from call to call"
            )
        return cut, value

    def _cut(self, args: Sequence[Any], kwargs: dict[str, Any]) -> SequentialCut | GraphCut:
        """A cut that does what the module does."""
        together = self._ranks.together
        cut = sequentialize(self._module, args, kwargs, known=self._cuts, afresh=together)
        if (cut in self._cuts and not together) or not isinstance(cut, GraphCut):
            return cut
        try:
            require_same(self._module, cut, args, kwargs)
        except ModelError:
            if cut.fixed.issuperset(cut.numbers):
                raise
            cut.fixed.update(cut.numbers)  # as it asks for their type
            return self._cut(args, kwargs)
        return cut

    def signature(self, cut: SequentialCut | GraphCut, value: Any) -> Signature:
        """Signature of a bound call."""
        tensors = tensors_in(value)
        if self._modes is None:
            self._modes = (
                tuple(module.training for module in self._submodules or ()),
                tuple((parameter.requires_grad, parameter.dtype) for parameter in self._module.parameters()),
            )
        totals = cut.recording.guards.totals if isinstance(cut, GraphCut) else ()
        return Signature(
            (*(tuple(tensor.shape) for tensor in tensors), *((total,) for total in totals)),
            tuple((tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors),
            cut,
            autocast_state(),
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
        self.made += 1

    def _warn_of_many(self, anew: str) -> None:
        message = (
            f"{type(self._module).__name__} was recorded {_MANY_CUTS} times, because an argument that is no tensor, an "
            "attribute or a value that its forward could read, or a size that decides over its operations, keeps "
            f"changing{f' (in the last, {anew})' * bool(anew)}: expected only values of tensors to differ from step to "
            "step. Pad to a few lengths, or raise max_plans so that recordings are kept"
        )
        warnings.warn(message, RotorWarning, stacklevel=2)
