"""One limit for a training step: what the step takes, what plans may use, and what happens where none keeps it.

Measured peaks lead to better budgets: less after a peak above the limit, more after one far below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from weakref import ReferenceType

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError, ProfilingError, ShortageError, TrialError
from lightning_rotor.execution.pending import Pending
from lightning_rotor.memory.budget import Budget, ResidentMemory, limit_error, usable_bytes
from lightning_rotor.memory.held import (
    existing_gradient_bytes,
    gradient_bytes,
    optimizer_state_bytes,
    own_gradients,
    predict_closure_bytes,
    predict_optimizer_state_bytes,
    predict_optimizer_temporary_bytes,
    temporary_bytes_one_by_one,
)
from lightning_rotor.planned.cache import Prepared, Turn
from lightning_rotor.planned.cuts import Signature
from lightning_rotor.planned.forward import shortage_message
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.modules import PlannedModules
from lightning_rotor.planned.plans import Plans
from lightning_rotor.planning import Plan
from lightning_rotor.planning import plan as solve
from lightning_rotor.private.values import sizes_by_address
from lightning_rotor.profiling import StepMeter
from lightning_rotor.profiling.meters import END, MeteredPhase, Recording
from lightning_rotor.units import MemoryLimit, format_bytes

# ------------------------------------ The running step: its calls, and which of them wait for their backward together.


LOSS = "loss"
"""Label of a phase that begins with a backward."""
INTO, BEHIND, BACK = "into", "behind", "back to"
"""How labels begin of the phases that begin with a call's forward, behind it, and with its backward."""
STEP_OF = "step of"
"""Prefix of labels of phases in which an optimizer of this class steps. END is what else comes behind a backward."""
MEANWHILE = "meanwhile"
"""Label of a phase that would be one of those two, but for calls that still wait for their backward."""


def is_final(phase: MeteredPhase) -> bool:
    """True if no plan can change a phase, since no call is alive."""
    return phase.label == END or is_step(phase)


def is_step(phase: MeteredPhase) -> bool:
    """True if an optimizer steps in a phase."""
    return phase.label.startswith(STEP_OF)


def highest_of(phases: Iterable[MeteredPhase]) -> MeteredPhase | None:
    """The phase with the highest peak, or None if there is none."""
    return max(phases, key=lambda phase: phase.peak_bytes, default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call in the running step."""

    key: CallKey
    prepared: Prepared
    pending: ReferenceType[Pending]

    @property
    def waits(self) -> bool:
        """True until its backward has come, or its graph is gone."""
        pending = self.pending()
        return pending is not None and pending.waits

    @property
    def plan(self) -> Plan:
        """What it has run under."""
        assert self.prepared.plan is not None
        return self.prepared.plan

    @property
    def has_another_plan(self) -> bool:
        """True if it will run under another one in the next step."""
        prepared = self.key.prepared()
        return prepared is None or prepared.plan is not self.plan


@dataclass(frozen=True, slots=True)
class CallKey:
    """What a call has in every step; ``plans`` are of its module."""

    plans: Plans
    signature: Signature
    turn: Turn

    @property
    def name(self) -> str:
        """Of the module."""
        return self.plans.name

    def prepared(self) -> Prepared | None:
        """What is known of it, if that is still known."""
        return self.plans.cache.use(self.signature, self.turn)


@dataclass(slots=True)
class Step:
    """The running step, with the batch as it was given; ``is_over`` once its optimizer has stepped."""

    given: Any
    batch: list[torch.Tensor] = field(default_factory=list)  # its tensors; empty until somebody asks
    is_first: bool | None = None  # no optimizer has stepped before; None until somebody asks
    paths: list[tuple[Call, ...]] = field(default_factory=list)  # calls that wait together; the running one is last
    numbers: dict[Call, int] = field(default_factory=dict)  # of its calls, from 0 on
    is_shared: bool = False  # a call was planned with a part of what is left, because others were to come
    other_bytes: int | None = None  # what else a GPU's allocator had given out when the first forward began
    missing: tuple[int, int] = (0, 0)  # what later steps will hold besides, in forwards and in backwards
    state_bytes: int = 0  # of optimizers, as predicted when it began
    optimizers: int = 1  # of the training
    growing_bytes: int = 0  # by which the state of optimizers will still grow, once they have stepped
    is_over: bool = False

    @property
    def waiting(self) -> tuple[Call, ...]:
        """Calls whose backward is still to come."""
        return tuple(call for call in self.paths[-1] if call.waits) if self.paths else ()

    @property
    def is_joint(self) -> bool:
        """True if some of its calls were alive together, or could have been."""
        return self.is_shared or any(len(path) > 1 for path in self.paths)

    def as_later(self, phases: Iterable[MeteredPhase]) -> list[MeteredPhase]:
        """Its phases, with what later steps hold besides."""
        forward, backward = self.missing
        has_stepped, found = False, []
        for phase in phases:
            has_stepped |= is_step(phase)
            if has_stepped and self.optimizers == 1:  # its state is there, as in a second closure of LBFGS
                found.append(phase.raised(self.growing_bytes))
            elif is_final(phase):
                found.append(phase)
            else:
                is_backward = phase.label == LOSS or phase.label.startswith(BACK)
                found.append(phase.raised(backward if is_backward else forward))
        return found

    def setter(self, phase: MeteredPhase) -> str:
        """Name of what sets the peak of a phase: a stage, what runs around the calls, or an optimizer's step."""
        if phase.label == END:
            return "behind the backward"
        if phase.label.startswith(STEP_OF):
            return f"{phase.label.removeprefix(STEP_OF).strip()}.step"
        kind, _, number = phase.label.rpartition(" ")
        calls = {str(number): call for call, number in self.numbers.items()}
        if kind not in (INTO, BACK) or number not in calls:
            place = "before" if not phase.label else "behind"
            names = [call.key.name for call in calls.values()] or [""]
            return (
                f"{place} {calls[number].key.name if number in calls else names[0 if not phase.label else -1]}".strip()
            )
        call = calls[number]
        events = [each for each in call.plan.simulation.events if (each.phase == "forward") == (kind == INTO)]
        name = call.plan.chain.names[max(events, key=lambda each: each.peak_bytes).stage]
        return f"{call.key.name}.{name}" if len({each.key.name for each in calls.values()}) > 1 else name

    def leave_out(self, given_up: Collection[Plans]) -> None:
        """Forget the calls of modules that are planned no more."""
        self.paths = [
            path for calls in self.paths if (path := tuple(call for call in calls if call.key.plans not in given_up))
        ]
        self.numbers = {call: number for call, number in self.numbers.items() if call.key.plans not in given_up}

    def find(self, taken: Iterable[torch.Tensor]) -> None:
        """Count the input of the first call that the step has made before a meter of the CPU could see it."""
        batch = sizes_by_address(self.batch)
        made_bytes = sum(size for address, size in sizes_by_address(taken).items() if address not in batch)
        self.missing = self.missing[0] + made_bytes, self.missing[1] + made_bytes

    def learn_state(self, state_bytes: int) -> None:
        """The state of optimizers is known, now that they have stepped."""
        error_bytes = state_bytes - self.state_bytes
        self.missing = self.missing[0] + error_bytes, self.missing[1] + error_bytes

    def add(self, call: Call) -> None:
        """A call has run."""
        self.numbers[call] = len(self.numbers)
        waiting = self.waiting
        if self.paths and waiting == self.paths[-1]:
            self.paths.pop()
        self.paths.append((*waiting, call))


# --------------------------------------------- The peaks of the first steps under each plan, as the allocator saw them.

_STEPS = 3


class StepWatch:
    """Measures a few steps of training after each plan, then leaves training alone.

    Peaks are of the step measured last, and include what was there before it.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self.reserved_bytes: int | None = None  # the most by a GPU's caching allocator; None on the CPU
        self.phases: list[MeteredPhase] = []  # in order
        self._left = 0
        self._meter: StepMeter | None = None
        self._base_bytes = 0
        self._model: nn.Module = nn.Module()
        self._seen, self._older = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()  # gradients, and their sizes
        self._older_bytes = 0  # of those that no meter saw made, nor will see go
        self._gone_bytes: list[int] = []  # of them, when a phase began
        self._was_interrupted = False

    @property
    def due(self) -> bool:
        """True if the next step is to be measured."""
        return self._left > 0

    @property
    def running(self) -> bool:
        """True while a step is being measured."""
        return self._meter is not None

    def renew(self) -> None:
        """Measure the steps that follow, as there is a new plan."""
        self._left = _STEPS

    def give_up(self) -> None:
        """Measure no more steps under this plan."""
        self._left = 0

    def start(self, loop: TrainingLoop, batch: Sequence[torch.Tensor], *, is_due: bool = True) -> bool:
        """Begin with a step, at its very start or, when a plan is new, in its first forward. True if it runs now.

        Not after an interruption in the same step: what torch's profiler saw begin in one recording (the optimizer's
        step, around its closure) and end in another, it notes in freed memory, and the process crashes (torch 2.14).
        A step that is not due is left alone, without a word, if the profiler is busy.
        """
        if self._was_interrupted:
            return False
        on_cpu = loop.device().type == "cpu"
        if on_cpu and loop.profiler_is_taken:
            self.give_up()  # torch has one profiler, and the user wants it
            return False
        if on_cpu and loop.may_take_new_buckets():
            return False  # the old ones, never measured, would not show as freed
        meter, gradients = StepMeter(loop.device()), own_gradients(loop.model)
        try:
            meter.start(older=[each for each in gradients if each in self._seen])
        except ProfilingError as error:
            if is_due:
                self.give_up()
                loop.warn(f"RotorCallback cannot measure the peak of this step: {error}")
            return False
        self._meter = meter
        self._model = loop.model
        # The CPU's meter sees only those go that were made under its eyes.
        self._older.clear()
        for each in gradients if on_cpu else ():
            if each not in self._seen:
                self._older[each] = each.nbytes
        self._older_bytes = sum(self._older.values())
        self._gone_bytes = [0]
        self._base_bytes = loop.allocated_bytes(batch)
        return True

    def mark(self, label: str) -> None:
        """Begin a phase of the step, if it is measured."""
        if self._meter is not None:
            self._gone_bytes.append(self._older_bytes - sum(self._older.values()))
            self._meter.lap(label)

    def stop(self) -> bool:
        """End with a step. True if there are new peaks."""
        self._was_interrupted = False
        trace = self._end()
        if trace is None:
            return False
        self._left -= 1
        self.phases = [
            phase.raised(self._base_bytes - gone) for phase, gone in zip(trace.phases, self._gone_bytes, strict=True)
        ]
        self.peak_bytes = max(phase.peak_bytes for phase in self.phases)
        self.reserved_bytes = trace.reserved_bytes
        return True

    def drop(self) -> None:
        """Give torch's one profiler back: a new input shape is about to be measured, or training is over."""
        if self._end() is not None:
            self._was_interrupted = True

    def _end(self) -> Recording | None:
        """What the meter has seen, under whose eyes gradients were made; None if none runs."""
        if self._meter is None:
            return None
        trace, self._meter = self._meter.stop(), None
        for each in own_gradients(self._model):
            if each not in self._older:
                self._seen[each] = each.nbytes
        return trace


# ---------------------------------------------------------------- Steps whose size is a draw.

# With several processes, threads keep what they have sent for a moment, longer in one step than in another.
_UNLIKE, _UNLIKE_BY_THREADS = 0.003, 0.1
_CALM_STEPS, _MOST_APART = 64, 64
_MOST_FOLLOWED = 64


class Draws:
    """Knows steps whose peaks differ under the same plans: layers skipped at random, experts, lengths inside of data.

    One measurement says little of those, so all of them are measured, until none has taken more than all before for
    long; then every second one, and so on.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], tuple[list[Plan], int, int]] = {}  # plans, the least peak, and the highest
        self._calm = 0
        self.are_seen = False

    @property
    def spread_bytes(self) -> int:
        """By how much steps under the same plans have differed: what a draw may take more than all that were seen."""
        return max((most - least for _, least, most in self._seen.values()), default=0) if self.are_seen else 0

    def is_due(self, number: int) -> bool:
        """True if the step of this number is to be measured."""
        return self.are_seen and number % min(1 << (self._calm // _CALM_STEPS), _MOST_APART) == 0

    def learn(self, plans: Iterable[Plan], peak_bytes: int, limit_bytes: int, *, processes: int = 1) -> None:
        """A step under plans has had a peak."""
        unlike = _UNLIKE if processes == 1 else _UNLIKE_BY_THREADS
        unique = {id(plan): plan for plan in plans}
        key = tuple(sorted(unique))
        _, least, most = self._seen.pop(key, ([], peak_bytes, peak_bytes))
        self.are_seen |= not (1 - unlike) * most <= peak_bytes <= (1 + unlike) * least
        has_grown = peak_bytes > limit_bytes or peak_bytes > most * (1 + unlike)
        self._calm = 0 if has_grown else self._calm + 1
        # With the plans themselves, for numbers of objects that are gone are given anew.
        self._seen[key] = list(unique.values()), min(peak_bytes, least), max(peak_bytes, most)
        for oldest in list(self._seen)[:-_MOST_FOLLOWED]:
            del self._seen[oldest]


# -------------------------------------------------------------------- The search for budgets.

# A peak this close to the limit is close enough; a gap smaller than the second figure is not worth a step.
_CLOSE = 0.9
_NARROW = 0.01
_MOST_OVERSHOOTS, _MOST_GROWTHS = 5, 8
_MARGIN = 0.1
_MOST_CHAINS = 256


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan, its predicted peak, and the peak of the whole process in a step under it, until the optimizer's step."""

    budget_bytes: int
    plan_bytes: int
    measured_bytes: int


class ClosedLoop:
    """The search for one chain's budget, between one that has kept the limit and a plan that took too much.

    ``size_bytes`` turned out to be needed outside of it so far; negative if less was needed than was kept free.
    """

    def __init__(self, chain_bytes: int = 1, size_bytes: int = 0) -> None:
        self.chain_bytes, self.size_bytes = chain_bytes, size_bytes
        self._good: Trial | None = None
        self._bad: Trial | None = None
        self._overshoots = self._growths = 0

    def following(self, trial: Trial, limit_bytes: int) -> int | None:
        """The next budget; None if this one is good enough, or if many that were too much did not help."""
        return (self._less if trial.measured_bytes > limit_bytes else self._more)(trial, limit_bytes)

    def _less(self, trial: Trial, limit_bytes: int) -> int | None:
        if self._bad is None or trial.plan_bytes <= self._bad.plan_bytes:
            self._bad = trial
        if self._good is not None and self._good.budget_bytes >= trial.budget_bytes:
            self._good = None  # what did once does not always
        self._overshoots += 1
        has_more = self._overshoots <= _MOST_OVERSHOOTS
        if self._good is not None:
            return (_between(self._good, self._bad, limit_bytes) if has_more else None) or self._good.budget_bytes
        # Another plan peaks elsewhere, where what is outside of it may take more again: the steps grow.
        steps_bytes = (trial.measured_bytes - limit_bytes) << (self._overshoots - 1)
        return trial.plan_bytes - steps_bytes if has_more else None

    def _more(self, trial: Trial, limit_bytes: int) -> int | None:
        if self._good is None or trial.budget_bytes > self._good.budget_bytes:
            self._good = trial
        if trial.measured_bytes >= _CLOSE * limit_bytes or self._growths >= _MOST_GROWTHS:
            return None
        grown = trial.plan_bytes + limit_bytes - trial.measured_bytes
        if self._bad is not None and grown >= self._bad.plan_bytes:
            grown = _between(self._good, self._bad, limit_bytes) or 0
        if grown <= trial.budget_bytes + _NARROW * limit_bytes:
            return None
        self._growths += 1
        return grown


def _between(good: Trial, bad: Trial, limit_bytes: int) -> int | None:
    """Where the limit should be reached, between a good budget and the plan that took too much."""
    gap = bad.plan_bytes - good.budget_bytes
    if gap <= _NARROW * limit_bytes:
        return None
    share = (limit_bytes - good.measured_bytes) / (bad.measured_bytes - good.measured_bytes)
    return good.budget_bytes + int(gap * min(max(share, _MARGIN), 1 - _MARGIN))


Foresight: TypeAlias = Callable[[Plan], int]
"""Peak of the whole process, until its backward is over, in a step like the measured one under another plan."""
_MOST_FORESEEN = 12


def _within(limit_bytes: int, plan: Plan, budget_bytes: int, foresee: Foresight) -> int:
    """A budget of at most so many bytes for a plan's chain whose plan is foreseen to keep the limit; 0 if none is."""
    for _ in range(_MOST_FORESEEN):
        try:
            candidate = solve(plan.chain, max(budget_bytes, 1), slots=plan.slots, **plan.conditions)
        except BudgetError:
            return 0
        excess_bytes = foresee(candidate) - limit_bytes
        if excess_bytes <= 0:
            return budget_bytes
        budget_bytes = candidate.peak_bytes - excess_bytes
    return 0


def _replanned(modules: PlannedModules, plan: Plan, known: ClosedLoop, available_bytes: int, budget_bytes: int) -> bool:
    """Give a chain another budget, or the least if there is no plan for it. False if that changes nothing.

    ``available_bytes`` is what the chain could use if nothing had been learned.
    """
    before, running = known.size_bytes, available_bytes - plan.budget_bytes
    known.size_bytes = available_bytes - budget_bytes
    try:
        modules.replan(plan)
    except BudgetError as error:
        known.size_bytes -= error.minimum_bytes - error.budget_bytes
        if known.size_bytes <= running:
            known.size_bytes = before
            return False
        return modules.replan(plan).schedule != plan.schedule
    return True


def bytes_kept(chain: Chain) -> int:
    """What a chain holds if nothing is recomputed, at least 1."""
    return max(chain.kept_bytes, 1)


# ----------------------------------------------------------- What plans may use, and what happens where none keeps it.

# Minima are named with so much more: steps differ by a few bytes, or by a few boxes of a detector, and the way to the
# least plan of several calls depends on the limit.
_UNEVEN, _SEVERAL = 1.005, 1.02


def optimizer_remedy(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> str:
    """What makes the steps of optimizers take less, with bytes where a dry step tells them."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        all_bytes = predict_optimizer_temporary_bytes(optimizer, device)
        single_bytes = temporary_bytes_one_by_one(optimizer, device)
        if all_bytes is not None and single_bytes is not None and single_bytes < all_bytes:
            return (
                f"pass foreach=False to {name}, which then takes {format_bytes(single_bytes)} besides instead of "
                f"{format_bytes(all_bytes)}, or raise mem_limit"
            )
    return "raise mem_limit, for no plan and no smaller batch changes this, or choose an optimizer that takes less"


class StepLimit:
    """What plans may use of a user's limit, and what happens where none keeps it.

    ``beyond`` lets training go on with the plan that takes least, and says so once.
    """

    def __init__(self, loop: TrainingLoop, limit: MemoryLimit | None, *, beyond: bool) -> None:
        self.size_bytes, self.beyond = 0, beyond
        self._excess_bytes = self._correction_bytes = 0  # of the least plan beyond the limit, and a part of that
        self._known: dict[str, ClosedLoop] = {}
        self._loop, self._limit = loop, limit
        self._agreed_bytes: int | None = None
        self._others: dict[str, int] = {}
        self._told = Budget(0)
        self._resident = ResidentMemory()
        self._final: MeteredPhase | None = None  # the highest behind the backward of a step that was not the first
        self.refused: tuple[Budget, BudgetError] | None = None  # what to raise when the step has run
        self._has_warned = False

    def agree(self, batch: Sequence[torch.Tensor]) -> None:
        """Take the least limit of all processes."""
        self._agreed_bytes = min(self._loop.told_by_all(self._loop.limit_bytes(self._limit, batch)))

    def take(self, batch: Sequence[torch.Tensor]) -> None:
        """Read the limit, which a budget does for a plan."""
        self.size_bytes = self._agreed_bytes or self._loop.limit_bytes(self._limit, batch)

    def budget(
        self, chain: Chain, modules: nn.Module, step: Step | None, *, correction_bytes: int | None = None
    ) -> Budget:
        """What a plan may use. What else there is shows when a step's first forward begins; between steps the first."""
        self._resident = self._resident_beside(chain, modules, step)
        self.take([] if step is None else step.batch)
        if correction_bytes is None:
            correction_bytes = self._correction_of(chain)
        budget = self._resident.budget(self.size_bytes, correction_bytes=correction_bytes)
        if chain.fingerprint not in self._known:
            budget = replace(budget, guessed_bytes=correction_bytes)
        self._told = replace(budget, error=TrialError) if self._loop.is_trial() else budget
        self._excess_bytes, self._correction_bytes = 0, correction_bytes
        return self._told

    def _resident_beside(self, chain: Chain, modules: nn.Module, step: Step | None) -> ResidentMemory:
        """What the process holds besides a chain."""
        batch = [] if step is None else step.batch
        resident = self._loop.resident(modules, batch, torch.device(chain.device))
        if not batch:  # in a tuner's trial, which is known from its forward alone
            resident = replace(resident, batch_bytes=chain.input_bytes)
        other_bytes = self._others.get(chain.fingerprint, resident.other_bytes)
        if step is not None:
            step.other_bytes = resident.other_bytes if step.other_bytes is None else step.other_bytes
            other_bytes = self._others.setdefault(chain.fingerprint, step.other_bytes)
        return replace(resident, other_bytes=other_bytes)

    def missing(self) -> tuple[int, int]:
        """What later steps hold besides, in forwards and in backwards: a first step has neither state nor gradients."""
        loop = self._loop
        with loop.untoggled():
            gradients = gradient_bytes(loop.model) - existing_gradient_bytes(loop.model)
            state = self.state_bytes() - sum(map(optimizer_state_bytes, loop.optimizers()))
        return gradients + state, state if loop.gradients_linger() else gradients + state

    def state_bytes(self) -> int:
        """What optimizers will keep, and hold while a closure runs."""
        with self._loop.untoggled():
            return sum(
                predict_optimizer_state_bytes(each) + predict_closure_bytes(each) for each in self._loop.optimizers()
            )

    def growing_bytes(self) -> int:
        """What the state of LBFGS will still grow by, which fills its history over many steps."""
        growing = [each for each in self._loop.optimizers() if isinstance(each, torch.optim.LBFGS)]
        return sum(max(predict_optimizer_state_bytes(each) - optimizer_state_bytes(each), 0) for each in growing)

    @property
    def reserved_bytes(self) -> int:
        """What of the process is not for the plan that was made last."""
        is_beyond = self._excess_bytes > 0  # where what is outside of the calls is only guessed
        return self._told.reserved_bytes - (self._correction_bytes if is_beyond else 0)

    @property
    def final_peak_bytes(self) -> int:
        """Peak behind the backward, when optimizers step: as measured, until then as predicted."""
        predicted_bytes = self._resident.staying_bytes + (self._resident.temporary_bytes or 0)
        if self._final is None:
            return predicted_bytes
        grows = any(isinstance(each, torch.optim.LBFGS) for each in self._loop.optimizers())
        return max(self._final.peak_bytes, predicted_bytes if grows else 0)

    @property
    def knows_final_peak(self) -> bool:
        """True if that has been measured in a step that was not the first."""
        return self._final is not None

    # ---------------------------------------------------------------- what measured steps have taught, for each chain

    def to_plain(self) -> dict[str, list[int]]:
        """For each chain, by its fingerprint, its size and what is kept free besides what was predicted; in bytes."""
        return {name: [each.chain_bytes, each.size_bytes] for name, each in self._known.items()}

    def recall(self, corrections: Mapping[str, Sequence[int]]) -> None:
        """Take over the corrections of an earlier training."""
        self._known |= {name: ClosedLoop(*sizes) for name, sizes in corrections.items()}

    def _correction_of(self, chain: Chain) -> int:
        """A chain's own correction, or for one that was never watched the largest of the others, in proportion."""
        own = self._known.get(chain.fingerprint)
        if own is not None:
            return own.size_bytes
        size = bytes_kept(chain)
        return max((int(each.size_bytes * max(1, size / each.chain_bytes)) for each in self._known.values()), default=0)

    def correct(
        self,
        modules: PlannedModules,
        step: Step,
        measured_bytes: int,
        foresight_of: Callable[[Plan, int], Foresight | None],
        *,
        may_grow: bool,
    ) -> bool:
        """Plan better if a step has shown how. False if its peak is above the limit and no plan takes less.

        ``measured_bytes`` is the process' peak until the optimizer's step. ``foresight_of`` tells of a plan, beside so
        many bytes that are not for it, what the peak would be with another one in its place. ``may_grow`` says that the
        step is like those to come.
        """
        exceeds, is_better = measured_bytes > self.size_bytes, True
        runs = [path[0].plan for path in step.paths]
        for plan in {id(plan): plan for plan in runs}.values():
            known = self._take_up(plan.chain)
            if not exceeds and not (may_grow and plan.recomputed and not modules.is_capped(plan)):
                continue
            plainly = self._resident_beside(plan.chain, modules.all, step).budget(self.size_bytes)
            budget = known.following(Trial(plan.budget_bytes, plan.peak_bytes, measured_bytes), self.size_bytes)
            foresee = foresight_of(plan, plainly.reserved_bytes) if budget else None
            if budget and foresee is not None:
                # What a chain's costs overstate (bounds of messages), they overstate under every plan.
                overstated_bytes = max(foresee(plan) - measured_bytes, 0)
                within = _within(self.size_bytes + overstated_bytes, plan, budget, foresee)
                budget = within if exceeds or within > plan.budget_bytes else None
            if exceeds:  # where other plans did not help, the one that takes least
                is_better = _replanned(modules, plan, known, plainly.available_bytes, budget or 0)
            elif budget is not None:
                _replanned(modules, plan, known, plainly.available_bytes, budget)
        if exceeds and is_better:
            modules.unplan(lambda plan: plan.chain.fingerprint in self._known)
        return is_better

    def _take_up(self, chain: Chain) -> ClosedLoop:
        """What is known of a chain, now used last."""
        size_bytes = self._correction_of(chain)
        known = self._known.pop(chain.fingerprint, ClosedLoop(bytes_kept(chain), size_bytes))
        self._known[chain.fingerprint] = known
        if len(self._known) > _MOST_CHAINS:
            del self._known[next(iter(self._known))]
        return known

    # ---------------------------------------------------------------- where no plan keeps it

    def refuse(self, error: BudgetError, step: Step | None) -> None:
        """No plan for a call fits: go beyond the limit, or end training, once the step has shown what it needs."""
        self._excess_bytes = error.minimum_bytes - error.budget_bytes - self._correction_bytes
        loop, runs = self._loop, step is not None and not step.is_over
        missing_bytes = error.minimum_bytes - self.size_bytes
        has_no_more = loop.device().type == "cuda" and missing_bytes > usable_bytes(loop.device())
        if not runs or loop.is_trial() or loop.processes > 1 or has_no_more:
            self._go_beyond(self._or_final(error))
        else:
            self.refused = self._told, error

    def end_backward(self, step: Step, watch: StepWatch) -> None:
        """End training if a call was refused, and nothing behind the backward can show more: weights are as before."""
        if self.refused is None or self.beyond or not self._loop.gradients_linger():
            return
        if self._resident.temporary_bytes is not None and not self._loop.has_hooks_at_end():
            self._end_refused(step, watch.phases if watch.stop() else [])

    def end_step(self, step: Step, watch: StepWatch, *, is_measured: bool) -> None:
        """End training if a call was refused, or go on with the plan that takes least."""
        if self.refused is None:
            return
        is_like_later = self._loop.gradients_linger() and self._resident.temporary_bytes is not None
        if is_measured and not is_like_later:
            self.refused = None  # later steps show what this one does not: gradients that add up, an unknown state
        else:
            self._end_refused(step, watch.phases if is_measured else [])

    def _end_refused(self, step: Step, phases: Sequence[MeteredPhase]) -> None:
        assert self.refused is not None
        (budget, error), self.refused = self.refused, None
        highest = highest_of(step.as_later(phases))
        least_bytes, stage = error.minimum_bytes - budget.reserved_bytes, error.stage
        if highest is not None and (rest_bytes := int(highest.peak_bytes * _UNEVEN) - error.minimum_bytes) > 0:
            if is_final(highest):
                self._go_beyond(self._final_error(highest))
                return
            budget = budget.reduced_to(budget.available_bytes - rest_bytes, "what else this step has taken")
            stage = step.setter(highest)
        self._go_beyond(self._or_final(budget.refusal(least_bytes, error, stage=stage)))

    def exceeded(self, highest: MeteredPhase, step: Step, *, spread_bytes: int) -> None:
        """A measured step has taken more, and no plan takes less: go beyond the limit, or end training.

        Steps have differed by ``spread_bytes``.
        """
        several = len({call.key for call in step.numbers}) > 1
        stage = step.setter(highest)
        error = limit_error(
            self.size_bytes,
            int(highest.peak_bytes * (_SEVERAL if several else _UNEVEN)) + spread_bytes,
            needs=f"a measured step has taken {format_bytes(highest.peak_bytes)} under the plan that takes least"
            + (f", and steps differ by {format_bytes(spread_bytes)} under the same plan" if spread_bytes else "")
            + f" (set by {stage!r})",
            stage=stage,
            remedy="raise mem_limit or lower the batch size",
            error=self._told.error,
        )
        self._go_beyond(self._or_final(error))

    def learn_final(self, step: Step, phases: Sequence[MeteredPhase]) -> None:
        """Remember what a measured step has taken behind its backward, if it is not the first."""
        highest = highest_of(phase for phase in phases if is_final(phase))
        if highest is None or step.is_first:
            return
        if self._final is None or highest.peak_bytes > self._final.peak_bytes:
            self._final = highest

    def check_final(self, step: Step, phases: Sequence[MeteredPhase]) -> None:
        """End training, or go beyond the limit, if what no plan can change is above it."""
        highest = highest_of(phase for phase in phases if is_final(phase))
        if highest is None or any(phase.peak_bytes > self.size_bytes for phase in phases if not is_final(phase)):
            return  # a smaller plan follows, or none keeps the limit, which then says what both need
        # A first step makes the state, for which some optimizers take what they never take again.
        sizes = (highest.peak_bytes, self.final_peak_bytes)
        if (min(sizes) if step.is_first else max(sizes)) > self.size_bytes:
            self._go_beyond(self._or_final(self._final_error(highest)))

    def _or_final(self, error: BudgetError) -> BudgetError:
        """The error, or the one for the optimizer's step if that needs more."""
        names = [type(optimizer).__name__ for optimizer in self._loop.optimizers()] or [""]
        label = f"{STEP_OF} {names[-1]}" if self._final is None else self._final.label
        final = MeteredPhase(label, 0, self.final_peak_bytes, 0)
        return self._final_error(final) if final.peak_bytes * _UNEVEN > error.minimum_bytes else error

    def _final_error(self, highest: MeteredPhase) -> BudgetError:
        """The error for a peak behind the backward."""
        stage, name = Step(None).setter(highest), highest.label.removeprefix(STEP_OF).strip()
        staying_bytes = min(self._resident.staying_bytes, highest.peak_bytes)
        optimizers = [each for each in self._loop.optimizers() if type(each).__name__ == name]
        who = f"the step of {name}, with hooks and clipping around it," if optimizers else "what runs behind it"
        return limit_error(
            self.size_bytes,
            int(highest.peak_bytes * _UNEVEN),
            needs=f"{format_bytes(staying_bytes)} for parameters, gradients, optimizer state and the batch, and "
            f"{format_bytes(highest.peak_bytes - staying_bytes)} that {who} takes besides, when no activations are "
            f"left that a plan could drop (set by {stage!r})",
            stage=stage,
            remedy=optimizer_remedy(optimizers, self._loop.device()),
            error=self._told.error,
        )

    def exceeded_without_a_plan(self, peak_bytes: int) -> None:
        """A measured step in which nothing is planned has taken more: go beyond the limit, or end training."""
        self._go_beyond(
            limit_error(
                self.size_bytes,
                int(peak_bytes * _UNEVEN),
                needs=f"a measured step has taken {format_bytes(peak_bytes)}, and nothing in it is planned",
                stage="",
                remedy="raise mem_limit, lower the batch size, or name a module that can be planned: "
                "RotorCallback(module=...)",
            )
        )

    def _go_beyond(self, error: BudgetError) -> None:
        if not self.beyond:
            raise error
        if not self._has_warned:
            self._has_warned = True
            self._loop.warn(f"training goes on beyond the limit, with the plan that takes least: {error}")

    def note_shortage(self, failure: BaseException, plan: Plan, *, lowered: bool) -> None:
        """Say what the device had too little for, unless the error does; ``lowered``: plans to come take less."""
        limit_bytes, consequence = self.size_bytes, "the next training with this callback plans with less"
        if isinstance(failure, ShortageError):
            if lowered:
                limit = format_bytes(limit_bytes)
                self._loop.warn(f"RotorCallback: the device has less than mem_limit {limit}: {consequence}")
            return
        reason = "A step cannot run again from where it failed" + f", but {consequence}" * lowered
        predicted_bytes = limit_bytes - plan.budget_bytes + plan.peak_bytes
        message = shortage_message(failure, reason, limit_bytes=limit_bytes, predicted_bytes=predicted_bytes)
        self._loop.warn(f"RotorCallback: {message}")
