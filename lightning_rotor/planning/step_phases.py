"""The phases of a measured training step: what began each, and what the process held in it.

A step with two calls of planned modules is cut like this::

    START │ FORWARD 0 │ AFTER 0 │ FORWARD 1 │ AFTER 1 │ LOSS │ BACKWARD 1 │ BACKWARD 0 │ END │ OPTIMIZER │ END
          │  call 0   │ user's  │  call 1   │ user's  │ its  │ of call 1, │ of call 0, │     │  step()   │
          │           │  code   │           │  code   │ back-│ then of    │ then of    │
          │           │         │           │         │ ward │ user's code│ user's code│
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum


class PhaseKind(Enum):
    """The event that a phase of a step begins with; it lasts until the next event."""

    START = "start"
    """The step begins."""
    FORWARD = "forward"
    """The forward of a call begins."""
    AFTER = "after"
    """The forward of a call has returned, and the user's code goes on."""
    LOSS = "loss"
    """A backward begins, with the user's code behind the last call."""
    BACKWARD = "backward"
    """The backward has reached a call."""
    WAITING = "waiting"
    """A backward is over, or an optimizer steps, while other calls still wait for their backward."""
    OPTIMIZER = "optimizer"
    """An optimizer steps, and no call is alive."""
    END = "end"
    """A backward or an optimizer's step is over, and no call is alive."""
    COMPILING = "compiling"
    """``torch.compile`` compiles a graph, and tries kernels on memory that no later step takes."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The begin of a phase.

    Attributes:
        kind: The event.
        call: Number of the call in the step, for FORWARD, AFTER and BACKWARD.
        optimizer: Name of the optimizer's class, for OPTIMIZER.
    """

    kind: PhaseKind
    call: int | None = None
    optimizer: str = ""


@dataclass(frozen=True, slots=True)
class StepPhase:
    """A phase with the bytes that the process held when it began, at most, and when it ended."""

    mark: Mark
    start_bytes: int
    peak_bytes: int
    end_bytes: int

    @property
    def kind(self) -> PhaseKind:
        """The event that it begins with."""
        return self.mark.kind

    @property
    def is_final(self) -> bool:
        """True if no plan can change it, since no call is alive."""
        return self.kind in (PhaseKind.OPTIMIZER, PhaseKind.END)

    @property
    def is_optimizer_step(self) -> bool:
        """True if an optimizer steps in it."""
        return self.kind is PhaseKind.OPTIMIZER

    @property
    def is_backward(self) -> bool:
        """True if a backward runs in it."""
        return self.kind in (PhaseKind.LOSS, PhaseKind.BACKWARD)

    def raised(self, size_bytes: int) -> StepPhase:
        """The phase with so much more held throughout."""
        return replace(
            self,
            start_bytes=self.start_bytes + size_bytes,
            peak_bytes=self.peak_bytes + size_bytes,
            end_bytes=self.end_bytes + size_bytes,
        )


def highest_of(phases: Iterable[StepPhase]) -> StepPhase | None:
    """The phase with the highest peak; None of none."""
    return max(phases, key=lambda phase: phase.peak_bytes, default=None)
