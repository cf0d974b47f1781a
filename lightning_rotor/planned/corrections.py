"""Lessons of measured steps about each chain: how much more, or less, its plans may use than was predicted.

No chain shows what lies around the planned modules, above all the loss. A measured step does, from the first one on:
``StepLimit.correct_each_plan`` hands it on to here, and a better plan follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.memory.budget import StepForesight
from lightning_rotor.planned.modules import PlannedModules
from lightning_rotor.planning import Plan
from lightning_rotor.planning import plan as solve
from lightning_rotor.planning.budget_search import BudgetSearch, Trial
from lightning_rotor.planning.outside import Foresight

# Chains that are remembered: one for each size of input, and a training may have thousands.
_MOST_CHAINS = 256
# Budgets that are looked at by simulation before one is tried in a step.
_MOST_FORESEEN = 12


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step, as far as it tells of steps to come under other plans.

    Attributes:
        plan: The step has run under it.
        peak_bytes: Of the process until the optimizer's step.
        foresight: Tells the peaks of a step like this one, or returns None if it cannot. Asked for only where it is
            needed, as it simulates.
        overstates: What is foreseen of the step beyond its peak is taken off for other plans, too: bounds of messages
            are beyond it under every plan. A stage whose costs are too high is so while it sets the peak, and another
            plan peaks elsewhere.
        reserved_bytes: What of the peak was kept free for the rest of the step.
        is_exact: The chain's costs were measured. Beside bounds on costs, what lies around the call seems less than it
            is, and would be too little for a chain that was measured.
    """

    plan: Plan
    peak_bytes: int
    foresight: Callable[[], Foresight | None]
    overstates: bool = True
    reserved_bytes: int = 0
    is_exact: bool = True

    def peak_under(self, other: Plan) -> int:
        """Peak of the process in a step like this one under another plan for the chain; 0 if it cannot tell."""
        foresee = self.foresight()
        return 0 if foresee is None else foresee(other) - self._overstated_bytes(foresee)

    def plan_within(self, limit_bytes: int, like: Plan) -> Plan | None:
        """The plan for a chain that keeps a limit in such a step, or takes least; None if it cannot tell."""
        foresee = self.foresight()
        return None if foresee is None else foresee.plan_within(limit_bytes + self._overstated_bytes(foresee), like)

    def _overstated_bytes(self, foresee: Foresight) -> int:
        return max(foresee(self.plan) - self.peak_bytes, 0) if self.overstates else 0


@dataclass(frozen=True, slots=True)
class _Foretold:
    """A measured step's foresight for steps that take so many bytes more. It looks only when it is asked."""

    measured: MeasuredStep
    more_bytes: int = 0

    def __call__(self, plan: Plan, /) -> int:
        return self.measured.peak_under(plan) + self.more_bytes

    def plan_within(self, limit_bytes: int, like: Plan) -> Plan | None:
        return self.measured.plan_within(limit_bytes - self.more_bytes, like)


class Corrections:
    """The searches for budgets of all chains, by the chains' fingerprints; those used last are kept."""

    def __init__(self) -> None:
        self._searches: dict[str, BudgetSearch] = {}
        self._measured: dict[str, MeasuredStep] = {}

    def __contains__(self, chain: Chain) -> bool:
        return chain.fingerprint in self._searches

    def to_plain(self) -> dict[str, list[int]]:
        """For each chain, by its fingerprint, its size and its correction; in bytes."""
        plain = {}
        for name, search in self._searches.items():
            # A search that no step has answered says nothing to a later training.
            if search.is_measured:
                plain[name] = [search.chain_bytes, search.correction_bytes]
        return plain

    def recall(self, corrections: Mapping[str, Sequence[int]]) -> None:
        """Take over the corrections of an earlier training."""
        for name, (chain_bytes, correction_bytes) in corrections.items():
            self._searches[name] = BudgetSearch(chain_bytes, correction_bytes, is_measured=True)

    def of(self, chain: Chain) -> int:
        """Bytes that a chain's plans leave free besides what was predicted.

        For a chain that no step has corrected it is the largest of the others, in proportion to their sizes.
        """
        own = self._searches.get(chain.fingerprint)
        if own is not None and own.is_measured:
            return own.correction_bytes
        size_bytes = _size_of(chain)
        # What a chain takes over from others is not noted as its own. It would be scaled up once more for each larger
        # chain that follows a smaller one, without an end.
        scaled = []
        for search in self._searches.values():
            if search.is_measured:
                # Not less for a smaller chain: a part of what is outside does not depend on sizes.
                growth = max(1, size_bytes / search.chain_bytes)
                scaled.append(int(search.correction_bytes * growth))
        # The largest, as the next step then shows that it may have more. One that exceeds the limit cannot be undone.
        # A chain that takes less than was predicted says nothing of others.
        return max([0, *scaled])

    def search_for(self, chain: Chain) -> BudgetSearch:
        """The search of a chain, which is now used last."""
        search = self._searches.pop(chain.fingerprint, None) or BudgetSearch(_size_of(chain))
        self._searches[chain.fingerprint] = search
        if len(self._searches) > _MOST_CHAINS:
            del self._searches[next(iter(self._searches))]
        return search

    # ---------------------------------------------------------------- a measured step

    def note(self, step: MeasuredStep) -> None:
        """Remember the last measured step of a chain."""
        fingerprint = step.plan.chain.fingerprint
        self._measured.pop(fingerprint, None)
        self._measured[fingerprint] = step
        if len(self._measured) > _MOST_CHAINS:
            del self._measured[next(iter(self._measured))]

    def teaches_nothing(self, plan: Plan, peak_bytes: int) -> bool:
        """True if a step under the same plan has taken as much, so that this one says no more."""
        measured = self._measured.get(plan.chain.fingerprint)
        # Under another plan, even for the same chain, the peak is another one's.
        return measured is not None and measured.plan is plan and peak_bytes <= measured.peak_bytes

    def has_seen(self, chain: Chain) -> bool:
        """True if a step of a chain was measured."""
        return chain.fingerprint in self._measured

    def foresight_for(self, chain: Chain, reserved_bytes: int = 0) -> StepForesight | None:
        """Peaks of the process in steps under plans for a chain; None if no step of such calls was measured.

        A chain that no step has shown has those of the nearest other size. A plan for a new size uses the whole budget,
        so that it must know what lies around the call before a step exceeds the limit.

        Args:
            chain: To plan.
            reserved_bytes: What is kept free for the rest of its steps.
        """
        measured = self._measured.get(chain.fingerprint)
        if measured is not None:
            return _Foretold(measured)
        nearest = self._nearest_size(chain)
        if nearest is None:
            return None
        # The batch is larger or smaller, too.
        more_bytes = reserved_bytes - nearest.reserved_bytes
        return _Foretold(nearest, more_bytes)

    def _nearest_size(self, chain: Chain) -> MeasuredStep | None:
        """The measured step of the nearest other size of a chain; None if there is none that tells of it."""
        alike = []
        for step in self._measured.values():
            if step.is_exact and step.plan.chain.names == chain.names:
                alike.append(step)
        return min(alike, key=lambda step: abs(step.plan.chain.kept_bytes - chain.kept_bytes), default=None)

    def correct_plan(
        self, modules: PlannedModules, measured: MeasuredStep, *, limit_bytes: int, available_bytes: int
    ) -> bool:
        """Replace a plan if a step has shown how to do better.

        Args:
            modules: Whose plans are replaced.
            measured: The step.
            limit_bytes: For the process.
            available_bytes: What of it the chain could use if nothing had been learned.
        Returns:
            False if the peak is above the limit, and no plan takes less.
        """
        plan = measured.plan
        search = self.search_for(plan.chain)
        exceeds = measured.peak_bytes > limit_bytes
        trial = Trial(plan.budget_bytes, plan.peak_bytes, measured.peak_bytes)
        budget_bytes = search.next_budget(trial, limit_bytes)
        if exceeds and modules.may_have_other_code(plan):
            # Its options are all that was compiled so far. The next call compiles again, for what the step has shown.
            search.correction_bytes = available_bytes - (plan.peak_bytes - (measured.peak_bytes - limit_bytes))
            search.is_measured = True
            modules.keep_only(lambda other: other is not plan)
            return True
        best = measured.plan_within(limit_bytes, plan) if exceeds else None
        if best is not None and measured.is_exact and best.schedule == plan.schedule:
            # A plan that takes less by itself takes more in this step.
            return False
        takes_less = best is not None and measured.peak_under(best) < measured.peak_bytes
        if best is not None and takes_less and search.may_foresee():
            budget_bytes = best.peak_bytes
        elif budget_bytes and measured.foresight() is not None:
            # A simulation says what a step under another plan would show, so that few steps are spent on trying.
            foreseen_bytes = _foreseen_budget(limit_bytes, measured, budget_bytes)
            # Below the limit a plan is replaced by a larger one only.
            may_use = exceeds or foreseen_bytes > plan.budget_bytes
            budget_bytes = foreseen_bytes if may_use else None
        if exceeds:
            # Where other plans did not help, it is the one that takes least.
            return _replan(modules, plan, search, available_bytes, budget_bytes or 0)
        if budget_bytes is not None:
            _replan(modules, plan, search, available_bytes, budget_bytes)
        return True


def _size_of(chain: Chain) -> int:
    """Bytes that a chain holds if nothing is recomputed, at least 1, to compare chains by."""
    return max(chain.kept_bytes, 1)


def _foreseen_budget(limit_bytes: int, measured: MeasuredStep, budget_bytes: int) -> int:
    """A budget of at most so many bytes for a step's chain whose plan is foreseen to keep the limit; 0 if none is."""
    plan = measured.plan
    for _ in range(_MOST_FORESEEN):
        try:
            candidate = solve(plan.chain, max(budget_bytes, 1), slots=plan.slots, **plan.conditions)
        except BudgetError:
            return 0
        excess_bytes = measured.peak_under(candidate) - limit_bytes
        if excess_bytes <= 0:
            return budget_bytes
        # From the plan's own peak: it may be far below its budget.
        budget_bytes = candidate.peak_bytes - excess_bytes
    return 0


def _replan(modules: PlannedModules, plan: Plan, search: BudgetSearch, available_bytes: int, budget_bytes: int) -> bool:
    """Give a chain another budget, or the least one if no plan keeps it. False if the least plan is no better.

    ``available_bytes`` is what the chain could use if nothing had been learned. The correction is that less the budget,
    so that a larger correction is a smaller budget.
    """
    before_bytes = search.correction_bytes
    # The correction that the running plan has.
    running_bytes = available_bytes - plan.budget_bytes
    was_measured = search.is_measured
    search.correction_bytes = available_bytes - budget_bytes
    search.is_measured = True
    try:
        modules.replan(plan)
    except BudgetError as error:
        # The least plan needs more than that budget. Where it needs no less than the running plan may use, it is no
        # better than that.
        search.correction_bytes -= error.minimum_bytes - error.budget_bytes
        if search.correction_bytes <= running_bytes:
            search.correction_bytes = before_bytes
            search.is_measured = was_measured
            return False
        return modules.replan(plan).schedule != plan.schedule
    return True
