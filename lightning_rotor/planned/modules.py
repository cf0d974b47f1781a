"""The planned modules of a model: which they are, by a step's compute."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import nn

from lightning_rotor.capture.compiled import taken_apart
from lightning_rotor.capture.cuts import check_module
from lightning_rotor.errors import ModelError, ProfilingError, RotorError
from lightning_rotor.planned.cache import model_fingerprint
from lightning_rotor.planned.forward import PlannedForward, attach, detach, is_attached
from lightning_rotor.planned.loop import StepCompute, TrainingLoop
from lightning_rotor.planned.plans import BudgetSource, Plans, PlanSettings
from lightning_rotor.planning import Plan
from lightning_rotor.private.torch_names import INNER, is_compiled

_log = logging.getLogger(__name__)

# -------------------------------------------------------------------- Which submodule to plan.

# A part of the compute that is worth a word, or another choice; and one that is worth a plan beside others.
_NOTABLE = 0.2
_HEAVY = 0.05


@dataclass(frozen=True, slots=True)
class Target:
    """A submodule to plan, by its dotted name (``""`` is the model itself), and why this one."""

    name: str
    module: nn.Module
    reason: str

    @property
    def place(self) -> str:
        """Name of the submodule for messages."""
        return repr(self.name) if self.name else "the model itself"

    def __str__(self) -> str:
        return f"{self.place} ({type(self.module).__name__}): {self.reason}"


def named_target(model: nn.Module, name: str) -> Target:
    """The submodule that the user named; ``ModelError`` if it does not exist, or can be no chain."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        plannable = [path for path, each in model.named_modules() if path and _computes(each)]
        close = get_close_matches(name, plannable, n=1)
        closest = f", such as {close[0]!r}" if close else ""
        outermost = ", ".join(repr(path) for path, each in _outermost(model) if _computes(each)) or "none"
        raise ModelError(
            f"{type(model).__name__} has no submodule {name!r}: expected a dotted name{closest}. "
            f"Submodules that can be planned: {outermost}"
        ) from None
    check_module(module)
    return Target(name, module, "as named")


def _computes(module: nn.Module) -> bool:
    """True if a module can be planned, and has a parameter, which metrics have not."""
    return next(module.parameters(), None) is not None and may_be_planned(module)


class TargetSearch:
    """Finds the submodule to plan when the user names none: by parameters at first, by compute once it is known.

    A model that ``may_be_whole`` is the choice if its forward reaches much more compute than any submodule.
    """

    def __init__(self, model: nn.Module, *, may_be_whole: bool) -> None:
        self._model, self._may_be_whole = model, may_be_whole
        self._compute: StepCompute | None = None
        self.unknown_because = "its compute is not known yet"
        self.refused: set[str] = set()  # those that have turned out to be no chain

    def count(self, compute: Callable[[], StepCompute]) -> None:
        """Rank by the compute of a training step from now on, if that can be counted."""
        try:
            self._compute = compute()
        except ProfilingError as error:
            self.unknown_because = str(error)

    def best(self) -> Target | None:
        """The submodule to plan, or None if there is none. Of submodules that do the same, the outermost."""
        names = [
            name
            for name, module in self._model.named_modules()
            if name and name not in self.refused and self._weight(name) and may_be_planned(module)
        ]
        # The first of the largest: a module comes before what is in it.
        best = max(names, key=self._weight, default=None)
        may_be_whole = self._may_be_whole and "" not in self.refused and self._weight("") > 0
        if may_be_whole and (best is None or self._share("") >= self._share(best) + _NOTABLE):
            best = ""
        return None if best is None else self._target(best)

    def all(self) -> list[Target]:
        """:meth:`best`, and whatever else is worth a plan, apart from it; empty if there is nothing."""
        best = self.best()
        if best is None:
            return []
        beside = self._shares([best.name], self.refused)
        return [best, *(self._target(name) for name, share in beside if share >= _HEAVY)]

    def calls(self, names: Collection[str]) -> int:
        """How many calls of these modules a step has; 0 if unknown."""
        return 0 if self._compute is None else sum(self._compute.calls.get(name, 0) for name in names)

    def _shares(self, planned: Collection[str], refused: Collection[str] = ()) -> list[tuple[str, float]]:
        """Other submodules that could be planned, and their shares of the compute, largest first; empty if unknown."""
        if self._compute is None or "" in planned:
            return []
        shares = [(name, self._share(name)) for name, _ in _outermost(self._model, planned, refused)]
        return sorted((entry for entry in shares if entry[1] >= 0.01), key=lambda entry: entry[1], reverse=True)

    def what_is_left_out(self, targets: Sequence[Target]) -> str | None:
        """A message about other submodules if they have much of the compute, and what to do about it, or None."""
        left_out = self._shares([target.name for target in targets])
        if sum(share for _, share in left_out) < _NOTABLE:
            return None
        named = [f"{name!r} ({100 * share:.0f} %)" for name, share in left_out]
        refused = " and ".join(sorted(repr(name) if name else "the model itself" for name in self.refused))
        planned = ", ".join(f"{target.place}, {target.reason}" for target in targets)
        return (
            f"plans {planned}; not planned, and kept as without a limit: {', '.join(named)}. "
            + (f"{refused} could not be planned as a whole, the log says why. " if refused else "")
            + "To have them planned, let nn.Modules do this work, and name them: "
            'RotorCallback(module=["...", "..."])'
        )

    def _weight(self, name: str) -> int:
        if self._compute is not None:
            return self._compute.plannable.get(name, 0)
        parameters = self._model.get_submodule(name).parameters()
        return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)

    def _share(self, name: str) -> float:
        return 0.0 if self._compute is None else self._compute.share(name)

    def _target(self, name: str) -> Target:
        reason = f"{self._weight(name):,} trainable parameters, the most that can be planned ({self.unknown_because})"
        if self._compute is not None:
            reason = f"{100 * self._share(name):.0f} % of the FLOPs of a training step's forward"
            if assumed := self._compute.assumed_values:
                reason += f" ({assumed} value{'s' * (assumed > 1)} that the step asks for taken as 1)"
        return Target(name, self._model.get_submodule(name), reason)


def _outermost(
    module: nn.Module, planned: Collection[str] = (), refused: Collection[str] = (), prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Submodules that may be chains and are not inside of others, nor in planned ones or around one, nor refused."""
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if name in planned:
            continue
        if name not in refused and may_be_planned(child) and not any(each.startswith(f"{name}.") for each in planned):
            yield name, child
        else:
            yield from _outermost(child, planned, refused, f"{name}.")


def may_be_planned(module: nn.Module) -> bool:
    """True if nothing speaks against planning a module, as far as can be told without its input."""
    try:
        check_module(module)
    except ModelError:
        return False
    return True


# -------------------------------------------------------------------- The planned modules.


@dataclass(slots=True, eq=False)
class PlannedModule:
    """One planned module."""

    target: Target
    plans: Plans

    def to_plain(self) -> dict[str, Any]:
        """What is known of it, for checkpoints."""
        return {
            "module": self.target.name,
            "model": model_fingerprint(self.target.module),
            "ceiling_bytes": self.plans.ceiling.size_bytes,
            "records": self.plans.records(),
        }


class PlannedModules:
    """The planned modules of a model, those of these names; else a guess until a first batch shows what is heavy."""

    def __init__(
        self, loop: TrainingLoop, source: BudgetSource, settings: PlanSettings, names: str | Sequence[str] | None
    ) -> None:
        self._loop, self._source, self._settings = loop, source, settings
        self._names = [names] if isinstance(names, str) else names
        self._search = None if names is not None else TargetSearch(loop.model, may_be_whole=loop.may_be_whole)
        self._modules: list[PlannedModule] = []
        self.is_guess = self._is_news = False
        self._first_refusal: RotorError | None = None

    def __iter__(self) -> Iterator[PlannedModule]:
        return iter(self._modules)

    def __str__(self) -> str:
        return "; ".join(str(module.target) for module in self)

    @property
    def all(self) -> nn.ModuleList:
        """All of them, to count what they hold."""
        return nn.ModuleList(module.target.module for module in self)

    @property
    def measuring_seconds(self) -> float:
        """Time spent on measuring them."""
        return sum(module.plans.measuring_seconds for module in self)

    def measured_overhead(self, plan: Plan) -> float | None:
        """Time of a step's calls beyond that of plain ones, by that; None before the second step under it."""
        found = [(call, entry) for module in self for call in plan.calls if (entry := module.plans.under(call))]
        overheads = [(call, entry.measured_overhead) for call, entry in found]
        seconds = [overhead * call.chain.step_seconds for call, overhead in overheads if overhead is not None]
        if len(seconds) < len(plan.calls) or not plan.chain.step_seconds:
            return None
        return sum(seconds) / plan.chain.step_seconds

    def begin(self, known: Sequence[Target] = ()) -> None:
        """Plan what the user has named, what saved plans are for (``known``), or a guess."""
        if self._names is not None:
            self._take([named_target(self._loop.model, name) for name in self._names])
            return
        assert self._search is not None
        self.is_guess = not known
        best = None if known else self._search.best()
        self._take(known or ([] if best is None else [best]))

    def choose(self, batch: Any, batch_idx: int) -> bool:
        """Decide by the compute of the first batch, as the first process does. True if others than a guess."""
        assert self._search is not None
        before, self.is_guess = list(self), False
        self._search.count(lambda: self._loop.compute(batch, batch_idx))
        found = self._search.all()
        names = self._loop.told_by_all([target.name for target in found])[0]
        known = {target.name: target for target in found}
        submodule = self._loop.model.get_submodule
        self._take([known.get(name) or Target(name, submodule(name), "as on rank 0") for name in names])
        return list(self) != before

    def refuse(self, plans: Plans, error: RotorError) -> None:
        """From inside the first forward: plan what is next best, unless the user has named this one."""
        if self._search is None:
            raise error
        module = next(module for module in self if module.plans is plans)
        self._search.refused.add(module.target.name)
        found = self._search.all()
        self._first_refusal = self._first_refusal or error
        if not found:
            raise self._first_refusal  # of those with most compute
        _log.info("RotorCallback cannot plan %s: %s", module.target.place, error)
        self._take(found)

    def is_alone(self, plans: Plans) -> bool:
        """True if a step calls nothing else that is planned, as far as is known."""
        calls = 0 if self._search is None else self._search.calls([each.target.name for each in self])
        return calls <= 1 and all(each.plans is plans for each in self)

    def end(self) -> None:
        """Give all of them their own forwards back."""
        for module in self:
            detach(module.target.module)
        self._modules = []

    def replan(self, plan: Plan) -> Plan:
        """A new plan in the place of one that steps run under, with the budget of now; ``BudgetError`` if none fits."""
        module = next((module for module in self if module.plans.under(plan)), None)
        return plan if module is None else module.plans.replan(plan)

    def unplan(self, keep: Callable[[Plan], bool]) -> None:
        """Drop all plans but those to keep."""
        for module in self:
            module.plans.cache.unplan(keep)

    def is_capped(self, plan: Plan) -> bool:
        """True if a plan has all that plans may take since the device ran out of memory."""
        return any(module.plans.ceiling.caps(part) for module in self for part in plan.calls)

    def tell(self) -> None:
        """Say what is planned, and warn of what is not, or not as it was, once that is certain."""
        if self.is_guess or not self._is_news:
            return
        self._is_news = False
        if self._loop.is_lead:
            _log.info("RotorCallback plans %s. RotorCallback(module=...) names others", str(self))
        for target in (module.target for module in self):
            if self._loop.is_compiled or is_compiled(target.module) or target.name.endswith(INNER):
                taken = taken_apart("the LightningModule" if self._loop.is_compiled else target.place)
                self._loop.warn(f"RotorCallback: {taken}")
        left_out = None if self._search is None else self._search.what_is_left_out([each.target for each in self])
        if left_out is not None:
            self._loop.warn(f"RotorCallback {left_out}")

    def _take(self, targets: Sequence[Target]) -> None:
        if not targets:
            raise ModelError(
                f"{type(self._loop.model).__name__} holds no submodule with several layers and trainable parameters "
                "that its training_step calls: expected one. Put the layers that take most of the memory into an "
                "nn.Sequential or a module of their own, and call that"
            )
        wanted = {id(target.module): target for target in targets}
        kept = []
        for module in self:
            target = wanted.pop(id(module.target.module), None)
            if target is None:
                detach(module.target.module)
            else:
                module.target = target  # why it is one may have changed
                kept.append(module)
        self._modules = kept
        attached: list[tuple[nn.Module, PlannedForward]] = []
        try:
            for target in wanted.values():
                _check_apart(self._loop.model, target)
                planned = PlannedForward(target.module, self._source, self._settings, target.name)
                attached.append((target.module, planned))  # before it is, as an interrupt may come in between
                attach(target.module, planned)
                self._modules.append(PlannedModule(target, planned.plans))
        except BaseException:
            self.end()
            for replaced, planned in attached:
                detach(replaced, planned)
            raise
        self._is_news = True


def _check_apart(model: nn.Module, target: Target) -> None:
    """Check that no module is planned inside of another one."""
    inside = set(target.module.modules())
    for name, module in model.named_modules():
        overlaps = module in inside or target.module in module.modules()
        if module is not target.module and overlaps and is_attached(module):
            raise ModelError(
                f"two plans would work on the same layers: one on {target.place}, the other on {name!r}. Expected "
                "modules apart from each other, or one RotorCallback on the larger one, which plans what is inside of "
                "it, too"
            )
