"""From measured peaks to a better budget: less after a peak above the limit, more after one far below it, and never back and forth.

What a plan cannot know shows in the peak of a step: the loss, several calls of the module, gradients that never come. The peak rises with the
budget, in steps of unknown size, so this is a search for the largest budget that keeps the limit::

    budget   ├────────────●───────────────────────○──────────►
                        good      next           bad
                  keeps the limit           has exceeded it

Above the limit without any good budget, the budget falls by the excess, and by twice as much each further time. Below it, the budget grows by no more
than the room that the peak left, shared by all calls of the step. Between a good and a bad budget the next one is interpolated; a plan that
was too much is never tried again, and the gap closes by a tenth each time at
least, so the search ends.
"""

from __future__ import annotations

from dataclasses import dataclass

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
