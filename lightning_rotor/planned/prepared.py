"""A call that is ready to run: costs alone, or costs with a plan and what runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from lightning_rotor.chain import Chain
from lightning_rotor.compiling.partitioner import Saving
from lightning_rotor.execution.executor import Executor
from lightning_rotor.execution.moving import OtherMemory
from lightning_rotor.execution.stopwatch import TIMED_CALLS, Stopwatch
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planning import Plan
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.meters import meter_for
from lightning_rotor.profiling.segment_seconds import segment_seconds, unwatched_seconds
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import seconds_apart, simulate

Turn: TypeAlias = tuple[str, ...]
"""Planned modules whose forward is done and whose backward is not when a call begins. One signature has one plan per
turn."""

MUCH_ROOM = 0.5
"""The share of its budget up to which a call leaves much room: what nobody has looked at is smaller than that."""

# Costs of segments are not corrected to less than a tenth of what was measured: then the clock was wrong.
_LEAST_FACTOR = 0.1
# A plain step takes at least half of what its stages take one by one: less would mean that the stopwatch was stopped.
_LEAST_PART = 0.5
# In the place of 0 in a division: such overheads differ by nothing.
_TINY = 1e-9
# Plans of one call that are timed: the first, and one that follows from what it took. More would go on for ever, as
# each measurement has its noise.
_MOST_TIMED = 2


@dataclass(frozen=True, slots=True)
class TimedSchedule:
    """A schedule that calls have run under, with the time beyond plain training as a fraction of that, as measured."""

    schedule: Schedule
    overhead: float


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """The costs of a call that has no plan.

    Attributes:
        profile: As measured, or as follows from measurements of other sizes.
        turn: That a plan will be for.
        origin: Where they come from: they were measured, are bounds that follow from measurements of other sizes, or
            are those of a larger size as they are.
        rough_seconds: At most lost in each step because such costs may be much too high.
        timed: Schedules that it has run under.
        compiled_anew: Times that stages which the user compiled were measured with other code for them, too.
        saving: By so much the counted peaks of a graph that is planned inside are lower than the user's.
    """

    profile: Profile
    turn: Turn = ()
    origin: Literal["measured", "bounds", "larger size"] = "measured"
    rough_seconds: float = 0.0
    timed: tuple[TimedSchedule, ...] = ()
    compiled_anew: int = 0
    saving: Saving | None = None

    @property
    def estimated(self) -> bool:
        """True if they follow from those of other sizes."""
        return self.origin != "measured"

    def under(
        self,
        signature: Signature,
        plan: Plan,
        *,
        lost_seconds: float = 0.0,
        is_chosen: bool = False,
        memory: OtherMemory | None = None,
        executor: Executor | None = None,
    ) -> Prepared:
        """These costs with a plan, and an executor for it.

        Args:
            signature: Of the call that the costs are for.
            plan: For them.
            lost_seconds: See :class:`Prepared`.
            is_chosen: Likewise.
            memory: Where the plan moves what it moves.
            executor: One that runs this schedule with the stages of these costs; by default it is made.
        """
        profile, cut = self.profile, signature.cut
        executor = executor or Executor(
            profile.stages,
            profile.chain,
            plan.schedule,
            profile.states,
            root=cut.module,
            inputs=cut.inputs,
            stopwatch=Stopwatch(meter_for(signature.device)),
            memory=memory,
        )
        runs_plainly = _may_run_plainly(signature, profile.chain, plan)
        return Prepared(self, signature, plan, executor, runs_plainly, lost_seconds, is_chosen)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A call with its plan.

    Attributes:
        costs: That the plan is for.
        signature: Of the call that the costs are for. Calls of smaller sizes may run under the plan, too.
        plan: As the executor runs it.
        executor: Runs it.
        runs_plainly: The plan recomputes nothing, and the module's own forward stays inside it, so that runs.
        lost_seconds: At most lost in each step because the schedule is that of another size.
        is_chosen: The user has chosen the schedule.
        room_bytes: The most that earlier calls of the step may hold when one begins under this plan; None if the plan
            was made without a look at others.
    """

    costs: Costs
    signature: Signature
    plan: Plan
    executor: Executor
    runs_plainly: bool
    lost_seconds: float = 0.0
    is_chosen: bool = False
    room_bytes: int | None = None

    @property
    def profile(self) -> Profile:
        """The costs themselves."""
        return self.costs.profile

    @property
    def turn(self) -> Turn:
        """The turn that the plan is for."""
        return self.costs.turn

    @property
    def schedule(self) -> Schedule:
        """The plan's schedule."""
        return self.plan.schedule

    @property
    def held_bytes(self) -> int:
        """Bytes that a call holds until its backward."""
        return self.plan.simulation.held_bytes

    @property
    def is_best_known(self) -> bool:
        """True if no better plan is expected of more searching or measuring."""
        return not self.lost_seconds and not self.costs.rough_seconds

    @property
    def has_much_room(self) -> bool:
        """True if it runs plainly, and takes at most half of what it may."""
        return self.runs_plainly and self.plan.peak_bytes <= MUCH_ROOM * self.plan.budget_bytes

    # ---------------------------------------------------------------- the seconds of its calls

    @property
    def measured_overhead(self) -> float | None:
        """Time beyond plain training as a fraction of it, as measured; None before a second call under the plan."""
        stopwatch = self.executor.stopwatch
        if stopwatch is None:
            return None
        if not self.plan.recomputed:
            return self.plan.overhead
        again_seconds, step_seconds = stopwatch.again_seconds, stopwatch.step_seconds
        if again_seconds is None or step_seconds is None:
            return None
        extra_seconds = again_seconds + _seconds_besides(self.plan)
        # The plain step is what is left of the whole call, and not the sum of its stages: single stages do not show
        # the caches, nor the host between them.
        plain_seconds = max(step_seconds - extra_seconds, _LEAST_PART * self.plan.chain.step_seconds)
        return max(extra_seconds / plain_seconds, 0.0)

    @property
    def shared_executor(self) -> Executor | None:
        """The executor, if calls of other sizes may use it, too; None while it times calls of this size."""
        return self.executor if self.is_settled else None

    @property
    def is_timed(self) -> bool:
        """True if all calls have run that tell what the plan costs."""
        stopwatch = self.executor.stopwatch
        # The first call warms up, and is not timed.
        return stopwatch is not None and stopwatch.calls > 1 + TIMED_CALLS and self.measured_overhead is not None

    @property
    def is_settled(self) -> bool:
        """True if the seconds that calls have taken lead to no other plan any more."""
        timed = self.costs.timed
        # Seconds of a call say nothing of costs that are bounds, and a schedule of the user's stays in any case.
        if self.is_chosen or self.costs.estimated or len(timed) == _MOST_TIMED:
            return True
        if self.schedule.moves:
            # What a call takes more or less would be laid to its segments, and may be the link's.
            return True
        # It was timed, and planning with its seconds has led to it again.
        return bool(timed) and timed[-1].schedule is self.schedule

    def with_timing(self) -> Costs:
        """The costs, with the seconds that the schedule has taken among them."""
        assert self.measured_overhead is not None
        entry = TimedSchedule(self.schedule, self.measured_overhead)
        return replace(self.costs, timed=(*self.costs.timed, entry))


def leaves_much_room(chain: Chain, budget: Budget, *, held_bytes: int = 0) -> bool:
    """True if a chain that recomputes nothing takes at most half of a budget, beside what other calls hold of it."""
    plain = simulate(chain, Schedule.keep_all(len(chain)), **budget.conditions)
    return held_bytes + plain.peak_bytes <= MUCH_ROOM * budget.available_bytes


def may_be_planned_again(costs: Costs) -> bool:
    """True if one more plan may follow from the seconds of calls."""
    return len(costs.timed) < _MOST_TIMED


def costs_of(entry: Costs | Prepared) -> Costs:
    """The costs of an entry, with or without a plan."""
    return entry.costs if isinstance(entry, Prepared) else entry


def corrected(plan: Plan, overhead: float) -> Chain:
    """The plan's chain with costs of segments under which the plan has this overhead."""
    chain, seconds = plan.chain, plan.chain.segment_seconds
    twice = simulate(replace(chain, segment_seconds=2 * seconds), plan.schedule, **plan.conditions)
    # The overhead is linear in the costs of segments, so two points of the line give the one that was measured.
    rise = max(twice.overhead - plan.overhead, _TINY)
    factor = 1 + (overhead - plan.overhead) / rise
    return replace(chain, segment_seconds=max(factor, _LEAST_FACTOR) * seconds)


def _seconds_besides(plan: Plan) -> float:
    """Predicted seconds beyond plain training, but for those that a stopwatch sees of recomputations."""
    run_once = sum(event.seconds for event in plan.simulation.events if event.phase != "recompute")
    device = torch.device(plan.chain.device)
    as_measured = replace(plan.chain, segment_seconds=segment_seconds(device, meter_for(device)))
    host_seconds = unwatched_seconds(as_measured, plan.schedule) + seconds_apart(as_measured, plan.schedule)
    return run_once - plan.chain.step_seconds + host_seconds


def _may_run_plainly(signature: Signature, chain: Chain, plan: Plan) -> bool:
    """True if the module's own forward stays within the plan, which recomputes nothing.

    Code that is written out keeps intermediate values in variables until it returns; the members of an
    ``nn.Sequential`` do not. Under autocast it keeps a cast copy of every weight.
    """
    if not plan.schedule.is_plain or any(enabled for enabled, _ in signature.autocast):
        return False
    passing_bytes = 0
    if signature.cut.way == "graph":
        passing_bytes = sum(stage.keep.forward_peak_bytes - stage.keep.saved_bytes for stage in chain)
    return plan.peak_bytes + passing_bytes <= plan.budget_bytes
