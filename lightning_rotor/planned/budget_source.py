"""The one question that planned modules ask, what a plan may use, and the events that they tell of.

Who answers and listens is a :class:`~lightning_rotor.Checkpointable`, for one module with a limit of its own, or the
planner of a training's steps, for all modules that share one limit::

    planned forward ── budget()? ──► BudgetSource
                    ── hear(event) ─► may raise, which ends the call

Modules are known by their dotted names in the model; the one of a ``Checkpointable`` has the name ``""``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import ReferenceType

from lightning_rotor.capture.sequentialize import Cut
from lightning_rotor.errors import BudgetError, ModelError, ProfilerBusyError, RotorError
from lightning_rotor.execution.pending import Pending
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.agreement import Agreement
from lightning_rotor.planned.prepared import Prepared, Turn
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planning import Plan
from lightning_rotor.profiling import Profile


@dataclass(frozen=True, slots=True)
class MeasuringBegins:
    """A module is about to run for cutting and measuring, which needs torch's profiler."""


@dataclass(frozen=True, slots=True)
class ModuleCut:
    """A module was cut into stages. A ``ModelError`` of the listener's leaves it unplanned, as ``NoChain`` does."""

    name: str
    cut: Cut


@dataclass(frozen=True, slots=True)
class PlanMade:
    """A plan was made, and calls of this signature will run under it."""

    plan: Plan
    signature: Signature


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call is about to run under a plan."""


@dataclass(frozen=True, slots=True)
class CallRan:
    """A call has run under a plan, and waits for its backward."""

    name: str
    signature: Signature
    prepared: Prepared
    pending: ReferenceType[Pending]


@dataclass(frozen=True, slots=True)
class NoChain:
    """A module turned out to be no chain. It runs plainly, unless the listener raises."""

    name: str
    error: RotorError


@dataclass(frozen=True, slots=True)
class ProfilerBusy:
    """A module cannot be measured in this call. It runs plainly this time, unless the listener raises."""

    error: ProfilerBusyError


@dataclass(frozen=True, slots=True)
class NothingFits:
    """No plan keeps the budget. The one that takes least runs, unless the listener raises."""

    error: BudgetError


PlanEvent: TypeAlias = (
    MeasuringBegins | ModuleCut | PlanMade | CallBegins | CallRan | NoChain | ProfilerBusy | NothingFits
)


class BudgetSource:
    """Answers what plans may use, and hears of events. Subclasses answer; by default errors end the call.

    Attributes:
        ranks: The processes that agree on plans; each source has its own.
        accumulates: Budgets may be for steps that add to gradients which are there.
        takes_apart: What was compiled as a whole, and cannot be planned inside, may be planned uncompiled.
    """

    # A plan may be made by several processes together. Sources share no agreement, or two trainings in one program
    # would wait for each other's answers.
    ranks: Agreement
    accumulates = True
    takes_apart = False

    @property
    def waiting(self) -> tuple[Prepared, ...]:
        """Calls of the running step that wait for their backward, in the order of their forwards."""
        return ()

    @property
    def turn(self) -> Turn:
        """Names of the modules whose calls wait for their backward."""
        # Names and not plans: the plans of calls that wait may still change, and the key of a plan must not.
        return ()

    def plan_beside(self, name: str, signature: Signature, value: Any) -> Prepared | None:
        """The plan of a call in a step of several, as a part of theirs; None if the module is to plan it by itself."""
        return None

    def budget(self, name: str, profile: Profile) -> Budget:
        """Bytes that one plan of a module may use at this moment."""
        # It is asked anew for each plan: gradients and optimizer state may have come to be since the last answer.
        raise NotImplementedError

    def plans_by_seconds(self, name: str) -> bool:
        """True if a plan of a module may be replaced by a faster one once its calls have been timed."""
        return True

    def hear(self, event: PlanEvent) -> None:
        """Something has happened. What this raises ends the call."""
        # Alone, a module has nobody who could train it plainly and still keep the limit, so these end the call. The
        # planner of whole steps goes on where the step as a whole lets it.
        if isinstance(event, (NoChain, ProfilerBusy, NothingFits)):
            raise event.error


def objection(source: BudgetSource, name: str, cut: Cut) -> ModelError | None:
    """Why a new cut should not be planned; None if it should."""
    try:
        source.hear(ModuleCut(name, cut))
    except ModelError as error:
        return error
    return None
