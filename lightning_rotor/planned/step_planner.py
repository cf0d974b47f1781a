"""Keeps the steps of a training inside one limit: hears of each step, plans its calls, watches, and corrects.

The states of a training, and the events that lead from one to another, are a table in ``step_state``. The moments of a
step, as an adapter of a framework tells them::

    begin_step ─ forwards of planned modules ─ begin_backward ─ end_backward ─ begin_optimizer_step ─ end_step
    choose,      budget(), hear()              └──────────── mark phases ─────────────────────────┘  read the meter,
    watch                                                                                            plan better
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.memory.budget import Budget
from lightning_rotor.memory.held import existing_gradient_bytes
from lightning_rotor.planned.agreement import Agreement, is_spread
from lightning_rotor.planned.budget_source import (
    BudgetSource,
    CallBegins,
    CallRan,
    MeasuringBegins,
    ModuleCut,
    NoChain,
    NothingFits,
    PlanEvent,
    PlanMade,
    ProfilerBusy,
)
from lightning_rotor.planned.compiled_steps import PRESSED_KEY, CompiledSteps
from lightning_rotor.planned.joint_paths import has_room
from lightning_rotor.planned.joint_plans import JointPlans
from lightning_rotor.planned.kept_sizes import KeptSizes
from lightning_rotor.planned.limit import StepLimit
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.modules import PlannedModules
from lightning_rotor.planned.plan_settings import PlanSettings
from lightning_rotor.planned.prepared import Prepared, Turn, leaves_much_room
from lightning_rotor.planned.records import SEAL, model_fingerprint, seal_of
from lightning_rotor.planned.running_step import Call, CallKey, Step
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planned.step_state import UNDER_A_PLAN, WITHOUT_A_PLAN, Event, Mode, State, following
from lightning_rotor.planned.step_watch import StepWatch
from lightning_rotor.planned.target_search import Target, may_be_planned
from lightning_rotor.planning import Plan
from lightning_rotor.planning.step_draws import Draws, is_sample_step
from lightning_rotor.planning.step_phases import PhaseKind, StepPhase, highest_of
from lightning_rotor.private.torch_names import compilation_heard
from lightning_rotor.private.values import tensors_in
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.workspaces import take_workspaces
from lightning_rotor.units import MemoryLimit, format_bytes

# Where sizes change at every step, there is always another plan, and it may never be one that fits, or is watched.
_MOST_EXCESSES = 4


class StepPlanner(BudgetSource):
    """Keeps the steps of a training inside a limit; ``ModelError`` if a module of these names cannot be planned.

    Args:
        loop: The training.
        limit: For the process; None for what is free.
        names: Dotted names of modules to plan, or None for all with much of the compute.
        beyond: Where no plan fits, train with the one that takes least.
        settings: For all modules.
        saved: What an earlier training has left in ``saved``, in plain types for ``weights_only``.
    """

    takes_apart = True

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
        self.loop = loop
        self.saved = saved
        # The plan that steps run under; the largest of several.
        self.plan: Plan | None = None
        self.state = State.CHOOSING
        self._mode = Mode()
        self.watch = StepWatch()
        self.limit = StepLimit(loop, limit, beyond=beyond)
        # Before the modules, whose plans read it.
        self.ranks = Agreement(beyond=beyond)
        self.modules = PlannedModules(loop, self, settings, names)
        self._step: Step | None = None
        self._steps_begun = 0
        # Of the last step: what decides how much a step takes, and may change by epoch.
        self._habits: tuple[object, ...] = ()
        self._draws = Draws()
        self._kept_sizes = KeptSizes()
        self._offloads = settings.offload is not None
        self._joint_plans = JointPlans(self, self._joint_budget, slots=settings.slots)
        # The highest peak beyond the limit of a step under the plans that take least, and whether the gradients of
        # such a step are to add up until an optimizer steps.
        self._highest_excess: StepPhase | None = None
        self._awaits_optimizer = False
        # Measured steps beyond the limit, of calls that share it, since one of a joint plan was inside it.
        self._excesses = 0
        # Peak of the step before, if that has taken more than the limit and was not the first: a smaller plan, or an
        # error, comes with the next one.
        self._unanswered_bytes = 0
        # Gradients that the measured step before has found, and whether one has found less since.
        self._most_gradient_bytes = 0
        self._lacked_gradients = False
        # Hooks of optimizers in a measured step, by the optimizers' identity.
        self._step_hooks: dict[int, RemovableHandle] = {}
        self._compiled_steps = CompiledSteps()
        self.has_run_as_compiled = False
        # Undone behind a measured step: hearing of what torch.compile compiles.
        self._compilation = ExitStack()
        try:
            # Of a damaged checkpoint it may be anything, and is left aside when it is loaded.
            if isinstance(saved, dict) and saved.get(PRESSED_KEY):
                self.modules.wake()
            if not self.load(saved):
                is_certain = self.modules.begin()
                if is_certain:
                    self._become(Event.CHOSEN)
                    self._leave_compiled()
        except BaseException:
            self.modules.end()  # whose forwards may be replaced already
            raise

    def _become(self, event: Event) -> None:
        """Go to the state that follows an event."""
        self.state = following(self.state, event)

    # ---------------------------------------------------------------- a step

    def begin_step(self, batch: Any, batch_idx: int) -> None:
        """A batch is about to be trained on: choose what to plan if it is the first, measure if a plan is new."""
        self._step = Step(batch)
        if self._steps_begun == 0:
            self.loop.steps_before = self.loop.steps()
            self._meet_others(batch)
        if self.state is State.CHOOSING:
            self._choose(batch, batch_idx)
        self._steps_begun += 1
        self._watch_new_habits()
        if self.plan is None:
            self._unanswered_bytes = 0  # the plan that this step gets is the answer
        if self.state is State.AS_COMPILED:
            self.has_run_as_compiled = True
            self._begin_as_compiled(self._step, batch_idx)
            if self.state is State.AS_COMPILED:
                return
        # A step that is not measured is left alone here: what follows asks for all tensors of the batch, and takes as
        # long as the planned forward of a small model.
        is_sample_due = self._draws.is_due(self._steps_begun) or is_sample_step(self._steps_begun)
        is_sample = is_sample_due and self.plan is not None
        to_measure = is_sample or self.watch.due
        if self.state is State.STEADY and not self._mode.is_joint and not to_measure:
            return
        self._look_at_start(self._step)
        self._tell_if_nothing_is_planned()
        # From its begin on, as only the meter sees what a step makes before its first call.
        to_measure = to_measure or self._steps_begun == 1
        # Without a plan the watch may have been renewed just now.
        if to_measure or self.watch.due:
            self.watch.start(self.loop, self._step.batch, is_due=self.watch.due)

    def _watch_new_habits(self) -> None:
        """Measure the next steps if gradients begin to add up, or optimizers are others than in the step before."""
        # By identity, as this runs in each step: whoever replaces layers makes an optimizer for them.
        habits = (self.loop.gradients_linger(), *map(id, self.loop.optimizers()))
        if self._habits and self._habits != habits and self.plan is not None:
            self.watch.renew(self.loop.optimizers())
        self._habits = habits

    def _meet_others(self, batch: Any) -> None:
        """Agree with other processes, before the first batch, on what must be alike from the beginning."""
        take_workspaces(self.loop.device())
        if self.loop.processes > 1:
            self.limit.agree(tensors_in(batch))
            if is_spread(self.loop.model):
                # FSDP gathers parameters before a forward and behind it, where nobody looks for messages.
                self.ranks.join_all()

    def _choose(self, batch: Any, batch_idx: int) -> None:
        """Choose the modules by the compute of the first batch."""
        if self.modules.choose(batch, batch_idx):
            self.plan = None  # of a guess, which was planned in a tuner's trial
            self._become(Event.CHOSEN_ANEW)
            return
        self._become(Event.CHOSEN)
        self._leave_compiled()
        if self.plan is not None:
            self._become(Event.PLAN_MADE)

    # ---------------------------------------------------------------- steps as the user compiled them

    def _leave_compiled(self) -> None:
        """Run as it is what the user compiled as a whole, for as long as it keeps the limit."""
        if self.modules.run_as_compiled:
            self._become(Event.LEFT_COMPILED)
            self.watch.renew(self.loop.optimizers())

    def _plan_from_now_on(self) -> None:
        """Let what the user compiled run as it is no longer."""
        self.watch.give_up()
        self.modules.wake()
        self._become(Event.PRESSED)

    def _begin_as_compiled(self, step: Step, batch_idx: int) -> None:
        """A step runs as the user compiled it, unless one can tell before that it must not."""
        batch = tensors_in(step.given)
        is_first = self._steps_begun == 1
        if is_first:
            self._look_at_start(step)
            self.limit.read(batch)
            estimated_bytes = self.modules.estimated_bytes(step.given, batch_idx)
            has_room = self.limit.device_has_room(step, estimated_bytes)
            if not all(self.loop.answers_of_all(has_room)):
                self._plan_from_now_on()
                return
        # Processes plan from the same step on, so only steps that all of them measure may lead to a plan.
        is_alone = self.loop.processes == 1
        if is_alone and self._compiled_steps.foresees_excess(batch, self.limit.size_bytes):
            self._plan_from_now_on()
            return
        is_due = self.watch.due
        is_measured = is_due or is_sample_step(self._steps_begun) or self._compiled_steps.is_new(batch)
        if not is_measured:
            return
        self._look_at_start(step)
        self.limit.look_around(batch)
        self._compilation.enter_context(compilation_heard(self.watch.begin_compiling, self.watch.end_compiling))
        self.watch.start(self.loop, batch, is_due=is_due)
        is_refused = is_due and not self.watch.due
        if is_due and any(self.loop.answers_of_all(is_refused)):
            # Nobody would see that the limit is exceeded. Costs of stages are measured by another step.
            self._compilation.close()
            self.watch.drop()
            self._plan_from_now_on()

    def _end_as_compiled(self, step: Step) -> bool:
        """Compare a step with the limit, and plan if it has taken more. True behind the last of the measured steps."""
        self._compilation.close()
        step.is_over = True
        was_due = self.watch.due
        phases: list[StepPhase] = []
        if self.watch.stop():
            step.growing_bytes = self.limit.growing_bytes()
            if step.is_first:
                step.note_state(self.limit.state_bytes())
            phases = step.as_later(self.watch.phases)
        self.limit.learn_final(step, phases)
        highest = highest_of(phase for phase in phases if not phase.is_final)
        if not self.watch.sees_all:
            highest = None
        exceeds = highest is not None and highest.peak_bytes > self.limit.size_bytes
        if highest is not None:
            self.limit.note_as_compiled(highest.peak_bytes)
        if was_due and any(self.loop.answers_of_all(exceeds)):
            # First, as it may end training with an error, which answers.
            self._plan_from_now_on()
            self._unanswered_bytes = 0 if highest is None or not exceeds else highest.peak_bytes
            return False
        if exceeds and highest is not None:
            if self.loop.processes > 1:
                self.limit.exceeded_as_compiled(highest.peak_bytes)
            else:
                self._plan_from_now_on()
                self._unanswered_bytes = highest.peak_bytes
            return False
        if highest is not None:
            self._compiled_steps.note(
                step.batch, held_bytes=min(phase.start_bytes for phase in phases), peak_bytes=highest.peak_bytes
            )
        if self.limit.check_final(step, phases):
            self.watch.repeat()
        return was_due and not self.watch.due

    def _look_at_start(self, step: Step | None) -> None:
        """Note what planning and measuring ask of a step, before its optimizer steps."""
        if step is not None and step.start is None:
            # Gradients are there from the second step on, also of a training that goes on from a checkpoint.
            is_first = self.loop.steps() == self.loop.steps_before
            if not self.loop.optimizers():
                # The user keeps them from the Trainer, which counts no steps then.
                is_first = self._steps_begun == 1
            step.note_start(self.limit.start_of(tensors_in(step.given), is_first=is_first))

    def begin_backward(self) -> None:
        """The loss is known."""
        step = self._step
        if step is not None and step.found_gradient_bytes is None and self.watch.running:
            # Gradients that linger are gone now, and those of an accumulation are there but for its first step.
            found_bytes = 0 if self.loop.gradients_linger() else existing_gradient_bytes(self.loop.model)
            step.found_gradient_bytes = found_bytes
        if self._steps_begun == 1 and any(module.plans.is_to_come for module in self.modules):
            # A checkpoint of the user's will call the module again in this backward, and so it is measured there. That
            # takes the profiler, which cannot be given away inside of a backward.
            self.watch.drop()
        self.watch.mark(PhaseKind.LOSS)

    def end_backward(self) -> None:
        """A backward is over."""
        self._mark_behind(PhaseKind.END)

    def _mark_behind(self, kind: PhaseKind, optimizer: str = "") -> None:
        """Begin a phase that no plan can change, unless calls still wait for their backward."""
        if self._step is None or not self.watch.running:
            return
        if self._step.waiting:
            self.watch.mark(PhaseKind.WAITING)
        else:
            self.watch.mark(kind, optimizer=optimizer)

    def begin_optimizer_step(self, optimizer: Any = None) -> None:
        """An optimizer is about to step."""
        step = self._step
        if step is None or (self.plan is None and self.state is not State.AS_COMPILED):
            return
        self.limit.end_backward(step, self.watch)
        # Steps that were measured from their begin on may have had no optimizer's step, as gradients add up over
        # several. So the first one that comes is measured from here on.
        if not self.watch.running and not self.limit.knows_final_peak:
            self._look_at_start(step)
            if not step.is_first:
                self.watch.start(self.loop, step.batch, is_due=False, sees_all=False)
        if not self.watch.running:
            return
        self._mark_behind(PhaseKind.OPTIMIZER, type(optimizer).__name__)
        if isinstance(optimizer, torch.optim.Optimizer) and id(optimizer) not in self._step_hooks:
            hook = optimizer.register_step_post_hook(lambda *_: self._mark_behind(PhaseKind.END))
            self._step_hooks[id(optimizer)] = hook

    def end_step(self) -> bool:
        """Read the meter, and plan again if the limit was exceeded or missed by far.

        Returns:
            True in the one step behind which plans are steady, so that they can be reported.
        """
        step, shows_modules = self._step, self.modules.is_open
        self._unhook()
        if step is not None and self.state is State.AS_COMPILED:
            self._unanswered_bytes = 0
            self._step = None
            return self._end_as_compiled(step)
        if step is not None:
            if shows_modules:
                self._close_choice(step)
            if self.plan is None:
                self._compare_without_a_plan(step)
        self._tell()
        self._unanswered_bytes = 0
        overdue = self.ranks.overdue
        if overdue is not None:
            # The step has called no planned module, so nobody has heard of it.
            raise overdue
        if step is not None and self.plan is not None:
            try:
                self._learn_from(step, shows_modules=shows_modules)
            except BudgetError as error:
                self.ranks.put_off(error)
                self._unanswered_bytes = self.watch.peak_bytes or 0
        self._step = None
        if self.state is not State.WATCHING or self.watch.due:
            return False
        self._become(Event.WATCHED)
        return True

    def _learn_from(self, step: Step, *, shows_modules: bool) -> None:
        """Learn from a step that has run under a plan; ``shows_modules`` if it has shown which modules it calls."""
        step.is_over = True
        was_exact = self.watch.is_exact
        was_sample = not self.watch.due
        is_measured = self.watch.stop()
        if is_measured and was_sample and self._may_be_a_message():
            self.watch.repeat()
            is_measured = False
        if is_measured and was_exact and not self.watch.is_exact:
            # The next step is, if anything can be. Twice in a row, the upper bound has to do.
            self.watch.repeat()
            is_measured = False
        phases: list[StepPhase] = []
        if is_measured:
            step.growing_bytes = self.limit.growing_bytes()
            if step.is_first:
                step.note_state(self.limit.state_bytes())
            phases = step.as_later(self.watch.phases)
        self.limit.learn_final(step, phases)
        self.limit.end_step(step, self.watch, is_measured=is_measured)
        self._mode = self._mode.joined_with(is_joint=step.is_joint, in_lockstep=self.ranks.together)
        sees_all = is_measured and self.watch.sees_all
        if self._mode.is_joint:
            if self._offloads:
                self.loop.warn_once(
                    "RotorCallback moves nothing in this training, whatever offload says: calls wait for their "
                    "backward together, and plans for several calls keep and recompute alone. Expected one call a "
                    "backward: name the module around them with RotorCallback(module=...)",
                    topic="offload",
                )
            self._follow(step, phases if sees_all else [])
        elif sees_all and not shows_modules and not self._lacks_gradients(step):
            self._learn_from_peak(step, phases)
        if self._awaits_optimizer and any(phase.is_optimizer_step for phase in phases):
            self._exceeded(step)  # it is the last of those whose gradients add up
        if self.limit.check_final(step, phases):
            self.watch.repeat()
        peak_bytes = self.watch.peak_bytes
        if is_measured and self._steps_begun > 1 and peak_bytes is not None and peak_bytes > self.limit.size_bytes:
            self._unanswered_bytes = peak_bytes

    def _lacks_gradients(self, step: Step) -> bool:
        """True if a measured step has kept the limit without gradients to which others add: the next step decides.

        Such is the first step of an accumulation. A plan that uses what it leaves would exceed the limit in the second.
        """
        found_bytes = step.found_gradient_bytes or 0
        peak_bytes = self.watch.peak_bytes or 0
        # Several processes measure the same steps, so what only one has seen decides nothing: peaks differ, but not the
        # gradients that a step finds.
        may_wait = self.ranks.watches or peak_bytes <= self.limit.size_bytes
        lacks = found_bytes < self._most_gradient_bytes and may_wait
        if lacks and not self._lacked_gradients:
            self._lacked_gradients = True
            self.watch.repeat()
            return True
        # Twice in a row: gradients add up no longer.
        self._lacked_gradients = False
        self._most_gradient_bytes = found_bytes
        return False

    def _may_be_a_message(self) -> bool:
        """True if the measured step is above the limit, and the one behind it may not be, under the same plans."""
        peak_bytes = self.watch.peak_bytes
        # A thread of gloo's gives a message back when it comes to it.
        return self.loop.processes > 1 and peak_bytes is not None and peak_bytes > self.limit.size_bytes

    def _close_choice(self, step: Step) -> None:
        """The first step has shown which modules it calls."""
        given_up = self.modules.close([call.key.name for call in step.numbers])
        step.leave_out(given_up)
        if len(step.numbers) == 1:
            # One call alone runs as lean as it did once more: what is around it shows in the second step.
            step.shares_budget = False

    def _tell(self) -> None:
        """Say what is planned, once that is certain."""
        if self.state is not State.CHOOSING:
            self.modules.tell()

    def _tell_if_nothing_is_planned(self) -> None:
        """Say once that training runs as without a plan, and watch some steps, for the limit holds all the same."""
        if self.state not in WITHOUT_A_PLAN or self._step is None:
            return
        reason = self.modules.why_nothing
        if not reason:
            return
        self._become(Event.NOTHING_TO_PLAN)
        self.limit.read(self._step.batch)
        self.watch.renew(self.loop.optimizers())
        self.loop.warn(
            f"RotorCallback plans nothing, so this training keeps all activations, as without a limit: {reason}. "
            "Steps are still compared with mem_limit"
        )

    def _compare_without_a_plan(self, step: Step) -> None:
        """The limit holds for steps in which nothing is planned, too."""
        self._tell_if_nothing_is_planned()
        if self.watch.stop() and not step.is_first:
            highest = highest_of(self.watch.phases)
            if highest is not None and highest.peak_bytes > self.limit.size_bytes:
                self.limit.exceeded_without_a_plan(highest.peak_bytes)

    def _unhook(self) -> None:
        """Take the hooks off the optimizers. Not inside of them, for torch goes through all while they run."""
        for handle in self._step_hooks.values():
            handle.remove()
        self._step_hooks = {}

    # ---------------------------------------------------------------- the peak of a step

    def _follow(self, step: Step, phases: Sequence[StepPhase]) -> None:
        """Plan calls that were alive together as one, by what the step has shown."""
        all_run_their_plans = all(map(has_room, step.paths))
        if all_run_their_plans and not self.ranks.any(bool(phases)):
            return
        highest = highest_of(phase for phase in phases if not phase.is_final)
        exceeds = highest is not None and highest.peak_bytes > self.limit.size_bytes
        if highest is not None and not step.is_first:
            if exceeds:
                self._excesses += 1
            elif all_run_their_plans:
                # Where new sizes come in every step, no plan that an excess has led to ever runs.
                self._excesses = 0
            self._learn_draw(step, highest.peak_bytes)
        self._joint_plans.follow(step, phases, exceeds=exceeds)
        self.plan = self._joint_plans.largest(step) or self.plan
        if not exceeds or step.is_first:
            # A first step takes what no later one does: it makes the optimizers' state, and compiles.
            return
        has_less_to_come = any(call.has_another_plan for call in step.numbers)
        has_less_to_come &= any(map(self._joint_plans.takes_less, step.paths))
        if has_less_to_come and self._excesses < _MOST_EXCESSES:
            return
        self._note_excess(highest)
        self._exceeded(step)

    def _learn_from_peak(self, step: Step, phases: Sequence[StepPhase]) -> None:
        """Closed loop: what the plan could not know shows in the measured peak."""
        highest = highest_of(phase for phase in phases if not phase.is_final)
        if highest is None:
            return
        if not step.is_first:
            # A first one finds nothing of those before it, so it differs anyway.
            self._learn_draw(step, highest.peak_bytes)
            self._note_sizes(step, highest.peak_bytes)
        # A larger plan follows only from the last of the measured steps, and not where the next draw may be larger.
        may_grow = not step.is_first and not self.watch.due and not self._draws.are_seen
        is_enough = self.limit.correct_each_plan(self.modules, step, phases, highest.peak_bytes, may_grow=may_grow)
        if is_enough:
            return
        if step.is_first:
            # It takes what no later one does, so the next one decides. As measured, and not as foretold for later ones,
            # it is no more than such a step takes: its batch may be larger than the next.
            self._note_excess(highest_of(phase for phase in self.watch.phases if not phase.is_final))
            return
        self._note_excess(highest)
        self._exceeded(step)

    def _note_sizes(self, step: Step, peak_bytes: int) -> None:
        """Remember for which sizes the limit was kept, as smaller ones keep it too."""
        for call in step.numbers:
            # Of the sizes that have come: the plan may be for larger ones, of which this step shows nothing.
            signature = call.signature or call.key.signature
            schedule = call.prepared.schedule
            # A smaller step takes no more under the same schedule. Under another one it may peak elsewhere.
            if peak_bytes > self.limit.size_bytes:
                self._kept_sizes.forget(signature, schedule)
            else:
                self._kept_sizes.note(signature, schedule, step.batch_bytes)

    def _learn_draw(self, step: Step, peak_bytes: int) -> None:
        """Compare a step that is not the first with others under the same plans."""
        plans = [call.plan for call in step.numbers]
        # By the sizes that have come: a plan may be for larger ones, and a smaller batch is no draw.
        sizes = tuple([call.signature.shapes for call in step.numbers if call.signature is not None])
        self._draws.learn(
            plans,
            peak_bytes,
            self.limit.size_bytes,
            sizes=sizes,
            processes=self.loop.processes,
        )

    def _note_excess(self, highest: StepPhase | None) -> None:
        """Remember the highest peak of steps that no plan has kept inside the limit."""
        if highest is None:
            return
        if self._highest_excess is None or highest.peak_bytes > self._highest_excess.peak_bytes:
            self._highest_excess = highest

    def _exceeded(self, step: Step) -> None:
        """The step took more than the limit under the least plan: end training, once an optimizer has stepped.

        The first step is not judged here, since it takes what no later one does.
        """
        assert self._highest_excess is not None
        has_stepped = any(phase.is_optimizer_step for phase in self.watch.phases)
        # Gradients that do not linger from step to step add up, and the steps until the optimizer's may take more. Of
        # optimizers that the user keeps from the Trainer nobody hears.
        has_optimizers = bool(self.loop.optimizers())
        self._awaits_optimizer = has_optimizers and not self.loop.gradients_linger() and not has_stepped
        if self._awaits_optimizer:
            self._become(Event.EXCEEDED)
            self.watch.renew(self.loop.optimizers())
            return
        self.watch.give_up()
        self.limit.exceeded(self._highest_excess, step, spread_bytes=self._draws.spread_bytes)

    def note_shortage(self, failure: BaseException) -> None:
        """A step ran out of memory. It cannot run again: some gradients are added already, and its graph is gone."""
        if self._step is not None and self.state is State.AS_COMPILED:
            self.loop.warn(
                "RotorCallback: the device has not enough memory for the step as you compiled it: the next training "
                "with this callback plans from its first step on"
            )
            self.saved = {PRESSED_KEY: True}
            return
        if self._step is None or self.plan is None:
            return
        # Nobody knows which of them would have needed less, so each gets less in the next training.
        lowered = False
        for module in self.modules:
            plan = module.plans.plan
            if plan is not None and module.plans.ceiling.lower(plan):
                lowered = True
        self.limit.note_shortage(failure, self.plan, lowered=lowered)

    def end(self) -> None:
        """Give the modules their own forwards back, and keep what was learned in ``saved``."""
        self._compilation.close()
        self.watch.drop()
        self._unhook()
        # Before the modules go, whose plans are saved.
        self.save()
        self.modules.end()
        self._step = None
        if self._unanswered_bytes and not self.limit.beyond:
            self.loop.warn(
                f"the last step of this training has taken {format_bytes(self._unanswered_bytes)}, more than mem_limit "
                f"{format_bytes(self.limit.size_bytes)}: expected another step, which would have run under a smaller "
                "plan or ended training with BudgetError. Raise mem_limit, or train on"
            )
            self._unanswered_bytes = 0

    # ---------------------------------------------------------------- questions of planned modules

    @property
    def turn(self) -> Turn:
        """Names of the modules whose calls wait for their backward."""
        return () if self._step is None else tuple(call.key.name for call in self._step.waiting)

    @property
    def waiting(self) -> tuple[Prepared, ...]:
        """Calls of the running step that wait for their backward, in the order of their forwards."""
        return () if self._step is None else tuple(call.prepared for call in self._step.waiting)

    def plan_beside(self, name: str, signature: Signature, value: Any) -> Prepared | None:
        """The plan of a call in a step of several, as a part of theirs; None if the module is to plan it by itself."""
        step = self._step
        module = self.modules.named(name)
        # Several processes plan behind a step, together.
        if step is None or module is None or not self._mode.is_joint or self.loop.processes > 1:
            return None
        before = self._joint_plans.newest
        prepared = self._joint_plans.beside(module.plans, signature, value, step.waiting)
        if self._joint_plans.newest is not before:
            self.plan = self._joint_plans.newest
        return prepared

    def budget(self, name: str, profile: Profile) -> Budget:
        """The budget of a plan for one call now. Notes that the step is shared, if it is.

        While other calls share the step it is a provisional 0, unless this call takes at most half of the budget with
        nothing recomputed.
        """
        step = self._step
        self._look_at_start(step)
        budget = self.limit.budget(profile.chain, self.modules.all, step)
        if self._mode.is_joint:
            budget = replace(budget, foresight=None)  # of a step in which this call was alone
        others_wait = step is not None and bool(step.waiting)
        others_may_come = step is not None and self.modules.is_open
        if not others_wait and not others_may_come and self.modules.is_alone(name):
            return budget
        if step is not None:
            step.shares_budget = True
            held_bytes = sum(call.prepared.held_bytes for call in step.waiting)
            # What the others will hold is not known, and is small beside half of the budget.
            if leaves_much_room(profile.chain, budget, held_bytes=held_bytes):
                return budget.reduced_to(budget.available_bytes - held_bytes, "other calls of the step")
        return replace(budget.reduced_to(0, "other calls of the step"), is_provisional=True)

    def _joint_budget(self, chain: Chain, copied_bytes: int) -> Budget:
        """Bytes that calls which are alive together may use."""
        self._look_at_start(self._step)
        # Without a correction: what steps take around these calls is in their joint chain (``around_calls``).
        budget = self.limit.budget(chain, self.modules.all, self._step, correction_bytes=0)
        return replace(budget, lingering_bytes=budget.lingering_bytes + copied_bytes)

    def plans_by_seconds(self, name: str) -> bool:
        """True if a plan may be replaced once its calls have been timed, as nothing else depends on it."""
        mode = self._mode.joined_with(is_joint=False, in_lockstep=self.ranks.together)
        return mode.plans_by_seconds and self.modules.is_alone(name)

    # ---------------------------------------------------------------- events of planned modules

    def hear(self, event: PlanEvent) -> None:
        """Something has happened in a planned module.

        Raises what ends the training, or what the module is to hear: that a cut or a plan will not do.
        """
        match event:
            case CallBegins():
                self._call_begins()
            case CallRan():
                self._call_ran(event)
            case PlanMade(plan, signature):
                self._plan_made(plan, signature)
            case MeasuringBegins():
                self.watch.pause()  # for torch has one profiler; the next mark resumes
            case ModuleCut(name, cut):
                self.modules.object_to(name, cut)
            case NoChain(name, error):
                self.watch.resume()  # the module runs plainly next
                self.modules.plan_parts_of(name, error)
            case ProfilerBusy(error):
                self.watch.resume()
                self._become(Event.PROFILER_IN_USE)
                self.loop.warn_once(
                    "RotorCallback runs the module plainly, whatever mem_limit says, for as long as torch's profiler "
                    f"records: {error}",
                    topic="profiler",
                )
            case NothingFits(error):
                self.limit.note_no_plan(error, self._step)

    def _call_begins(self) -> None:
        """A call is about to run."""
        if self._step is not None:
            self.watch.mark(PhaseKind.FORWARD, call=len(self._step.numbers))

    def _call_ran(self, event: CallRan) -> None:
        """Count a call of the step, and hear of its backward while peaks are of interest."""
        step = self._step
        if step is None:
            return
        module = self.modules.named(event.name)
        if module is None:  # it is planned no more
            return
        key = CallKey(module.plans, event.prepared.signature, event.prepared.turn)
        call = Call(key, event.prepared, event.pending, event.signature)
        step.add(call)
        pending = event.pending()
        # Steady steps are left alone: nobody reads their marks.
        is_of_interest = self.state is not State.STEADY or self.watch.running
        if pending is not None and is_of_interest:
            pending.on_backward = partial(self._backward_begins, call)
        self.watch.mark(PhaseKind.AFTER, call=step.numbers[call])

    def _backward_begins(self, call: Call) -> None:
        """The backward has reached a call."""
        if self._step is not None and call in self._step.numbers:
            self.watch.mark(PhaseKind.BACKWARD, call=self._step.numbers[call])
        if torch.is_grad_enabled():
            # create_graph=True: the graph of this backward keeps what a recomputation makes.
            self._joint_plans.keep_whole(call.key)

    def _plan_made(self, plan: Plan, signature: Signature) -> None:
        """Watch the steps that follow, from inside the first forward on, unless a larger one has kept the limit."""
        self.plan = plan
        step = self._step
        # Where lengths differ in nearly every step, planning and watching each by itself took three times a plain step.
        is_covered = step is not None and self._kept_sizes.cover(signature, plan.schedule, step.batch_bytes)
        if is_covered and self.state in UNDER_A_PLAN:
            return  # nothing new: no step is watched for it, and no plan is reported
        self._become(Event.PLAN_MADE)
        if is_covered:
            return
        if self._kept_sizes.knows(signature, plan.schedule):
            # Only this size is new. The steps behind it most likely have others, under plans of their own.
            self.watch.repeat()
        else:
            self.watch.renew(self.loop.optimizers())
        if any(module.plans.plan is None for module in self.modules):
            # Others are still to be measured, which takes torch's profiler away again, or may be refused.
            return
        self._tell()
        if step is not None and not step.is_over and not self.watch.running:
            self.watch.start(self.loop, step.batch)

    # ---------------------------------------------------------------- from one training to the next

    def save(self) -> None:
        """Keep what was measured and planned so far: the first module and, as ``others``, further ones."""
        modules = [module.to_plain() for module in self.modules]
        if self.plan is not None and modules:
            saved = {**modules[0], "corrections": self.limit.corrections.to_plain(), "others": modules[1:]}
            self.saved = {**saved, SEAL: seal_of(saved)}

    def load(self, saved: Mapping[str, Any] | None) -> bool:
        """Go on without measuring again. False if it is for another model or version, and left aside."""
        if not isinstance(saved, Mapping) or SEAL not in saved or saved[SEAL] != seal_of(saved):
            return False
        # Of a training that ran as it was compiled, there is no plan to go on with.
        if not {"module", "model", "ceiling_bytes", "records", "corrections"} <= saved.keys():
            return False
        entries = {}
        for entry in (saved, *saved.get("others", ())):
            entries[entry["module"]] = entry
        targets = []
        for entry in entries.values():
            target = _target_in(self.loop.model, entry)
            if target is None:
                return False
            targets.append(target)
        self.saved = saved
        self.modules.begin(targets)
        self._become(Event.RESTORED)
        if set(self.modules.names) != entries.keys():
            return True  # the user has named other modules
        for module in self.modules:
            entry = entries[module.name]
            module.plans.recall(entry["records"])
            module.plans.ceiling.size_bytes = entry["ceiling_bytes"]
        self.limit.corrections.recall(saved["corrections"])
        return True


def _target_in(model: nn.Module, saved: Mapping[str, Any]) -> Target | None:
    """The module in a model that was saved, or None if it is not there as it was."""
    name = saved["module"]
    module = dict(model.named_modules()).get(name)
    if module is None or not may_be_planned(module):
        return None
    if model_fingerprint(module) != saved["model"]:
        return None
    return Target(name, module, "as before")
