"""The user's limit for the whole process, as what a plan may use; corrected by what steps have shown."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_rotor.callbacks.ranks import communication_bytes, processes_sharing
from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.memory.budget import Allowance, ResidentMemory, named_bytes, process_limit_bytes
from lightning_rotor.planned.forward import PlannedForward
from lightning_rotor.planning import Plan
from lightning_rotor.private.lightning_names import toggled_parameters
from lightning_rotor.units import MemoryLimit

# ----------------------------------------------------------------------------------------------------
# From measured peaks to a better budget: less after a peak above the limit, more after one far below it, and never
# back and forth.


# A peak this close to the limit is close enough; what is left of a gap that is smaller than the second figure is not worth a step.
_CLOSE = 0.9
_NARROW = 0.01
_MOST_OVERSHOOTS = 5
_MOST_GROWTHS = 8
_MARGIN = 0.1


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan, and what a step under it took.

    Attributes:
        budget_bytes: Of the plan.
        plan_bytes: Its predicted peak.
        measured_bytes: Peak of the whole process, until the optimizer's step.
    """

    budget_bytes: int
    plan_bytes: int
    measured_bytes: int


class ClosedLoop:
    """The search for one chain."""

    def __init__(self) -> None:
        self._good: Trial | None = None
        self._bad: Trial | None = None
        self._overshoots = 0
        self._growths = 0

    def too_much(self, trial: Trial, limit_bytes: int) -> int | None:
        """The next budget after a peak above the limit, or None if so many did not help that another one would not either."""
        if self._bad is None or trial.plan_bytes <= self._bad.plan_bytes:
            self._bad = trial
        if self._good is not None and self._good.budget_bytes >= trial.budget_bytes:
            self._good = None  # what did once does not always
        self._overshoots += 1
        if self._good is not None:
            between = None if self._overshoots > _MOST_OVERSHOOTS else self._between(limit_bytes)
            return between or self._good.budget_bytes
        if self._overshoots > _MOST_OVERSHOOTS:
            return None
        # Another plan peaks elsewhere, where what is outside of it may take more again: the steps grow.
        return trial.plan_bytes - ((trial.measured_bytes - limit_bytes) << (self._overshoots - 1))

    def too_little(self, trial: Trial, limit_bytes: int, *, calls: int) -> int | None:
        """The next budget after a peak that kept the limit, or None if this one is good enough.

        Args:
            trial: Of a plan that recomputes.
            limit_bytes: For the whole process.
            calls: Of the planned module in the step: what each of them takes more may be alive at the same time.
        """
        if self._good is None or trial.budget_bytes > self._good.budget_bytes:
            self._good = trial
        if trial.measured_bytes >= _CLOSE * limit_bytes or self._growths >= _MOST_GROWTHS:
            return None
        grown: int | None = trial.plan_bytes + (limit_bytes - trial.measured_bytes) // max(calls, 1)
        if self._bad is not None and grown is not None and grown >= self._bad.plan_bytes:
            grown = self._between(limit_bytes)
        if grown is None or grown <= trial.budget_bytes + _NARROW * limit_bytes:
            return None
        self._growths += 1
        return grown

    def _between(self, limit_bytes: int) -> int | None:
        """Where the limit should be reached, going by the peaks of the good and the bad budget: any that allows the bad plan is bad."""
        assert self._good is not None
        assert self._bad is not None
        gap = self._bad.plan_bytes - self._good.budget_bytes
        if gap <= _NARROW * limit_bytes:
            return None
        share = (limit_bytes - self._good.measured_bytes) / (self._bad.measured_bytes - self._good.measured_bytes)
        return self._good.budget_bytes + int(gap * min(max(share, _MARGIN), 1 - _MARGIN))


# ----------------------------------------------------------------------------------------------------
# What a Trainer's process holds besides the planned module's activations, under the user's limit.


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """A training process and its limit.

    Attributes:
        limit_bytes: For all of it.
        resident: What it holds.
        gradients_linger: Those of one step are there until after the next forward, and no longer.
    """

    limit_bytes: int
    resident: ResidentMemory
    gradients_linger: bool

    @classmethod
    def of(
        cls,
        limit: MemoryLimit | None,
        trainer: pl.Trainer,
        model: pl.LightningModule,
        *,
        target: nn.Module,
        batch: Sequence[torch.Tensor],
        device: torch.device,
        agreed_bytes: int | None = None,
    ) -> ProcessMemory:
        """Count what is there, and predict what will be.

        Args:
            limit: As the user gave it.
            trainer: Whose process.
            model: What it trains.
            target: The planned module.
            batch: Tensors of one batch.
            device: Where.
            agreed_bytes: The limit that all processes have agreed on, if they have.
        """
        with _untoggled(model):
            resident = ResidentMemory.of(model, target, trainer.optimizers, batch, device)
        resident = replace(resident, communication_bytes=communication_bytes(trainer, model))
        if device.type == "cuda":
            named = named_bytes(model, trainer.optimizers, batch, device) + resident.communication_bytes
            resident = replace(resident, other_bytes=max(0, torch.cuda.memory_allocated(device) - named))
        return cls(
            agreed_bytes or own_limit_bytes(limit, trainer, model, batch, device),
            resident,
            # zero_grad runs between forward and backward, so gradients of the step before linger through the forward. Not so when
            # several backwards add up, or when the user decides.
            gradients_linger=model.automatic_optimization and trainer.accumulate_grad_batches == 1,
        )

    def allowance(self, *, batch_bytes: int | None = None, correction_bytes: int = 0) -> Allowance:
        """What remains for the planned module.

        Args:
            batch_bytes: Of another batch than the one that was counted.
            correction_bytes: Found to be used by something else.
        """
        resident = self.resident if batch_bytes is None else replace(self.resident, batch_bytes=batch_bytes)
        return resident.allowance(
            self.limit_bytes, gradients_linger=self.gradients_linger, correction_bytes=correction_bytes
        )


def own_limit_bytes(
    limit: MemoryLimit | None,
    trainer: pl.Trainer,
    model: pl.LightningModule,
    batch: Sequence[torch.Tensor],
    device: torch.device,
) -> int:
    """A limit as this process sees it."""
    sharing = processes_sharing(trainer, device)
    return process_limit_bytes(limit, model, trainer.optimizers, batch, device, sharing=sharing)


@contextmanager
def _untoggled(model: pl.LightningModule) -> Iterator[None]:
    """Let every parameter require a gradient as it will once ``toggle_optimizer`` is undone: the others train later in the same step."""
    toggled = toggled_parameters(model)
    now = {parameter: parameter.requires_grad for parameter in toggled}
    try:
        for parameter, state in toggled.items():
            parameter.requires_grad = state
        yield
    finally:
        for parameter, state in now.items():
            parameter.requires_grad = state


# ----------------------------------------------------------------------------------------------------


_MOST_CHAINS = 256


@dataclass(slots=True)
class _Correction:
    """What turned out to be needed outside of one chain; negative if less was needed than was kept free."""

    chain_bytes: int
    size_bytes: int = 0
    loop: ClosedLoop = field(default_factory=ClosedLoop)


class ProcessLimit:
    """Turns a limit into allowances, one for each chain, and measured peaks into better ones.

    Args:
        limit: As the user gave it.
    Attributes:
        limit_bytes: In bytes, known once there was an allowance.
    """

    def __init__(self, limit: MemoryLimit | None) -> None:
        self._limit = limit
        self.limit_bytes = 0
        self._corrections: OrderedDict[str, _Correction] = OrderedDict()
        self._others: dict[str, int] = {}

    @property
    def corrections(self) -> dict[str, list[int]]:
        """For each chain, by its fingerprint, its size and what is kept free besides what was predicted; in bytes."""
        return {name: [each.chain_bytes, each.size_bytes] for name, each in self._corrections.items()}

    def recall(self, corrections: Mapping[str, Sequence[int]]) -> None:
        """Go on with the corrections of an earlier training."""
        for name, (chain_bytes, size_bytes) in corrections.items():
            self._corrections[name] = _Correction(chain_bytes, size_bytes)

    def allowance(
        self,
        chain: Chain,
        trainer: pl.Trainer,
        model: pl.LightningModule,
        *,
        target: nn.Module,
        batch: Sequence[torch.Tensor],
        agreed_bytes: int | None,
        in_step: bool,
    ) -> Allowance:
        """What a plan for a chain may use now, under the limit that all processes have agreed on, if they have.

        What else there is besides the chain shows in a step, when its forward begins; between steps the first such moment is remembered.
        """
        memory = ProcessMemory.of(
            self._limit,
            trainer,
            model,
            target=target,
            batch=batch,
            device=torch.device(chain.device),
            agreed_bytes=agreed_bytes,
        )
        self.limit_bytes = memory.limit_bytes
        other = memory.resident.other_bytes
        other = (
            self._others.setdefault(chain.fingerprint, other) if in_step else self._others.get(chain.fingerprint, other)
        )
        memory = replace(memory, resident=replace(memory.resident, other_bytes=other))
        correction = self._correction(chain)
        # There is no batch in a tuner's trial, which is known from its forward alone.
        batch_bytes = None if batch else chain.input_bytes
        allowed = memory.allowance(batch_bytes=batch_bytes, correction_bytes=correction)
        return allowed if chain.fingerprint in self._corrections else replace(allowed, guessed_bytes=correction)

    def own_limit_bytes(
        self, trainer: pl.Trainer, model: pl.LightningModule, batch: Sequence[torch.Tensor], device: torch.device
    ) -> int:
        """The limit as this process sees it."""
        return own_limit_bytes(self._limit, trainer, model, batch, device)

    def _correction(self, chain: Chain) -> int:
        """A chain's own, or for one that was never measured in a step that of the others, as far as it is larger in proportion."""
        own = self._corrections.get(chain.fingerprint)
        if own is not None:
            return own.size_bytes
        size = _bytes_of(chain)
        return max(
            (int(each.size_bytes * max(1, size / each.chain_bytes)) for each in self._corrections.values()), default=0
        )

    # ---------------------------------------------------------------- closing the loop

    def correct(
        self, planned: PlannedForward, runs: Sequence[Plan], measured_bytes: int, *, may_grow: bool
    ) -> str | None:
        """Plan better if a step has shown how.

        Args:
            planned: Runs the plans.
            runs: The plan of each of its calls in the step.
            measured_bytes: Peak of the process, until the optimizer's step.
            may_grow: The peak is that of a step like those to come.
        Returns:
            Why nothing can be done about a peak above the limit; None if there was none, or something was done.
        """
        reason = None
        for plan in {id(plan): plan for plan in runs}.values():
            known = self._known(plan.chain)
            trial = Trial(plan.budget_bytes, plan.peak_bytes, measured_bytes)
            if measured_bytes > self.limit_bytes:
                budget = known.loop.too_much(trial, self.limit_bytes)
                reason = "other plans did not help" if budget is None else self._take(planned, plan, known, budget)
            elif may_grow and plan.recomputed and not planned.is_capped(plan):
                budget = known.loop.too_little(trial, self.limit_bytes, calls=len(runs))
                if budget is not None:
                    self._take(planned, plan, known, budget)
        if measured_bytes > self.limit_bytes and reason is None:
            planned.unplan(lambda plan: plan.chain.fingerprint in self._corrections)
        return reason

    def _take(self, planned: PlannedForward, plan: Plan, known: _Correction, budget_bytes: int) -> str | None:
        """Give a chain another budget, or the least if there is no plan for it. Why that changes nothing, if so."""
        before = known.size_bytes
        known.size_bytes += plan.budget_bytes - budget_bytes
        try:
            planned.replan(plan)
        except BudgetError as error:
            known.size_bytes -= error.minimum_bytes - error.budget_bytes
            if known.size_bytes <= before:
                known.size_bytes = before
                return f"no plan saves that much: {error}"
            if planned.replan(plan).schedule == plan.schedule:
                return f"no plan saves that much: {error}"
        return None

    def _known(self, chain: Chain) -> _Correction:
        name = chain.fingerprint
        if name not in self._corrections:
            self._corrections[name] = _Correction(_bytes_of(chain), self._correction(chain))
        self._corrections.move_to_end(name)
        while len(self._corrections) > _MOST_CHAINS:
            self._corrections.popitem(last=False)
        return self._corrections[name]


def _bytes_of(chain: Chain) -> int:
    return max(sum(stage.output_bytes + stage.keep.saved_bytes for stage in chain), 1)
