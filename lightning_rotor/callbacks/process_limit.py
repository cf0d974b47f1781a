"""The user's limit for the whole process, as what a plan may use; corrected by what steps have shown."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_rotor.allowance import Allowance
from lightning_rotor.callbacks.closed_loop import ClosedLoop, Trial
from lightning_rotor.callbacks.process_memory import ProcessMemory, own_limit_bytes
from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.planned import PlannedForward
from lightning_rotor.planning import Plan
from lightning_rotor.units import MemoryLimit

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
