"""The planned modules of a model: which they are, and what each asks of the plan for the whole step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_rotor.capture.compiled import taken_apart
from lightning_rotor.errors import ModelError, RotorError
from lightning_rotor.planned.forward import PlannedForward, attach, detach, is_attached
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.plans import BudgetSource, Plans, PlanSettings
from lightning_rotor.planned.target import Target, TargetSearch, named_target
from lightning_rotor.planning import Plan
from lightning_rotor.private.torch_names import INNER, is_compiled

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PlannedModule:
    """One planned module."""

    target: Target
    plans: Plans


class PlannedModules:
    """The planned modules of a model; a guess until the first batch shows where a step computes.

    Args:
        names: What the user wants planned, or None for all that is heavy.
    """

    def __init__(
        self, loop: TrainingLoop, source: BudgetSource, settings: PlanSettings, names: str | Sequence[str] | None
    ) -> None:
        self._loop, self._source, self._settings = loop, source, settings
        self._names = [names] if isinstance(names, str) else names
        self._search = None if names is not None else TargetSearch(loop.model, may_be_whole=loop.may_be_whole)
        self._modules: list[PlannedModule] = []
        self._warnings: list[str] = []
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
        self._search.refuse(module.target)
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
        if self.is_guess:
            return
        if self._is_news and self._loop.is_lead:
            _log.info("RotorCallback plans %s. RotorCallback(module=...) names others", str(self))
        self._is_news = False
        for message in self._warnings:
            self._loop.warn(message)
        self._warnings.clear()

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
        try:
            for target in wanted.values():
                _check_apart(self._loop.model, target)
                planned = PlannedForward(target.module, self._source, self._settings, target.name)
                attach(target.module, planned)
                self._modules.append(PlannedModule(target, planned.plans))
        except ModelError:
            self.end()
            raise
        left_out = None if self._search is None else self._search.what_is_left_out([each.target for each in self])
        self._warnings = self._what_is_taken_apart() + [f"RotorCallback {left_out}"] * (left_out is not None)
        self._is_news = True

    def _what_is_taken_apart(self) -> list[str]:
        """A warning for each target that was compiled and does not stay so."""
        return [
            f"RotorCallback: {taken_apart('the LightningModule' if self._loop.is_compiled else target.place)}"
            for target in (module.target for module in self)
            if self._loop.is_compiled or is_compiled(target.module) or target.name.endswith(INNER)
        ]


def _check_apart(model: nn.Module, target: Target) -> None:
    """Check that no module is planned inside of another one."""
    inside = set(target.module.modules())
    for name, module in model.named_modules():
        if module is target.module or not is_attached(module):
            continue
        if module in inside or target.module in module.modules():
            raise ModelError(
                f"two plans would work on the same layers: one on {target.place}, the other on {name!r}. Expected "
                "modules apart from each other, or one RotorCallback on the larger one, which plans what is inside of "
                "it, too"
            )
