"""One limit for a training step: the budgets that follow from it, and the errors where no plan keeps it.

A limit is broken in one of five ways, each found as early as it can be known::

    before the forward     no plan for a call fits beside what the process holds        note_no_plan()
    behind a step          it has taken more, and no plan takes less                    exceeded()
    in the optimizer       its step takes more, which no plan changes                   check_final()
    without any plan       the step has taken more, and nothing in it is planned        exceeded_without_a_plan()
    as it was compiled     one of several processes has taken more in a later step      exceeded_as_compiled()

Here is decided when training ends. The sentence of all these errors is in ``memory/budget`` (``limit_error``). What
takes the memory, and what to do, say its callers: the functions above, and ``Budget.minimum_error``. The layer that
they name comes from ``planning/solver`` (``Solver._minimum_error``) before a step has run, and from ``running_step``
(``Step.cause_of_peak``) behind it. A step that shows how to do better is for ``corrections``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import nn

from lightning_rotor.chain import Chain
from lightning_rotor.devices import kind_of
from lightning_rotor.errors import BudgetError, ShortageError, TrialError
from lightning_rotor.memory.budget import Budget, limit_error
from lightning_rotor.memory.device_memory import usable_bytes
from lightning_rotor.memory.held import existing_gradient_bytes, gradient_bytes, optimizer_state_bytes
from lightning_rotor.memory.optimizer_prediction import (
    predict_closure_bytes,
    predict_optimizer_state_bytes,
    predict_optimizer_temporary_bytes,
    steps_differ,
    temporary_bytes_one_by_one,
)
from lightning_rotor.memory.resident_memory import ResidentMemory
from lightning_rotor.planned.corrections import Corrections, MeasuredStep
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.modules import PlannedModules
from lightning_rotor.planned.out_of_memory import shortage_message
from lightning_rotor.planned.running_step import Call, NoPlan, Step, StepStart
from lightning_rotor.planned.step_watch import StepWatch
from lightning_rotor.planning import Plan
from lightning_rotor.planning.outside import Foresight, foresight
from lightning_rotor.planning.step_phases import Mark, PhaseKind, StepPhase, highest_of
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from lightning_rotor.units import MemoryLimit, format_bytes

_log = logging.getLogger(__name__)
# Minima are named with so much more: steps differ by a few bytes, or by a few boxes of a detector.
_UNEVEN = 1.005
# With so much among several processes, where a thread of gloo's may keep a message a moment longer in one step.
_UNEVEN_MESSAGES = 1.02
# And with so much of what plans can change, for the way to the least plan of several calls depends on the limit.
_SEVERAL = 0.015


class StepLimit:
    """The user's limit: the part of it that plans may use, and the error where none keeps it.

    Attributes:
        size_bytes: The limit of the process, as it was read last.
        beyond: Training goes on with the plan that takes least where none keeps the limit, and says so once. Otherwise
            it ends.
        corrections: What measured steps have taught about each chain.
    """

    def __init__(self, loop: TrainingLoop, limit: MemoryLimit | None, *, beyond: bool) -> None:
        self.size_bytes = 0
        self.beyond = beyond
        self.corrections = Corrections()
        self._loop = loop
        self._limit = limit
        # The least limit of several processes, once they have agreed.
        self._agreed_bytes: int | None = None
        # What else a GPU's allocator had given out when a chain's first forward began, by the chain's fingerprint.
        # Later it is more: what the step itself holds then is in the chain's costs already.
        self._other_bytes: dict[str, int] = {}
        self._resident = ResidentMemory()
        self._last_budget = Budget(0)
        # In the last budget, and by how much the least plan was beyond that.
        self._correction_bytes = 0
        self._excess_bytes = 0
        # The highest phase behind the backward of a step that was not the first.
        self._final: StepPhase | None = None
        # Highest peak of a step that ran as the user compiled it, in which nothing was planned.
        self._as_compiled_bytes = 0
        # One measurement has contradicted what is predicted for the optimizer.
        self._has_doubted = False

    def agree(self, batch: Sequence[torch.Tensor]) -> None:
        """Take the least limit of all processes."""
        own_bytes = self._loop.limit_bytes(self._limit, batch)
        # Processes that exchange messages run one plan, so what the fullest device has is what all of them may use.
        self._agreed_bytes = min(self._loop.answers_of_all(own_bytes))

    def read(self, batch: Sequence[torch.Tensor]) -> None:
        """Read the limit, as every budget does."""
        self.size_bytes = self._agreed_bytes or self._loop.limit_bytes(self._limit, batch)

    def look_around(self, batch: Sequence[torch.Tensor]) -> None:
        """Read the limit, and count what a step holds in which nothing is planned."""
        self.read(batch)
        self._resident = self._loop.resident(self._loop.model, batch, self._loop.device())

    def device_has_room(self, step: Step, held_bytes: int | None) -> bool:
        """True unless a step that makes and holds so much for its backward is known to run out of memory."""
        # What nobody knows is tried: a step that exceeds the limit leads to a plan, which costs one step.
        if held_bytes is None or step.start is None:
            return True
        return held_bytes + step.start.missing_forward_bytes <= usable_bytes(self._loop.device())

    # ---------------------------------------------------------------- budgets

    def budget(
        self,
        chain: Chain,
        modules: nn.Module,
        step: Step | None,
        *,
        correction_bytes: int | None = None,
    ) -> Budget:
        """Bytes that a plan may use. Errors of the running step are worded from the last answer, which is noted here.

        Args:
            chain: To plan.
            modules: All planned modules.
            step: The running one; None between steps. What else there is shows when its first forward begins.
            correction_bytes: Kept free for what no chain shows; by default what measured steps have taught.
        """
        self._resident = self._resident_beside(chain, modules, step)
        self.read([] if step is None else step.batch)
        if correction_bytes is None:
            correction_bytes = self.corrections.of(chain)
            if not correction_bytes and chain not in self.corrections:
                correction_bytes = self._around_compiled(chain)
        budget = self._resident.budget(self.size_bytes, correction_bytes=correction_bytes)
        if chain not in self.corrections:
            # It was learned of other chains, so that it is worth no error for this one.
            budget = replace(budget, guessed_bytes=correction_bytes)
        foresight = self.corrections.foresight_for(chain, budget.reserved_bytes - correction_bytes)
        is_new_size = not self.corrections.has_seen(chain)
        budget = replace(budget, foresight=foresight, is_new_size=is_new_size)
        if self._loop.is_trial():
            # Lightning's BatchSizeFinder takes an error for a lack of memory by its words, which this type adds.
            budget = replace(budget, error=TrialError)
        self._last_budget = budget
        self._correction_bytes = correction_bytes
        self._excess_bytes = 0
        return budget

    def note_as_compiled(self, peak_bytes: int) -> None:
        """Remember the peak of a step that ran as the user compiled it."""
        self._as_compiled_bytes = max(self._as_compiled_bytes, peak_bytes)

    def _around_compiled(self, chain: Chain) -> int:
        """Bytes that the step as it was compiled has taken beyond what it holds and what the chain takes.

        That is the loss, mostly, which no chain shows. A plan that left no room for it would exceed the limit once.
        """
        if not self._as_compiled_bytes:
            return 0
        budget = self._resident.budget(self.size_bytes)
        plain = simulate(chain, Schedule.keep_all(len(chain)), **budget.conditions)
        return max(self._as_compiled_bytes - budget.reserved_bytes - plain.peak_bytes, 0)

    def _resident_beside(self, chain: Chain, modules: nn.Module, step: Step | None) -> ResidentMemory:
        """The memory that the process holds besides a chain."""
        batch = [] if step is None else step.batch
        device = torch.device(chain.device)
        resident = self._loop.resident(modules, batch, device)
        if not batch:
            # In a tuner's trial, which is known from its forward alone.
            resident = replace(resident, batch_bytes=chain.input_bytes)
        if step is None:
            other_bytes = self._other_bytes.get(chain.fingerprint, resident.other_bytes)
        else:
            if step.other_bytes is None:
                step.other_bytes = resident.other_bytes
            other_bytes = self._other_bytes.setdefault(chain.fingerprint, step.other_bytes)
        return replace(resident, other_bytes=other_bytes)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the process that are not for the plan that was made last."""
        reserved_bytes = self._last_budget.reserved_bytes
        if self._excess_bytes > 0:
            # The least plan does not leave room for what is only guessed.
            reserved_bytes -= self._correction_bytes
        return reserved_bytes

    # ---------------------------------------------------------------- what a step begins and ends with

    def start_of(self, batch: list[torch.Tensor], *, is_first: bool) -> StepStart:
        """A step as it begins. A first one has no gradients, and no optimizer state but a checkpoint's."""
        loop = self._loop
        optimizers = loop.optimizers()
        if not is_first:
            # Later steps find what they hold, so nothing need be predicted.
            return StepStart(batch, is_first=False, optimizers=len(optimizers))
        with loop.untoggled():
            missing_gradients = gradient_bytes(loop.model)
            missing_gradients -= existing_gradient_bytes(loop.model)
            state_bytes = self.state_bytes()
            missing_state = state_bytes
            missing_state -= sum(map(optimizer_state_bytes, optimizers))
        missing_backward = missing_state
        if not loop.gradients_linger():
            # Lingering gradients are freed between forward and backward, and made again.
            missing_backward += missing_gradients
        return StepStart(
            batch,
            is_first=True,
            state_bytes=state_bytes,
            missing_forward_bytes=missing_gradients + missing_state,
            missing_backward_bytes=missing_backward,
            optimizers=len(optimizers),
        )

    def state_bytes(self) -> int:
        """Bytes that optimizers will keep, and hold while a closure runs."""
        with self._loop.untoggled():
            optimizers = self._loop.optimizers()
            kept_bytes = sum(map(predict_optimizer_state_bytes, optimizers))
            return kept_bytes + sum(map(predict_closure_bytes, optimizers))

    def growing_bytes(self) -> int:
        """Bytes by which the state of LBFGS will still grow, which fills its history over many steps."""
        # Other optimizers have all of their state after one step.
        growing_bytes = 0
        for optimizer in self._lbfgs():
            full_bytes = predict_optimizer_state_bytes(optimizer)
            growing_bytes += max(full_bytes - optimizer_state_bytes(optimizer), 0)
        return growing_bytes

    def _lbfgs(self) -> list[torch.optim.Optimizer]:
        return [each for each in self._loop.optimizers() if isinstance(each, torch.optim.LBFGS)]

    @property
    def final_peak_bytes(self) -> int:
        """Peak behind the backward, when optimizers step: as measured, until then as predicted."""
        if self._final is None:
            return self._predicted_final_bytes
        if self._lbfgs() or any(map(steps_differ, self._loop.optimizers())):
            # A history still grows behind the measured step, or a later one takes more.
            return max(self._final.peak_bytes, self._predicted_final_bytes)
        return self._final.peak_bytes

    @property
    def _predicted_final_bytes(self) -> int:
        return self._resident.staying_bytes + (self._resident.temporary_bytes or 0)

    @property
    def knows_final_peak(self) -> bool:
        """True if that has been measured in a step that was not the first."""
        return self._final is not None

    def learn_final(self, step: Step, phases: Sequence[StepPhase]) -> None:
        """Remember the peak of a measured step behind its backward, if it is not the first."""
        highest = highest_of(phase for phase in phases if phase.is_final)
        # A first step makes the optimizers' state, which takes what no later one does.
        if highest is None or step.is_first:
            return
        # The most of all steps: no plan changes it, so a lower one says nothing about the next.
        if self._final is None or highest.peak_bytes > self._final.peak_bytes:
            self._final = highest

    # ---------------------------------------------------------------- a measured step

    def correct_each_plan(
        self,
        modules: PlannedModules,
        step: Step,
        phases: Sequence[StepPhase],
        measured_bytes: int,
        *,
        may_grow: bool,
    ) -> bool:
        """Plan better if a step has shown how.

        Args:
            modules: Whose plans are replaced.
            step: The measured one.
            phases: Of this step.
            measured_bytes: Its peak until the optimizer's step.
            may_grow: The step is like those to come, so that a peak far below the limit counts.
        Returns:
            False if the peak is above the limit, and no plan takes less.
        """
        exceeds = measured_bytes > self.size_bytes
        is_better = True
        # Calls that are never alive together: each path has one. Several of them may run under one plan.
        calls_by_plan: dict[int, Call] = {}
        for path in step.paths:
            calls_by_plan[id(path[0].plan)] = path[0]
        for call in calls_by_plan.values():
            plan = call.plan
            self.corrections.search_for(plan.chain)
            # A plan for bounds on costs does not grow: that takes longer than a new length is worth, and where bounds
            # are too high, the next measurement of a length near by says so.
            can_grow = may_grow and bool(plan.recomputed) and not call.prepared.costs.estimated
            if not exceeds and not can_grow and self.corrections.teaches_nothing(plan, measured_bytes):
                # Counting what the process holds would take a third of a small model's step on a GPU, and where sizes
                # are draws all steps are measured.
                continue
            uncorrected = self._resident_beside(plan.chain, modules.all, step).budget(self.size_bytes)
            measured = MeasuredStep(
                plan,
                measured_bytes,
                _foresight_of(step, plan, phases, uncorrected.reserved_bytes),
                # Where the limit was exceeded, what is foreseen too high must not lead to the least plan at once.
                overstates=exceeds or self._loop.processes > 1,
                reserved_bytes=uncorrected.reserved_bytes,
                is_exact=not call.prepared.costs.estimated,
            )
            # Also where this plan stays: another may follow from the seconds of its calls.
            self.corrections.note(measured)
            if not exceeds and (not can_grow or modules.is_capped(plan)):
                continue
            is_better = self.corrections.correct_plan(
                modules,
                measured,
                limit_bytes=self.size_bytes,
                available_bytes=uncorrected.available_bytes,
            )
        if exceeds and is_better:
            # Plans of other sizes were made without what this step has taught.
            modules.keep_only(lambda plan: plan.chain in self.corrections)
        return is_better

    def check_final(self, step: Step, phases: Sequence[StepPhase]) -> bool:
        """End training, or go beyond the limit, if what no plan can change is above it.

        True if the next step must be measured for that: this one contradicts what is predicted for the optimizer.
        """
        highest = highest_of(phase for phase in phases if phase.is_final)
        before = highest_of(phase for phase in phases if not phase.is_final)
        if highest is None:
            return False
        if before is not None and before.peak_bytes > self.size_bytes:
            return False  # a smaller plan follows, or none keeps the limit, which then says what both need
        if step.is_first:
            # It makes the state, for which some optimizers take what they never take again.
            peak_bytes = min(highest.peak_bytes, self.final_peak_bytes)
        else:
            peak_bytes = max(highest.peak_bytes, self.final_peak_bytes)
        if peak_bytes <= self.size_bytes:
            return False
        # Among several processes all must measure the same steps.
        may_doubt = self._resident.temporary_bytes is not None and self._loop.processes == 1
        if may_doubt and not self._has_doubted:
            self._has_doubted = True
            if self._predicted_final_bytes <= self.size_bytes:
                # Once, under load, one step seemed to hold all gradients twice, and no other did. Training does not end
                # for one measurement alone.
                _log.info("a step seems to exceed the limit behind its backward: %s", phases)
                self._final = None
                return True
        self._go_beyond(self._or_final(self._final_error(highest)))
        return False

    # ---------------------------------------------------------------- where no plan keeps it

    def note_no_plan(self, error: BudgetError, step: Step | None) -> None:
        """No plan for a call fits: go beyond the limit, or end training, once the step has shown what it needs."""
        self._excess_bytes = error.minimum_bytes - error.budget_bytes - self._correction_bytes
        loop = self._loop
        may_run_on = step is not None and not step.is_over
        # A tuner wants to hear of it at once, and other processes must not wait for one that ends later than they do.
        may_run_on &= not loop.is_trial() and loop.processes == 1
        if kind_of(loop.device()).has_own_memory:
            # Beyond the limit the step may still be inside of the device. Else it would run out of memory midway.
            missing_bytes = error.minimum_bytes - self.size_bytes
            may_run_on &= missing_bytes <= usable_bytes(loop.device())
        if step is not None and may_run_on:
            step.no_plan = NoPlan(self._last_budget, error)
        else:
            self._go_beyond(self._or_final(error))

    def end_backward(self, step: Step, watch: StepWatch) -> None:
        """End training if a call was refused, and nothing behind the backward can show more: weights are as before."""
        if step.no_plan is None or self.beyond:
            return
        # What the user's hooks take behind the backward shows in no phase before it.
        shows_all = self._loop.gradients_linger() and not self._loop.has_hooks_at_end()
        if shows_all and self._resident.temporary_bytes is not None:
            self._end_without_plan(step, watch.phases if watch.stop() else [])

    def end_step(self, step: Step, watch: StepWatch, *, is_measured: bool) -> None:
        """End training if a call was refused, or go on with the plan that takes least."""
        if step.no_plan is None:
            return
        is_like_later = self._loop.gradients_linger()
        is_like_later &= self._resident.temporary_bytes is not None
        if is_measured and not is_like_later:
            return  # later steps show what this one does not: gradients that add up, an unknown state
        self._end_without_plan(step, watch.phases if is_measured else [])

    def _end_without_plan(self, step: Step, phases: Sequence[StepPhase]) -> None:
        assert step.no_plan is not None
        budget, error = step.no_plan.budget, step.no_plan.error
        step.no_plan = None
        stage = error.stage
        later = step.as_later(phases)
        highest = highest_of(later)
        least_bytes = error.minimum_bytes - budget.reserved_bytes
        needed_bytes = error.minimum_bytes
        if highest is not None and highest.peak_bytes * _UNEVEN > error.minimum_bytes:
            # The step itself needs more than the least plan of the call, so the error names that.
            if highest.is_final:
                self._go_beyond(self._final_error(highest))
                return
            step_bytes = _least_of_step(step, later, highest.peak_bytes, budget.reserved_bytes)
            needed_bytes = max(needed_bytes, step_bytes)
            stage = step.cause_of_peak(highest)
        # Measured anew, a chain may take some bytes more.
        rest_bytes = int(needed_bytes * _UNEVEN) - error.minimum_bytes
        available_bytes = budget.available_bytes - rest_bytes
        budget = budget.reduced_to(available_bytes, "what else steps take")
        needed = budget.minimum_error(least_bytes, error, stage=stage)
        self._go_beyond(self._or_final(needed))

    def exceeded(self, highest: StepPhase, step: Step, *, spread_bytes: int) -> None:
        """A measured step has taken more, and no plan takes less: go beyond the limit, or end training.

        Steps have differed by ``spread_bytes``.
        """
        uneven = _UNEVEN if self._loop.processes == 1 else _UNEVEN_MESSAGES
        least_bytes = int(highest.peak_bytes * uneven)
        if len({call.key for call in step.numbers}) > 1:
            changeable_bytes = max(highest.peak_bytes - self._resident.staying_bytes, 0)
            least_bytes += int(changeable_bytes * _SEVERAL)
        stage = step.cause_of_peak(highest)
        needs = f"a measured step has taken {format_bytes(highest.peak_bytes)} under the plan that takes least"
        if spread_bytes:
            needs += f", and steps differ by {format_bytes(spread_bytes)} under the same plan"
        error = limit_error(
            self.size_bytes,
            least_bytes + spread_bytes,
            needs=f"{needs} (set by {stage!r})",
            stage=stage,
            remedy="raise mem_limit or lower the batch size",
            error=self._last_budget.error,
        )
        self._go_beyond(self._or_final(error))

    def exceeded_without_a_plan(self, peak_bytes: int) -> None:
        """A measured step in which nothing is planned has taken more: go beyond the limit, or end training."""
        error = limit_error(
            self.size_bytes,
            int(peak_bytes * _UNEVEN),
            needs=f"a measured step has taken {format_bytes(peak_bytes)}, and nothing in it is planned",
            stage="",
            remedy="raise mem_limit, lower the batch size, or name a module that can be planned: "
            "RotorCallback(module=...)",
        )
        # The peak is that of the whole step, the optimizer's included.
        self._go_beyond(error, "without a plan")

    def exceeded_as_compiled(self, peak_bytes: int) -> None:
        """A later step of a model that runs as the user compiled it has taken more in one of several processes.

        No plan can follow: processes plan together, and only behind steps that all of them have measured.
        """
        error = limit_error(
            self.size_bytes,
            int(peak_bytes * _UNEVEN),
            needs=f"a later step has taken {format_bytes(peak_bytes)} as it was compiled",
            stage="",
            remedy="raise mem_limit, lower the batch size, or compile the blocks of the model instead of the whole "
            "(for block in net.blocks: block.compile()), so that processes plan before a step",
        )
        self._go_beyond(error, "as it was compiled")

    def _or_final(self, error: BudgetError) -> BudgetError:
        """The error, or the one for the optimizer's step if that needs more."""
        # Whoever raises the limit to the minimum that an error names must not meet the next error there.
        if self.final_peak_bytes * _UNEVEN <= error.minimum_bytes:
            return error
        mark = Mark(PhaseKind.OPTIMIZER)
        optimizers = self._loop.optimizers()
        if optimizers:
            mark = Mark(PhaseKind.OPTIMIZER, optimizer=type(optimizers[-1]).__name__)
        if self._final is not None:
            mark = self._final.mark
        return self._final_error(StepPhase(mark, 0, self.final_peak_bytes, 0))

    def _final_error(self, highest: StepPhase) -> BudgetError:
        """The error for a peak behind the backward."""
        stage = Step(None).cause_of_peak(highest)
        name = highest.mark.optimizer
        optimizers = [each for each in self._loop.optimizers() if type(each).__name__ == name]
        who = "what runs behind it"
        if optimizers:
            who = f"the step of {name}, with hooks and clipping around it,"
        staying_bytes = min(self._resident.staying_bytes, highest.peak_bytes)
        besides_bytes = highest.peak_bytes - staying_bytes
        return limit_error(
            self.size_bytes,
            int(highest.peak_bytes * _UNEVEN),
            needs=f"{format_bytes(staying_bytes)} for parameters, gradients, optimizer state and the batch, and "
            f"{format_bytes(besides_bytes)} that {who} takes besides, when no activations are left that a plan could "
            f"drop (set by {stage!r})",
            stage=stage,
            remedy=_optimizer_remedy(optimizers, self._loop.device()),
            error=self._last_budget.error,
        )

    def _go_beyond(self, error: BudgetError, how: str = "with the plan that takes least") -> None:
        """End training, or warn that it goes on beyond the limit, and how."""
        if not self.beyond:
            raise error
        self._loop.warn_once(
            f"training goes on beyond the limit, {how}: {error}",
            topic="limit",
        )

    def note_shortage(self, failure: BaseException, plan: Plan, *, lowered: bool) -> None:
        """Warn of a step that ran out of memory, unless the error says it all; ``lowered``: plans to come take less."""
        consequence = "the next training with this callback plans with less"
        if isinstance(failure, ShortageError):
            if lowered:
                limit = format_bytes(self.size_bytes)
                self._loop.warn(f"RotorCallback: the device has less than mem_limit {limit}: {consequence}")
            return
        reason = "A step cannot run again from where it failed"
        if lowered:
            reason += f", but {consequence}"
        predicted_bytes = self.size_bytes - plan.budget_bytes + plan.peak_bytes
        message = shortage_message(failure, reason, limit_bytes=self.size_bytes, predicted_bytes=predicted_bytes)
        self._loop.warn(f"RotorCallback: {message}")


def _foresight_of(
    step: Step, plan: Plan, phases: Sequence[StepPhase], reserved_bytes: int
) -> Callable[[], Foresight | None]:
    """The foresight from a step for other plans of the calls that ran under this one, looked for once it is asked."""
    # It outlives the step, whose tensors it must not hold.
    numbers = [number for call, number in step.numbers.items() if call.plan is plan]
    # Looked for once: a step foretells those of all plans for its chain, and of other sizes.
    return cache(partial(foresight, plan, numbers, phases, reserved_bytes))


def _least_of_step(step: Step, phases: Sequence[StepPhase], peak_bytes: int, reserved_bytes: int) -> int:
    """Bytes that a step needs which has taken so much under the least plan of its only module."""
    # The least plan of a chain is not that of a step whose loss takes most.
    waits_alone = all(len(path) == 1 for path in step.paths)
    plans = [call.plan for call in step.numbers]
    if not plans or not waits_alone or any(plan is not plans[0] for plan in plans):
        return peak_bytes
    measured = MeasuredStep(plans[0], peak_bytes, _foresight_of(step, plans[0], phases, reserved_bytes))
    least = measured.plan_within(1, plans[0])
    if least is None:
        return peak_bytes
    return min(peak_bytes, measured.peak_under(least))


def _optimizer_remedy(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> str:
    """Advice that makes the steps of optimizers take less, with bytes where a dry step tells them."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        # torch's default on GPUs, foreach, updates all parameters at once, with temporaries for all of them.
        all_bytes = predict_optimizer_temporary_bytes(optimizer, device)
        single_bytes = temporary_bytes_one_by_one(optimizer, device)
        if all_bytes is None or single_bytes is None:
            continue
        if single_bytes < all_bytes:
            return (
                f"pass foreach=False to {name}, which then takes {format_bytes(single_bytes)} besides instead of "
                f"{format_bytes(all_bytes)}, or raise mem_limit"
            )
    return "raise mem_limit, for no plan and no smaller batch changes this, or choose an optimizer that takes less"
