"""One limit for a training step: which module is planned, what its plan may use, and whether the steps keep the limit.

A :class:`StepPlanner` goes through these states, and back to ``SETTLING`` whenever there is a new plan::

    LOOKING ──► MEASURING ──► SETTLING ──► SETTLED
    which       its first     steps are    the peaks
    module?     forward       watched      are known
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lightning_rotor.capture.compiled import is_compiled, taken_apart
from lightning_rotor.errors import BudgetError, ModelError, ProfilerBusyError, ShortageError, TrialError
from lightning_rotor.memory.budget import Budget, take_workspaces
from lightning_rotor.planned.cache import model_fingerprint
from lightning_rotor.planned.closed_loop import Corrections, StepWatch
from lightning_rotor.planned.forward import PlannedForward, attach, detach, is_attached, shortage_message
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.plans import BudgetSource, Plans, PlanSettings
from lightning_rotor.planned.target import Target, TargetSearch, may_be_planned, named_target
from lightning_rotor.planning import Plan
from lightning_rotor.private.torch_names import INNER
from lightning_rotor.private.values import tensors_in
from lightning_rotor.profiling import Profile
from lightning_rotor.units import MemoryLimit, format_bytes

_log = logging.getLogger(__name__)


class State(enum.Enum):
    """State of a training."""

    LOOKING = enum.auto()
    """The module is a guess; the first batch shows which has most of the compute."""
    MEASURING = enum.auto()
    """The module is chosen, and has no plan yet."""
    SETTLING = enum.auto()
    """A plan is new, and the peaks of its first steps are being measured."""
    SETTLED = enum.auto()
    """Training is left alone."""


@dataclass(slots=True)
class _Step:
    """The running step, with the plan of each planned call so far; ``is_over`` once its optimizer has stepped."""

    batch: list[torch.Tensor]
    is_first: bool
    runs: list[Plan] = field(default_factory=list)
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class SavedPlans:
    """What a fit leaves for the next one, in plain types alone, so that checkpoints load with ``weights_only=True``."""

    module: str
    model: str
    corrections: dict[str, list[int]]
    ceiling_bytes: int | None
    records: list[dict[str, Any]]

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> SavedPlans | None:
        """Plans from :meth:`to_plain`, or None if that was of another version of this package."""
        try:
            return cls(**state)
        except TypeError:
            return None

    def to_plain(self) -> dict[str, Any]:
        """In plain types."""
        return asdict(self)

    def target_in(self, model: nn.Module) -> Target | None:
        """The module in a model, or None if there is no such module in it."""
        module = dict(model.named_modules()).get(self.module)
        if module is None or not may_be_planned(module):
            return None
        target = Target(self.module, module, "as before")
        return target if self.are_for(target) else None

    def are_for(self, target: Target) -> bool:
        """True if a module has their name, and is made like the one that they are for."""
        return target.name == self.module and model_fingerprint(target.module) == self.model


class PlannedModule:
    """The planned module of a model, and its forward under plans; a guess until the first batch shows the compute."""

    def __init__(self, loop: TrainingLoop, source: BudgetSource, settings: PlanSettings, name: str | None) -> None:
        self._loop, self._source, self._settings, self._name = loop, source, settings, name
        self._search = None if name is not None else TargetSearch(loop.model, may_be_whole=loop.may_be_whole)
        self._target: Target | None = None
        self._planned: PlannedForward | None = None
        self.warnings: list[str] = []
        self.is_guess = False

    @property
    def target(self) -> Target:
        """The module."""
        assert self._target is not None
        return self._target

    @property
    def plans(self) -> Plans | None:
        """Plans of its forward; None before and after training."""
        return None if self._planned is None else self._planned.plans

    def begin(self, saved: SavedPlans | None) -> bool:
        """Plan the module that the user named, that of the saved plans, or a guess. True if the plans are for it."""
        if self._search is None:
            assert self._name is not None
            self._take(named_target(self._loop.model, self._name))
            return saved is not None and saved.are_for(self.target)
        known = None if saved is None else saved.target_in(self._loop.model)
        self.is_guess = known is None
        self._take(known or self._search.best())
        return known is not None

    def move_to(self, target: Target) -> bool:
        """The module of saved plans is the choice, unless the user names one. True if it is planned now."""
        if self._search is not None:
            self.is_guess = False
            self._take(target)
        return self.target.module is target.module

    def choose(self, batch: Any, batch_idx: int) -> None:
        """Decide by the compute of the first batch, for all processes as the first of them does."""
        if not self.is_guess:
            return
        assert self._search is not None
        self.is_guess = False
        found = self._search.best_by_compute(lambda: self._loop.compute(batch, batch_idx))
        name = self._loop.same(None if found is None else found.name)
        if name is not None and (found is None or found.name != name):
            found = Target(name, self._loop.model.get_submodule(name), "as on rank 0")
        self._take(found if name is not None else None)

    def refuse(self, error: ModelError) -> None:
        """From inside the first forward: plan the next best module, unless the user has named this one."""
        if self._search is None:
            raise error
        self._search.refuse(self.target)
        found = self._search.best()
        if found is None:
            raise error
        _log.info("RotorCallback cannot plan %s: %s", self.target.place, error)
        self._take(found)

    def end(self) -> None:
        """Give the module its own forward back."""
        if self._planned is not None:
            detach(self.target.module)
            self._planned = None

    def _take(self, target: Target | None) -> None:
        if target is None:
            raise ModelError(
                f"{type(self._loop.model).__name__} holds no submodule with several layers and trainable parameters "
                "that its training_step calls: expected one. Put the layers that take most of the memory into an "
                "nn.Sequential or a module of their own, and call that"
            )
        if self._planned is None or self.target.module is not target.module:
            self.end()
            _check_apart(self._loop.model, target)
            planned = PlannedForward(target.module, self._source, self._settings)
            attach(target.module, planned)
            self._planned = planned
        self._target = target
        self.warnings = [*self._what_is_taken_apart(target), *self._what_is_left_out(target)]
        if self._loop.is_lead:
            level = logging.DEBUG if self.is_guess else logging.INFO
            _log.log(level, "RotorCallback plans %s. RotorCallback(module=...) names another", target)

    def _what_is_taken_apart(self, target: Target) -> list[str]:
        """A warning if the target was compiled and does not stay so."""
        if not (self._loop.is_compiled or is_compiled(target.module) or target.name.endswith(INNER)):
            return []
        return [f"RotorCallback: {taken_apart('the LightningModule' if self._loop.is_compiled else target.place)}"]

    def _what_is_left_out(self, target: Target) -> list[str]:
        """A warning of other modules with a notable share of the compute."""
        message = None if self._search is None else self._search.what_is_left_out(target)
        return [] if message is None else [f"RotorCallback {message}"]


class StepPlanner(BudgetSource):
    """Keeps the steps of a training inside a limit; ``ModelError`` if the module of this name cannot be planned.

    Args:
        limit: For the whole process, as the user gave it.
        name: Dotted name of the module to plan, or None for the one with most of the compute.
        beyond: Where no plan fits, train with the one that takes least, and say so.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        limit: MemoryLimit | None,
        name: str | None,
        *,
        beyond: bool,
        settings: PlanSettings,
        saved: SavedPlans | None = None,
    ) -> None:
        self.loop, self.saved = loop, saved
        self.plan: Plan | None = None
        self.planned_module = ""
        self.limit_bytes = 0
        self.watch = StepWatch()
        self._is_settled = False
        self.was_put_off = False
        self._limit, self._beyond = limit, beyond
        self._step: _Step | None = None
        self._has_met = False
        self._agreed_bytes: int | None = None
        self._corrections = Corrections()
        self._others: dict[str, int] = {}
        self._warned_beyond = False
        self._module = PlannedModule(loop, self, settings, name)
        if self._module.begin(saved) and saved is not None:
            self._recall(saved)

    @property
    def state(self) -> State:
        """State of the training."""
        if self._module.is_guess:
            return State.LOOKING
        if self.plan is None:
            return State.MEASURING
        return State.SETTLED if self._is_settled else State.SETTLING

    # ---------------------------------------------------------------- a step

    def begin_step(self, batch: Any, batch_idx: int) -> None:
        """A batch is about to be trained on: choose what to plan if it is the first, measure if a plan is new."""
        tensors = tensors_in(batch)
        self._step = _Step(tensors, is_first=not self.loop.has_stepped)
        if not self._has_met:
            self._has_met = True
            take_workspaces(self.loop.device)
            if self.loop.processes > 1:
                self._agreed_bytes = self.loop.least(self.loop.limit_bytes(self._limit, tensors))
                self.ranks = self.loop.meet(beyond=self._beyond)
        plans = self._module.plans
        self._module.choose(batch, batch_idx)
        if self._module.plans is not plans:  # those of a guess, in a tuner's trial
            self.plan = None
        if self.watch.due:
            self.watch.start(self.loop, tensors)

    def end_backward(self) -> None:
        """The optimizer is about to step: what it allocates is nothing that a plan could change."""
        self.watch.lap()

    def end_step(self) -> bool:
        """Read the meter, and plan again if the limit was exceeded or missed by far. True if plans have settled now."""
        step = self._step
        if self.plan is not None and step is not None:
            step.is_over = True
            if self.watch.stop():
                self._correct(step)
        self._step = None
        if self.plan is None or self.watch.due or self._is_settled:
            return False
        self._is_settled = True
        return True

    def _correct(self, step: _Step) -> None:
        """Closed loop: what the plan could not know shows in the measured peak."""
        if self._module.plans is None:
            return
        peak_bytes = self.watch.backward_peak_bytes
        may_grow = not step.is_first and not self.watch.due  # with all that a step finds from those before it
        reason = self._corrections.correct(
            self._module.plans, step.runs, peak_bytes, limit_bytes=self.limit_bytes, may_grow=may_grow
        )
        if reason is not None:
            self.watch.give_up()
            self.loop.warn(
                f"the step took {format_bytes(peak_bytes)}, more than mem_limit {format_bytes(self.limit_bytes)}. "
                f"The current plan stays, since {reason}"
            )

    def end(self) -> None:
        """Give the module its own forward back, and keep what was learned in ``saved``."""
        self.watch.drop()
        self.save()
        self._module.end()
        self._step = None

    def note_shortage(self, failure: BaseException) -> None:
        """A step ran out of memory. It cannot run again: some gradients are added already, and its graph is gone."""
        plans = self._module.plans
        if self._step is None or plans is None or self.plan is None:
            return
        lowered = plans.plan is not None and plans.lower_ceiling(plans.plan)
        consequence = "the next training with this callback plans with less"
        if not isinstance(failure, ShortageError):
            reason = "A step cannot run again from where it failed"
            message = shortage_message(
                failure,
                f"{reason}, but {consequence}" if lowered else reason,
                limit_bytes=self.limit_bytes,
                predicted_bytes=self.limit_bytes - self.plan.budget_bytes + self.plan.peak_bytes,
            )
        elif lowered:  # the error says all the rest
            message = f"the device has less than mem_limit {format_bytes(self.limit_bytes)}: {consequence}"
        else:
            return
        self.loop.warn(f"RotorCallback: {message}")

    # ---------------------------------------------------------------- what the planned forward asks and tells

    def budget(self, profile: Profile) -> Budget:
        """What a plan may use now. What else there is shows when a forward begins; between steps the first counts."""
        chain = profile.chain
        batch = [] if self._step is None else self._step.batch
        resident = self.loop.resident(self._module.target.module, batch, torch.device(chain.device))
        if not batch:  # in a tuner's trial, which is known from its forward alone
            resident = replace(resident, batch_bytes=chain.input_bytes)
        first = self._others.get if self._step is None else self._others.setdefault
        resident = replace(resident, other_bytes=first(chain.fingerprint, resident.other_bytes))
        self.limit_bytes = self._agreed_bytes or self.loop.limit_bytes(self._limit, batch)
        correction_bytes = self._corrections.of(chain)
        budget = resident.budget(self.limit_bytes, correction_bytes=correction_bytes)
        if chain not in self._corrections:
            budget = replace(budget, guessed_bytes=correction_bytes)
        return replace(budget, error=TrialError) if self.loop.is_trial else budget

    def before_measuring(self) -> None:
        """Give torch's profiler to who measures."""
        self.watch.drop()

    def on_plan(self, plan: Plan) -> None:
        """Watch the steps that follow, from inside the first forward on."""
        self.plan, self.planned_module = plan, str(self._module.target)
        self.watch.renew()
        self._is_settled = False
        if not self._module.is_guess:
            for message in self._module.warnings:
                self.loop.warn(message)
            self._module.warnings.clear()
        if self._step is not None and not self._step.is_over and not self.watch.running:
            self.watch.start(self.loop, self._step.batch)

    def on_run(self, plan: Plan) -> None:
        """Count a call of the step."""
        if self._step is not None:
            self._step.runs.append(plan)

    def on_unsupported(self, error: ModelError) -> None:
        """From inside the first forward: plan the next best module, unless the user has named this one."""
        self._module.refuse(error)

    def on_busy(self, error: ProfilerBusyError) -> None:
        """Say once that the module runs plainly."""
        if not self.was_put_off:
            self.was_put_off = True
            self.loop.warn(
                "RotorCallback runs the module plainly, whatever mem_limit says, for as long as torch's profiler "
                f"records: {error}"
            )

    def on_infeasible(self, error: BudgetError) -> None:
        """Say once that training goes beyond the limit, or end it."""
        if not self._beyond:
            raise error
        if not self._warned_beyond:
            self._warned_beyond = True
            self.loop.warn(f"training goes on beyond the limit, with the plan that takes least: {error}")

    # ---------------------------------------------------------------- from one training to the next

    def save(self) -> None:
        """Keep what was measured and planned so far."""
        plans, target = self._module.plans, self._module.target
        if plans is not None and self.plan is not None:
            self.saved = SavedPlans(
                target.name,
                model_fingerprint(target.module),
                self._corrections.to_plain(),
                plans.ceiling_bytes,
                plans.records(),
            )

    def load(self, saved: SavedPlans | None) -> bool:
        """Go on without measuring again. False if it is for another model, and left aside."""
        target = None if saved is None else saved.target_in(self.loop.model)
        if saved is None or target is None:
            return False
        self.saved = saved
        if self._module.move_to(target):
            self._recall(saved)
        return True

    def _recall(self, saved: SavedPlans) -> None:
        plans = self._module.plans
        assert plans is not None
        plans.recall(saved.records)
        plans.ceiling_bytes = saved.ceiling_bytes
        self._corrections.recall(saved.corrections)


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
