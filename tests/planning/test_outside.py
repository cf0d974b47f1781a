"""What a measured step has taken around its calls, against simulations of steps whose outside is known."""

from __future__ import annotations

import pytest

from lightning_rotor.planning.joint_chain import joined
from lightning_rotor.planning.outside import measured_outside
from lightning_rotor.planning.step_phases import Mark, PhaseKind, StepPhase
from lightning_rotor.simulator import Simulation, simulate
from tests.planning.test_joint_chain import NAMES, OUTSIDE, budgets, pair, planned


@pytest.mark.parametrize("seed", range(6))
def test_what_a_step_shows_of_the_outside_is_what_there_was(seed: int) -> None:
    """A step that is as the simulation says, measured as its phases would be, under another schedule."""
    chains = pair(seed)
    lengths = [len(chain) for chain in chains]
    schedule = planned(chains, budgets(chains)[2]).schedule
    real = simulate(joined(NAMES, chains, OUTSIDE), schedule)
    found = measured_outside(
        simulate(joined(NAMES, chains), schedule), lengths, [0, 1], phases_of(real, lengths), lingering_bytes=0
    )
    assert found is not None
    again = simulate(joined(NAMES, chains, found), schedule)
    assert [event.peak_bytes for event in again.events] == pytest.approx(
        [event.peak_bytes for event in real.events], abs=40
    )
    assert again.peak_bytes >= real.peak_bytes


def phases_of(real: Simulation, lengths: list[int]) -> list[StepPhase]:
    """The phases of a simulated step with two calls, as a meter would tell them."""
    second = lengths[0] + 1
    marks = {
        ("forward", 0): Mark(PhaseKind.FORWARD, 0),
        ("forward", lengths[0]): Mark(PhaseKind.AFTER, 0),
        ("forward", second): Mark(PhaseKind.FORWARD, 1),
        ("forward", sum(lengths) + 1): Mark(PhaseKind.AFTER, 1),
        ("backward", sum(lengths) + 1): Mark(PhaseKind.LOSS),
    }
    phases: list[StepPhase] = []
    level, mark = 0, Mark(PhaseKind.START)
    for event in real.events:
        new = marks.get((event.phase, event.stage), mark)
        if event.phase != "forward" and event.stage not in (lengths[0], sum(lengths) + 1):
            new = Mark(PhaseKind.BACKWARD, int(event.stage >= second))
        if new != mark:
            phases.append(StepPhase(new, level, event.peak_bytes, event.after_bytes))
        else:
            last = phases[-1]
            phases[-1] = StepPhase(new, last.start_bytes, max(last.peak_bytes, event.peak_bytes), event.after_bytes)
        mark, level = new, event.after_bytes
    return phases
