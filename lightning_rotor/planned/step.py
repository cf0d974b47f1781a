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
from lightning_rotor.planned.closed_loop import Corrections
from lightning_rotor.planned.forward import PlannedForward, attach, detach, is_attached
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.out_of_memory import shortage_message
from lightning_rotor.planned.plans import BudgetSource, PlanSettings
from lightning_rotor.planned.step_watch import StepWatch
from lightning_rotor.planned.target import Target, TargetSearch, may_be_planned, named_target
from lightning_rotor.planning import Plan
from lightning_rotor.private.torch_names import INNER
from lightning_rotor.private.values import tensors_in
from lightning_rotor.profiling import Profile
from lightning_rotor.units import MemoryLimit, format_bytes

_log = logging.getLogger(__name__)


class State(enum.Enum):
    """How far a training has come."""

    LOOKING = enum.auto()
    """What has most of the compute shows in the first batch; until then there is a guess."""
    MEASURING = enum.auto()
    """The module is chosen, and has no plan yet."""
    SETTLING = enum.auto()
    """A plan is new, and the peaks of its first steps are being measured."""
    SETTLED = enum.auto()
    """Training is left alone."""


@dataclass(slots=True)
class _Step:
    """The step that is running.

    Attributes:
        batch: Its tensors.
        is_first: No optimizer has taken a step before.
        runs: The plan of each planned call so far.
        is_over: Its optimizer has stepped, and only what was measured is looked at.
    """

    batch: list[torch.Tensor]
    is_first: bool
    runs: list[Plan] = field(default_factory=list)
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class SavedPlans:
    """What a fit leaves for the next one, in plain types alone, so that checkpoints load with ``weights_only=True``.

    Attributes:
        module: Dotted name of the module in its model.
        model: Its fingerprint.
        corrections: What the closed loop had found out, from :meth:`.Corrections.to_plain`.
        ceiling_bytes: The most that a plan may take since the device ran out of memory, or None.
        records: From :meth:`.Plans.records`.
    """

    module: str
    model: str
    corrections: dict[str, list[int]]
    ceiling_bytes: int | None
    records: list[dict[str, Any]]

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> SavedPlans | None:
        """From :meth:`to_plain`, or None if that was of another version of this package."""
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


class StepPlanner(BudgetSource):
    """Keeps the steps of a training inside a limit.

    Args:
        loop: Trains.
        limit: For the whole process, as the user gave it.
        name: Dotted name of the module to plan, or None for the one with most of the compute.
        beyond: Where no plan fits, train with the one that takes least, and say so.
        settings: How plans are made.
        saved: What an earlier training has left.
    Attributes:
        plan: What training runs, or ran last; None before the first.
        planned_module: The module that it was made for, for people.
        limit_bytes: The limit, known once there is a plan.
        watch: The peaks of the steps.
    Raises:
        ModelError: No such module, or none that can be planned.
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
        self.state = State.MEASURING
        self.was_put_off = False
        self._limit, self._beyond, self._settings = limit, beyond, settings
        self._step: _Step | None = None
        self._has_met = False
        self._agreed_bytes: int | None = None
        self._corrections = Corrections()
        self._others: dict[str, int] = {}
        self._warnings: list[str] = []
        self._warned_beyond = False
        self._target: Target | None = None
        self._planned: PlannedForward | None = None
        self._search = None if name is not None else TargetSearch(loop.model, may_be_whole=loop.may_be_whole)
        self._begin(name)

    def _begin(self, name: str | None) -> None:
        """Plan the module that the user named, the one that plans were saved for, or a first guess."""
        if self._search is None:
            assert name is not None
            target: Target | None = named_target(self.loop.model, name)
        else:
            target = None if self.saved is None else self.saved.target_in(self.loop.model)
            if target is None:
                self.state = State.LOOKING
                target = self._search.best()
        self._take(target)
        if self.saved is not None and self.state is not State.LOOKING and self.saved.are_for(self.target):
            self._recall(self.saved)

    @property
    def target(self) -> Target:
        """The module that is planned."""
        assert self._target is not None
        return self._target

    @property
    def reserved_bytes(self) -> int:
        """What the process holds besides what was planned."""
        return 0 if self.plan is None else self.limit_bytes - self.plan.budget_bytes

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
        if self.state is State.LOOKING:
            assert self._search is not None
            self.state = State.MEASURING
            self._take(self._same(self._search.best_by_compute(lambda: self.loop.compute(batch, batch_idx))))
        if self.watch.due:
            self.watch.start(self.loop, tensors)

    def end_backward(self) -> None:
        """The optimizer is about to step: what it allocates is nothing that a plan could change."""
        self.watch.lap()

    def end_step(self) -> bool:
        """Read the meter, and plan again if the limit was exceeded, or missed by far.

        True if plans have settled now.
        """
        step = self._step
        if self.plan is not None and step is not None:
            step.is_over = True
            if self.watch.stop():
                self._correct(step)
        self._step = None
        if self.plan is None or self.watch.due or self.state is State.SETTLED:
            return False
        self.state = State.SETTLED
        return True

    def _correct(self, step: _Step) -> None:
        """Closed loop: what the plan could not know shows in the measured peak."""
        if self._planned is None:
            return
        peak_bytes = self.watch.backward_peak_bytes
        may_grow = not step.is_first and not self.watch.due  # with all that a step finds from those before it
        reason = self._corrections.correct(
            self._planned.plans, step.runs, peak_bytes, limit_bytes=self.limit_bytes, may_grow=may_grow
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
        if self._planned is not None:
            detach(self.target.module)
            self._planned = None
        self._step = None

    def note_shortage(self, failure: BaseException) -> None:
        """A step ran out of memory. It cannot run again: some gradients are added already, and its graph is gone."""
        if self._step is None or self._planned is None or self.plan is None:
            return
        latest = self._planned.plans.plan
        lowered = latest is not None and self._planned.plans.lower_ceiling(latest)
        consequence = "the next training with this callback plans with less"
        if not isinstance(failure, ShortageError):
            reason = "A step cannot run again from where it failed"
            message = shortage_message(
                failure,
                f"{reason}, but {consequence}" if lowered else reason,
                limit_bytes=self.limit_bytes,
                predicted_bytes=self.reserved_bytes + self.plan.peak_bytes,
            )
        elif lowered:  # the error says all the rest
            message = f"the device has less than mem_limit {format_bytes(self.limit_bytes)}: {consequence}"
        else:
            return
        self.loop.warn(f"RotorCallback: {message}")

    # ---------------------------------------------------------------- what the planned forward asks and tells

    def budget(self, profile: Profile) -> Budget:
        """What a plan may use now.

        What else there is shows when a forward begins; between steps the first is remembered.
        """
        chain = profile.chain
        batch = [] if self._step is None else self._step.batch
        resident = self.loop.resident(self.target.module, batch, torch.device(chain.device))
        if not batch:  # in a tuner's trial, which is known from its forward alone
            resident = replace(resident, batch_bytes=chain.input_bytes)
        other_bytes = resident.other_bytes
        if self._step is not None:
            other_bytes = self._others.setdefault(chain.fingerprint, other_bytes)
        resident = replace(resident, other_bytes=self._others.get(chain.fingerprint, other_bytes))
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
        self.plan, self.planned_module = plan, str(self.target)
        self.watch.renew()
        if self.state is not State.LOOKING:
            self.state = State.SETTLING
            for message in self._warnings:
                self.loop.warn(message)
            self._warnings.clear()
        if self._step is not None and not self._step.is_over and not self.watch.running:
            self.watch.start(self.loop, self._step.batch)

    def on_run(self, plan: Plan) -> None:
        """Count a call of the step."""
        if self._step is not None:
            self._step.runs.append(plan)

    def on_unsupported(self, error: ModelError) -> None:
        """From inside the first forward: plan the next best module, unless the user has named this one."""
        if self._search is None:
            raise error
        self._search.refuse(self.target)
        found = self._search.best()
        if found is None:
            raise error
        _log.info("RotorCallback cannot plan %s: %s", self.target.place, error)
        self._take(found)

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

    # ---------------------------------------------------------------- which module

    def _same(self, found: Target | None) -> Target | None:
        """Rank 0's choice: batches of different shapes may speak for different modules."""
        name = self.loop.same(None if found is None else found.name)
        if name is None or (found is not None and found.name == name):
            return found if name is not None else None
        return Target(name, self.loop.model.get_submodule(name), "as on rank 0")

    def _take(self, target: Target | None) -> None:
        """Plan a module from now on."""
        model = self.loop.model
        if target is None:
            raise ModelError(
                f"{type(model).__name__} holds no submodule with several layers and trainable parameters that its "
                "training_step calls: expected one. Put the layers that take most of the memory into an nn.Sequential "
                "or a module of their own, and call that"
            )
        if self._planned is None or self.target.module is not target.module:
            if self._planned is not None:
                detach(self.target.module)
                self._planned = None
            _check_apart(model, target)
            planned = PlannedForward(target.module, self, self._settings)
            attach(target.module, planned)
            self._planned, self.plan = planned, None
        self._target = target
        self._warnings = [*self._what_is_taken_apart(target), *self._what_is_left_out(target)]
        if self.loop.is_lead:
            level = logging.DEBUG if self.state is State.LOOKING else logging.INFO
            _log.log(level, "RotorCallback plans %s. RotorCallback(module=...) names another", target)

    def _what_is_taken_apart(self, target: Target) -> list[str]:
        """A warning if the target was compiled and does not stay so."""
        if not (self.loop.is_compiled or is_compiled(target.module) or target.name.endswith(INNER)):
            return []
        return [f"RotorCallback: {taken_apart('the LightningModule' if self.loop.is_compiled else target.place)}"]

    def _what_is_left_out(self, target: Target) -> list[str]:
        """A warning of other modules with a notable share of the compute."""
        message = None if self._search is None else self._search.what_is_left_out(target)
        return [] if message is None else [f"RotorCallback {message}"]

    # ---------------------------------------------------------------- from one training to the next

    def save(self) -> None:
        """Keep what was measured and planned so far."""
        if self._planned is not None and self.plan is not None:
            self.saved = SavedPlans(
                self.target.name,
                model_fingerprint(self.target.module),
                self._corrections.to_plain(),
                self._planned.plans.ceiling_bytes,
                self._planned.plans.records(),
            )

    def load(self, saved: SavedPlans | None) -> bool:
        """Go on without measuring again. False if it is for another model, and left aside."""
        target = None if saved is None else saved.target_in(self.loop.model)
        if saved is None or target is None:
            return False
        self.saved = saved
        if self._search is not None:
            self.state = State.MEASURING
            self._take(target)
        if self.target.module is target.module:
            self._recall(saved)
        return True

    def _recall(self, saved: SavedPlans) -> None:
        assert self._planned is not None
        self._planned.plans.recall(saved.records)
        self._planned.plans.ceiling_bytes = saved.ceiling_bytes
        self._corrections.recall(saved.corrections)


def _check_apart(model: nn.Module, target: Target) -> None:
    """No module is planned inside of another one."""
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
