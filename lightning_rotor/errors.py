"""Every exception and warning that lightning-rotor raises on purpose.

All of them derive from :class:`RotorError`, and each one also from the built-in type that a caller would expect
(``ValueError`` for a bad value, ``RuntimeError`` for a bad state), so that generic handlers keep working. A message
says what was expected, what was received, and what to do; the numbers in it are also attributes.
"""

from __future__ import annotations

from typing import Any


class RotorError(Exception):
    """Base class of everything that lightning-rotor raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by calling their class with ``args`` alone; ours may need keywords too (spawned processes).
        return type(self).__new__, (type(self), *self.args), self.__dict__


class UnitError(RotorError, ValueError):
    """A size such as ``mem_limit`` cannot be read as bytes."""


class OptionError(RotorError, ValueError):
    """An option that is no size has a value that it cannot have, such as ``slots="many"``."""


class BudgetError(RotorError, ValueError):
    """No schedule fits the budget.

    Attributes:
        budget_bytes: What was allowed.
        minimum_bytes: The least budget for which a schedule exists.
        stage: Name of the stage that sets that minimum.
        gradient_bytes: The part of the minimum that is new gradients of parameters, which no smaller batch makes
            smaller.
    """

    def __init__(
        self, message: str, *, budget_bytes: int, minimum_bytes: int, stage: str, gradient_bytes: int = 0
    ) -> None:
        super().__init__(message)
        self.budget_bytes, self.minimum_bytes = budget_bytes, minimum_bytes
        self.stage, self.gradient_bytes = stage, gradient_bytes


class TrialError(BudgetError, RuntimeError):
    """No schedule fits in a trial of Lightning's batch size finder, which recognizes a lack of memory by text alone."""

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(f"{message}. (For Lightning's tuner: this counts as CUDA out of memory.)", **attributes)


class ShortageError(RotorError, RuntimeError):
    """The device ran out of memory inside a planned module, and no smaller plan is left that can be tried safely.

    Attributes:
        limit_bytes: What the user allowed.
        predicted_bytes: What the plan that failed was to take of it.
    """

    def __init__(self, message: str, *, limit_bytes: int, predicted_bytes: int) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes
        self.predicted_bytes = predicted_bytes


class ScheduleError(RotorError, ValueError):
    """A schedule is malformed, or does not belong to the chain that it is used with."""


class PlanError(RotorError, ValueError):
    """A saved plan cannot be read, or was made for another model, shape, dtype or device."""


class ModelError(RotorError, ValueError):
    """A module cannot be turned into a chain of stages, or a named module does not exist."""


class SampleError(RotorError, ValueError):
    """The sample input is missing, is no tensor, or holds values that are not finite."""


class ProfilingError(RotorError, RuntimeError):
    """Costs cannot be measured: no meter for the device, or a stage that misbehaves while measured."""


class ProfilerBusyError(ProfilingError):
    """Costs cannot be measured now, because torch's one profiler is recording for somebody else."""


class ExecutionError(RotorError, RuntimeError):
    """A schedule cannot be run: a stage changes its input in place, or a graph is used a second time."""


class OffloadError(RotorError, RuntimeError):
    """The other memory, a disk or the host's, has no room for what a plan moves there, or cannot be read."""


class MessageError(RotorError, RuntimeError):
    """Processes that exchange messages in a planned module do not run the same, so they cannot agree on a plan."""


class PipelineError(RotorError, ValueError):
    """A pipeline cannot be built as asked: too many stages, no such schedule, a balance that does not add up."""


class AdviceError(RotorError, ValueError):
    """Nothing can be said about what to run: an unknown GPU, a wrong number of devices, or nothing that fits."""


class InverseError(RotorError, RuntimeError):
    """A module's inverse is missing or does not undo its forward, or the module cannot go without its input otherwise.

    Attributes:
        stage: Name of the module.
        error: How far the rebuilt input is from the real one, largest element; None if it never came to a comparison.
        tolerance: What would have been allowed; None likewise.
    """

    def __init__(self, message: str, *, stage: str, error: float | None = None, tolerance: float | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.error = error
        self.tolerance = tolerance

    def located(self, stage: str) -> InverseError:
        """This error with the name of the module, which knows only its own type."""
        return InverseError(f"{stage!r}: {self.args[0]}", stage=stage, error=self.error, tolerance=self.tolerance)


class RotorWarning(UserWarning):
    """Something works, but not as well as the user might expect."""
