"""What a measured step has taken around its calls, against simulations of steps whose outside is known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.reference import all_schedules
from lightning_rotor.chain import Chain
from lightning_rotor.planning import Plan, minimum_budget, scheduled
from lightning_rotor.planning.combined_chain import combined
from lightning_rotor.planning.joint_chain import Outside, concatenated, joined
from lightning_rotor.planning.outside import Foresight, foresight, measured_outside
from lightning_rotor.planning.step_phases import Mark, PhaseKind, StepPhase
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import Simulation, simulate
from tests.planning.test_joint_chain import NAMES, OUTSIDE, budgets, pair, planned
from tests.strategies import KINDS, random_chain
from tests.test_simulator import STAGE


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


def chain_alone(seed: int) -> Chain:
    return random_chain(random.Random(seed), 6, KINDS[seed % len(KINDS)])


def phases_of_one(real: Simulation, length: int, number: int) -> list[StepPhase]:
    """The phases of a simulated step with one call, which has this number, as a meter would tell them."""
    phases = [StepPhase(Mark(PhaseKind.START), 0, 0, 0)]
    level = 0
    for event in real.events:
        if event.phase == "forward":
            kind = PhaseKind.AFTER if event.stage == length else PhaseKind.FORWARD
        else:
            kind = PhaseKind.LOSS if event.stage == length else PhaseKind.BACKWARD
        mark = Mark(kind, None if kind is PhaseKind.LOSS else number)
        last = phases[-1]
        if mark == last.mark:
            phases[-1] = StepPhase(mark, last.start_bytes, max(last.peak_bytes, event.peak_bytes), event.after_bytes)
        else:
            phases.append(StepPhase(mark, level, event.peak_bytes, event.after_bytes))
        level = event.after_bytes
    return phases


AROUND = Outside(forward_bytes=20, after_bytes=90, backward_bytes=35, loss_bytes=70)


@pytest.mark.parametrize("lingering_bytes", [0, 11])
@pytest.mark.parametrize("seed", range(5))
def test_a_measured_step_foretells_steps_under_other_plans(seed: int, lingering_bytes: int) -> None:
    chain = chain_alone(seed)
    least = minimum_budget(chain, lingering_bytes=lingering_bytes)
    kept = scheduled(chain, Schedule.keep_all(len(chain)), lingering_bytes=lingering_bytes)

    def real(plan: Plan) -> Simulation:
        return simulate(joined([""], [chain], [AROUND]), concatenated([plan.schedule]), **plan.conditions)

    phases = [phase.raised(1000) for phase in phases_of_one(real(kept), len(chain), 4)]
    optimizer = StepPhase(Mark(PhaseKind.OPTIMIZER, optimizer="Adam"), 5000, 9000, 5000)
    foretold = foresight(kept, [4], [*phases, optimizer], 1000)
    assert foretold is not None
    for plan in (kept, least):
        assert foretold(plan) >= 1000 + real(plan).peak_bytes
        assert foretold(plan) <= 1000 + real(plan).peak_bytes + 40


def test_a_step_whose_call_goes_back_twice_foretells_no_plan() -> None:
    chain = chain_alone(0)
    kept = scheduled(chain, Schedule.keep_all(len(chain)))
    simulation = simulate(joined([""], [chain], [AROUND]), concatenated([kept.schedule]), **kept.conditions)
    phases = phases_of_one(simulation, len(chain), 4)
    backward = next(phase for phase in phases if phase.kind is PhaseKind.BACKWARD)
    once, twice = foresight(kept, [4], phases, 0), foresight(kept, [4], [*phases, backward], 0)
    assert once is not None
    assert once.plan_within(1, kept) is not None
    assert twice is not None
    assert twice(kept) == once(kept)
    assert twice.plan_within(1, kept) is None


@pytest.mark.parametrize("loss_share", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_the_plan_for_the_whole_step_is_the_best_of_all_schedules(seed: int, loss_share: float) -> None:
    """Beside a loss that takes as much as the chain, the chain's own least plan is not the step's."""
    chain = random_chain(random.Random(seed), 4, KINDS[seed])
    large_bytes = int(loss_share * chain.kept_bytes)
    around = Outside(after_bytes=large_bytes, loss_bytes=large_bytes)
    foretold = Foresight((around,), chain.kept_bytes, 1000)
    # With the user's code behind the call, a segment may reach to the call's end.
    step = joined([""], [chain], [around])
    every = [simulate(step, schedule) for schedule in all_schedules(step)]
    of_all = sorted(1000 + each.peak_bytes for each in every)
    kept = scheduled(chain, Schedule.keep_all(len(chain)))
    assert foretold(foretold.plan_within(1, kept)) == of_all[0]
    for limit_bytes in (of_all[0], of_all[len(of_all) // 2], of_all[-1]):
        best = foretold.plan_within(limit_bytes, kept)
        assert foretold(best) <= limit_bytes
        fitting = [each.seconds for each in every if 1000 + each.peak_bytes <= limit_bytes]
        assert simulate(step, concatenated([best.schedule])).seconds == pytest.approx(min(fitting))


def test_a_chains_least_plan_may_take_more_in_the_whole_step_than_another() -> None:
    """The kind that the plan for the whole step is there for: the chain's own least peak says nothing of the loss."""
    better = 0
    for seed in range(40):
        chain = random_chain(random.Random(seed), 6, "odd")
        size_bytes = chain.kept_bytes
        foretold = Foresight((Outside(after_bytes=size_bytes, loss_bytes=size_bytes),), size_bytes, 0)
        least = minimum_budget(chain)
        whole = foretold.plan_within(1, least)
        assert foretold(whole) <= foretold(least)
        if foretold(whole) < foretold(least):
            better += 1
            assert whole.peak_bytes >= least.peak_bytes
    assert better > 5


def test_around_larger_calls_lies_more_and_around_smaller_ones_no_less() -> None:
    chain = chain_alone(1)
    kept = scheduled(chain, Schedule.keep_all(len(chain)))
    around = Outside(after_bytes=50, loss_bytes=20)
    real = simulate(joined([""], [chain], [around]), concatenated([kept.schedule]))
    foretold = foresight(kept, [0], phases_of_one(real, len(chain), 0), 0)
    assert foretold is not None
    for factor, expected in ((1, around), (3, around.scaled(3))):
        other = combined(
            (chain,),
            of_bytes=lambda values, factor=factor: factor * values[0],
            of_seconds=lambda values: values[0],
        )
        plan = scheduled(other, Schedule.keep_all(len(other)))
        peak_bytes = simulate(joined([""], [other], [expected]), concatenated([plan.schedule])).peak_bytes
        assert peak_bytes <= foretold(plan) <= peak_bytes + 40 * factor
    smaller = scheduled(chain, Schedule.keep_all(len(chain)))
    large = combined((chain,), of_bytes=lambda values: 3 * values[0], of_seconds=lambda values: values[0])
    large_plan = scheduled(large, Schedule.keep_all(len(large)))
    large_real = simulate(joined([""], [large], [around]), concatenated([large_plan.schedule]))
    of_large = foresight(large_plan, [0], phases_of_one(large_real, len(large), 0), 0)
    assert of_large is not None
    assert of_large(smaller) >= real.peak_bytes


def test_the_call_with_most_around_it_counts() -> None:
    chain = chain_alone(0)
    kept = scheduled(chain, Schedule.keep_all(len(chain)))
    plain = simulate(joined([""], [chain]), concatenated([kept.schedule]))
    phases = phases_of_one(plain, len(chain), 0)
    above = [phase.raised(300) for phase in phases_of_one(plain, len(chain), 1)]
    foretold = [foresight(kept, numbers, [*phases, *above], 0) for numbers in ([0], [1])]
    assert None not in foretold
    assert foretold[0](kept) < foretold[1](kept)  # type: ignore[misc]
    one_of_both = foresight(kept, [0, 1], [*phases, *above], 0)
    assert one_of_both is not None
    assert one_of_both(kept) == foretold[1](kept)  # type: ignore[misc]


def test_a_call_that_the_meter_did_not_see_foretells_nothing() -> None:
    chain = chain_alone(0)
    kept = scheduled(chain, Schedule.keep_all(len(chain)))
    phases = phases_of_one(simulate(joined([""], [chain]), concatenated([kept.schedule])), len(chain), 0)
    assert foresight(kept, [0, 1], phases, 0) is None
    assert foresight(kept, [], phases, 0) is None
    assert measured_outside(kept.simulation, [len(chain)], [1], phases, lingering_bytes=0) is None


def test_what_lies_around_a_call_is_what_its_phases_exceed_the_simulation_by() -> None:
    """Phase by phase, with figures that differ: the start counts where it exceeds by more than the peak."""
    chain = Chain((STAGE, STAGE))
    simulation = simulate(joined(["net"], [chain]), Schedule.keep_all(3), lingering_bytes=5)
    forward, after, backward = _peaks(simulation)
    phases = [
        StepPhase(Mark(PhaseKind.START), 0, 900, 0),
        StepPhase(Mark(PhaseKind.FORWARD, 0), 5 + 3, forward + 2, 0),
        StepPhase(Mark(PhaseKind.AFTER, 0), 0, after + 40, 0),
        StepPhase(Mark(PhaseKind.LOSS), 0, after - 5 + 17, 0),
        StepPhase(Mark(PhaseKind.AFTER, 0), 0, after + 33, 0),
        StepPhase(Mark(PhaseKind.LOSS), 0, after - 5 + 60, 0),
        StepPhase(Mark(PhaseKind.BACKWARD, 0), 0, backward + 70, 0),
        StepPhase(Mark(PhaseKind.END), 0, 5000, 0),
    ]
    (around,) = measured_outside(simulation, [2], [0], phases, lingering_bytes=5) or ()
    assert around == Outside(forward_bytes=3, after_bytes=40, backward_bytes=70, loss_bytes=60)
    phases[1] = replace(phases[1], peak_bytes=forward + 8)
    (around,) = measured_outside(simulation, [2], [0], phases[:2], lingering_bytes=5) or ()
    assert around == Outside(forward_bytes=8, after_bytes=-after, backward_bytes=0, loss_bytes=5 - after)


def _peaks(simulation: Simulation) -> tuple[int, int, int]:
    """Of the forward of two stages, of the code behind them, and of their backward with that code's."""
    forward = max(event.peak_bytes for event in simulation.events if event.phase == "forward" and event.stage < 2)
    after = next(event.peak_bytes for event in simulation.events if event.phase == "forward" and event.stage == 2)
    backward = max(event.peak_bytes for event in simulation.events if event.phase != "forward" and event.stage < 2)
    return forward, after, backward


def test_the_backward_of_a_call_includes_that_of_the_code_in_front_of_it() -> None:
    """Its gradient of a hundred bytes is the highest level of the phase, though not of the call."""
    first, second = Chain((replace(STAGE, output_bytes=100),)), Chain((STAGE,))
    simulation = simulate(joined(["a", "b"], [first, second]), Schedule.keep_all(4))
    peak_of = {event.stage: event.peak_bytes for event in simulation.events if event.phase == "backward"}
    assert peak_of[1] > peak_of[2]
    phases = [
        StepPhase(Mark(PhaseKind.FORWARD, 0), 0, 0, 0),
        StepPhase(Mark(PhaseKind.FORWARD, 1), 0, 0, 0),
        StepPhase(Mark(PhaseKind.BACKWARD, 1), 0, peak_of[1] + 50, 0),
        StepPhase(Mark(PhaseKind.BACKWARD, 0), 0, peak_of[0] + 20, 0),
    ]
    around = measured_outside(simulation, [1, 1], [0, 1], phases, lingering_bytes=0)
    assert around is not None
    assert [outside.backward_bytes for outside in around] == [20, 50]
