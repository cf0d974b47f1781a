"""Several calls of planned modules that are alive at the same time, as one chain with one schedule.

Between two calls, and behind the last, the user's own code runs, once: a stage that no segment may contain::

    image tower ──► user's code ──► text tower ──► user's code
    stages 0-5      stage 6         stages 7-12    stage 13

Autograd runs first what was recorded last, so backwards come in the reverse order, as those of a single chain do. A
schedule for the joint chain falls apart into one for each call. Bounds, tables and the planner hold for joint chains as
for any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

from lightning_rotor.chain import Chain, Option, Skip, StageCost
from lightning_rotor.planning.plan import Plan, scheduled
from lightning_rotor.schedule import Item, Leaf, Move, Schedule, Segment
from lightning_rotor.simulator import simulate


@dataclass(frozen=True, slots=True, repr=False)
class StepPlan(Plan):
    """A plan for several calls, in the order of their forwards.

    Attributes:
        names: Of the modules that are called.
        calls: The plan of each call. Its budget is what the call may use beyond what is there when its forward begins;
            where that is less than the call's own peak, its peak, as nobody gives up its output before the backward.
    """

    names: tuple[str, ...] = ()
    calls: tuple[Plan, ...] = ()

    @classmethod
    def of(cls, plan: Plan, names: Sequence[str], chains: Sequence[Chain]) -> StepPlan:
        """A plan for :func:`joined` of these chains, told apart."""
        lengths = list(map(len, chains))
        schedules = split(plan.schedule, lengths)
        # Recomputations have a phase of their own, so each stage has one such event.
        held_after_stage = {}
        for event in plan.simulation.events:
            if event.phase == "forward":
                held_after_stage[event.stage] = event.after_bytes
        calls = []
        for chain, schedule, start in zip(chains, schedules, first_stages(lengths), strict=True):
            call = scheduled(chain, schedule, slots=plan.slots, **plan.conditions)
            held_by_earlier_bytes = 0
            if start > 0:
                # What lingers is counted by the call's own conditions.
                held_by_earlier_bytes = held_after_stage[start - 1] - plan.lingering_bytes
            budget_bytes = max(plan.budget_bytes - held_by_earlier_bytes, call.peak_bytes)
            calls.append(replace(call, budget_bytes=budget_bytes))
        # Not asdict(), which would turn the chain and the schedule into dictionaries, too.
        values: dict[str, Any] = {}
        for field in fields(plan):
            values[field.name] = getattr(plan, field.name)
        return cls(**values, names=tuple(names), calls=tuple(calls))


@dataclass(frozen=True, slots=True)
class Outside:
    """Bytes that the process takes around a call of a step, beyond what the calls' chains say.

    Attributes:
        forward_bytes: While the call's forward runs.
        after_bytes: Peak of the user's code behind the call.
        backward_bytes: While the call's backward runs.
        loss_bytes: Peak in the backward of the user's code behind the call; read of the last call only.
    """

    forward_bytes: int = 0
    after_bytes: int = 0
    backward_bytes: int = 0
    loss_bytes: int = 0

    def scaled(self, factor: float) -> Outside:
        """The bytes around larger calls, in proportion; what was less than nothing stays."""

        def grown(size_bytes: int) -> int:
            # What was saved at one size need not be saved more of at a larger one.
            if size_bytes <= 0:
                return size_bytes
            return math.ceil(size_bytes * factor)

        return Outside(
            grown(self.forward_bytes),
            grown(self.after_bytes),
            grown(self.backward_bytes),
            grown(self.loss_bytes),
        )

    def at_least(self, other: Outside) -> Outside:
        """The larger of each of two measurements."""
        return Outside(
            max(self.forward_bytes, other.forward_bytes),
            max(self.after_bytes, other.after_bytes),
            max(self.backward_bytes, other.backward_bytes),
            max(self.loss_bytes, other.loss_bytes),
        )


def joined(names: Sequence[str], parts: Sequence[Chain | Plan], outside: Sequence[Outside] = ()) -> Chain:
    """The costs of several calls as one chain.

    Args:
        names: Of the modules that are called, in the order of their forwards.
        parts: Of each call its costs, or a plan that it runs under in any case, which becomes a single stage.
        outside: Of each call what the process takes around it; by default nothing.
    """
    chains = []
    for part in parts:
        chains.append(part.chain if isinstance(part, Plan) else part)
    around = tuple(outside) or (Outside(),) * len(parts)
    # What is there before a call stays until the end of the step, so it never falls from call to call.
    forward_bytes = [outside_call.forward_bytes for outside_call in around]
    before_bytes = list(accumulate(forward_bytes, max, initial=0))[1:]
    # One number for all backwards: the peak of the one where it is largest is hardly ever that of another.
    backward_bytes = 0
    for outside_call, there in zip(around, before_bytes, strict=True):
        backward_bytes = max(backward_bytes, outside_call.backward_bytes - there)
    stages: list[StageCost] = []
    skips: list[Skip] = []
    for number, (name, part, chain) in enumerate(zip(names, parts, chains, strict=True)):
        start = len(stages)
        if isinstance(part, Plan):
            stages.append(_settled_call(name, part))
        else:
            # A later call of the module, whose backward comes first, leaves gradients that these are added to.
            is_called_again = name in names[number + 1 :]
            first_skip = len(skips)
            for stage in part:
                own = _stage_of_call(stage, name, first_skip, gradients_exist=is_called_again)
                stages.append(own)
            for skip in part.skips:
                born = skip.born + start
                uses = _shifted(skip.uses, start)
                skips.append(replace(skip, born=born, uses=uses))
        # The code behind a call holds the call's output and leaves its gradient.
        output_bytes = chain.stages[-1].output_bytes
        after_bytes = around[number].after_bytes - before_bytes[number]
        held_bytes = 0
        loss_bytes = 0
        if number + 1 < len(parts):
            held_bytes = before_bytes[number + 1] - before_bytes[number]
        else:
            loss_bytes = around[number].loss_bytes - before_bytes[number] - backward_bytes
        users_code = _run_once(
            f"behind {name}",
            # The next call's input counts in no peak.
            output_bytes=0,
            forward_peak_bytes=max(after_bytes, held_bytes),
            backward_peak_bytes=max(loss_bytes, output_bytes),
            saved_bytes=held_bytes,
            saved_input_bytes=output_bytes,
            # More than nothing: whoever calls has the next call's input, which no peak counts.
            saved_output_bytes=1,
            input_gradient_bytes=output_bytes,
            parameter_gradient_bytes=0,
        )
        stages.append(users_code)
    # Pinned bytes are alive from a stage's forward to the end of the step, as what the user holds is.
    pinned_bytes = stages[0].pinned_bytes + before_bytes[0]
    stages[0] = replace(stages[0], pinned_bytes=pinned_bytes)
    stages[-1] = replace(stages[-1], pinned_bytes=backward_bytes)
    # States and host time of a segment are the device's rather than a call's.
    rng_state_bytes = [chain.rng_state_bytes for chain in chains]
    segment_seconds = [chain.segment_seconds for chain in chains]
    return Chain(
        tuple(stages),
        input_bytes=chains[0].input_bytes,
        rng_state_bytes=max(rng_state_bytes),
        segment_seconds=max(segment_seconds),
        device=chains[0].device,
        skips=tuple(skips),
    )


def split(schedule: Schedule, lengths: Sequence[int]) -> list[Schedule]:
    """The schedules of calls with so many stages each, from one for :func:`joined`.

    What moves is given back when the call's forward is over, and taken again when its backward begins, where the
    schedule would do it while other calls run: this takes no more memory.
    """
    schedules = []
    before = 0
    for start, length in zip(first_stages(lengths), lengths, strict=True):
        # The stage behind a call runs once, so no item reaches from one call into another.
        items = []
        for item in schedule.items:
            if start <= item.first < start + length:
                items.append(_shifted_item(item, -start))
        forward_ends = before + len(items)
        # Backwards come in the reverse order, so a point is as far from the end as its mirror image from the begin.
        backward_begins = 2 * len(schedule.items) - forward_ends
        moves = []
        for move in schedule.moves:
            if before <= move.item < forward_ends:
                release = _nearest_point(move.release, before, forward_ends, backward_begins)
                fetch = _nearest_point(move.fetch, before, forward_ends, backward_begins)
                moves.append(Move(move.item - before, release, fetch))
        schedules.append(Schedule(tuple(items), tuple(moves)))
        before = forward_ends + 1
    return schedules


def _nearest_point(point: int, before: int, forward_ends: int, backward_begins: int) -> int:
    """The point of a call's own schedule that is next to one of the whole step's, inside of forward and backward.

    Args:
        point: Of the whole schedule: items before it, of the forwards and then of the backwards.
        before: The point where the call's forward begins.
        forward_ends: The point where it ends.
        backward_begins: The point where the call's backward begins.
    """
    if point < backward_begins:
        return min(max(point, before), forward_ends) - before
    return forward_ends - before + point - backward_begins


def concatenated(schedules: Sequence[Schedule]) -> Schedule:
    """The schedule for :func:`joined` in which each call has its own."""
    items: list[Item] = []
    moves: list[Move] = []
    starts = first_stages(list(map(len, schedules)))
    # With one item for the user's code behind each call.
    count = len(schedules)
    for schedule in schedules:
        count += len(schedule.items)
    for start, schedule in zip(starts, schedules, strict=True):
        own = len(schedule.items)
        before = len(items)
        # The first point of the call's backward.
        backward_begins = 2 * count - before - own
        for move in schedule.moves:
            release = before + move.release
            if move.release > own:
                # In the call's backward.
                release = backward_begins + move.release - own
            fetch = backward_begins + move.fetch - own
            moves.append(Move(before + move.item, release, fetch))
        for item in schedule.items:
            items.append(_shifted_item(item, start))
        # The user's code behind the call.
        items.append(Leaf(start + len(schedule)))
    return Schedule(tuple(items), tuple(moves))


def first_stages(lengths: Sequence[int]) -> list[int]:
    """Numbers of the first stages of calls with so many stages each, in :func:`joined`."""
    # Behind each call there is a stage for the user's code.
    *firsts, _ = accumulate((length + 1 for length in lengths), initial=0)
    return firsts


def _run_once(
    name: str,
    *,
    output_bytes: int,
    forward_peak_bytes: int,
    backward_peak_bytes: int,
    saved_bytes: int,
    saved_input_bytes: int,
    saved_output_bytes: int,
    input_gradient_bytes: int,
    parameter_gradient_bytes: int,
) -> StageCost:
    """A stage that runs once, whose seconds do not count, by its peaks."""
    option = Option(
        name="keep",
        saved_bytes=saved_bytes,
        saved_input_bytes=saved_input_bytes,
        saved_output_bytes=saved_output_bytes,
        saved_tensors=1,
        forward_peak_bytes=forward_peak_bytes,
        replay_peak_bytes=forward_peak_bytes,
        unpack_peak_bytes=0,
        unpack_bytes=0,
        backward_peak_bytes=backward_peak_bytes,
        backward_segment_peak_bytes=backward_peak_bytes,
        backward_held_peak_bytes=backward_peak_bytes,
        input_gradient_bytes=input_gradient_bytes,
        parameter_gradient_bytes=parameter_gradient_bytes,
        forward_seconds=0.0,
        replay_seconds=0.0,
        backward_seconds=0.0,
    )
    return StageCost(name, output_bytes, forward_peak_bytes, 0.0, (option,), recomputable=False)


def _settled_call(name: str, plan: Plan) -> StageCost:
    """A call under a plan that stays, as one stage."""
    output_bytes = plan.chain.stages[-1].output_bytes
    chain = joined([name], [plan.chain])
    alone = simulate(chain, concatenated([plan.schedule]), **plan.conditions)
    forward_peak_bytes = 0
    backward_peak_bytes = 0
    for event in alone.events:
        if event.stage >= len(plan.chain):
            # The user's code behind the call, which the step has a stage of its own for.
            continue
        if event.phase == "forward":
            forward_peak_bytes = max(forward_peak_bytes, event.peak_bytes)
        else:
            # Recomputations are a part of the backward: to the rest of the step it is one stage.
            backward_peak_bytes = max(backward_peak_bytes, event.peak_bytes)
    # The backward of the user's code runs first. Behind it, its gradient is there, and perhaps not all of the output.
    users_backward = next(event for event in alone.events if event.phase == "backward")
    kept_bytes = users_backward.after_bytes - output_bytes
    given_up_bytes = alone.held_bytes - kept_bytes
    return _run_once(
        name,
        output_bytes=output_bytes,
        forward_peak_bytes=forward_peak_bytes - plan.lingering_bytes,
        backward_peak_bytes=backward_peak_bytes - kept_bytes,
        saved_bytes=max(alone.held_bytes - output_bytes, 0),
        saved_input_bytes=0,
        saved_output_bytes=min(max(output_bytes - given_up_bytes, 0), output_bytes),
        input_gradient_bytes=0,
        parameter_gradient_bytes=plan.chain.parameter_gradient_bytes,
    )


def _stage_of_call(stage: StageCost, call: str, first_skip: int, *, gradients_exist: bool) -> StageCost:
    """A stage of a call among the others of the step; ``first_skip`` is the number of the call's first skip there."""
    options = []
    for option in stage.options:
        # The number of a skip is its place among all skips of the step.
        saved_skips = _shifted(option.saved_skips, first_skip)
        option = replace(option, saved_skips=saved_skips)
        if gradients_exist:
            # A later call of the module has made the gradients, which this one adds to: they are counted there.
            peaks = option.backward_peaks(gradients_exist=True)
            option = replace(
                option,
                parameter_gradient_bytes=0,
                backward_peak_bytes=peaks.plain_bytes,
                backward_segment_peak_bytes=peaks.segment_bytes,
                backward_held_peak_bytes=peaks.held_bytes,
                backward_replayed_peak_bytes=peaks.replayed_bytes,
            )
        options.append(option)
    return replace(stage, name=f"{call}.{stage.name}", options=tuple(options))


def _shifted_item(item: Item, by: int) -> Item:
    if isinstance(item, Leaf):
        return replace(item, stage=item.stage + by)
    inside = [_shifted_item(inner, by) for inner in item.items]
    return Segment(tuple(inside))


def _shifted(numbers: Sequence[int], by: int) -> tuple[int, ...]:
    return tuple(number + by for number in numbers)
