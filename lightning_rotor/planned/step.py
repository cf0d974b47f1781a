"""One limit for a training step: which module is planned, what its plan may use, and whether the steps keep the limit.

A :class:`StepPlanner` goes through these states, and back to ``SETTLING`` whenever there is a new plan::

    LOOKING ──► MEASURING ──► SETTLING ──► SETTLED
    which       its first     steps are    the peaks
    module?     forward       watched      are known
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError, ModelError, ProfilerBusyError, TrialError
from lightning_rotor.memory.budget import Budget, take_workspaces
from lightning_rotor.memory.devices import usable_bytes
from lightning_rotor.memory.held import (
    existing_gradient_bytes,
    gradient_bytes,
    optimizer_state_bytes,
    predict_optimizer_state_bytes,
)
from lightning_rotor.planned.cache import model_fingerprint
from lightning_rotor.planned.calls import BACK, BEHIND, INTO, LOSS, Call, Step
from lightning_rotor.planned.closed_loop import Corrections, StepWatch
from lightning_rotor.planned.forward import note_of_shortage
from lightning_rotor.planned.joint import PathPlans
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.modules import PlannedModule, PlannedModules
from lightning_rotor.planned.plans import PlanSettings
from lightning_rotor.planned.ranks import Agreement
from lightning_rotor.planned.target import Target, may_be_planned
from lightning_rotor.planning import Plan
from lightning_rotor.private.values import tensors_in
from lightning_rotor.profiling import Profile
from lightning_rotor.units import MemoryLimit, format_bytes


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


@dataclass(frozen=True, slots=True)
class SavedPlans:
    """What a fit leaves for the next one, in plain types alone, so that checkpoints load with ``weights_only=True``.

    ``others`` are the fields ``module``, ``model``, ``ceiling_bytes`` and ``records`` of further modules.
    """

    module: str
    model: str
    corrections: dict[str, list[int]]
    ceiling_bytes: int | None
    records: list[dict[str, Any]]
    others: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, modules: Iterable[PlannedModule], corrections: Corrections) -> SavedPlans:
        """What is known of modules."""
        first, *others = map(_saved, modules)
        return cls(**first, corrections=corrections.to_plain(), others=others)

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

    @property
    def modules(self) -> list[dict[str, Any]]:
        """All of them alike."""
        names = ("module", "model", "ceiling_bytes", "records")
        return [{name: getattr(self, name) for name in names}, *self.others]

    def targets_in(self, model: nn.Module) -> list[Target]:
        """The modules in a model, or none if they are not all in it as they were."""
        found = []
        for saved in self.modules:
            module = dict(model.named_modules()).get(saved["module"])
            if module is None or not may_be_planned(module) or model_fingerprint(module) != saved["model"]:
                return []
            found.append(Target(saved["module"], module, "as before"))
        return found

    def recall(self, modules: Iterable[PlannedModule]) -> bool:
        """Let modules go on with what was known of them. True if these are the ones."""
        present = {module.target.name: module for module in modules}
        known = [present.get(saved["module"]) for saved in self.modules]
        if len(known) != len(present) or not all(
            module is not None and model_fingerprint(module.target.module) == saved["model"]
            for module, saved in zip(known, self.modules, strict=True)
        ):
            return False
        for module, saved in zip(known, self.modules, strict=True):
            assert module is not None
            module.plans.recall(saved["records"])
            module.plans.ceiling_bytes = saved["ceiling_bytes"]
        return True


class StepLimit:
    """What plans may use of a user's limit."""

    def __init__(self, loop: TrainingLoop, limit: MemoryLimit | None) -> None:
        self.size_bytes = 0
        self.corrections = Corrections()
        self._loop, self._limit = loop, limit
        self._agreed_bytes: int | None = None
        self._others: dict[str, int] = {}

    def agree(self, batch: Sequence[torch.Tensor]) -> None:
        """Take the least limit of all processes."""
        self._agreed_bytes = self._loop.least(self._loop.limit_bytes(self._limit, batch))

    def budget(
        self, chain: Chain, modules: nn.Module, step: Step | None, *, correction_bytes: int | None = None
    ) -> Budget:
        """What a plan may use. What else there is shows when a forward begins; between steps the first counts."""
        batch = [] if step is None else step.batch
        resident = self._loop.resident(modules, batch, torch.device(chain.device))
        if not batch:  # in a tuner's trial, which is known from its forward alone
            resident = replace(resident, batch_bytes=chain.input_bytes)
        resident = replace(resident, other_bytes=self._other_bytes(chain, step, resident.other_bytes))
        self.size_bytes = self._agreed_bytes or self._loop.limit_bytes(self._limit, batch)
        if correction_bytes is None:
            correction_bytes = self.corrections.of(chain)
        budget = resident.budget(self.size_bytes, correction_bytes=correction_bytes)
        if chain not in self.corrections:
            budget = replace(budget, guessed_bytes=correction_bytes)
        return replace(budget, error=TrialError) if self._loop.is_trial else budget

    def _other_bytes(self, chain: Chain, step: Step | None, now_bytes: int) -> int:
        """What else there was when the first forward of the step began."""
        if step is None:
            return self._others.get(chain.fingerprint, now_bytes)
        if step.other_bytes is None:
            step.other_bytes = now_bytes
        return self._others.setdefault(chain.fingerprint, step.other_bytes)


class StepPlanner:
    """Keeps the steps of a training inside a limit; ``ModelError`` if a module of these names cannot be planned.

    Args:
        limit: For the whole process, as the user gave it.
        names: Dotted names of the modules to plan, or None for all with much of the compute.
        beyond: Where no plan fits, train with the one that takes least, and say so.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        limit: MemoryLimit | None,
        names: str | Sequence[str] | None,
        *,
        beyond: bool,
        settings: PlanSettings,
        saved: SavedPlans | None = None,
    ) -> None:
        self.loop, self.saved = loop, saved
        self.ranks = Agreement()
        self.plan: Plan | None = None
        self.planned_modules = ""
        self.watch = StepWatch()
        self._is_settled = False
        self.was_put_off = False
        self._limit = StepLimit(loop, limit)
        self._beyond, self._slots = beyond, settings.slots
        self._step: Step | None = None
        self._has_met = False
        self._warned_beyond = False
        self._is_cautious = False  # the budget told last is not what there is
        self._told = Budget(0)
        self._refused: tuple[Budget, BudgetError] | None = None  # what to raise when the step has run
        self._is_joint = False  # calls of a step may be alive together
        self._paths = PathPlans(self._joint_budget, self._solve)
        self._modules = PlannedModules(loop, self, settings, names)
        self._modules.begin([] if saved is None else saved.targets_in(loop.model))
        if saved is not None:
            self._recall(saved)

    @property
    def limit_bytes(self) -> int:
        """The limit of the whole process, 0 before it is known."""
        return self._limit.size_bytes

    @property
    def state(self) -> State:
        """State of the training."""
        if self._modules.is_guess:
            return State.LOOKING
        if self.plan is None:
            return State.MEASURING
        return State.SETTLED if self._is_settled else State.SETTLING

    # ---------------------------------------------------------------- a step

    def begin_step(self, batch: Any, batch_idx: int) -> None:
        """A batch is about to be trained on: choose what to plan if it is the first, measure if a plan is new."""
        tensors = tensors_in(batch)
        self._step = Step(tensors, is_first=not self.loop.has_stepped)
        if not self._has_met:
            self._has_met = True
            take_workspaces(self.loop.device)
            if self.loop.processes > 1:
                self._limit.agree(tensors)
                self.ranks = self.loop.meet(beyond=self._beyond)
        if self._modules.is_guess:
            before = list(self._modules)
            self._modules.choose(batch, batch_idx)
            if list(self._modules) != before:  # those of a guess, in a tuner's trial
                self.plan = None
        if self._step.is_first:
            self._step.missing = self._missing()
        if self.watch.due:
            self.watch.start(self.loop, tensors)

    def _missing(self) -> tuple[int, int]:
        """What later steps hold besides, in forwards and in backwards: a first step has neither state nor gradients."""
        loop = self.loop
        with loop.untoggled():
            gradients = gradient_bytes(loop.model) - existing_gradient_bytes(loop.model)
            state = sum(predict_optimizer_state_bytes(each) - optimizer_state_bytes(each) for each in loop.optimizers)
        return gradients + state, state if loop.gradients_linger else gradients + state

    def begin_backward(self) -> None:
        """The loss is known."""
        self.watch.mark(LOSS)

    def end_backward(self) -> None:
        """The optimizer is about to step: what it allocates is nothing that a plan could change."""
        self.watch.mark()
        refused, self._refused = self._refused, None
        if refused is None or self._step is None:
            return
        # The weights are as they were, and a step under the least plan has shown what it takes.
        budget, error = refused
        peak_bytes = max((phase.peak_bytes for phase in self._step.as_later(self.watch.take())), default=0)
        rest_bytes = max(peak_bytes - error.minimum_bytes, 0)
        least_bytes = error.minimum_bytes - budget.reserved_bytes
        raise budget.reduced_to(budget.available_bytes - rest_bytes, "the rest of the step").refusal(
            least_bytes, error.stage
        )

    def end_step(self) -> bool:
        """Read the meter, and plan again if the limit was exceeded or missed by far. True if plans have settled now."""
        step = self._step
        if self.plan is not None and step is not None:
            step.is_over = True
            is_measured = self.watch.stop()
            self._is_joint |= step.is_joint
            if self._is_joint:
                self._follow(step, is_measured=is_measured)
            elif is_measured:
                self._correct(step)
        self._step = None
        if self.plan is None or self.watch.due or self._is_settled:
            return False
        self._is_settled = True
        return True

    def _follow(self, step: Step, *, is_measured: bool) -> None:
        """Plan calls that were alive together as one, by what the step has shown."""
        phases = self.watch.phases if is_measured else []
        exceeds = is_measured and self.watch.backward_peak_bytes > self.limit_bytes
        self._paths.follow(step, phases, exceeds=exceeds)
        self.plan = self._paths.largest(step)
        if exceeds and not any(call.has_another_plan for call in step.numbers):
            self._exceeded(step)

    def _correct(self, step: Step) -> None:
        """Closed loop: what the plan could not know shows in the measured peak."""
        may_grow = not step.is_first and not self.watch.due  # with all that a step finds from those before it
        is_enough = self._limit.corrections.correct(
            self,
            [path[0].plan for path in step.paths],
            self.watch.backward_peak_bytes,
            limit_bytes=self.limit_bytes,
            may_grow=may_grow,
        )
        if not is_enough:
            self._exceeded(step)

    def _exceeded(self, step: Step) -> None:
        """No plan takes less than this step has taken. The first takes what no later one does."""
        if not step.is_first:
            self.watch.give_up()
            self._go_beyond(self._too_much(self.watch.backward_peak_bytes))

    def _too_much(self, peak_bytes: int) -> BudgetError:
        """A measured step has exceeded the limit under the plan that takes least."""
        assert self.plan is not None
        limit_bytes = self.limit_bytes
        names = getattr(self.plan, "names", None) or [module.target.name for module in self._modules]
        calls = ", ".join(
            f"{format_bytes(call.peak_bytes)} in {name or 'the model itself'}"
            for name, call in zip(names, self.plan.calls, strict=False)
        )
        return BudgetError(
            f"mem_limit {format_bytes(limit_bytes)} is below the minimum {format_bytes(peak_bytes)} ({peak_bytes:,} "
            f"bytes) for this model and batch, which a measured step has taken under the plan that takes least: "
            f"{calls}, and the rest of the step. Raise mem_limit or lower the batch size",
            budget_bytes=limit_bytes,
            minimum_bytes=peak_bytes,
            stage=max(self.plan.calls, key=lambda call: call.peak_bytes).chain.names[0],
        )

    def replan(self, plan: Plan) -> Plan:
        """A new plan in the place of one that steps run under, with the budget of this moment."""
        module = next((module for module in self._modules if module.plans.runs(plan)), None)
        return plan if module is None else module.plans.replan(plan)

    def unplan(self, keep: Callable[[Plan], bool]) -> None:
        """Drop all plans but those to keep."""
        for module in self._modules:
            module.plans.unplan(keep)

    def is_capped(self, plan: Plan) -> bool:
        """True if a plan has all that plans may take since the device ran out of memory."""
        return any(module.plans.is_capped(part) for module in self._modules for part in plan.calls)

    def end(self) -> None:
        """Give the modules their own forwards back, and keep what was learned in ``saved``."""
        self.watch.drop()
        self.save()
        self._modules.end()
        self._step = None

    def note_shortage(self, failure: BaseException) -> None:
        """A step ran out of memory. It cannot run again: some gradients are added already, and its graph is gone."""
        if self._step is None or self.plan is None:
            return
        lowered = any(list(map(_lower, self._modules)))
        predicted_bytes = self.limit_bytes - self.plan.budget_bytes + self.plan.peak_bytes
        message = note_of_shortage(
            failure, lowered=lowered, limit_bytes=self.limit_bytes, predicted_bytes=predicted_bytes
        )
        if message is not None:
            self.loop.warn(f"RotorCallback: {message}")

    # ---------------------------------------------------------------- what the planned forward asks and tells

    def turn(self, module: PlannedModule) -> int:
        """How many earlier calls of a module wait for their backward."""
        return 0 if self._step is None else [call.module for call in self._step.waiting].count(module)

    def budget(self, module: PlannedModule, profile: Profile) -> Budget:
        """What a plan for one call may use now: as little as it can, until the step is over, if there are others."""
        budget = self._limit.budget(profile.chain, self._modules.all, self._step)
        waiting = () if self._step is None else self._step.waiting
        self._is_cautious = bool(waiting) or not self._modules.is_alone(module)
        self._told = budget
        if not self._is_cautious:
            return budget
        if self._step is not None:
            self._step.is_shared = True
        return budget.reduced_to(0, "other calls of the step")

    def _joint_budget(self, chain: Chain, copied_bytes: int) -> Budget:
        """What calls that are alive together may use."""
        budget = self._limit.budget(chain, self._modules.all, self._step, correction_bytes=0)
        return replace(budget, lingering_bytes=budget.lingering_bytes + copied_bytes)

    def _solve(self, chain: Chain, budget: Budget, must_fit: bool) -> Plan:
        """Plan such calls, as all processes agree. Where nothing fits, a step under the least plan shows what it is."""
        try:
            outcome = budget.plan(chain, slots=self._slots)
        except BudgetError as error:
            if must_fit:
                raise
            outcome = budget.least_plan(chain, error, slots=self._slots)
        return self.ranks.settle(chain.fingerprint, outcome)

    def before_measuring(self) -> None:
        """Give torch's profiler to who measures."""
        self.watch.drop()

    def on_plan(self, plan: Plan) -> None:
        """Watch the steps that follow, from inside the first forward on."""
        self.plan, self.planned_modules = plan, str(self._modules)
        self.watch.renew()
        self._is_settled = False
        self._tell()
        if self._step is None or self._step.is_over or self.watch.running:
            return
        # Not while others are still to be measured, which takes torch's profiler away again.
        if all(module.plans.plan is not None for module in self._modules):
            self.watch.start(self.loop, self._step.batch)

    def on_start(self) -> None:
        """A call is about to run."""
        if self._step is not None:
            self.watch.mark(f"{INTO} {len(self._step.numbers)}")

    def on_run(self, call: Call) -> None:
        """Count a call of the step."""
        if self._step is None:
            return
        if self._step.is_first and not self._step.numbers and self.loop.device.type == "cpu":
            self._step.find(call.signature)
        self._step.add(call)
        pending = call.pending()
        if pending is not None and not self._is_settled:
            pending.on_backward = partial(self._begin_backward_of, call)
        self.watch.mark(f"{BEHIND} {self._step.numbers[call]}")

    def _begin_backward_of(self, call: Call) -> None:
        """The backward has reached a call."""
        if self._step is not None and call in self._step.numbers:
            self.watch.mark(f"{BACK} {self._step.numbers[call]}")
        if torch.is_grad_enabled():
            self._paths.keep(call.key)

    def on_unsupported(self, module: PlannedModule, error: ModelError) -> None:
        """From inside the first forward: plan what is next best, unless the user has named this one."""
        self._modules.refuse(module, error)
        if self.plan is not None:
            self._tell()

    def _tell(self) -> None:
        """Warn of what is not planned, or not as it was."""
        if not self._modules.is_guess:
            for message in self._modules.warnings:
                self.loop.warn(message)
            self._modules.warnings.clear()

    def on_busy(self, error: ProfilerBusyError) -> None:
        """Say once that the module runs plainly."""
        if not self.was_put_off:
            self.was_put_off = True
            self.loop.warn(
                "RotorCallback runs the module plainly, whatever mem_limit says, for as long as torch's profiler "
                f"records: {error}"
            )

    def on_infeasible(self, error: BudgetError) -> None:
        """Say once that training goes beyond the limit, or end it: now, or once the step has shown what it needs."""
        if self._is_cautious:
            return
        loop, runs = self.loop, self._step is not None and not self._step.is_over
        is_simple = runs and loop.gradients_linger and not loop.is_trial and loop.processes == 1
        if self._beyond or not is_simple or self._has_no_more(error):
            self._go_beyond(error)
        else:
            self._refused = self._told, error

    def _has_no_more(self, error: BudgetError) -> bool:
        """True if the device has no memory for the least plan."""
        device = self.loop.device
        return device.type == "cuda" and error.minimum_bytes - self.limit_bytes > usable_bytes(device)

    def _go_beyond(self, error: BudgetError) -> None:
        """Say once that training goes beyond the limit, or end it."""
        if not self._beyond:
            raise error
        if not self._warned_beyond:
            self._warned_beyond = True
            self.loop.warn(f"training goes on beyond the limit, with the plan that takes least: {error}")

    # ---------------------------------------------------------------- from one training to the next

    def save(self) -> None:
        """Keep what was measured and planned so far."""
        if self.plan is not None and any(True for _ in self._modules):
            self.saved = SavedPlans.of(self._modules, self._limit.corrections)

    def load(self, saved: SavedPlans | None) -> bool:
        """Go on without measuring again. False if it is for another model, and left aside."""
        targets = [] if saved is None else saved.targets_in(self.loop.model)
        if saved is None or not targets:
            return False
        self.saved = saved
        self._modules.move_to(targets)
        self._recall(saved)
        return True

    def _recall(self, saved: SavedPlans) -> None:
        if saved.recall(self._modules):
            self._limit.corrections.recall(saved.corrections)


def _saved(module: PlannedModule) -> dict[str, Any]:
    """What is known of a module."""
    return {
        "module": module.target.name,
        "model": model_fingerprint(module.target.module),
        "ceiling_bytes": module.plans.ceiling_bytes,
        "records": module.plans.records(),
    }


def _lower(module: PlannedModule) -> bool:
    """Let the module's plans take less than the latest does. True if they can."""
    plan = module.plans.plan
    return plan is not None and module.plans.lower_ceiling(plan)
