"""The running step: its calls, and which of them wait for their backward together."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType

import torch

from lightning_rotor.errors import BudgetError
from lightning_rotor.execution.pending import Pending
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.module_plans import ModulePlans
from lightning_rotor.planned.prepared import Costs, Prepared, Turn
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planning import Plan
from lightning_rotor.planning.step_phases import PhaseKind, StepPhase


@dataclass(frozen=True, slots=True)
class CallKey:
    """A call as it returns in every step.

    Attributes:
        plans: Of the module that is called.
        signature: Of its input.
        turn: Names of the modules whose calls wait for their backward when this one begins.
    """

    plans: ModulePlans
    signature: Signature
    turn: Turn

    @property
    def name(self) -> str:
        """Name of the module."""
        return self.plans.name

    def entry(self) -> Costs | Prepared | None:
        """Its costs, perhaps with the plan that it would run under now; None if they are not known any more."""
        return self.plans.cache.use(self.signature, self.turn)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call in the running step.

    Attributes:
        key: That its plan is for. Its own sizes may be smaller.
        prepared: With the plan that it has run under.
        pending: Its backward.
        signature: Its own.
    """

    key: CallKey
    prepared: Prepared
    pending: ReferenceType[Pending]
    signature: Signature | None = None

    @property
    def waits(self) -> bool:
        """True until its backward has come, or its graph is gone."""
        pending = self.pending()
        return pending is not None and pending.waits

    @property
    def plan(self) -> Plan:
        """The plan that it has run under."""
        return self.prepared.plan

    @property
    def has_another_plan(self) -> bool:
        """True if it will run under another plan in the next step."""
        entry = self.key.entry()
        return not isinstance(entry, Prepared) or entry.plan is not self.plan


@dataclass(frozen=True, slots=True)
class StepStart:
    """A step as it began, for planning and measuring.

    Attributes:
        batch: Tensors of the batch.
        is_first: No optimizer has stepped in this training before: there are no gradients yet, and perhaps no state.
        state_bytes: State of optimizers, as predicted.
        missing_forward_bytes: What later steps will hold besides in their forwards, and this one does not.
        missing_backward_bytes: The same in their backwards.
        optimizers: Number of optimizers of the training.
    """

    batch: list[torch.Tensor]
    is_first: bool
    state_bytes: int = 0
    missing_forward_bytes: int = 0
    missing_backward_bytes: int = 0
    optimizers: int = 1


@dataclass(frozen=True, slots=True)
class NoPlan:
    """No plan for a call has kept the budget, and the step runs to its end to show what it needs."""

    budget: Budget
    error: BudgetError

    def __post_init__(self) -> None:
        # Frames of its traceback, and of those before it, hold what the call has returned, which the step would count.
        error: BaseException | None = self.error
        while error is not None:
            error.__traceback__ = None
            error = error.__context__


class Step:
    """The running step.

    Attributes:
        given: The batch as it was given.
        paths: Calls that wait for their backward together, in the order of their forwards; the running path is last.
        numbers: Of its calls, from 0 on.
        other_bytes: What else a GPU's allocator had given out when the first forward began; None on the CPU.
        growing_bytes: By which the state of optimizers will still grow, once they have stepped.
        no_plan: Set where no plan for a call fits.
        shares_budget: A call was planned with a part of the budget, because others were to come.
        is_over: Its optimizer has stepped, or gradients are to add up.
        found_gradient_bytes: Gradients that its backward adds to; None before that, or in a step that is not measured.
    """

    def __init__(self, given: Any) -> None:
        self.given = given
        self.paths: list[tuple[Call, ...]] = []
        self.numbers: dict[Call, int] = {}
        self.other_bytes: int | None = None
        self.growing_bytes = 0
        self.no_plan: NoPlan | None = None
        self.shares_budget = False
        self.is_over = False
        self.found_gradient_bytes: int | None = None
        self._start: StepStart | None = None
        # By which the optimizers' state is larger than it was predicted; less than nothing if it is smaller.
        self._more_state_bytes = 0

    # ---------------------------------------------------------------- its start

    @property
    def start(self) -> StepStart | None:
        """Its start, if somebody has asked for that; a steady step is left alone."""
        return self._start

    def note_start(self, start: StepStart) -> None:
        """Keep its start, which has been looked at before an optimizer stepped."""
        self._start = start

    @property
    def batch(self) -> list[torch.Tensor]:
        """Tensors of the batch; empty if nobody has looked at the start."""
        return [] if self._start is None else self._start.batch

    @property
    def batch_bytes(self) -> int:
        """Bytes of the batch; 0 if nobody has looked at the start."""
        return sum(tensor.nbytes for tensor in self.batch)

    @property
    def is_first(self) -> bool:
        """True if no optimizer has stepped before, as far as somebody has looked."""
        return self._start is not None and self._start.is_first

    def note_state(self, state_bytes: int) -> None:
        """The state of optimizers is known, now that they have stepped."""
        if self._start is None:
            return
        self._more_state_bytes = state_bytes - self._start.state_bytes

    # ---------------------------------------------------------------- its calls

    def add(self, call: Call) -> None:
        """A call has run."""
        self.numbers[call] = len(self.numbers)
        waiting = self.waiting
        # The running path goes on. If some of its calls had their backward, it stays, and another one begins with the
        # rest of them.
        if self.paths and waiting == self.paths[-1]:
            self.paths.pop()
        self.paths.append((*waiting, call))

    @property
    def waiting(self) -> tuple[Call, ...]:
        """Calls whose backward is still to come."""
        if not self.paths:
            return ()
        # A call that waits is always on the last path: each new one takes over those that do.
        return tuple([call for call in self.paths[-1] if call.waits])

    @property
    def is_joint(self) -> bool:
        """True if some of its calls were alive together, or could have been."""
        return self.shares_budget or any(len(path) > 1 for path in self.paths)

    def leave_out(self, plans: Collection[ModulePlans]) -> None:
        """Forget the calls of modules that are planned no more."""
        # The others keep their numbers, by which the meter's marks name them.
        for call in list(self.numbers):
            if call.key.plans in plans:
                del self.numbers[call]
        paths = []
        for path in self.paths:
            rest = tuple([call for call in path if call in self.numbers])
            if rest:
                paths.append(rest)
        self.paths = paths

    # ---------------------------------------------------------------- its phases

    def as_later(self, phases: Iterable[StepPhase]) -> list[StepPhase]:
        """Its phases, with what later steps hold besides."""
        # Where nobody has looked at the start, the step was like those before it, and is like later ones.
        start = self._start or StepStart([], is_first=False)
        phases = list(phases)
        kinds = [phase.kind for phase in phases]
        # A backward in front of the loss runs inside of the forward (forces, a gradient penalty): gradients linger.
        loss_place = kinds.index(PhaseKind.LOSS) if PhaseKind.LOSS in kinds else 0
        has_stepped = False
        later = []
        for place, phase in enumerate(phases):
            has_stepped = has_stepped or phase.is_optimizer_step
            if has_stepped and start.optimizers == 1:
                # The state is there, as in the second closure of LBFGS, and only its history still grows.
                more_bytes = self.growing_bytes
            elif phase.is_final:
                # Here the step makes itself what later ones find.
                more_bytes = 0
            elif phase.is_backward and place >= loss_place:
                more_bytes = start.missing_backward_bytes + self._more_state_bytes
            else:
                more_bytes = start.missing_forward_bytes + self._more_state_bytes
            later.append(phase.raised(more_bytes))
        return later

    def cause_of_peak(self, phase: StepPhase) -> str:
        """Name of what sets the peak of a phase: a stage, the code around the calls, or an optimizer's step."""
        if phase.kind is PhaseKind.END:
            return "behind the backward"
        if phase.kind is PhaseKind.OPTIMIZER:
            return f"{phase.mark.optimizer}.step"
        marked: Call | None = None
        names = []
        for call, number in self.numbers.items():
            names.append(call.key.name)
            if number == phase.mark.call:
                marked = call
        if not names:
            names = [""]
        if phase.kind is PhaseKind.START:
            return f"before {names[0]}".strip()
        if phase.kind is PhaseKind.AFTER and marked is not None:
            return f"behind {marked.key.name}".strip()
        if phase.kind not in (PhaseKind.FORWARD, PhaseKind.BACKWARD) or marked is None:
            return f"behind {names[-1]}".strip()
        # The meter knows of no stages. The simulation knows which of them peaks in this direction.
        is_forward = phase.kind is PhaseKind.FORWARD
        plan = marked.plan
        events = [event for event in plan.simulation.events if (event.phase == "forward") == is_forward]
        highest = max(events, key=lambda event: event.peak_bytes)
        stage = plan.chain.names[highest.stage]
        if len(set(names)) > 1:
            return f"{marked.key.name}.{stage}"
        return stage
