"""Levels and phases of a recording that is told each block."""

from __future__ import annotations

from lightning_rotor.profiling.memory_recording import MeteredPhase, Recording


def recorded() -> Recording:
    recording = Recording()
    recording.count(100)
    recording.mark("forward")
    recording.count(50)
    recording.count(-120)
    recording.mark("backward")
    recording.count(10)
    recording.mark("forward")
    recording.count(-60)
    recording.stop()
    return recording


def test_marks_cut_levels_into_phases() -> None:
    recording = recorded()
    assert recording.phases == [
        MeteredPhase("", 0, 100, 100),
        MeteredPhase("forward", 100, 150, 30),
        MeteredPhase("backward", 30, 40, 40),
        MeteredPhase("forward", 40, 40, -20),
    ]
    assert (recording.peak_bytes, recording.end_bytes) == (150, -20)


def test_phases_are_found_by_the_first_mark_with_a_label() -> None:
    recording = recorded()
    assert recording.first("forward").peak_bytes == 150
    assert recording.peak_between("forward", "backward") == 150
    assert recording.peak_between("backward", "forward") == 0
    assert recording.peak_between("nothing", "forward") == 0


def test_a_phase_can_be_raised() -> None:
    phase = MeteredPhase("forward", 100, 150, 30)
    assert phase.freed_bytes == 70
    assert phase.raised(5) == MeteredPhase("forward", 105, 155, 35)
    assert phase.raised(5).freed_bytes == 70
