"""The state of a training whose steps keep a limit, and the events that change it.

::

                    modules are chosen         a plan is made           its steps are measured
        CHOOSING ──────────────────► PLANNING ────────────► WATCHING ───────────────────────► STEADY
                                        │  ▲                   ▲                                │
                       nothing can be   │  │ profiler is free  └────────────────────────────────┘
                       planned          ▼  ▼                      a new shape's plan, another plan,
                              UNPLANNED    PUT_OFF                or none kept the limit

The plan of a new shape is made inside of the forward, by ``module_plans`` (``prepare``, ``_new_entry``); this table
only hears of it, as ``PLAN_MADE``, unless steps of a larger size have kept the limit (``kept_sizes``).

``TRANSITIONS`` has all of it. An event that has no entry for a state is a mistake of this package, and raises
``KeyError``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class State(Enum):
    """The purpose of the next step."""

    CHOOSING = auto()
    """Which modules are planned is a guess, until the first batch has been looked at."""
    PLANNING = auto()
    """Modules are chosen, and there is no plan: their first forwards are measured and planned."""
    AS_COMPILED = auto()
    """Modules are chosen, but what the user compiled as a whole runs as it is until a step needs a plan."""
    PUT_OFF = auto()
    """Modules are chosen, but they run plainly for as long as the user's profiler records."""
    WATCHING = auto()
    """A plan is new: the peaks of the next steps are measured, and may lead to another one."""
    STEADY = auto()
    """Peaks are known. Training is left alone, but for a sample step now and then."""
    UNPLANNED = auto()
    """Nothing can be planned: training runs plainly, and some of its steps are compared with the limit."""


class Event(Enum):
    """An event that may change the state."""

    CHOSEN = auto()
    """The modules are certain: named by the user, or those of the guess once the first batch has been looked at."""
    CHOSEN_ANEW = auto()
    """The first batch has been looked at, and the modules are others than those of the guess."""
    RESTORED = auto()
    """A checkpoint has told which modules are planned."""
    LEFT_COMPILED = auto()
    """The modules that are certain were compiled as a whole."""
    PRESSED = auto()
    """A step that ran as the user compiled it has taken more than the limit, or cannot be measured."""
    NOTHING_TO_PLAN = auto()
    """No module is left that can be planned."""
    PROFILER_IN_USE = auto()
    """A module could not be measured, since the user's profiler records."""
    PLAN_MADE = auto()
    """A plan was made: for the first call, for one of a new shape, or anew."""
    EXCEEDED = auto()
    """The plan that takes least has exceeded the limit, in a step whose gradients are still to add up."""
    WATCHED = auto()
    """No more steps are to be measured under this plan."""


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.CHOOSING, Event.CHOSEN): State.PLANNING,
    (State.CHOOSING, Event.CHOSEN_ANEW): State.PLANNING,
    (State.CHOOSING, Event.RESTORED): State.PLANNING,
    (State.CHOOSING, Event.PROFILER_IN_USE): State.CHOOSING,
    # A module may run before the first batch: in a tuner's trial, or in a loop of the user's.
    (State.CHOOSING, Event.PLAN_MADE): State.CHOOSING,
    (State.PLANNING, Event.RESTORED): State.PLANNING,
    # A plan would take the compiled code apart, so it waits for a step that needs one.
    (State.PLANNING, Event.LEFT_COMPILED): State.AS_COMPILED,
    (State.AS_COMPILED, Event.PRESSED): State.PLANNING,
    (State.AS_COMPILED, Event.RESTORED): State.PLANNING,
    (State.PLANNING, Event.NOTHING_TO_PLAN): State.UNPLANNED,
    (State.PLANNING, Event.PROFILER_IN_USE): State.PUT_OFF,
    (State.PLANNING, Event.PLAN_MADE): State.WATCHING,
    (State.PUT_OFF, Event.RESTORED): State.PLANNING,
    (State.PUT_OFF, Event.NOTHING_TO_PLAN): State.UNPLANNED,
    (State.PUT_OFF, Event.PROFILER_IN_USE): State.PUT_OFF,
    (State.PUT_OFF, Event.PLAN_MADE): State.WATCHING,
    (State.WATCHING, Event.RESTORED): State.WATCHING,
    (State.WATCHING, Event.PROFILER_IN_USE): State.WATCHING,  # of another input: the plans of known ones go on
    (State.WATCHING, Event.PLAN_MADE): State.WATCHING,
    # Gradients that add up make the next steps larger, so they are measured as well.
    (State.WATCHING, Event.EXCEEDED): State.WATCHING,
    (State.WATCHING, Event.WATCHED): State.STEADY,
    (State.STEADY, Event.RESTORED): State.STEADY,
    (State.STEADY, Event.PROFILER_IN_USE): State.STEADY,
    # Any new plan is watched, also that of a shape that training has met before: it was made for another budget.
    (State.STEADY, Event.PLAN_MADE): State.WATCHING,
    (State.STEADY, Event.EXCEEDED): State.WATCHING,
    # A checkpoint is loaded behind the choice of modules, and knows better.
    (State.UNPLANNED, Event.RESTORED): State.PLANNING,
}


def following(state: State, event: Event) -> State:
    """The state after an event."""
    return TRANSITIONS[state, event]


WITHOUT_A_PLAN = frozenset((State.PLANNING, State.PUT_OFF))
"""States of modules that are chosen and have no plan yet."""

UNDER_A_PLAN = frozenset((State.WATCHING, State.STEADY))
"""States of modules that run under plans."""


@dataclass(frozen=True, slots=True)
class Mode:
    """The way in which plans are made; it only ever grows.

    Attributes:
        is_joint: Calls of a step may be alive together, so one plan covers several.
        in_lockstep: Processes exchange messages in planned modules, so they measure and plan together.
    """

    is_joint: bool = False
    in_lockstep: bool = False

    def joined_with(self, *, is_joint: bool, in_lockstep: bool) -> Mode:
        """The mode once a step was joint, or messages were seen."""
        return Mode(self.is_joint or is_joint, self.in_lockstep or in_lockstep)

    @property
    def plans_by_seconds(self) -> bool:
        """True if one call may be planned again by the seconds that it has taken, which is nobody else's concern."""
        return not self.is_joint and not self.in_lockstep
