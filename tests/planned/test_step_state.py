"""The table of a training's states, which needs no torch: every way through it, and no way out of it."""

from __future__ import annotations

import pytest

from lightning_rotor.planned.step_state import TRANSITIONS, WITHOUT_A_PLAN, Event, Mode, State, following


def after(*events: Event) -> State:
    """The state after events, from the beginning."""
    state = State.CHOOSING
    for event in events:
        state = following(state, event)
    return state


def test_a_training_plans_watches_and_is_left_alone() -> None:
    assert after() is State.CHOOSING
    assert after(Event.CHOSEN) is State.PLANNING
    assert after(Event.CHOSEN, Event.PLAN_MADE) is State.WATCHING
    assert after(Event.CHOSEN, Event.PLAN_MADE, Event.WATCHED) is State.STEADY


@pytest.mark.parametrize("event", [Event.PLAN_MADE, Event.EXCEEDED])
def test_another_plan_or_an_excess_is_watched_again(event: Event) -> None:
    steady = (Event.CHOSEN, Event.PLAN_MADE, Event.WATCHED)
    assert after(*steady, event) is State.WATCHING
    assert after(*steady, event, Event.WATCHED) is State.STEADY


def test_a_guess_that_was_planned_is_not_watched_before_the_first_batch_confirms_it() -> None:
    assert after(Event.PLAN_MADE) is State.CHOOSING
    assert after(Event.PLAN_MADE, Event.CHOSEN_ANEW) is State.PLANNING
    assert after(Event.PLAN_MADE, Event.CHOSEN, Event.PLAN_MADE) is State.WATCHING


def test_nothing_to_plan_ends_planning_until_a_checkpoint_tells_of_modules() -> None:
    unplanned = (Event.CHOSEN_ANEW, Event.NOTHING_TO_PLAN)
    assert after(*unplanned) is State.UNPLANNED
    assert after(*unplanned, Event.RESTORED) is State.PLANNING


def test_a_profiler_of_the_users_puts_off_only_what_has_no_plan() -> None:
    assert after(Event.CHOSEN, Event.PROFILER_IN_USE) is State.PUT_OFF
    assert after(Event.CHOSEN, Event.PROFILER_IN_USE, Event.PROFILER_IN_USE, Event.PLAN_MADE) is State.WATCHING
    assert after(Event.CHOSEN, Event.PLAN_MADE, Event.PROFILER_IN_USE) is State.WATCHING
    assert after(Event.CHOSEN, Event.PLAN_MADE, Event.WATCHED, Event.PROFILER_IN_USE) is State.STEADY


def test_no_plan_is_dropped_in_silence() -> None:
    """Only other modules lead from a plan back to none."""
    for (state, event), following_state in TRANSITIONS.items():
        if state in (State.WATCHING, State.STEADY):
            assert following_state in (State.WATCHING, State.STEADY), (state, event)


def test_every_state_is_reached_and_every_event_leads_somewhere() -> None:
    reached = {State.CHOOSING}
    while more := {TRANSITIONS[entry] for entry in TRANSITIONS if entry[0] in reached} - reached:
        reached |= more
    assert reached == set(State)
    assert {event for _, event in TRANSITIONS} == set(Event)


def test_an_event_that_cannot_come_is_an_error() -> None:
    with pytest.raises(KeyError, match="UNPLANNED"):
        after(Event.CHOSEN, Event.NOTHING_TO_PLAN, Event.PLAN_MADE)
    with pytest.raises(KeyError, match="STEADY"):
        following(State.STEADY, Event.WATCHED)


def test_states_without_a_plan_are_those_that_may_turn_out_to_need_none() -> None:
    assert {state for state, event in TRANSITIONS if event is Event.NOTHING_TO_PLAN} == WITHOUT_A_PLAN


def test_the_mode_grows_and_seconds_count_only_for_one_call_alone() -> None:
    alone = Mode()
    assert alone.plans_by_seconds
    joint = alone.joined_with(is_joint=True, in_lockstep=False)
    assert joint == Mode(is_joint=True)
    assert joint.joined_with(is_joint=False, in_lockstep=True) == Mode(is_joint=True, in_lockstep=True)
    assert not joint.plans_by_seconds
    assert not Mode(in_lockstep=True).plans_by_seconds


def test_what_was_compiled_as_a_whole_runs_as_it_is_until_a_step_needs_a_plan() -> None:
    resting = (Event.CHOSEN, Event.LEFT_COMPILED)
    assert after(*resting) is State.AS_COMPILED
    assert after(*resting, Event.PRESSED) is State.PLANNING
    assert after(*resting, Event.PRESSED, Event.PLAN_MADE) is State.WATCHING
