"""Phases of a measured step: their kinds, levels, and the highest of them."""

from __future__ import annotations

import pytest

from lightning_rotor.planning.step_phases import Mark, PhaseKind, StepPhase, highest_of


def phase(kind: PhaseKind, peak_bytes: int = 30, call: int | None = None) -> StepPhase:
    return StepPhase(Mark(kind, call), 10, peak_bytes, 20)


@pytest.mark.parametrize("kind", PhaseKind)
def test_what_a_kind_says_of_its_phase(kind: PhaseKind) -> None:
    found = phase(kind)
    assert found.kind is kind
    assert found.is_final == (kind in (PhaseKind.OPTIMIZER, PhaseKind.END))
    assert found.is_optimizer_step == (kind is PhaseKind.OPTIMIZER)
    assert found.is_backward == (kind in (PhaseKind.LOSS, PhaseKind.BACKWARD))


def test_a_raised_phase_holds_more_throughout() -> None:
    mark = Mark(PhaseKind.OPTIMIZER, optimizer="Adam")
    assert StepPhase(mark, 10, 30, 20).raised(5) == StepPhase(mark, 15, 35, 25)
    assert StepPhase(mark, 10, 30, 20).raised(-5) == StepPhase(mark, 5, 25, 15)


def test_the_highest_phase_is_the_first_with_the_highest_peak() -> None:
    phases = [phase(PhaseKind.START, 30), phase(PhaseKind.LOSS, 50), phase(PhaseKind.END, 50), phase(PhaseKind.END, 40)]
    assert highest_of(phases) is phases[1]
    assert highest_of([]) is None


def test_marks_of_two_calls_differ() -> None:
    assert Mark(PhaseKind.FORWARD, 0) != Mark(PhaseKind.FORWARD, 1)
    assert Mark(PhaseKind.FORWARD, 0) == Mark(PhaseKind.FORWARD, 0)
