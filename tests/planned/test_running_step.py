"""A step's phases as later steps have them, and the name of what sets a peak."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rotor.planned.running_step import Call, Step, StepStart
from lightning_rotor.planning.step_phases import Mark, PhaseKind, StepPhase


class Event:
    def __init__(self, phase: str, stage: int, peak_bytes: int) -> None:
        self.phase, self.stage, self.peak_bytes = phase, stage, peak_bytes


def call(name: str, *, waits: bool = True) -> Call:
    """A call of a module with two stages, of which the second peaks in the forward and the first behind it."""
    plan: Any = type("Plan", (), {})()
    plan.simulation = type("Simulation", (), {})()
    plan.simulation.events = [
        Event("forward", 0, 5),
        Event("forward", 1, 7),
        Event("backward", 1, 6),
        Event("backward", 0, 9),
    ]
    plan.chain = type("Chain", (), {"names": ("first", "second")})()
    key: Any = type("Key", (), {"name": name, "plans": name})()
    pending: Any = type("Pending", (), {"waits": waits})()
    prepared: Any = type("Prepared", (), {"plan": plan})()
    return Call(key, prepared, lambda: pending)  # type: ignore[arg-type]


def phase(kind: PhaseKind, number: int | None = None, optimizer: str = "", peak_bytes: int = 10) -> StepPhase:
    return StepPhase(Mark(kind, number, optimizer), 0, peak_bytes, 0)


def test_calls_that_wait_together_are_one_path() -> None:
    step = Step(None)
    first, second = call("left"), call("right")
    step.add(first)
    assert not step.is_joint
    step.add(second)
    assert step.paths == [(first, second)]
    assert step.numbers == {first: 0, second: 1}
    assert step.is_joint
    step.leave_out(["right"])  # type: ignore[list-item]
    assert step.paths == [(first,)]


def test_a_call_whose_backward_has_come_begins_another_path() -> None:
    step = Step(None)
    first, second = call("left", waits=False), call("right")
    step.add(first)
    step.add(second)
    assert step.paths == [(first,), (second,)]
    assert not step.is_joint


@pytest.mark.parametrize(
    ("mark", "name"),
    [
        (Mark(PhaseKind.FORWARD, 0), "net.second"),
        (Mark(PhaseKind.BACKWARD, 1), "other.first"),
        (Mark(PhaseKind.AFTER, 0), "behind net"),
        (Mark(PhaseKind.START), "before net"),
        (Mark(PhaseKind.LOSS), "behind other"),
        (Mark(PhaseKind.WAITING), "behind other"),
        (Mark(PhaseKind.BACKWARD, 7), "behind other"),
        (Mark(PhaseKind.END), "behind the backward"),
        (Mark(PhaseKind.OPTIMIZER, optimizer="Adam"), "Adam.step"),
    ],
)
def test_what_sets_a_peak_has_a_name(mark: Mark, name: str) -> None:
    step = Step(None)
    step.add(call("net"))
    step.add(call("other"))
    assert step.cause_of_peak(StepPhase(mark, 0, 1, 0)) == name


def test_the_stage_alone_is_named_where_one_module_is_called() -> None:
    step = Step(None)
    step.add(call("net"))
    assert step.cause_of_peak(phase(PhaseKind.FORWARD, 0)) == "second"


def test_later_steps_hold_what_the_first_one_lacks() -> None:
    step = Step(None)
    step.note_start(StepStart([], is_first=True, state_bytes=100, missing_forward_bytes=30, missing_backward_bytes=20))
    step.note_state(104)  # four more than predicted
    step.growing_bytes = 3
    phases = [
        phase(PhaseKind.FORWARD, 0),
        phase(PhaseKind.LOSS),
        phase(PhaseKind.BACKWARD, 0),
        phase(PhaseKind.END),
        phase(PhaseKind.OPTIMIZER, optimizer="LBFGS"),
        phase(PhaseKind.FORWARD, 0),
    ]
    later = [each.peak_bytes for each in step.as_later(phases)]
    assert later == [44, 34, 34, 10, 13, 13]
