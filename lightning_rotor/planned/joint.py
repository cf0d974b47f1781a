"""One plan for several calls of planned modules that are alive at the same time, as one chain.

Between two calls, and behind the last, the user's own code runs, once: a stage that no segment may contain::

    image tower ──► user's code ──► text tower ──► user's code
    stages 0-5      stage 6         stages 7-12    stage 13

Autograd runs what was recorded last first, so backwards come in the other order. A schedule for this chain falls apart
into one for each call; bounds and tables hold for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import accumulate, zip_longest
from typing import Any, TypeAlias

from lightning_rotor.chain import Chain, Option, Skip, StageCost
from lightning_rotor.errors import BudgetError
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.cache import Prepared
from lightning_rotor.planned.limit import (
    BACK,
    BEHIND,
    INTO,
    LOSS,
    Call,
    CallKey,
    Foresight,
    Step,
    bytes_kept,
    is_final,
)
from lightning_rotor.planned.plans import BudgetSource
from lightning_rotor.planning import Plan, minimum_budget
from lightning_rotor.planning.plan import scheduled
from lightning_rotor.profiling.meters import MeteredPhase
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment
from lightning_rotor.simulator import Event, Simulation, simulate


@dataclass(frozen=True, slots=True, repr=False)
class StepPlan(Plan):
    """A plan for several calls, in the order of their forwards.

    The budget of each call is what it may use beyond what is there when its forward begins, or its peak alone, whose
    output nobody gives up before the backward.
    """

    names: tuple[str, ...] = ()  # of the modules that are called
    calls: tuple[Plan, ...] = ()

    @classmethod
    def of(cls, plan: Plan, names: Sequence[str], chains: Sequence[Chain]) -> StepPlan:
        """A plan for :func:`joined`, told apart."""
        lengths = [len(chain) for chain in chains]
        calls = []
        after = {event.stage: event.after_bytes for event in plan.simulation.events if event.phase == "forward"}
        for chain, schedule, start in zip(chains, split(plan.schedule, lengths), _starts(lengths), strict=True):
            call = scheduled(chain, schedule, slots=plan.slots, **plan.conditions)
            held_bytes = after[start - 1] - plan.lingering_bytes if start else 0  # by earlier calls
            calls.append(replace(call, budget_bytes=max(plan.budget_bytes - held_bytes, call.peak_bytes)))
        values: dict[str, Any] = {field.name: getattr(plan, field.name) for field in fields(plan)}
        return cls(**values, names=tuple(names), calls=tuple(calls))


@dataclass(frozen=True, slots=True)
class Outside:
    """What the process takes around a call of a step beyond what the calls' chains say, in bytes."""

    forward_bytes: int = 0  # while the call runs
    behind_bytes: int = 0  # peak of the user's code behind it
    backward_bytes: int = 0  # while its backward runs
    loss_bytes: int = 0  # peak in the backward of the user's code behind it; read of the last call only


def joined(names: Sequence[str], parts: Sequence[Chain | Plan], outside: Sequence[Outside] = ()) -> Chain:
    """What several calls of modules with these names cost, as one chain.

    A part is what a call costs, or the plan that it runs under in any case, which becomes a single stage.
    """
    stages: list[StageCost] = []
    skips: list[Skip] = []
    chains = [part.chain if isinstance(part, Plan) else part for part in parts]
    found = tuple(outside) or (Outside(),) * len(parts)
    # What is there before a call stays until the end of the step.
    before = list(accumulate((each.forward_bytes for each in found), max, initial=0))[1:]
    # The same for all backwards: the peak of the one where it is most is hardly ever that of another.
    more_bytes = max(0, *(each.backward_bytes - there for each, there in zip(found, before, strict=True)))
    for number, (name, part, chain) in enumerate(zip(names, parts, chains, strict=True)):
        if isinstance(part, Plan):
            stages.append(_as_stage(name, part))
        else:
            # A later call of the module, whose backward comes first, has left gradients that these are added to.
            again = name in names[number + 1 :]
            stages += [_moved_stage(stage, name, len(skips), gradients_exist=again) for stage in part]
            start = len(stages) - len(part)
            skips += [replace(skip, born=skip.born + start, uses=_moved(skip.uses, start)) for skip in part.skips]
        is_last = number + 1 == len(parts)
        held_bytes = 0 if is_last else before[number + 1] - before[number]
        peak_bytes = max(found[number].behind_bytes - before[number], held_bytes)
        loss_bytes = found[number].loss_bytes - before[number] - more_bytes if is_last else 0
        # The code behind a call holds the output and leaves its gradient. The next call's input counts in no peak.
        output_bytes = chain.stages[-1].output_bytes
        peaks, saved = (peak_bytes, max(loss_bytes, output_bytes)), (held_bytes, output_bytes, 1)
        stages.append(_run_once(f"behind {name}", 0, peaks, saved=saved, left=(output_bytes, 0)))
    stages[0] = replace(stages[0], pinned_bytes=stages[0].pinned_bytes + before[0])
    stages[-1] = replace(stages[-1], pinned_bytes=more_bytes)
    return Chain(
        tuple(stages),
        input_bytes=chains[0].input_bytes,
        rng_state_bytes=max(chain.rng_state_bytes for chain in chains),
        segment_seconds=max(chain.segment_seconds for chain in chains),
        device=chains[0].device,
        skips=tuple(skips),
    )


def measured_outside(
    bare: Simulation,
    lengths: Sequence[int],
    numbers: Sequence[int],
    phases: Sequence[MeteredPhase],
    *,
    lingering_bytes: int,
) -> list[Outside] | None:
    """What the process has taken beyond the chains of some calls, or None if the meter did not see all of them.

    ``bare`` simulates these calls, with so many stages each, joined under the schedules that they have run, with
    nothing outside. ``phases`` are those of the step, in bytes beyond what is kept free for the rest of it.
    """
    first = {phase.label: place for place, phase in reversed(list(enumerate(phases)))}
    if any(f"{INTO} {number}" not in first for number in numbers):
        return None
    before = [lingering_bytes, *(event.after_bytes for event in bare.events)]
    timed = list(zip(before, bare.events, strict=False))
    found = []
    for number, following, start, length in zip_longest(numbers, numbers[1:], _starts(lengths), lengths):
        last = start + length
        into, behind, back = (first.get(f"{label} {number}", len(phases)) for label in (INTO, BEHIND, BACK))
        end = loss = back if following is None else first[f"{INTO} {following}"]
        if following is None:
            loss = max((place for place in range(behind, end) if phases[place].label == LOSS), default=end)
        forward = [(level, event) for level, event in timed if event.phase == "forward" and start <= event.stage < last]
        backward = [  # with that of the user's code before
            (level, event) for level, event in timed if event.phase != "forward" and start - 1 <= event.stage < last
        ]
        # A stage that is run to be discarded holds its input until the next one begins.
        behind_bytes = next(each.peak_bytes for each in bare.events if each.phase == "forward" and each.stage == last)
        found.append(
            Outside(
                forward_bytes=_most_beyond(forward, phases[into]),
                behind_bytes=_peak_bytes(phases[behind:loss]) - behind_bytes,
                backward_bytes=_most_beyond(backward, phases[back]) if back < len(phases) else 0,
                loss_bytes=_peak_bytes(phases[loss:end]) - (behind_bytes - lingering_bytes),
            )
        )
    return found


def foresight(step: Step, phases: Sequence[MeteredPhase], plan: Plan, reserved_bytes: int) -> Foresight | None:
    """Peaks of a step like a measured one, if the calls under a plan ran under another one; None if not all was seen.

    None of the calls waits together with others; ``reserved_bytes`` is what is kept free for the rest of the step.
    """
    numbers = [number for call, number in step.numbers.items() if call.plan is plan]
    beyond = [phase.raised(-reserved_bytes) for phase in phases if not is_final(phase)]
    bare, found = _alone(plan), list[Outside]()
    for number in numbers:
        outside = measured_outside(bare, [len(plan.chain)], [number], beyond, lingering_bytes=plan.lingering_bytes)
        if outside is None:
            return None
        found += outside

    def peak_bytes(other: Plan) -> int:
        return reserved_bytes + max(_alone(other, outside).peak_bytes for outside in found)

    return peak_bytes if found else None


def _alone(plan: Plan, outside: Outside | None = None) -> Simulation:
    """A step with a single call, and what lies around it."""
    chain = joined([""], [plan.chain], () if outside is None else [outside])
    return simulate(chain, concatenated([plan.schedule]), **plan.conditions)


def _peak_bytes(phases: Sequence[MeteredPhase]) -> int:
    return max((phase.peak_bytes for phase in phases), default=0)


def _most_beyond(simulated: Sequence[tuple[int, Event]], phase: MeteredPhase) -> int:
    """By how much a measured phase exceeds its simulation. A GPU's meter may not have seen its peak."""
    start_bytes, peak_bytes = simulated[0][0], max(event.peak_bytes for _, event in simulated)
    return max(phase.start_bytes - start_bytes, phase.peak_bytes - peak_bytes)


def split(schedule: Schedule, lengths: Sequence[int]) -> list[Schedule]:
    """The schedules of calls with so many stages each, from one for :func:`joined`."""
    found = []
    for start, length in zip(_starts(lengths), lengths, strict=True):
        mine = (item for item in schedule.items if start <= item.first < start + length)
        found.append(Schedule(tuple(_moved_item(item, -start) for item in mine)))
    return found


def concatenated(schedules: Sequence[Schedule]) -> Schedule:
    """The schedule for :func:`joined` in which each call has its own."""
    starts = _starts([len(schedule) for schedule in schedules])
    items: list[Item] = []
    for start, schedule in zip(starts, schedules, strict=True):
        items += [_moved_item(item, start) for item in schedule.items]
        items.append(Leaf(start + len(schedule)))
    return Schedule(tuple(items))


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(length + 1 for length in lengths)][:-1]


def _run_once(
    name: str, output_bytes: int, peaks: tuple[int, int], *, saved: tuple[int, int, int], left: tuple[int, int]
) -> StageCost:
    """What runs once, by its peaks; ``saved``: inside, of input and output; ``left``: gradients, first the input's."""
    forward_bytes, backward_bytes = peaks
    option = Option(
        name="keep",
        saved_bytes=saved[0],
        saved_input_bytes=saved[1],
        saved_output_bytes=saved[2],
        saved_tensors=1,
        forward_peak_bytes=forward_bytes,
        replay_peak_bytes=forward_bytes,
        unpack_peak_bytes=0,
        unpack_bytes=0,
        backward_peak_bytes=backward_bytes,
        backward_segment_peak_bytes=backward_bytes,
        backward_held_peak_bytes=backward_bytes,
        input_gradient_bytes=left[0],
        parameter_gradient_bytes=left[1],
        forward_seconds=0.0,
        replay_seconds=0.0,
        backward_seconds=0.0,
    )
    return StageCost(name, output_bytes, forward_bytes, 0.0, (option,), recomputable=False)


def _as_stage(name: str, plan: Plan) -> StageCost:
    """A call under a plan that is settled."""
    last = plan.chain.stages[-1]
    alone = simulate(joined([name], [plan.chain]), concatenated([plan.schedule]), **plan.conditions)
    own = [event for event in alone.events if event.stage < len(plan.chain)]
    forward_bytes = max(event.peak_bytes for event in own if event.phase == "forward") - plan.lingering_bytes
    # What is still there of the output when the backward of the user's code is done, which leaves its gradient.
    users_code = next(event for event in alone.events if event.phase == "backward")
    kept_bytes = users_code.after_bytes - last.output_bytes
    given_up_bytes = alone.held_bytes - kept_bytes
    backward_bytes = max(event.peak_bytes for event in own if event.phase != "forward") - kept_bytes
    saved_output_bytes = min(max(last.output_bytes - given_up_bytes, 0), last.output_bytes)
    saved = max(alone.held_bytes - last.output_bytes, 0), 0, saved_output_bytes
    left = 0, plan.chain.parameter_gradient_bytes
    return _run_once(name, last.output_bytes, (forward_bytes, backward_bytes), saved=saved, left=left)


def _moved_stage(stage: StageCost, call: str, first_skip: int, *, gradients_exist: bool) -> StageCost:
    """A stage of a call among the others of the step."""

    def moved(option: Option) -> Option:
        option = replace(option, saved_skips=_moved(option.saved_skips, first_skip))
        if not gradients_exist:
            return option
        peaks = option.backward_peaks(gradients_exist=True)
        return replace(
            option,
            parameter_gradient_bytes=0,
            backward_peak_bytes=peaks.plain_bytes,
            backward_segment_peak_bytes=peaks.segment_bytes,
            backward_held_peak_bytes=peaks.held_bytes,
            backward_replayed_peak_bytes=peaks.replayed_bytes,
        )

    return replace(stage, name=f"{call}.{stage.name}", options=tuple(map(moved, stage.options)))


def _moved_item(item: Item, by: int) -> Item:
    if isinstance(item, Leaf):
        return replace(item, stage=item.stage + by)
    return Segment(tuple(_moved_item(inner, by) for inner in item.items))


def _moved(numbers: Sequence[int], by: int) -> tuple[int, ...]:
    return tuple(number + by for number in numbers)


# ------------------- The plans of all paths. A call that is on several has one plan, made for the path that needs most.

_MOST_PATHS = 64
_SPARED = 0.01  # of what is taken: under another plan, the code around calls takes a little more
Path: TypeAlias = tuple[CallKey, ...]
"""Calls that wait for their backward together, in the order of their forwards."""


class _NoRoomError(Exception):
    """A path has no plan beside those that other paths have settled."""


class PathPlans:
    """Plans for calls that are alive together: the least ones until a step has shown what lies around its calls.

    ``budget`` says what a chain may use that copies so many bytes; ``source`` knows the processes that agree on plans.
    """

    def __init__(self, source: BudgetSource, budget: Callable[[Chain, int], Budget], *, slots: int) -> None:
        self._source, self._budget, self._slots = source, budget, slots
        self._known: dict[Path, StepPlan] = {}
        self._measured: dict[Path, list[Outside]] = {}
        self._kept: set[CallKey] = set()
        self._in_part: set[Path] = set()  # those with a step whose backward did not reach all calls

    def keep(self, call: CallKey) -> None:
        """Recompute nothing of a call whose backward is differentiated: its graph would hold what was recomputed."""
        self._kept.add(call)

    def follow(self, step: Step, phases: Sequence[MeteredPhase], *, exceeds: bool) -> None:
        """Plan the paths of a step that is over, where they have no plan, or its phases have shown more of them."""
        stale = []
        for calls in step.paths:
            path = _path(calls)
            if any(key.prepared() is None for key in path):  # dropped, as there are more shapes than plans are kept
                continue
            is_new = self.running(calls) is None
            is_first_measurement = self._learn(path, calls, step, phases, exceeds=exceeds)
            if self._source.ranks.any(is_new or is_first_measurement or exceeds):  # whoever planned alone would wait
                stale.append(path)
        for path in stale:
            self.plan(path)

    def largest(self, step: Step) -> StepPlan | None:
        """Of the plans for the paths of a step, the one with the highest peak."""
        known = (self._known.get(_path(calls)) for calls in step.paths)
        return max(filter(None, known), key=lambda plan: plan.peak_bytes, default=None)

    def _learn(
        self, path: Path, calls: Sequence[Call], step: Step, phases: Sequence[MeteredPhase], *, exceeds: bool
    ) -> bool:
        """Keep what the step has taken around some calls. True if nothing was known of it."""
        if not phases:
            return False
        is_whole = {f"{BACK} {step.numbers[call]}" for call in calls} <= {phase.label for phase in phases}
        if not is_whole and path not in self._in_part:
            self._in_part.add(path)
            return False
        names, chains = [key.name for key in path], [call.plan.chain for call in calls]
        bare = joined(names, chains)
        budget = self._budget(bare, _copied_bytes(call.prepared for call in calls))
        schedule = concatenated([call.plan.schedule for call in calls])
        # What is kept free for the rest of the step is in the budget already.
        beyond = [phase.raised(-budget.reserved_bytes) for phase in phases if not is_final(phase)]
        found = measured_outside(
            simulate(bare, schedule, **budget.conditions),
            list(map(len, chains)),
            [step.numbers[call] for call in calls],
            beyond,
            lingering_bytes=budget.lingering_bytes,
        )
        if found is None:
            return False
        known = self._measured.get(path)
        if known is not None and exceeds:  # what was known was too little
            found = [Outside(*map(max, astuple(one), astuple(new))) for one, new in zip(known, found, strict=True)]
        self._measured[path] = found
        return known is None

    def running(self, calls: Sequence[Call]) -> StepPlan | None:
        """The plan that calls have run under, or None if each had one of its own."""
        found = self._known.get(_path(calls))
        if found is None or any(call.plan is not plan for call, plan in zip(calls, found.calls, strict=True)):
            return None
        return found

    def plan(self, path: Path) -> None:
        """Plan a path anew, and what shares calls with it; where they exclude each other, as small as can be."""
        related = [known for known in self._known if known != path and not set(known).isdisjoint(path)]
        order = sorted([path, *related], key=_demand, reverse=True)
        try:
            found = self._in_order(order, tight=False)
        except _NoRoomError:
            found = self._in_order(order, tight=True)
        self._known.pop(path, None)
        for each, plan in found.items():
            self._known.pop(each, None)
            self._known[each] = self._in_use(each, plan)
        for oldest in list(self._known)[:-_MOST_PATHS]:
            del self._known[oldest]
            self._measured.pop(oldest, None)
            self._in_part.discard(oldest)
            self._kept.difference_update(oldest)  # a path that is still known tells again

    def _in_use(self, path: Path, plan: StepPlan) -> StepPlan:
        """Let calls run under a plan, those that run the same schedule under what they have."""
        parts = []
        for key, part in zip(path, plan.calls, strict=True):
            prepared = key.prepared()
            if prepared is not None and prepared.plan is not None and prepared.plan.schedule == part.schedule:
                part = prepared.plan
            elif prepared is not None:
                key.plans.use_plan(key.signature, prepared, part)
            parts.append(part)
        return replace(plan, calls=tuple(parts))

    def _in_order(self, order: Sequence[Path], *, tight: bool) -> dict[Path, StepPlan]:
        """Plans for paths, those of earlier ones settled. ``_NoRoomError`` if that is why there is none."""
        found: dict[Path, StepPlan] = {}
        settled: dict[CallKey, Plan] = {}
        for path in order:
            plan = self._beside(path, settled, tight=tight)
            if plan is not None:
                found[path] = plan
                settled.update(zip(path, plan.calls, strict=True))
        return found

    def _beside(self, path: Path, settled: Mapping[CallKey, Plan], *, tight: bool) -> StepPlan | None:
        """A plan for a path, some of whose calls have theirs; None if one of its calls is not known any more."""
        known = [prepared for key in path if (prepared := key.prepared()) is not None]
        if len(known) < len(path):
            return None
        names, chains = [key.name for key in path], [prepared.profile.chain for prepared in known]
        measured = self._measured.get(path)
        outside: Sequence[Outside] = measured or ()
        kept = {
            key: scheduled(each.profile.chain, Schedule.keep_all(len(each.profile.chain)), **each.plan.conditions)
            for key, each in zip(path, known, strict=True)
            if key in self._kept and each.plan is not None
        }
        settled = {**kept, **settled}
        parts = [settled.get(key, chain) for key, chain in zip(path, chains, strict=True)]
        chain = joined(names, parts, outside)
        budget = self._budget(chain, _copied_bytes(known))
        if measured is None:
            outside = self._guessed(names, parts, budget)
            chain = joined(names, parts, outside)
        if measured is None or tight:
            budget = budget.reduced_to(0, "other calls, and what is not measured yet")
        else:
            # Where all fits with ease, of what is held then.
            plain = simulate(chain, Schedule.keep_all(len(chain)), **budget.conditions)
            spared_bytes = int(min(budget.limit_bytes, budget.reserved_bytes + plain.peak_bytes) * _SPARED)
            budget = replace(budget, available_bytes=budget.available_bytes - spared_bytes, guessed_bytes=spared_bytes)
        must_fit = measured is not None and not tight and not settled.keys().isdisjoint(path)
        try:
            solved = self._solved(chain, budget, must_fit=must_fit)
        except BudgetError:
            raise _NoRoomError from None
        lengths = [1 if isinstance(part, Plan) else len(part) for part in parts]
        schedules = [
            part.schedule if isinstance(part, Plan) else schedule
            for part, schedule in zip(parts, split(solved.schedule, lengths), strict=True)
        ]
        chain, schedule = joined(names, chains, outside), concatenated(schedules)
        simulation = simulate(chain, schedule, **solved.conditions)
        plan = StepPlan.of(replace(solved, chain=chain, schedule=schedule, simulation=simulation), names, chains)
        calls = tuple(settled.get(key, part) for key, part in zip(path, plan.calls, strict=True))
        return replace(plan, calls=calls)

    def _guessed(self, names: Sequence[str], parts: Sequence[Chain | Plan], budget: Budget) -> list[Outside]:
        """Peaks behind calls, the higher the less calls keep, as high as the least plan allows, whatever the limit."""
        least = minimum_budget(joined(names, parts), slots=self._slots, **budget.conditions)
        for share in (1.0, 0.5, 0.25, 0.0):
            guess = [Outside(behind_bytes=int(share * (least.peak_bytes - budget.lingering_bytes)))] * len(parts)
            guessed = simulate(joined(names, parts, guess), least.schedule, **budget.conditions)
            if guessed.peak_bytes <= least.peak_bytes:
                break
        return guess

    def _solved(self, chain: Chain, budget: Budget, *, must_fit: bool) -> Plan:
        """Plan calls, as all processes agree. Where nothing fits, a step under the least plan shows what it is."""
        outcome: Plan | BudgetError
        try:
            outcome = budget.plan(chain, slots=self._slots)
        except BudgetError as error:
            outcome = error if must_fit else budget.least_plan(chain, error, slots=self._slots)
        return self._source.ranks.settle(outcome)  # an error, too, since others may wait for it


def _path(calls: Sequence[Call]) -> Path:
    """The same calls in every step."""
    return tuple(call.key for call in calls)


def _copied_bytes(calls: Iterable[Prepared]) -> int:
    """What the forwards of some calls copy."""
    return sum(call.profile.copied_bytes for call in calls)


def _demand(path: Path) -> int:
    """What a path holds if nothing is recomputed."""
    return sum(bytes_kept(prepared.profile.chain) for key in path if (prepared := key.prepared()) is not None)
