"""A forward under its plan, and where the device runs out of memory another time under a smaller one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch

from lightning_rotor.allowed_plans import AllowedPlans
from lightning_rotor.known_cuts import Signature
from lightning_rotor.plan_cache import Prepared
from lightning_rotor.preparation import Preparation
from lightning_rotor.shortage import BeforeForward, CopiedStatistics, is_shortage, shortage_error
from lightning_rotor.units import format_bytes

_log = logging.getLogger(__name__)

# Out of memory so many times, a forward gets the plan that takes the least.
_CAUTIOUS_ATTEMPTS = 2


class Attempts:
    """Runs prepared calls of one module.

    Args:
        preparation: Prepares them again.
        plans: Says how much they may take, which here becomes less.
    """

    def __init__(self, preparation: Preparation, plans: AllowedPlans) -> None:
        self._preparation = preparation
        self._plans = plans
        self._statistics = CopiedStatistics()

    def run(
        self, signature: Signature, prepared: Prepared, value: Any, *, plainly: Callable[[], Any] | None = None
    ) -> Any:
        """Run a call; if the device has no memory left for it, once more under a smaller plan, and so on."""
        before = BeforeForward(prepared.profile, value, self._statistics)
        for attempt in itertools.count():
            try:
                assert prepared.executor is not None
                output = plainly() if plainly is not None and not attempt else prepared.executor(value)
                before.forget()
                return output
            except RuntimeError as error:
                if not is_shortage(error):
                    raise
                failure = error
            failure.__traceback__ = failure.__context__ = None  # whose frames hold what the failed forward has made
            prepared = self._with_less(signature, prepared, failure, restored=before.restore(), attempt=attempt)
        raise AssertionError

    def _with_less(
        self, signature: Signature, prepared: Prepared, failure: RuntimeError, *, restored: bool, attempt: int
    ) -> Prepared:
        """The next smaller plan for a forward that has failed.

        Raises:
            ShortageError: There is none, or the forward cannot run again.
        """
        assert prepared.plan is not None
        solved = prepared.plan
        allowance = self._plans.allowance_without_ceiling(prepared.profile)
        reason = "The forward has changed its input or a large buffer, so it cannot run again with a smaller plan"
        if self._preparation.together:
            reason = "The forward communicates with other processes, so it cannot run again here alone"
        elif restored:
            reason = "No plan takes less"
            if self._plans.lower_ceiling(solved, to_the_least=attempt >= _CAUTIOUS_ATTEMPTS):
                if signature.device.type == "cuda":
                    torch.cuda.empty_cache()
                self._preparation.unplan(self._plans.allows)
                smaller = self._preparation.plan_again(signature, prepared)
                _log.warning(
                    "out of memory under a plan of %s: the forward runs again, and all that follow, with plans of at most %s",
                    format_bytes(solved.peak_bytes),
                    format_bytes(self._plans.ceiling_bytes or 0),
                )
                return smaller
        raise shortage_error(
            failure,
            reason,
            limit_bytes=allowance.limit_bytes,
            predicted_bytes=allowance.reserved_bytes + solved.peak_bytes,
        ) from failure
