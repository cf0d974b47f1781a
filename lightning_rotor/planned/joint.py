"""One plan for several calls of planned modules that are alive at the same time, as one chain.

Between two calls, and behind the last, the user's own code runs, once: a stage that no segment may contain::

    image tower ──► user's code ──► text tower ──► user's code
    stages 0-5      stage 6         stages 7-12    stage 13

Autograd runs what was recorded last first, so backwards come in the other order. A schedule for this chain falls apart
into one for each call; bounds and tables hold for all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, TypeAlias

from lightning_rotor.chain import Chain, Option, Skip, StageCost
from lightning_rotor.errors import BudgetError
from lightning_rotor.planned.calls import Call, CallKey, Outside, Step
from lightning_rotor.planning import Plan
from lightning_rotor.planning.plan import scheduled
from lightning_rotor.profiling.meters import MeteredPhase
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment
from lightning_rotor.simulator import simulate


@dataclass(frozen=True, slots=True)
class StepPlan(Plan):
    """A plan for several calls, in the order of their forwards.

    Attributes:
        names: Of the modules that are called.
        plans: Of the calls. The budget of each is what it may use beyond what is there when its forward begins, or its
            peak alone, whose output nobody gives up before the backward.
    """

    names: tuple[str, ...] = ()
    plans: tuple[Plan, ...] = ()

    @classmethod
    def of(cls, plan: Plan, names: Sequence[str], chains: Sequence[Chain]) -> StepPlan:
        """A plan for :func:`joined`, told apart."""
        lengths = [len(chain) for chain in chains]
        before_bytes = _held_before(plan, lengths)
        plans = tuple(
            _of_call(chain, schedule, plan, plan.budget_bytes - before)
            for chain, schedule, before in zip(chains, split(plan.schedule, lengths), before_bytes, strict=True)
        )
        values: dict[str, Any] = {field.name: getattr(plan, field.name) for field in fields(plan)}
        return cls(**values, names=tuple(names), plans=plans)

    @property
    def calls(self) -> tuple[Plan, ...]:
        """The plans of the calls."""
        return self.plans

    @property
    def is_of_step(self) -> bool:
        """True: what it does not know of the step is measured, so that no larger budget is worth a try."""
        return True


def _of_call(chain: Chain, schedule: Schedule, plan: Plan, budget_bytes: int) -> Plan:
    found = scheduled(chain, schedule, slots=plan.slots, **plan.conditions)
    return replace(found, budget_bytes=max(budget_bytes, found.peak_bytes))


def joined(names: Sequence[str], parts: Sequence[Chain | Plan], outside: Sequence[Outside | None] = ()) -> Chain:
    """What several calls cost, as one chain.

    Args:
        names: Of the called modules; one that comes twice is called twice.
        parts: As many: what a call costs, or the plan that it runs under in any case, which becomes a single stage.
        outside: What is known of the code behind each; nothing by default.
    """
    stages: list[StageCost] = []
    skips: list[Skip] = []
    chains = [part.chain if isinstance(part, Plan) else part for part in parts]
    for number, (name, part, chain) in enumerate(zip(names, parts, chains, strict=True)):
        if isinstance(part, Plan):
            stages.append(_as_stage(name, part))
        else:
            # A later call of the module, whose backward comes first, has left gradients that these are added to.
            again = name in names[number + 1 :]
            stages += [_moved_stage(stage, name, len(skips), gradients_exist=again) for stage in part]
            start = len(stages) - len(part)
            skips += [replace(skip, born=skip.born + start, uses=_moved(skip.uses, start)) for skip in part.skips]
        behind = (outside[number] if outside else None) or Outside()
        stages.append(_users_code(name, chain.stages[-1].output_bytes, behind))
    found_bytes = (outside[0] or Outside()).found_bytes if outside else 0
    stages[0] = replace(stages[0], pinned_bytes=stages[0].pinned_bytes + found_bytes)
    return Chain(
        tuple(stages),
        input_bytes=chains[0].input_bytes,
        rng_state_bytes=max(chain.rng_state_bytes for chain in chains),
        segment_seconds=max(chain.segment_seconds for chain in chains),
        device=chains[0].device,
        skips=tuple(skips),
    )


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


def _held_before(plan: Plan, lengths: Sequence[int]) -> Iterator[int]:
    """What earlier calls hold when the forward of each begins."""
    forwards = {event.stage: event.after_bytes for event in plan.simulation.events if event.phase == "forward"}
    lingering_bytes = plan.lingering_bytes
    for start in _starts(lengths):
        yield forwards[start - 1] - lingering_bytes if start else 0


def _kept_option(
    forward_bytes: int, backward_bytes: int, *, saved: tuple[int, int, int], left: tuple[int, int]
) -> Option:
    """What runs once, from its peaks; ``saved``: inside, of input and output; ``left``: gradients, input's and others."""
    return Option(
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


def _users_code(behind: str, output_bytes: int, outside: Outside) -> StageCost:
    """The code behind a call: it holds the call's output, and leaves its gradient."""
    forward_bytes = max(outside.forward_peak_bytes, outside.held_bytes)
    backward_bytes = max(outside.backward_peak_bytes, output_bytes)
    # Whoever calls has the next call's input, which no peak counts.
    option = _kept_option(
        forward_bytes, backward_bytes, saved=(outside.held_bytes, output_bytes, 1), left=(output_bytes, 0)
    )
    pinned_bytes = outside.left_bytes - output_bytes if outside.left_bytes >= output_bytes else outside.left_bytes
    name = f"behind {behind}"
    return StageCost(name, 0, forward_bytes, 0.0, (option,), pinned_bytes=pinned_bytes, recomputable=False)


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
    saved = (
        max(alone.held_bytes - last.output_bytes, 0),
        0,
        min(max(last.output_bytes - given_up_bytes, 0), last.output_bytes),
    )
    left = (0, plan.chain.parameter_gradient_bytes)
    option = _kept_option(forward_bytes, backward_bytes, saved=saved, left=left)
    return StageCost(name, last.output_bytes, forward_bytes, 0.0, (option,), recomputable=False)


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


# ----------------------------------------------------------------------------------------------------
# The plans of all paths. A call that is on several has one plan, made for the path that needs most.

_MOST_PATHS = 64
Path: TypeAlias = tuple[CallKey, ...]
"""Calls that wait for their backward together, in the order of their forwards."""


class _NoRoomError(Exception):
    """A path has no plan beside those that other paths have settled."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path


class PathPlans:
    """Plans for calls that are alive together.

    ``solve`` plans a chain, with so many bytes copied in its forward; True if that is all that is known of it.
    """

    def __init__(self, solve: Callable[[Chain, int, bool], Plan]) -> None:
        self._solve = solve
        self._known: OrderedDict[Path, StepPlan] = OrderedDict()
        self._measured: dict[Path, list[Outside | None]] = {}
        self._outside: dict[Path, list[Outside | None]] = {}  # with guesses

    def learn(self, path: Path, measured: Sequence[Outside | None], assumed: Sequence[Outside | None]) -> bool:
        """Keep what the code behind the calls of a path has taken, or may take. True if it is not as it was known."""
        known = self._measured.setdefault(path, [None] * len(path))
        news = [number for number, found in enumerate(measured) if found is not None and known[number] is None]
        for number in news:
            known[number] = measured[number]
        outside = [found or guess for found, guess in zip(known, assumed, strict=True)]
        is_new = bool(news) and outside != self._outside.get(path)
        if is_new or path not in self._outside:
            self._outside[path] = outside
        return is_new

    def follow(
        self, step: Step, phases: Mapping[str, MeteredPhase], assumed: Sequence[Outside | None]
    ) -> list[StepPlan]:
        """New plans for the paths of a step that is over, where it had none, or has shown what lies around its calls.

        ``phases`` are those measured, by their labels; ``assumed`` is what was thought of the code around each call.
        """
        plans = []
        for calls in step.paths:
            path = tuple(call.key for call in calls)
            measured = [step.outside(call, phases) for call in calls]
            learned = self.learn(path, measured, [assumed[step.numbers[call]] for call in calls])
            if learned or self.running(calls) is None:
                plans.append(self.plan(path))
        return plans

    def is_measured(self, path: Path) -> bool:
        """True if the code behind all calls of a path has been measured."""
        return None not in self._measured.get(path, [None])

    def running(self, calls: Sequence[Call]) -> StepPlan | None:
        """The plan that calls have run under, or None if each had one of its own."""
        found = self._known.get(tuple(call.key for call in calls))
        if found is None or any(call.plan is not plan for call, plan in zip(calls, found.plans, strict=True)):
            return None
        return found

    def path_of(self, plan: Plan) -> Path | None:
        """The path that a plan is for."""
        return next((path for path, known in self._known.items() if known is plan), None)

    def plan(self, path: Path) -> StepPlan:
        """Plan a path anew, and what shares calls with it as far as that changes. ``BudgetError`` if none fits."""
        related = [known for known in self._known if known != path and not set(known).isdisjoint(path)]
        order = sorted([path, *related], key=_demand, reverse=True)
        self._known.pop(path, None)
        try:
            found = self._in_order(order)
        except _NoRoomError as failure:
            found = self._in_order([failure.path, *(each for each in order if each != failure.path)], strict=False)
        for each, plan in found.items():
            self._known[each] = plan
            self._known.move_to_end(each)
            for key, part in zip(each, plan.plans, strict=True):
                prepared = key.prepared()
                if prepared is not None and prepared.plan is not part:
                    key.module.plans.use_plan(key.signature, prepared, part)
        self._known.move_to_end(path)
        while len(self._known) > _MOST_PATHS:
            oldest, _ = self._known.popitem(last=False)
            self._outside.pop(oldest, None)
            self._measured.pop(oldest, None)
        return found[path]

    def _in_order(self, order: Sequence[Path], *, strict: bool = True) -> dict[Path, StepPlan]:
        """Plans for paths, those of earlier ones settled. ``_NoRoomError`` if that is why there is none."""
        settled: dict[CallKey, Plan] = {}
        found: dict[Path, StepPlan] = {}
        for path in order:
            plan = self._known.get(path)
            if plan is None or any(
                settled.get(key, part) is not part for key, part in zip(path, plan.plans, strict=True)
            ):
                plan = self._beside(path, settled, strict=strict)
            if plan is not None:
                found[path] = plan
                settled.update(zip(path, plan.plans, strict=True))
        return found

    def _beside(self, path: Path, settled: Mapping[CallKey, Plan], *, strict: bool) -> StepPlan | None:
        """A plan for a path, some of whose calls have theirs; None if one of its calls is not known any more."""
        profiles = [prepared.profile for key in path if (prepared := key.prepared()) is not None]
        if len(profiles) < len(path):
            return None
        names, chains = [key.name for key in path], [profile.chain for profile in profiles]
        copied_bytes = sum(profile.copied_bytes for profile in profiles)
        outside = self._outside.get(path, ())
        parts = [settled.get(key, chain) for key, chain in zip(path, chains, strict=True)]
        try:
            solved = self._solve(joined(names, parts, outside), copied_bytes, self.is_measured(path))
        except BudgetError:
            if strict and any(key in settled for key in path):
                raise _NoRoomError(path) from None
            raise
        if not any(key in settled for key in path):
            return StepPlan.of(solved, names, chains)
        lengths = [1 if isinstance(part, Plan) else len(part) for part in parts]
        schedules = [
            part.schedule if isinstance(part, Plan) else schedule
            for part, schedule in zip(parts, split(solved.schedule, lengths), strict=True)
        ]
        chain = joined(names, chains, outside)
        whole = scheduled(chain, concatenated(schedules), solved.budget_bytes, **solved.conditions)
        plan = StepPlan.of(whole, names, chains)
        plans = tuple(settled.get(key, part) for key, part in zip(path, plan.plans, strict=True))
        return replace(plan, plans=plans)


def _demand(path: Path) -> int:
    """What a path holds if nothing is recomputed."""
    known = [prepared.profile.chain for key in path if (prepared := key.prepared()) is not None]
    return sum(stage.output_bytes + stage.keep.saved_bytes for chain in known for stage in chain)
