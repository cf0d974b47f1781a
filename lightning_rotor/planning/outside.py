"""Bytes that a measured step has taken around its calls, by its phases and by a simulation of the calls alone.

The simulation knows what the calls' chains take at each moment. What the meter saw beyond that is the user's code, what
it holds, and whatever the chains do not show::

    measured   ──┐ peak of FORWARD 0        ┌── peak of BACKWARD 0
                 │ Outside.forward_bytes    │ Outside.backward_bytes
    simulated  ──┘                          └──
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.planning.joint_chain import Outside, concatenated, first_stages, joined, split
from lightning_rotor.planning.plan import Plan, scheduled
from lightning_rotor.planning.solver import plan as solve
from lightning_rotor.planning.step_phases import Mark, PhaseKind, StepPhase
from lightning_rotor.simulator import Event, Simulation, simulate


@dataclass(frozen=True, slots=True)
class Foresight:
    """Tells of steps like a measured one, until their backward is over, in which some calls run under another plan.

    Attributes:
        around: What lay around each of these calls, none of which waited together with others.
        kept_bytes: What the calls' chain holds if nothing is recomputed.
        reserved_bytes: What is kept free for the rest of the step.
        goes_back_twice: A call has gone back more than once. What its first backward keeps for the second is nearly the
            same under every plan, and no part of its chain.
    """

    around: tuple[Outside, ...]
    kept_bytes: int
    reserved_bytes: int
    goes_back_twice: bool = False

    def __call__(self, plan: Plan) -> int:
        """Peak of the whole process."""
        # Calls of a module run one by one, each with its own code around: the worst of them decides.
        peaks = [_alone(plan, outside).peak_bytes for outside in self._around(plan.chain)]
        return self.reserved_bytes + max(peaks)

    def plan_within(self, limit_bytes: int, like: Plan) -> Plan | None:
        """The fastest plan under which a step keeps a limit, or else the one under which it takes least.

        None if calls have gone back twice: what the plan takes is not what the step takes.

        A chain's own least plan need not be that: where the loss takes most, the plan that holds least between forward
        and backward is better, though its own peak is higher.

        Args:
            limit_bytes: For the whole process.
            like: A plan for the same chain, under the same conditions.
        """
        if self.goes_back_twice:
            return None
        worst = reduce(Outside.at_least, self._around(like.chain))
        chain = joined([""], [like.chain], [worst])
        budget_bytes = max(limit_bytes - self.reserved_bytes, 1)
        try:
            solved = solve(chain, budget_bytes, slots=like.slots, **like.conditions)
        except BudgetError as error:
            solved = solve(chain, error.minimum_bytes, slots=like.slots, **like.conditions)
        (schedule,) = split(solved.schedule, [len(like.chain)])
        return scheduled(like.chain, schedule, slots=like.slots, **like.conditions)

    def _around(self, chain: Chain) -> list[Outside]:
        # Around larger calls lies more, in proportion. Around smaller ones lies no less, as a part of it does not
        # depend on sizes.
        growth = max(chain.kept_bytes / max(self.kept_bytes, 1), 1)
        return [outside.scaled(growth) for outside in self.around]


def measured_outside(
    simulation: Simulation,
    lengths: Sequence[int],
    numbers: Sequence[int],
    phases: Sequence[StepPhase],
    *,
    lingering_bytes: int,
) -> list[Outside] | None:
    """Bytes that the process has taken around some calls of a step, beyond their chains.

    Args:
        simulation: Of these calls, joined under the schedules that they have run, with nothing outside.
        lengths: Number of stages of each call.
        numbers: Number of each call in the step.
        phases: Of the step, in bytes beyond what is kept free for the rest of it.
        lingering_bytes: Gradients that were there when the step began.
    Returns:
        One entry a call; None if the meter did not see all of them.
    """
    place_of: dict[Mark, int] = {}
    for place, phase in enumerate(phases):
        place_of.setdefault(phase.mark, place)
    if any(Mark(PhaseKind.FORWARD, number) not in place_of for number in numbers):
        return None
    # Each event of the simulation with the level before it.
    levels = [lingering_bytes, *(event.after_bytes for event in simulation.events)]
    timed = list(zip(levels, simulation.events, strict=False))
    peak_by_stage: dict[int, int] = {}
    for event in simulation.events:
        if event.phase == "forward":
            peak_by_stage.setdefault(event.stage, event.peak_bytes)
    outside = []
    for number, following, start, length in zip_longest(numbers, numbers[1:], first_stages(lengths), lengths):
        # The stage behind the call.
        users_code = start + length
        forward_place = place_of[Mark(PhaseKind.FORWARD, number)]
        after_place = place_of.get(Mark(PhaseKind.AFTER, number), len(phases))
        backward_place = place_of.get(Mark(PhaseKind.BACKWARD, number), len(phases))
        if following is None:
            end_place = loss_place = backward_place
            for place in range(after_place, end_place):
                # The last one, if there were several: a step may tell of its loss more than once.
                if phases[place].kind is PhaseKind.LOSS:
                    loss_place = place
        else:
            end_place = loss_place = place_of[Mark(PhaseKind.FORWARD, following)]
        forward, backward = [], []
        for level, event in timed:
            if event.phase == "forward":
                if start <= event.stage < users_code:
                    forward.append((level, event))
            elif start - 1 <= event.stage < users_code:
                # With that of the user's code in front of the call, which its backward runs into.
                backward.append((level, event))
        # A stage that is run to be discarded holds its input until the next one begins.
        simulated_after_bytes = peak_by_stage[users_code]
        backward_bytes = 0
        if backward_place < len(phases):
            backward_bytes = _most_beyond(backward, phases[backward_place])
        after_bytes = _peak_of(phases[after_place:loss_place])
        loss_bytes = _peak_of(phases[loss_place:end_place])
        # What lingers of the step before is gone when the loss goes back.
        simulated_loss_bytes = simulated_after_bytes - lingering_bytes
        outside.append(
            Outside(
                forward_bytes=_most_beyond(forward, phases[forward_place]),
                after_bytes=after_bytes - simulated_after_bytes,
                backward_bytes=backward_bytes,
                loss_bytes=loss_bytes - simulated_loss_bytes,
            )
        )
    return outside


def foresight(plan: Plan, numbers: Sequence[int], phases: Sequence[StepPhase], reserved_bytes: int) -> Foresight | None:
    """The foresight from a measured step, of steps in which some of its calls run under another plan.

    Args:
        plan: The plan that the calls have run under. None of them waits together with others.
        numbers: Numbers of these calls in the step.
        phases: Of the step.
        reserved_bytes: What is kept free for the rest of the step.
    Returns:
        None if the meter did not see all of the calls, or there are none.
    """
    beyond = [phase.raised(-reserved_bytes) for phase in phases if not phase.is_final]
    simulation = _alone(plan)
    around: list[Outside] = []
    for number in numbers:
        outside = measured_outside(
            simulation, [len(plan.chain)], [number], beyond, lingering_bytes=plan.lingering_bytes
        )
        if outside is None:
            return None
        around += outside
    if not around:
        return None

    backwards = [phase.mark.call for phase in phases if phase.kind is PhaseKind.BACKWARD]
    goes_back_twice = any(backwards.count(number) > 1 for number in numbers)
    return Foresight(tuple(around), plan.chain.kept_bytes, reserved_bytes, goes_back_twice)


def _alone(plan: Plan, outside: Outside | None = None) -> Simulation:
    """A step with a single call, and what lies around it."""
    around = [] if outside is None else [outside]
    chain = joined([""], [plan.chain], around)
    return simulate(chain, concatenated([plan.schedule]), **plan.conditions)


def _peak_of(phases: Sequence[StepPhase]) -> int:
    return max((phase.peak_bytes for phase in phases), default=0)


def _most_beyond(simulated: Sequence[tuple[int, Event]], phase: StepPhase) -> int:
    """Bytes by which a measured phase exceeds its simulation, at its start or at its peak.

    A GPU's meter may not have seen the peak: its statistics are reset once a step.
    """
    start_bytes = simulated[0][0]
    peak_bytes = max(event.peak_bytes for _, event in simulated)
    return max(phase.start_bytes - start_bytes, phase.peak_bytes - peak_bytes)
