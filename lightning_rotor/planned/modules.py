"""The planned modules of a model: named by the user, or found by a step's compute and in the first step itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_rotor.capture.compiled import taken_apart
from lightning_rotor.capture.cuts import GraphCut, SequentialCut
from lightning_rotor.errors import ModelError, RotorError
from lightning_rotor.execution.passes import is_recomputing
from lightning_rotor.planned.cache import model_fingerprint
from lightning_rotor.planned.forward import (
    NO_GRAPH,
    ForwardInPlace,
    ForwardWithoutCaches,
    KeyValueCaches,
    PlannedForward,
    attach,
    detach,
    inactive,
    is_attached,
)
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.plans import BudgetSource, Plans, PlanSettings
from lightning_rotor.planned.target_search import Target, TargetSearch, may_be_planned, named_target, spelled_shares
from lightning_rotor.planning import Plan
from lightning_rotor.private.torch_names import INNER, is_compiled, outside_of_graphs
from lightning_rotor.private.values import tensors_in

_log = logging.getLogger(__name__)
_MOST = 0.5
"""A module with more of its saved bytes in parts that are one stage is planned in parts."""
_SLIGHT = 0.01
"""A module that was found in the first step is not planned if less of its calls' time and bytes are in it."""


@dataclass(slots=True, eq=False)
class PlannedModule:
    """One planned module."""

    target: Target
    plans: Plans
    caches: KeyValueCaches

    def to_plain(self) -> dict[str, Any]:
        """What is known of it, for checkpoints."""
        return {
            "module": self.target.name,
            "model": model_fingerprint(self.target.module),
            "ceiling_bytes": self.plans.ceiling.size_bytes,
            # Those of one process would let it go on where the others measure, and wait for it.
            "records": [] if self.plans.together else self.plans.records(),
        }


class UnseenForward:
    """Stands in for the forward of a module that nobody has seen run, until the first step calls it.

    ``found`` is told of the first call that trains, before it runs. It may put another forward in this one's place.
    """

    active = True

    def __init__(self, found: Callable[[], None]) -> None:
        self._found = found

    def __reduce__(self) -> tuple[Any, ...]:
        return inactive, ()

    @partial(outside_of_graphs, reason=NO_GRAPH)
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of the module."""
        trains = module.training and torch.is_grad_enabled() and not is_recomputing()
        if not trains or not _needs_gradients(module, args, kwargs):
            return type(module).forward(module, *args, **kwargs)
        self._found()
        return module.forward(*args, **kwargs)


def _needs_gradients(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if autograd may keep something of a call."""
    learning = (parameter.requires_grad for parameter in module.parameters())
    return any(learning) or any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))


class PlannedModules:
    """The planned modules of a model: those of these names, or those that the steps show to have much of the compute.

    Modules that may have much of it, and were not seen to run, wait for their first call.
    """

    def __init__(
        self, loop: TrainingLoop, source: BudgetSource, settings: PlanSettings, names: str | Sequence[str] | None
    ) -> None:
        self._loop, self._source, self._settings = loop, source, settings
        self._names = [names] if isinstance(names, str) else names
        self._search = None if names is not None else TargetSearch(loop.model, may_be_whole=loop.may_be_whole)
        self._modules: list[PlannedModule] = []
        self._unseen: dict[str, Target] = {}
        self._attached: list[tuple[nn.Module, ForwardInPlace]] = []  # forwards in the place of modules' own
        self._refusals: list[RotorError] = []
        self.is_guess = self._is_news = False

    def __iter__(self) -> Iterator[PlannedModule]:
        return iter(self._modules)

    def __str__(self) -> str:
        return "; ".join(str(module.target) for module in self)

    @property
    def all(self) -> nn.ModuleList:
        """All of them, to count what they hold."""
        return nn.ModuleList(module.target.module for module in self)

    @property
    def is_open(self) -> bool:
        """True while the first step may still show modules to plan."""
        return self._search is not None and self._search.is_open

    @property
    def left_out(self) -> str:
        """Modules that are not planned, with their shares of a step's compute; empty if there are none."""
        if self._search is None:
            return ""
        return spelled_shares(self._search.left_out([module.target.name for module in self]))

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

    # ---------------------------------------------------------------- which they are

    def begin(self, known: Sequence[Target] = ()) -> None:
        """Plan what the user has named, or what saved plans are for (``known``); else whatever the first calls show."""
        if self._names is not None:
            self._take([named_target(self._loop.model, name) for name in self._names])
            return
        assert self._search is not None
        self.is_guess = not known
        if known:
            self._search.close(())
        self._take(known or self._search.targets())

    def choose(self, batch: Any, batch_idx: int) -> bool:
        """Decide by the compute of the first batch, as the first process does. True if others than before."""
        assert self._search is not None
        before, self.is_guess = list(self), False
        self._search.count(lambda: self._loop.compute(batch, batch_idx))
        targets = self._search.targets()
        told = [(target.name, target.is_unseen) for target in targets], self._search.is_open, self._search.messages
        heard = self._loop.told_by_all(told)
        listed, self._search.is_open, _ = heard[0]
        planned = [name for name, _ in listed]
        self._source.ranks.join_connected(
            [seen for _, _, messages in heard for name in planned for seen in messages.get(name, ())]
        )
        known = {target.name: target for target in targets}
        submodule = self._loop.model.get_submodule
        self._take(
            [known.get(name) or Target(name, submodule(name), "as on rank 0", is_unseen) for name, is_unseen in listed]
        )
        return list(self) != before

    def _found(self, name: str) -> None:
        """The first step is about to call a module that waits: plan it, and nothing inside of it or around it."""
        target = self._unseen[name]
        inside = set(target.module.modules())
        for other, waiting in list(self._unseen.items()):
            if waiting.module in inside or _holds(waiting.module, target.module):
                self._dismiss(other)
        self._plan(target)
        self._is_news = True

    def close(self, calls: Sequence[str]) -> list[Plans]:
        """The first step is over, and has called these of the modules, once for each name. Returns plans given up.

        Modules that it has not called are planned no more, nor those that hardly count.
        """
        assert self._search is not None
        for name in list(self._unseen):
            self._dismiss(name)
        names = [module.target.name for module in self]
        kept = self._loop.told_by_all(sorted({name for name in names if name in calls} - self._slight(calls)))[0]
        given_up = [module for module in self if module.target.name not in kept]
        for module in given_up:
            self._detach(module.target.module)
        self._modules = [module for module in self if module.target.name in kept]
        self._search.close([name for name in calls if name in kept])
        return [module.plans for module in given_up]

    def _slight(self, calls: Sequence[str]) -> set[str]:
        """Names of modules found in the first step whose calls take next to nothing of all calls' time and bytes."""
        chains = {module.target.name: module.plans.plan.chain for module in self if module.plans.plan is not None}
        known = [name for name in calls if name in chains]
        seconds = sum(chains[name].step_seconds for name in known)
        kept_bytes = sum(chains[name].kept_bytes for name in known)
        return {
            module.target.name
            for module in self
            if module.target.is_unseen
            and (chain := chains.get(module.target.name)) is not None
            and (count := known.count(module.target.name)) * chain.step_seconds < _SLIGHT * seconds
            and count * chain.kept_bytes < _SLIGHT * kept_bytes
        }

    def objection(self, plans: Plans, cut: SequentialCut | GraphCut) -> ModelError | None:
        """An error if most of a module that nobody has named is in parts that are one stage, and that can be planned.

        A model may do one thing that no recording can hold around all of its layers: it sets an attribute, or asks for
        a value. Then its parts are planned.
        """
        if self._search is None or not isinstance(cut, GraphCut) or cut.opaque_share() < _MOST:
            return None
        target = next(module.target for module in self if module.plans is plans)
        inside = [cut.module.get_submodule(path) for path in cut.opaque]
        if not any(may_be_planned(part) for module in inside for part in list(module.modules())[1:]):
            return None
        (path, reason), *_ = cut.opaque.items()
        return ModelError(f"{target.place} is planned in parts, for most of it is in {path!r}, and {reason}")

    def refuse(self, plans: Plans, error: RotorError) -> None:
        """From inside the first forward: plan all its parts that can be, unless the user has named this one."""
        if self._search is None:
            raise error
        module = next(module for module in self if module.plans is plans)
        self._search.refused.add(module.target.name)
        self._refusals.append(error)
        _log.info("RotorCallback cannot plan %s: %s", module.target.place, error)
        found = [each.target for each in self if each is not module and each.target.is_unseen]
        self._take([*found, *self._search.targets()])
        if module.caches:
            self._attach(module.target.module, ForwardWithoutCaches(module.caches))

    def is_alone(self, plans: Plans) -> bool:
        """True if a step calls nothing else that is planned, as far as is known."""
        calls = 0 if self._search is None else self._search.calls([each.target.name for each in self])
        return calls <= 1 and all(each.plans is plans for each in self)

    def end(self) -> None:
        """Give all of them their own forwards back."""
        for module, forward in self._attached:
            detach(module, forward)
        self._attached, self._modules, self._unseen = [], [], {}

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
        if self.is_guess or self.is_open or not self._is_news or not self._modules:
            return  # that nothing is planned, :attr:`why_nothing` says
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

    @property
    def why_nothing(self) -> str:
        """Why no module is planned; empty if one is, or may be."""
        if self._modules or self._unseen or self.is_guess:
            return ""
        if self._refusals:
            return str(self._refusals[0])  # of the one with most compute
        return (
            f"{type(self._loop.model).__name__} holds no submodule with several layers and trainable parameters "
            "that its training_step calls: expected one. Put the layers that take most of the memory into an "
            "nn.Sequential or a module of their own, and call that"
        )

    # ---------------------------------------------------------------- forwards in the place of modules' own

    def _take(self, targets: Sequence[Target]) -> None:
        """Plan these, and let unseen ones wait for their first call."""
        wanted = {id(target.module): target for target in targets}
        kept = []
        for module in self:
            target = wanted.pop(id(module.target.module), None)
            if target is None:
                self._detach(module.target.module)
            else:
                module.target = target  # why it is one may have changed
                kept.append(module)
        self._modules = kept
        for name in list(self._unseen):
            self._dismiss(name)
        try:
            for target in wanted.values():
                if not target.is_unseen:
                    self._plan(target)
            self._await([target for target in wanted.values() if target.is_unseen])
        except BaseException:
            self.end()
            raise
        self._is_news = True

    def _plan(self, target: Target) -> None:
        _check_apart(self._loop.model, target)
        planned = PlannedForward(target.module, self._source, self._settings, target.name)
        self._attach(target.module, planned)
        self._modules.append(PlannedModule(target, planned.plans, planned.caches))

    def _await(self, targets: Collection[Target]) -> None:
        """Let modules wait for their first call, but those inside of one that is planned, or around one."""
        taken = [module for module in self._loop.model.modules() if is_attached(module)]
        for target in targets:
            inside = set(target.module.modules())
            if any(other in inside or _holds(other, target.module) for other in taken):
                continue
            if "forward" in target.module.__dict__:  # somebody else's patch, which nobody could put back
                continue
            self._attach(target.module, UnseenForward(partial(self._found, target.name)))
            self._unseen[target.name] = target

    def _dismiss(self, name: str) -> None:
        self._detach(self._unseen.pop(name).module)

    def _attach(self, module: nn.Module, forward: ForwardInPlace) -> None:
        self._attached.append((module, forward))  # before it is, as an interrupt may come in between
        attach(module, forward)

    def _detach(self, module: nn.Module) -> None:
        for attached, forward in self._attached:
            if attached is module:
                detach(module, forward)
        self._attached = [entry for entry in self._attached if entry[0] is not module]


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    """True if a module lies in another one, or is it. A metric of torchmetrics equals any module by ``==``."""
    return any(each is inner for each in outer.modules())


def _check_apart(model: nn.Module, target: Target) -> None:
    """Check that no module is planned inside of another one."""
    inside = set(target.module.modules())
    for name, module in model.named_modules():
        overlaps = module in inside or _holds(module, target.module)
        if module is not target.module and overlaps and is_attached(module):
            raise ModelError(
                f"two plans would work on the same layers: one on {target.place}, the other on {name!r}. Expected "
                "modules apart from each other, or one RotorCallback on the larger one, which plans what is inside of "
                "it, too"
            )
