"""The search for the budget of a chain whose measured steps take more, or less, than was predicted.

A plan's peak is predicted for its chain alone. What the rest of the step takes besides shows in a measured step, as one
number: the peak of the whole process. The search moves the chain's budget by the difference and tries again::

    process' peak
        │                        × too much: the next budget is smaller
    limit ───────────────────────────────────
        │            ○ kept, and close enough: the search ends
        │   ○ kept, but far below: the next budget is larger
        └──────────────────────────── budget of the chain
"""

from __future__ import annotations

from dataclasses import dataclass

# A measured peak this close to the limit, as a share of it, ends the search.
_CLOSE = 0.9
# Budgets that differ by a smaller share of the limit lead to nearly the same plan, which is not worth a measured step.
_NARROW = 0.01
_MOST_OVERSHOOTS, _MOST_GROWTHS = 5, 8
# Plans that are made for the whole of a step, each by what the last one has shown. Behind them, budgets only shrink.
_MOST_FORESEEN = 3
# Between a good and a bad budget, the next one is at least this share of the gap away from both: peaks jump from plan
# to plan, so the line between two measurements may point next to one of them again and again.
_MARGIN = 0.1


@dataclass(frozen=True, slots=True)
class Trial:
    """A measured step under a plan.

    Attributes:
        budget_bytes: What the plan was made for.
        plan_bytes: The plan's predicted peak, at most the budget.
        measured_bytes: Peak of the whole process in the step, until the optimizer's step.
    """

    budget_bytes: int
    plan_bytes: int
    measured_bytes: int


class BudgetSearch:
    """The search for one chain's budget.

    Attributes:
        chain_bytes: What the chain holds if nothing is recomputed; tells how far a correction applies to other chains.
        correction_bytes: What has turned out to be needed outside of the chain beyond the prediction; negative if less
            was needed.
        is_measured: Steps of this chain have shown the correction; else the other chains' says more.
    """

    def __init__(self, chain_bytes: int = 1, correction_bytes: int = 0, *, is_measured: bool = False) -> None:
        self.chain_bytes = chain_bytes
        self.correction_bytes = correction_bytes
        self.is_measured = is_measured
        self._largest_good: Trial | None = None
        self._smallest_bad: Trial | None = None
        self._overshoots = 0
        self._growths = 0
        self._foreseen = 0

    def next_budget(self, trial: Trial, limit_bytes: int) -> int | None:
        """The budget to try after a measured step.

        Returns:
            Bytes; None if this budget is good enough, or if many smaller ones did not help.
        """
        if trial.measured_bytes > limit_bytes:
            return self._smaller(trial, limit_bytes)
        return self._larger(trial, limit_bytes)

    def may_foresee(self) -> bool:
        """True a few times: the next plan may be one for the whole step, as the measured one foretells it."""
        self._foreseen += 1
        return self._foreseen <= _MOST_FORESEEN

    def _smaller(self, trial: Trial, limit_bytes: int) -> int | None:
        """The budget after one that was too large."""
        if self._smallest_bad is None or trial.plan_bytes <= self._smallest_bad.plan_bytes:
            self._smallest_bad = trial
        if self._largest_good is not None and self._largest_good.budget_bytes >= trial.budget_bytes:
            # It has kept the limit once, and steps differ.
            self._largest_good = None
        self._overshoots += 1
        may_try = self._overshoots <= _MOST_OVERSHOOTS
        if self._largest_good is not None:
            between = _between(self._largest_good, self._smallest_bad, limit_bytes) if may_try else None
            return between or self._largest_good.budget_bytes
        if not may_try:
            return None
        # A smaller plan may peak at another moment, where the rest of the step needs more. So each step down is twice
        # the last.
        step_bytes = (trial.measured_bytes - limit_bytes) << (self._overshoots - 1)
        return trial.plan_bytes - step_bytes

    def _larger(self, trial: Trial, limit_bytes: int) -> int | None:
        """The budget after one that has kept the limit."""
        if self._largest_good is None or trial.budget_bytes > self._largest_good.budget_bytes:
            self._largest_good = trial
        if trial.measured_bytes >= _CLOSE * limit_bytes or self._growths >= _MOST_GROWTHS:
            return None
        grown_bytes = trial.plan_bytes + limit_bytes - trial.measured_bytes
        if self._smallest_bad is not None and grown_bytes >= self._smallest_bad.plan_bytes:
            grown_bytes = _between(self._largest_good, self._smallest_bad, limit_bytes) or 0
        if grown_bytes <= trial.budget_bytes + _NARROW * limit_bytes:
            return None
        self._growths += 1
        return grown_bytes


def _between(good: Trial, bad: Trial, limit_bytes: int) -> int | None:
    """The budget at which the limit should be reached, by a line through two trials; None if they are too close."""
    gap_bytes = bad.plan_bytes - good.budget_bytes
    if gap_bytes <= _NARROW * limit_bytes:
        return None
    share = (limit_bytes - good.measured_bytes) / (bad.measured_bytes - good.measured_bytes)
    share = min(max(share, _MARGIN), 1 - _MARGIN)
    return good.budget_bytes + int(gap_bytes * share)
