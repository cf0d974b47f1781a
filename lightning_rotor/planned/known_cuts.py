"""The ways in which one module was cut into stages, each for other calls."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_rotor.capture.compiled_call import CompiledCut
from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.capture.module_facts import ModuleFacts
from lightning_rotor.capture.sequentialize import WAYS, Cut, sequentialize
from lightning_rotor.capture.watch import Watch
from lightning_rotor.errors import ModelError, RotorWarning
from lightning_rotor.planned.signature import Modes, Signature, modes_of
from lightning_rotor.private.sharding import unrecorded
from lightning_rotor.private.torch_names import CompiledCall, shares_weights
from lightning_rotor.private.values import require_tensors
from lightning_rotor.profiling.ranks import ALONE, Ranks
from lightning_rotor.profiling.same_results import require_same
from lightning_rotor.profiling.undrawn_generators import undrawn
from lightning_rotor.stages.known_layers import is_plain_stock
from lightning_rotor.stages.other_threads import leaving_alone

_log = logging.getLogger(__name__)
# Recordings after which the user is warned: each takes as long as several steps.
_MANY_CUTS = 12


class KnownCuts:
    """The cuts of one module.

    Args:
        module: The module.
        most: Cuts that are kept, those used last.
        on_cut: Called before cutting runs the module.
        ranks: Processes that exchange messages. Where they are together, cutting runs the module equally often on all,
            whatever cuts they know.
        compiled: What the user compiled as a whole, if that is to stay.
    Attributes:
        made: Number of times that the module was cut.
        facts: Facts of the module as they were at the last call.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        most: int,
        on_cut: Callable[[], None] = lambda: None,
        ranks: Ranks = ALONE,
        compiled: CompiledCall | None = None,
    ) -> None:
        self.made = 0
        self.facts: ModuleFacts | None = None
        self._module = module
        self._most = most
        self._on_cut = on_cut
        self._ranks = ranks
        self._compiled = compiled
        # Those used last are at the end.
        self._cuts: list[Cut] = []
        # Times, for the warning. A cut that was forgotten and is made again counts as well.
        self._recorded = 0
        # Submodules as they were, and which of them are torch's own without hooks.
        self._submodules: tuple[nn.Module, ...] | None = None
        self._stock: tuple[bool, ...] = ()
        # Derived from the facts, and made anew with them.
        self._besides: tuple[Watch, ModuleFacts] | None = None
        self._modes: Modes | None = None

    def __contains__(self, cut: Cut) -> bool:
        return cut in self._cuts

    def forget(self) -> None:
        """Cut anew at the next call."""
        # ``made`` goes on: that the module can be cut is known for good.
        self._cuts.clear()

    def forget_those_for(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Cut anew at the next call like this one."""
        self._cuts = [cut for cut in self._cuts if cut.bind(args, kwargs) is None]

    def follow_changes(self) -> bool:
        """Start afresh if a module was replaced at any depth, or one got hooks. True if so."""
        if self.facts is not None and self.facts.holds():
            return False
        self.facts = ModuleFacts(self._module)
        self._besides = None
        self._modes = None
        # Without the module itself, whose forward may be ours.
        submodules = tuple(self._module.modules())[1:]
        stock = tuple(map(is_plain_stock, submodules))
        if submodules == self._submodules and stock == self._stock:
            return False
        self._submodules = submodules
        self._stock = stock
        self.forget()
        return True

    def facts_besides(self, cut: Cut) -> ModuleFacts | None:
        """Facts that must be as at the last call, besides those that a cut looks at itself."""
        if not isinstance(cut, GraphCut) or self.facts is None:
            return self.facts
        watch = cut.guards.watch
        if self._besides is None or self._besides[0] is not watch:
            self._besides = watch, ModuleFacts(self._module, watch.modules)
        return self._besides[1]

    def known(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Iterator[tuple[Cut, Any]]:
        """Cuts that hold for a call, with their input; those used last come first."""
        for cut in reversed(self._cuts):
            value = cut.bind(args, kwargs)
            if value is not None:
                yield cut, value

    def known_signature(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Signature | None:
        """Signature of a call, or None if the module must be cut for it."""
        for cut, value in self.known(args, kwargs):
            return self.signature(cut, value)
        return None

    def cut_and_input(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> tuple[Cut, Any]:
        """The cut for a call, and its chain's input. The module is cut now if it must be.

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
        has_one = len(args) == 1 and not kwargs
        require_tensors(args[0] if has_one else (args, kwargs))
        self._require_values()
        self._on_cut()
        # Generators that other threads draw from, and the module does not. Telling runs the module once more, which
        # processes that exchange messages must do equally often; so there it is left out.
        others = frozenset[str]()
        if not self._ranks.together and self._compiled is None:
            others = undrawn(self._module, args, kwargs)
        with self._ranks.watching(), unrecorded(self._module), leaving_alone(others):
            cut = self._cut(args, kwargs)
        if cut not in self._cuts:
            message = f"{name} becomes {len(cut.stages)} stages {WAYS[cut.way]}"
            for way, reason in cut.reasons.items():
                message += f"; not {WAYS[way]}: {reason}"
            _log.info("%s", message)
            self._remember(cut)
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

    def _cut(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Cut:
        """A cut that does what the module does."""
        if self._compiled is not None:
            return CompiledCut(self._module, self._compiled, args, kwargs)
        together = self._ranks.together
        if not together:
            # Processes that exchange messages in the forward must run it equally often, and names in their batches
            # differ.
            for known in reversed(self._cuts):
                if isinstance(known, GraphCut) and known.is_for_any(args, kwargs):
                    return known
        cut = sequentialize(self._module, args, kwargs, known=self._cuts, afresh=together)
        if (cut in self._cuts and not together) or not isinstance(cut, GraphCut):
            return cut
        try:
            require_same(self._module, cut, args, kwargs)
        except ModelError:
            if cut.fixed.issuperset(cut.number_slots):
                raise
            cut.fixed.update(cut.number_slots)  # as it asks for their type
            return self._cut(args, kwargs)
        return cut

    def signature(self, cut: Cut, value: Any) -> Signature:
        """Signature of a bound call."""
        if self._modes is None:
            self._modes = modes_of(self._module, self._submodules or ())
        return Signature.of(cut, value, self._modes)

    def _require_values(self) -> None:
        for name, parameter in self._module.named_parameters():
            if parameter.is_meta:
                raise ModelError(
                    f"parameter {name!r} is on the meta device, without values: expected a model that can run. Call "
                    'to_empty(device="cpu") and load its weights, or plan it without memory: '
                    "python -m lightning_rotor plan --device meta"
                )
            if isinstance(parameter, UninitializedParameter):
                raise ModelError(
                    f"parameter {name!r} of a lazy module has no shape yet: expected an initialized model. Run a "
                    "batch through it first"
                )

    def _remember(self, cut: Cut) -> None:
        """Remember a cut, and drop those of layers that are gone."""
        present = set(self._module.modules())
        kept: list[Cut] = []
        for other in self._cuts:
            # An nn.Sequential has one cut at a time.
            lives = isinstance(other, CompiledCut)
            lives |= isinstance(other, GraphCut) and other.lives_in(present)
            if lives:
                kept.append(other)
        too_many = max(len(kept) + 1 - self._most, 0)
        self._cuts = [*kept[too_many:], cut]
        self.made += 1

    def _warn_of_many(self, anew: str) -> None:
        last = f" (in the last, {anew})" if anew else ""
        message = (
            f"{type(self._module).__name__} was recorded {_MANY_CUTS} times, because an argument that is no tensor, an "
            "attribute or a value that its forward could read, or a size that decides over its operations, keeps "
            f"changing{last}: expected only values of tensors to differ from step to "
            "step. Pad to a few lengths, or raise max_plans so that recordings are kept"
        )
        warnings.warn(message, RotorWarning, stacklevel=2)
