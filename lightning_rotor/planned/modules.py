"""The planned modules of a model: named by the user, or found by a step's compute and in the first step itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.capture.sequentialize import Cut
from lightning_rotor.errors import ModelError, ProfilingError, RotorError
from lightning_rotor.planned.attachment import (
    ForwardInPlace,
    attach,
    detach,
    is_attached,
)
from lightning_rotor.planned.budget_source import BudgetSource
from lightning_rotor.planned.compiled_steps import compiled_around, require_several_graphs, whole_around
from lightning_rotor.planned.forward import PlannedForward
from lightning_rotor.planned.key_value_caches import (
    ForwardWithoutCaches,
    KeyValueCaches,
)
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.module_plans import ModulePlans
from lightning_rotor.planned.plan_settings import PlanSettings
from lightning_rotor.planned.prepared import Prepared
from lightning_rotor.planned.records import model_fingerprint
from lightning_rotor.planned.target_search import (
    Target,
    TargetSearch,
    holds,
    may_be_planned,
    named_target,
    spelled_shares,
)
from lightning_rotor.planned.unseen_forward import UnseenForward
from lightning_rotor.planning import Plan
from lightning_rotor.private.torch_names import compiled_call_of
from lightning_rotor.stages.submodules import submodule_of

_log = logging.getLogger(__name__)

# A module with more of its saved bytes in parts that are one stage is planned in parts: from one stage nothing can be
# saved but all of it.
_MOST_OPAQUE = 0.5
# A module that was found in the first step is not planned if its calls have a smaller share of all calls' time and
# bytes: measuring it would cost more than a plan could save.
_SLIGHT = 0.01


@dataclass(slots=True, eq=False)
class PlannedModule:
    """One planned module."""

    target: Target
    plans: ModulePlans
    key_value_caches: KeyValueCaches
    uncompiled_warning: str | None = None
    """A warning about what the user compiled, and its plan takes apart; None if there is nothing of that kind."""
    is_whole: bool = False
    """True if it was compiled as a whole, and stays so: its graph is planned inside."""

    @property
    def name(self) -> str:
        """Its dotted name in the model."""
        return self.target.name

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self.target.module

    def to_plain(self) -> dict[str, Any]:
        """Its plans and measurements, for checkpoints."""
        # Records of one process would let it go on where the others measure, and wait for it.
        records = [] if self.plans.together else self.plans.records()
        return {
            "module": self.name,
            "model": model_fingerprint(self.module),
            "ceiling_bytes": self.plans.ceiling.size_bytes,
            "records": records,
        }


class PlannedModules:
    """The planned modules of a model.

    They are those that the user has named, or those that the steps show to have much of the compute. Modules that may
    have much of it, and were not seen to run, wait for their first call.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        source: BudgetSource,
        settings: PlanSettings,
        names: str | Sequence[str] | None,
    ) -> None:
        self._loop = loop
        self._source = source
        self._settings = settings
        self._names = [names] if isinstance(names, str) else names
        self._search: TargetSearch | None = None
        if names is None:
            self._search = TargetSearch(loop.model, may_be_whole=loop.may_be_whole)
        # Those that run under plans now.
        self._modules: list[PlannedModule] = []
        # By name, targets that the dry run has not reached. The first step plans those that it calls.
        self._unseen: dict[str, Target] = {}
        # Chosen modules that run as the user compiled them; None once they are planned.
        self._as_compiled: list[Target] | None = None
        # The targets as they were chosen, and why those that were compiled as a whole cannot be planned inside.
        self._chosen: list[Target] = []
        self._not_inside: dict[str, str] = {}
        self._may_run_as_compiled = loop.may_run_as_compiled
        # All forwards that stand in the place of modules' own.
        self._attached: list[tuple[nn.Module, ForwardInPlace]] = []
        # As texts: frames of an error's traceback would hold all that the first step has made, to the end of training.
        self._reasons: list[str] = []
        # The planned modules when they were told of last.
        self._told_of: list[PlannedModule] = []

    def __iter__(self) -> Iterator[PlannedModule]:
        return iter(self._modules)

    def __str__(self) -> str:
        return "; ".join(str(module.target) for module in self)

    def named(self, name: str) -> PlannedModule | None:
        """The planned module of this name; None if there is none, or it is planned no more."""
        for module in self._modules:
            if module.name == name:
                return module
        return None

    @property
    def names(self) -> list[str]:
        """Dotted names of the modules."""
        return [module.name for module in self]

    @property
    def all(self) -> nn.ModuleList:
        """The modules themselves, to count what they hold."""
        return nn.ModuleList(module.module for module in self)

    @property
    def run_as_compiled(self) -> bool:
        """True while nothing is planned, and what the user compiled as a whole runs as it is."""
        return self._as_compiled is not None

    def wake(self) -> None:
        """Plan the modules that run as they were compiled, from their next calls on."""
        self._may_run_as_compiled = False
        if self._as_compiled is not None:
            self._plan_only(self._as_compiled)

    def estimated_bytes(self, batch: Any, batch_idx: int) -> int | None:
        """Bytes that a step makes, and holds when its backward begins, if nothing is compiled; None if unknown."""
        if self._search is not None:
            return self._search.held_bytes
        try:
            return self._loop.compute(batch, batch_idx).held_bytes
        except ProfilingError:
            return None

    @property
    def is_open(self) -> bool:
        """True while the first step may still show modules to plan."""
        return self._search is not None and self._search.is_open

    def is_alone(self, name: str) -> bool:
        """True if a step calls nothing else that is planned, and this module once, as far as is known."""
        if self._search is not None and self._search.calls(self.names) > 1:
            return False
        return all(module.name == name for module in self)

    # ---------------------------------------------------------------- the choice

    def begin(self, known: Sequence[Target] = ()) -> bool:
        """Plan the modules that are certain, or guess from the modules' sizes.

        Args:
            known: Modules that saved plans are for; names of the user's go before.
        Returns:
            True if the choice stays; False if it is a guess until the first batch has been looked at.
        """
        if known:
            self._may_run_as_compiled = False  # a plan was needed before
        if self._names is not None:
            model = self._loop.model
            self._plan_only([named_target(model, name) for name in self._names])
            return True
        assert self._search is not None
        # What a checkpoint knows was learned in real steps, so nothing is left to be found.
        if known:
            self._search.close(())
        self._plan_only(known or self._search.targets())
        return bool(known)

    def choose(self, batch: Any, batch_idx: int) -> bool:
        """Decide by the compute of the first batch, as the first process does.

        True if others run under plans than before; those that a step has yet to call, or that run as they were
        compiled, do not count.
        """
        assert self._search is not None
        before = list(self)
        self._search.count(lambda: self._loop.compute(batch, batch_idx))
        targets = self._search.targets()
        listed = [(target.name, target.is_unseen) for target in targets]
        # Batches of processes differ, so their dry runs may rank modules differently. What one plans alone would send
        # messages that no other waits for, so the first process decides.
        told = listed, self._search.is_open, self._search.messages
        heard = self._loop.answers_of_all(told)
        listed, self._search.is_open, _ = heard[0]
        # Which processes exchange messages is known to each for its own modules only. They must be joined before any
        # of them plans, or one asks while another still measures.
        members: list[frozenset[int]] = []
        for _, _, messages in heard:
            for name, _ in listed:
                members += messages.get(name, ())
        self._source.ranks.join_connected(members)
        of_this_process = {target.name: target for target in targets}
        chosen = []
        for name, is_unseen in listed:
            target = of_this_process.get(name)
            if target is None:
                module = submodule_of(self._loop.model, name)
                target = Target(name, module, "as on rank 0", is_unseen)
            chosen.append(target)
        self._plan_only(chosen)
        return list(self) != before

    def close(self, calls: Sequence[str]) -> list[ModulePlans]:
        """The first step is over: nothing is found any more.

        Args:
            calls: Names of the modules that the step has called, once for each call.
        Returns:
            Plans of modules that are planned no more: the step has not called them, or they hardly count.
        """
        assert self._search is not None
        for name in list(self._unseen):
            self._dismiss(name)
        wanted = set(self.names) & set(calls) - self._slight(calls)
        # Again as the first process does: layers that are skipped at random differ from process to process.
        kept = self._loop.answers_of_all(sorted(wanted))[0]
        given_up = [module for module in self if module.name not in kept]
        for module in given_up:
            self._detach(module.module)
        self._modules = [module for module in self if module.name in kept]
        # Counts of calls decide later whether a step has several, so those of modules that are given up do not count.
        self._search.close([name for name in calls if name in kept])
        return [module.plans for module in given_up]

    def _slight(self, calls: Sequence[str]) -> set[str]:
        """Names of modules found in the first step whose calls take next to nothing of all calls' time and bytes."""
        seconds: dict[str, float] = {}
        kept_bytes: dict[str, int] = {}
        for module in self:
            plan, count = module.plans.plan, calls.count(module.name)
            if plan is not None:
                seconds[module.name] = count * plan.chain.step_seconds
                kept_bytes[module.name] = count * plan.chain.kept_bytes
        least_seconds = _SLIGHT * sum(seconds.values())
        least_bytes = _SLIGHT * sum(kept_bytes.values())
        slight = set()
        for module in self:
            name = module.name
            if not module.target.is_unseen or name not in seconds:
                continue
            # Both must be small: a fast layer may hold most of the bytes, and a slow one may be what recomputation
            # must avoid.
            if seconds[name] < least_seconds and kept_bytes[name] < least_bytes:
                slight.add(name)
        return slight

    def object_to(self, name: str, cut: Cut) -> None:
        """Raise ``ModelError`` if most of a module that nobody has named is in parts that are better planned alone.

        A model may do one thing that no recording can hold around all of its layers: it sets an attribute, or asks for
        a value. Each of its parts is one stage then, from which nothing can be saved, though the parts could be cut.
        """
        module = self.named(name)
        if self._search is None or module is None:
            return
        if not isinstance(cut, GraphCut) or cut.opaque_share() < _MOST_OPAQUE:
            return
        parts: list[nn.Module] = []
        for path in cut.opaque:
            parts += list(submodule_of(cut.module, path).modules())[1:]
        if not any(map(may_be_planned, parts)):
            return
        (path, reason), *_ = cut.opaque.items()
        raise ModelError(f"{module.target.place} is planned in parts, for most of it is in {path!r}, and {reason}")

    def plan_parts_of(self, name: str, error: RotorError) -> None:
        """From inside a module's first forward, which cannot be planned: plan its parts that can be.

        What was compiled as a whole is planned around its graph. ``error`` is raised where the user has named the
        module, as nothing else may be planned then.
        """
        module = self.named(name)
        if module is not None and module.is_whole:
            _log.info("RotorCallback cannot plan inside of what was compiled at %s: %s", module.target.place, error)
            self._not_inside[name] = str(error)
            self._plan_only(self._chosen)
            return
        if self._search is None or module is None:
            raise error
        self._search.no_chains.add(name)
        self._reasons.append(str(error))
        _log.info("RotorCallback cannot plan %s: %s", module.target.place, self._reasons[-1])
        # Those found in this step run right now, perhaps around this call, and keep their plans whatever the search
        # says.
        targets = []
        for other in self:
            if other is not module and other.target.is_unseen:  # found in this step
                targets.append(other.target)
        self._plan_only([*targets, *self._search.targets()])
        # The parts are planned from now on, and would be asked for caches by the module around them.
        if module.key_value_caches:
            self._attach(module.module, ForwardWithoutCaches(module.key_value_caches))

    def _found(self, name: str) -> None:
        """The first step is about to call a module that waits: plan it, and nothing inside of it or around it."""
        target = self._unseen[name]
        # One of nested modules is planned. The call that came first is the outer one, whose recomputation contains the
        # others'.
        inside = set(target.module.modules())
        for other, waiting in list(self._unseen.items()):
            if waiting.module in inside or holds(waiting.module, target.module):
                self._dismiss(other)
        self._plan(target)

    # ---------------------------------------------------------------- plans

    def replan(self, plan: Plan) -> Plan:
        """A new plan in the place of one that steps run under, with the budget of now; ``BudgetError`` if none fits."""
        for module in self:
            if module.plans.entry_under(plan) is not None:
                return module.plans.replan(plan)
        return plan

    def may_have_other_code(self, plan: Plan) -> bool:
        """True if a plan is for a graph that can be planned inside once more, or taken apart."""
        return any(module.plans.may_have_other_code(plan) for module in self)

    def keep_only(self, is_kept: Callable[[Plan], bool]) -> None:
        """Drop all other plans."""
        for module in self:
            module.plans.cache.keep_only_plans(is_kept)

    def is_capped(self, plan: Plan) -> bool:
        """True if a plan has all that plans may take since the device ran out of memory."""
        for module in self:
            if any(map(module.plans.ceiling.caps, plan.calls)):
                return True
        return False

    @property
    def measuring_seconds(self) -> float:
        """Time spent on measuring them."""
        return sum(module.plans.measuring_seconds for module in self)

    def measured_overhead(self, plan: Plan) -> float | None:
        """Time of a step's calls beyond that of plain ones, by that; None before the second step under it."""
        plain_seconds = plan.chain.step_seconds
        extra_seconds = 0.0
        for call in plan.calls:
            prepared = self._prepared_under(call)
            overhead = None if prepared is None else prepared.measured_overhead
            if overhead is None:
                return None
            # Overheads of calls are shares of different plain times, so seconds are added and not shares.
            extra_seconds += overhead * call.chain.step_seconds
        return extra_seconds / plain_seconds if plain_seconds else None

    def _prepared_under(self, plan: Plan) -> Prepared | None:
        """The entry that a plan is in use for; None if it is in use no more."""
        for module in self:
            prepared = module.plans.entry_under(plan)
            if prepared is not None:
                return prepared
        return None

    # ---------------------------------------------------------------- telling the user

    def tell(self) -> None:
        """Say what is planned, and warn of what is not, or not as it was, unless that was said or is not certain.

        That nothing is planned, :attr:`why_nothing` says.
        """
        if self.is_open or not self._modules or self._modules == self._told_of:
            return
        self._told_of = list(self._modules)
        if self._loop.is_lead:
            _log.info("RotorCallback plans %s. RotorCallback(module=...) names others", str(self))
        for module in self:
            message = module.uncompiled_warning
            if message is not None:
                self._loop.warn_once(f"RotorCallback: {message}", topic=message)
        if self._search is None:
            return
        left_out = self._search.what_is_left_out([module.target for module in self])
        if left_out is not None:
            self._loop.warn(f"RotorCallback {left_out}")

    @property
    def left_out(self) -> str:
        """Modules that are not planned, with their shares of a step's compute; empty if there are none."""
        if self._search is None:
            return ""
        return spelled_shares(self._search.left_out(self.names))

    @property
    def why_nothing(self) -> str:
        """The reason why no module is planned; empty if one is, or may be."""
        if self._modules or self._unseen or self._as_compiled:
            return ""
        if self._reasons:
            return self._reasons[0]  # of the one with most compute
        return (
            f"{type(self._loop.model).__name__} holds no submodule with several layers and trainable parameters "
            "that its training_step calls: expected one. Put the layers that take most of the memory into an "
            "nn.Sequential or a module of their own, and call that"
        )

    # ---------------------------------------------------------------- forwards in the place of modules' own

    def end(self) -> None:
        """Give all of them their own forwards back."""
        self._as_compiled = None
        # All that were ever attached, since one that was refused may still have a forward without caches.
        for module, forward in self._attached:
            detach(module, forward)
        self._attached = []
        self._modules = []
        self._unseen = {}

    def _plan_only(self, targets: Sequence[Target]) -> None:
        """Plan these and no others, and let unseen ones wait for their first call.

        They run as they are for now if what the user compiled would be taken apart.
        """
        if self._may_run_as_compiled and any(compiled_around(self._loop, target) for target in targets):
            self.end()
            self._as_compiled = list(targets)
            return
        self._as_compiled = None
        self._chosen = list(targets)
        wanted: dict[int, Target] = {}
        for target in targets:
            outermost = self._whole_around(target) or target
            wanted[id(outermost.module)] = outermost
        kept = []
        for module in self:
            again = wanted.get(id(module.module))
            was_whole = module.is_whole and module.name in self._not_inside
            if again is None or was_whole:
                self._detach(module.module)
            else:
                # Of a module that a guess or a tuner's trial has planned, more is known now.
                del wanted[id(module.module)]
                module.target = again
                module.plans.expect_unused(again.unused_outputs)
                kept.append(module)
        self._modules = kept
        for name in list(self._unseen):
            self._dismiss(name)
        try:
            for target in wanted.values():
                if not target.is_unseen:
                    self._plan(target)
            self._let_wait([target for target in wanted.values() if target.is_unseen])
        except BaseException:
            self.end()
            raise

    def _whole_around(self, target: Target) -> Target | None:
        """The module that was compiled as a whole, at or around a target, if its graph may be planned; else None."""
        if self._settings.compiled_variants == "off":
            return None
        whole = whole_around(self._loop, target)
        return None if whole is None or whole.name in self._not_inside else whole

    def _plan(self, target: Target) -> None:
        """Plan a module from its next call on."""
        _check_apart(self._loop.model, target)
        # Before its forward is replaced, which may be compiled itself.
        uncompiled_warning, compiled = None, None
        if self._whole_around(target) is not None:
            compiled = compiled_call_of(target.module)
        else:
            uncompiled_warning = compiled_around(self._loop, target, self._not_inside)
            if uncompiled_warning is not None:
                require_several_graphs(self._loop, target, uncompiled_warning)
        planned = PlannedForward(target.module, self._source, self._settings, target.name, compiled=compiled)
        planned.plans.expect_unused(target.unused_outputs)
        self._attach(target.module, planned)
        module = PlannedModule(
            target, planned.plans, planned.key_value_caches, uncompiled_warning, is_whole=compiled is not None
        )
        self._modules.append(module)

    def _let_wait(self, targets: Collection[Target]) -> None:
        """Let modules wait for their first call, but those inside of one that is planned, or around one."""
        # Read once: modules that wait may lie in each other, and the first that is called ends that (``_found``).
        taken = [module for module in self._loop.model.modules() if is_attached(module)]
        for target in targets:
            if _overlaps(target.module, taken):
                continue
            if "forward" in target.module.__dict__:  # somebody else's patch, which nobody could put back
                continue
            waiting = UnseenForward(partial(self._found, target.name))
            self._attach(target.module, waiting)
            self._unseen[target.name] = target

    def _dismiss(self, name: str) -> None:
        """Let a module wait no longer."""
        self._detach(self._unseen.pop(name).module)

    def _attach(self, module: nn.Module, forward: ForwardInPlace) -> None:
        # It is noted before it happens, as an interrupt may come in between.
        self._attached.append((module, forward))
        attach(module, forward)

    def _detach(self, module: nn.Module) -> None:
        for attached, forward in self._attached:
            if attached is module:
                detach(module, forward)
        self._attached = [entry for entry in self._attached if entry[0] is not module]


def _overlaps(module: nn.Module, others: Collection[nn.Module]) -> bool:
    """True if one of others is inside of a module, or around it."""
    inside = set(module.modules())
    return any(other in inside or holds(other, module) for other in others)


def _check_apart(model: nn.Module, target: Target) -> None:
    """Check that no module is planned inside of another one."""
    for name, module in model.named_modules():
        if module is target.module or not is_attached(module):
            continue
        if _overlaps(target.module, [module]):
            raise ModelError(
                f"two plans would work on the same layers: one on {target.place}, the other on {name!r}. Expected "
                "modules apart from each other, or one RotorCallback on the larger one, which plans what is inside of "
                "it, too"
            )
