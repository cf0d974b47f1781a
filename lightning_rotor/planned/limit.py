"""One limit for a training step: what plans may use of it, and what happens where no plan keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError, ShortageError, TrialError
from lightning_rotor.memory.budget import Budget
from lightning_rotor.memory.devices import usable_bytes
from lightning_rotor.memory.held import (
    existing_gradient_bytes,
    gradient_bytes,
    optimizer_state_bytes,
    predict_optimizer_state_bytes,
)
from lightning_rotor.planned.calls import Step
from lightning_rotor.planned.closed_loop import Corrections, StepWatch
from lightning_rotor.planned.forward import shortage_message
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planning import Plan
from lightning_rotor.units import MemoryLimit, format_bytes

# Minima are named with so much more: steps differ by a few bytes, or by a few boxes of a detector, and the way to the
# least plan of several calls depends on the limit.
_UNEVEN, _SEVERAL = 1.005, 1.02


class StepLimit:
    """What plans may use of a user's limit, and what happens where none keeps it.

    ``beyond`` lets training go on with the plan that takes least, and says so once.
    """

    def __init__(self, loop: TrainingLoop, limit: MemoryLimit | None, *, beyond: bool) -> None:
        self.size_bytes, self.beyond = 0, beyond
        self.excess_bytes = self._correction_bytes = 0  # what the least plan takes beyond the limit, and a part of that
        self.corrections = Corrections()
        self._loop, self._limit = loop, limit
        self._agreed_bytes: int | None = None
        self._others: dict[str, int] = {}
        self._told = Budget(0)
        self._refused: tuple[Budget, BudgetError] | None = None  # what to raise when the step has run
        self._has_warned = False

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
        self._told = replace(budget, error=TrialError) if self._loop.is_trial else budget
        self.excess_bytes, self._correction_bytes = 0, correction_bytes
        return self._told

    def _other_bytes(self, chain: Chain, step: Step | None, now_bytes: int) -> int:
        """What else there was when the first forward of the step began."""
        if step is None:
            return self._others.get(chain.fingerprint, now_bytes)
        if step.other_bytes is None:
            step.other_bytes = now_bytes
        return self._others.setdefault(chain.fingerprint, step.other_bytes)

    def missing(self) -> tuple[int, int]:
        """What later steps hold besides, in forwards and in backwards: a first step has neither state nor gradients."""
        loop = self._loop
        with loop.untoggled():
            gradients = gradient_bytes(loop.model) - existing_gradient_bytes(loop.model)
            state = sum(predict_optimizer_state_bytes(each) - optimizer_state_bytes(each) for each in loop.optimizers)
        return gradients + state, state if loop.gradients_linger else gradients + state

    def reserved_beside(self, plan: Plan) -> int:
        """What of the process is not for a plan."""
        return max(self.size_bytes - plan.budget_bytes + self.excess_bytes, 0)

    # ---------------------------------------------------------------- where no plan keeps it

    def refuse(self, error: BudgetError, step: Step | None) -> None:
        """No plan for a call fits: go beyond the limit, or end training once the step has shown what it needs."""
        self.excess_bytes = error.minimum_bytes - error.budget_bytes - self._correction_bytes
        loop, runs = self._loop, step is not None and not step.is_over
        is_simple = runs and loop.gradients_linger and not loop.is_trial and loop.processes == 1
        if self.beyond or not is_simple or self._has_no_more(error):
            self._go_beyond(error)
        else:
            self._refused = self._told, error

    def _has_no_more(self, error: BudgetError) -> bool:
        """True if the device has no memory for the least plan."""
        device = self._loop.device
        return device.type == "cuda" and error.minimum_bytes - self.size_bytes > usable_bytes(device)

    def end_backward(self, step: Step, watch: StepWatch) -> None:
        """End training if a call was refused. The weights are as they were, and the step has shown what it takes."""
        if self._refused is None:
            return
        (budget, error), self._refused = self._refused, None
        peak_bytes = max((phase.peak_bytes for phase in step.as_later(watch.take())), default=0)
        rest_bytes = max(int(peak_bytes * _UNEVEN) - error.minimum_bytes, 0)
        least_bytes = error.minimum_bytes - budget.reserved_bytes
        budget = budget.reduced_to(budget.available_bytes - rest_bytes, "the rest of the step")
        raise budget.refusal(least_bytes, error)

    def exceeded(self, peak_bytes: int, names: Sequence[str], calls: Sequence[Plan]) -> None:
        """A measured step has taken more, and no plan takes less: go beyond the limit, or end training."""
        parts = ", ".join(
            f"{format_bytes(call.peak_bytes)} in {name or 'the model itself'}"
            for name, call in zip(names, calls, strict=False)
        )
        minimum_bytes = int(peak_bytes * (_SEVERAL if len(calls) > 1 else _UNEVEN))
        error = self._told.error(
            f"mem_limit {format_bytes(self.size_bytes)} is below the minimum {format_bytes(minimum_bytes)} "
            f"({minimum_bytes:,} bytes) for this model and batch: a measured step has taken {format_bytes(peak_bytes)} "
            f"under the plan that takes least, {parts} and the rest of the step. Raise mem_limit or lower the batch "
            "size",
            budget_bytes=self.size_bytes,
            minimum_bytes=minimum_bytes,
            stage=max(calls, key=lambda call: call.peak_bytes).chain.names[0],
        )
        self._go_beyond(error)

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
