"""One limit for a training step: which module is planned, what its plan may use, and whether the steps keep the limit.

A training goes through these states, and back to the third whenever there is a new plan::

    modules.is_guess ──► no plan ──► not is_settled ──► is_settled
    which module?        its first   steps are          the peaks
                         forward     watched            are known
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ReferenceType

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.capture.sequentialize import SequentialCut
from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError, ModelError, ProfilerBusyError, RotorError
from lightning_rotor.execution.pending import Pending
from lightning_rotor.memory.budget import Budget, take_workspaces
from lightning_rotor.planned.agreement import Agreement, is_spread
from lightning_rotor.planned.cache import SEAL, Prepared, Turn, model_fingerprint, seal_of
from lightning_rotor.planned.cuts import Signature
from lightning_rotor.planned.joint import PathPlans, foresight
from lightning_rotor.planned.limit import (
    BACK,
    BEHIND,
    INTO,
    LOSS,
    MEANWHILE,
    STEP_OF,
    Call,
    CallKey,
    Draws,
    Step,
    StepLimit,
    StepWatch,
    highest_of,
    is_final,
    is_step,
)
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.modules import PlannedModules
from lightning_rotor.planned.plans import BudgetSource, Plans, PlanSettings
from lightning_rotor.planned.target_search import Target, may_be_planned
from lightning_rotor.planning import Plan
from lightning_rotor.private.values import tensors_in
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.meters import END, MeteredPhase
from lightning_rotor.units import MemoryLimit


class StepPlanner(BudgetSource):
    """Keeps the steps of a training inside a limit; ``ModelError`` if a module of these names cannot be planned.

    ``names`` are dotted ones, or None for all with much of the compute. Where no plan fits, ``beyond`` trains with the
    one that takes least. ``saved`` is what an earlier training has left there, in plain types for ``weights_only``.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        limit: MemoryLimit | None,
        names: str | Sequence[str] | None,
        *,
        beyond: bool,
        settings: PlanSettings,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self.loop, self.saved = loop, saved
        self.plan: Plan | None = None
        self.watch = StepWatch()
        self.is_settled = False
        self.was_put_off = self.planned_nothing = False
        self.limit = StepLimit(loop, limit, beyond=beyond)
        self.ranks = Agreement(beyond=beyond)
        self._step: Step | None = None
        self._has_met = False
        self._is_cautious = False  # the budget told last is not what there is
        self._is_joint = False  # calls of a step may be alive together
        self._most: MeteredPhase | None = None  # that a step has taken beyond the limit under the least plan
        self._awaits_step = False  # no plan keeps the limit, and gradients add up until an optimizer steps
        self._begun = 0  # steps
        self._draws = Draws()
        self._sees_the_end_only = False  # the meter began when the backward was over
        self._on_stepped: dict[int, RemovableHandle] = {}  # hooks of optimizers in a measured step, by identity
        self._paths = PathPlans(self, self._joint_budget, slots=settings.slots)
        self.modules = PlannedModules(loop, self, settings, names)
        try:
            if not self.load(saved):
                self.modules.begin()
        except BaseException:
            self.modules.end()  # whose forwards may be replaced already
            raise

    # ---------------------------------------------------------------- a step

    def begin_step(self, batch: Any, batch_idx: int) -> None:
        """A batch is about to be trained on: choose what to plan if it is the first, measure if a plan is new."""
        self._step = Step(batch)
        if not self._has_met:
            self._has_met = True
            take_workspaces(self.loop.device())
            if self.loop.processes > 1:
                self.limit.agree(tensors_in(batch))
                if is_spread(self.loop.model):
                    self.ranks.join_all()
        if self.modules.is_guess and self.modules.choose(batch, batch_idx):  # others than a guess, in a tuner's trial
            self.plan = None
        self._begun += 1
        is_sample = self.plan is not None and (is_sample_step(self._begun) or self._draws.is_due(self._begun))
        if self.is_settled and not self._is_joint and not is_sample:
            return
        self._look_at(self._step)
        self._tell_if_nothing_is_planned()
        if self.watch.due or is_sample:
            self.watch.start(self.loop, self._step.batch, is_due=self.watch.due)

    def _look_at(self, step: Step | None) -> None:
        """Note what planning and measuring ask of a step, before its optimizer steps."""
        if step is None or step.is_first is not None:
            return
        step.batch, step.is_first = tensors_in(step.given), not self.loop.steps()
        if step.is_first:
            step.missing, step.state_bytes = self.limit.missing(), self.limit.state_bytes()
        step.optimizers = len(self.loop.optimizers())

    def begin_backward(self) -> None:
        """The loss is known."""
        self.watch.mark(LOSS)

    def end_backward(self) -> None:
        """A backward is over."""
        self._mark_behind(END)

    def _mark_behind(self, label: str) -> None:
        """Begin a phase that no plan can change, unless calls still wait for their backward."""
        if self._step is not None and self.watch.running:
            self.watch.mark(MEANWHILE if self._step.waiting else label)

    def begin_optimizer_step(self, optimizer: Any = None) -> None:
        """An optimizer is about to step."""
        step = self._step
        if step is None or self.plan is None:
            return
        self.limit.end_backward(step, self.watch)
        if not self.watch.running and not self.limit.knows_final_peak:
            self._look_at(step)
            if not step.is_first:  # the steps that were measured had none: gradients add up
                self._sees_the_end_only = self.watch.start(self.loop, step.batch, is_due=False)
        if not self.watch.running:
            return
        self._mark_behind(f"{STEP_OF} {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.Optimizer) and id(optimizer) not in self._on_stepped:
            hook = optimizer.register_step_post_hook(lambda *_: self._mark_behind(END))
            self._on_stepped[id(optimizer)] = hook

    def end_step(self) -> bool:
        """Read the meter, and plan again if the limit was exceeded or missed by far. True if plans have settled now."""
        step, shows_modules = self._step, self.modules.is_open
        self._unhook()
        if step is not None and shows_modules:
            self._close(step)
        if step is not None and self.plan is None:
            self._compare_without_a_plan(step)
        self.modules.tell()
        if self.plan is not None and step is not None:
            step.is_over = True
            is_measured = self.watch.stop()
            if is_measured:
                step.growing_bytes = self.limit.growing_bytes()
            if is_measured and step.is_first:
                step.learn_state(self.limit.state_bytes())
            phases = step.as_later(self.watch.phases) if is_measured else []
            self.limit.learn_final(step, phases)
            self.limit.end_step(step, self.watch, is_measured=is_measured)
            sees_all = is_measured and not self._sees_the_end_only
            self._sees_the_end_only = False
            self._is_joint |= step.is_joint
            if self._is_joint:
                self._follow(step, phases if sees_all else [])
            elif sees_all and not shows_modules:
                self._correct(step, phases)
            if self._awaits_step and any(map(is_step, phases)):  # the last of those whose gradients add up
                self._exceeded(step)
            self.limit.check_final(step, phases)
        self._step = None
        if self.plan is None or self.watch.due or self.is_settled:
            return False
        self.is_settled = True
        return True

    def _tell_if_nothing_is_planned(self) -> None:
        """Say once that training runs as without a plan, and watch some steps, for the limit holds all the same."""
        reason = self.modules.why_nothing
        if self.plan is not None or self.planned_nothing or not reason or self._step is None:
            return
        self.planned_nothing = True
        self.limit.take(self._step.batch)
        self.watch.renew()
        self.loop.warn(
            f"RotorCallback plans nothing, so this training keeps all activations, as without a limit: {reason}. "
            "Steps are still compared with mem_limit"
        )

    def _close(self, step: Step) -> None:
        """The first step has shown which modules it calls. One call alone is planned again, with all that is left."""
        step.leave_out(self.modules.close([call.key.name for call in step.numbers]))
        if len(step.numbers) == 1:
            step.is_shared = False
            self.modules.unplan(lambda plan: False)

    def _compare_without_a_plan(self, step: Step) -> None:
        """The limit holds for steps in which nothing is planned, too."""
        self._tell_if_nothing_is_planned()
        if self.watch.stop() and not step.is_first:
            highest = highest_of(self.watch.phases)
            if highest is not None and highest.peak_bytes > self.limit.size_bytes:
                self.limit.exceeded_without_a_plan(highest.peak_bytes)

    def _unhook(self) -> None:
        """Take the hooks off the optimizers. Not inside of them, for torch goes through all while they run."""
        for handle in self._on_stepped.values():
            handle.remove()
        self._on_stepped = {}

    def _follow(self, step: Step, phases: Sequence[MeteredPhase]) -> None:
        """Plan calls that were alive together as one, by what the step has shown."""
        if not self.ranks.any(bool(phases)) and all(map(self._paths.running, step.paths)):
            return
        highest = highest_of(phase for phase in phases if not is_final(phase))
        exceeds = highest is not None and highest.peak_bytes > self.limit.size_bytes
        if highest is not None and not step.is_first:
            self._learn_draw(step, highest.peak_bytes)
        self._paths.follow(step, phases, exceeds=exceeds)
        self.plan = self._paths.largest(step) or self.plan
        if not exceeds or step.is_first:
            return
        self._note_most(highest)
        if not any(call.has_another_plan for call in step.numbers):
            self._exceeded(step)

    def _correct(self, step: Step, phases: Sequence[MeteredPhase]) -> None:
        """Closed loop: what the plan could not know shows in the measured peak."""
        highest = highest_of(phase for phase in phases if not is_final(phase))
        if highest is None:
            return
        if not step.is_first:  # with all that a step finds from those before it
            self._learn_draw(step, highest.peak_bytes)
        may_grow = not step.is_first and not self.watch.due and not self._draws.are_seen
        foresight_of = partial(foresight, step, phases)
        is_enough = self.limit.correct(self.modules, step, highest.peak_bytes, foresight_of, may_grow=may_grow)
        if not is_enough and not step.is_first:
            self._note_most(highest)
            self._exceeded(step)

    def _learn_draw(self, step: Step, peak_bytes: int) -> None:
        """Compare a step that is not the first with others under the same plans."""
        plans = (call.plan for call in step.numbers)
        self._draws.learn(plans, peak_bytes, self.limit.size_bytes, processes=self.loop.processes)

    def _note_most(self, highest: MeteredPhase | None) -> None:
        """Remember the highest peak of steps that no plan has kept inside the limit."""
        if highest is not None and (self._most is None or highest.peak_bytes > self._most.peak_bytes):
            self._most = highest

    def _exceeded(self, step: Step) -> None:
        """No plan takes less than a step has taken that is not the first, which takes what no later one does."""
        assert self._most is not None
        self._awaits_step = self._adds_up()  # the steps up to the optimizer's may take more
        if self._awaits_step:
            self.watch.renew()
            return
        self.watch.give_up()
        self.limit.exceeded(self._most, step, spread_bytes=self._draws.spread_bytes)

    def _adds_up(self) -> bool:
        """True if gradients go on adding up behind a measured step."""
        return not self.loop.gradients_linger() and not any(map(is_step, self.watch.phases))

    def end(self) -> None:
        """Give the modules their own forwards back, and keep what was learned in ``saved``."""
        self.watch.drop()
        self._unhook()
        self.save()
        self.modules.end()
        self._step = None

    def note_shortage(self, failure: BaseException) -> None:
        """A step ran out of memory. It cannot run again: some gradients are added already, and its graph is gone."""
        if self._step is None or self.plan is None:
            return
        plans = [module.plans for module in self.modules]
        lowered = [each.ceiling.lower(each.plan) for each in plans if each.plan is not None]
        self.limit.note_shortage(failure, self.plan, lowered=any(lowered))

    # ---------------------------------------------------------------- what the planned forward asks and tells

    @property
    def turn(self) -> Turn:
        """Names of the modules whose calls wait for their backward."""
        return () if self._step is None else tuple(call.key.name for call in self._step.waiting)

    def budget(self, plans: Plans, profile: Profile) -> Budget:
        """What a plan for one call may use now: as little as it can, until the step is over, if there are others."""
        self._look_at(self._step)
        budget = self.limit.budget(profile.chain, self.modules.all, self._step)
        waiting = () if self._step is None else self._step.waiting
        is_first_of_many = self._step is not None and self.modules.is_open
        self._is_cautious = bool(waiting) or is_first_of_many or not self.modules.is_alone(plans)
        if not self._is_cautious:
            return budget
        if self._step is not None:
            self._step.is_shared = True
        return budget.reduced_to(0, "other calls of the step")

    def may_plan_again(self, plans: Plans) -> bool:
        """Calls that are alive together, and those of processes in lockstep, are not planned by the seconds of each."""
        return not self.ranks.together and not self._is_joint and self.modules.is_alone(plans)

    def _joint_budget(self, chain: Chain, copied_bytes: int) -> Budget:
        """What calls that are alive together may use."""
        self._look_at(self._step)
        budget = self.limit.budget(chain, self.modules.all, self._step, correction_bytes=0)
        return replace(budget, lingering_bytes=budget.lingering_bytes + copied_bytes)

    def before_measuring(self) -> None:
        """Give torch's profiler to who measures."""
        self.watch.drop()

    def on_plan(self, plan: Plan) -> None:
        """Watch the steps that follow, from inside the first forward on."""
        self.plan = plan
        self.watch.renew()
        self.is_settled = False
        if any(module.plans.plan is None for module in self.modules):
            return  # others are still to be measured, which takes torch's profiler away again, or may be refused
        self.modules.tell()
        if self._step is not None and not self._step.is_over and not self.watch.running:
            self.watch.start(self.loop, self._step.batch)

    def on_start(self, value: Any) -> None:
        """A call is about to run."""
        if self._step is None:
            return
        if self._step.is_first and not self._step.numbers and self.loop.device().type == "cpu":
            self._step.find(tensors_in(value))
        self.watch.mark(f"{INTO} {len(self._step.numbers)}")

    def on_run(self, plans: Plans, signature: Signature, prepared: Prepared, pending: ReferenceType[Pending]) -> None:
        """Count a call of the step."""
        if self._step is None:
            return
        call = Call(CallKey(plans, signature, prepared.turn), prepared, pending)
        self._step.add(call)
        waiting = pending()
        if waiting is not None and (not self.is_settled or self.watch.running):
            waiting.on_backward = partial(self._begin_backward_of, call)
        self.watch.mark(f"{BEHIND} {self._step.numbers[call]}")

    def _begin_backward_of(self, call: Call) -> None:
        """The backward has reached a call."""
        if self._step is not None and call in self._step.numbers:
            self.watch.mark(f"{BACK} {self._step.numbers[call]}")
        if torch.is_grad_enabled():
            self._paths.keep(call.key)

    def on_unsupported(self, plans: Plans, error: RotorError) -> None:
        """From inside the first forward: plan what is next best, unless the user has named this one."""
        self.modules.refuse(plans, error)

    def objection(self, plans: Plans, cut: SequentialCut | GraphCut) -> ModelError | None:
        """Why the parts of a module should be planned in its place."""
        return self.modules.objection(plans, cut)

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
        if not self._is_cautious:
            self.limit.refuse(error, self._step)

    # ---------------------------------------------------------------- from one training to the next

    def save(self) -> None:
        """Keep what was measured and planned so far: the first module and, as ``others``, further ones."""
        modules = [module.to_plain() for module in self.modules]
        if self.plan is not None and modules:
            saved = {**modules[0], "corrections": self.limit.to_plain(), "others": modules[1:]}
            self.saved = {**saved, SEAL: seal_of(saved)}

    def load(self, saved: Mapping[str, Any] | None) -> bool:
        """Go on without measuring again. False if it is for another model or version, and left aside."""
        if not isinstance(saved, Mapping) or SEAL not in saved or saved[SEAL] != seal_of(saved):
            return False
        if not {"module", "model", "ceiling_bytes", "records", "corrections"} <= saved.keys():
            return False
        known = {each["module"]: each for each in (saved, *saved.get("others", ()))}
        targets = [target for each in known.values() if (target := _target_in(self.loop.model, each)) is not None]
        if len(targets) < len(known):
            return False
        self.saved = saved
        self.modules.begin(targets)
        present = {module.target.name: module.plans for module in self.modules}
        if present.keys() == known.keys():  # those that the user has named may be others
            for name, plans in present.items():
                plans.recall(known[name]["records"])
                plans.ceiling.size_bytes = known[name]["ceiling_bytes"]
            self.limit.recall(saved["corrections"])
        return True


_FIRST_SAMPLE, _SAMPLES_APART = 8, 1024


def is_sample_step(number: int) -> bool:
    """True of the steps that are measured in any case: some optimizers, data and models take more as they go on."""
    return number % _SAMPLES_APART == 0 or (number >= _FIRST_SAMPLE and number.bit_count() == 1)


def _target_in(model: nn.Module, saved: Mapping[str, Any]) -> Target | None:
    """The module in a model that was saved, or None if it is not there as it was."""
    name, module = saved["module"], dict(model.named_modules()).get(saved["module"])
    if module is None or not may_be_planned(module) or model_fingerprint(module) != saved["model"]:
        return None
    return Target(name, module, "as before")
