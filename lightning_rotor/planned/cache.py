"""The plans of one module, one for each signature of its input. Those used last stay."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.capture.guards import ModuleFacts
from lightning_rotor.chain import BackwardPeaks, Chain, Option, Skip, StageCost
from lightning_rotor.errors import RotorError
from lightning_rotor.execution.executor import Executor, Stopwatch
from lightning_rotor.planned.cuts import Signature
from lightning_rotor.planning import Plan
from lightning_rotor.planning.plan import from_plain
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.chain import profile_over
from lightning_rotor.profiling.meters import meter_for
from lightning_rotor.profiling.options import unwatched_seconds
from lightning_rotor.schedule import Leaf, Schedule
from lightning_rotor.simulator import simulate
from lightning_rotor.stages.sequential import Stage

Turn: TypeAlias = tuple[str, ...]
_LEAST_FACTOR, _TINY = 0.5, 1e-9
MOST_TIMED = 2
"""Plans of one call that are timed: the first, and one that follows from what it took."""
MAX_PLANS = 64
"""Plans that are kept by default, each for another signature."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Everything that belongs to one input signature.

    Attributes:
        plan: None until there is one, and once it no longer holds.
        estimated: True if the costs follow from those of other shapes.
        runs_plainly: True if the plan recomputes nothing, and the module's own forward keeps inside it.
        turn: Names of the modules whose calls wait for their backward meanwhile: behind others a call has another plan.
        lost_seconds: The most that a better plan would save in each step, where the schedule is that of another size.
        rough_seconds: The same, where the costs may be much too high.
        timed: Schedules that it has run under, with the overhead that was measured of each.
        is_chosen: True if the user has chosen the schedule.
    """

    profile: Profile
    plan: Plan | None = None
    executor: Executor | None = None
    estimated: bool = False
    runs_plainly: bool = False
    turn: Turn = ()
    lost_seconds: float = 0.0
    rough_seconds: float = 0.0
    timed: tuple[tuple[Schedule, float], ...] = ()
    is_chosen: bool = False

    def under(self, signature: Signature, plan: Plan) -> Prepared:
        """The same costs with a plan, and an executor for it."""
        profile, cut = self.profile, signature.cut
        watch = Stopwatch(meter_for(signature.device))
        executor = Executor(
            profile.stages,
            profile.chain,
            plan.schedule,
            profile.states,
            root=cut.module,
            inputs=cut.inputs,
            watch=watch,
        )
        runs_plainly = _may_run_plainly(signature, profile.chain, plan)
        return replace(self, plan=plan, executor=executor, runs_plainly=runs_plainly)

    @property
    def measured_overhead(self) -> float | None:
        """Time beyond plain training as a fraction of it, as measured; None before a second call under the plan."""
        if self.executor is None or self.executor.watch is None or self.plan is None:
            return None
        if not self.plan.recomputed:
            return self.plan.overhead
        seconds = self.executor.watch.seconds
        if seconds is None:
            return None
        seconds += unwatched_seconds(self.plan)
        return max(self.plan.overhead + (seconds - _seconds_in_segments(self.plan)) / self.plan.chain.step_seconds, 0.0)

    @property
    def is_settled(self) -> bool:
        """True if what calls have taken changes nothing any more."""
        timed = self.timed
        return self.is_chosen or len(timed) == MOST_TIMED or bool(timed and timed[-1][0] is self.schedule)

    @property
    def schedule(self) -> Schedule | None:
        """The plan's schedule."""
        return None if self.plan is None else self.plan.schedule

    @property
    def is_timed(self) -> bool:
        """True if all calls have run that tell what the plan costs."""
        return self.executor is not None and self.executor.watch is not None and self.executor.watch.is_done

    def without_plan(self) -> Prepared:
        """Prepared costs alone."""
        return replace(self, plan=None, executor=None, runs_plainly=False, lost_seconds=0.0, is_chosen=False)


def _seconds_in_segments(plan: Plan) -> float:
    """Predicted seconds of first passes and recomputations."""
    kept = {item.stage for item in plan.schedule.items if isinstance(item, Leaf)}
    return plan.seconds - sum(
        event.seconds
        for event in plan.simulation.events
        if event.phase == "backward" or (event.phase == "forward" and event.stage in kept)
    )


def corrected(plan: Plan, overhead: float) -> Chain:
    """The plan's chain with costs of segments under which the plan has this overhead."""
    twice = simulate(_with_segments(plan.chain, 2.0), plan.schedule, **plan.conditions)
    factor = 1 + (overhead - plan.overhead) / max(twice.overhead - plan.overhead, _TINY)
    return _with_segments(plan.chain, max(factor, _LEAST_FACTOR))


def _with_segments(chain: Chain, factor: float) -> Chain:
    """Costs with segments that take so much more time: their first passes, and the host."""
    stages = tuple(replace(stage, discard_seconds=factor * stage.discard_seconds) for stage in chain)
    return replace(chain, stages=stages, segment_seconds=factor * chain.segment_seconds)


def _may_run_plainly(signature: Signature, chain: Chain, plan: Plan) -> bool:
    """True if the module's own forward stays within the plan, which recomputes nothing.

    Code that is written out keeps intermediate values in variables until it returns; the members of an
    ``nn.Sequential`` do not. Under autocast it keeps a cast copy of every weight.
    """
    if any(not isinstance(item, Leaf) or item.option for item in plan.schedule.items):
        return False
    if any(enabled for enabled, _ in signature.autocast):
        return False
    passing_bytes = 0
    if signature.cut.way != "sequential":
        passing_bytes = sum(stage.keep.forward_peak_bytes - stage.keep.saved_bytes for stage in chain)
    return plan.peak_bytes + passing_bytes <= plan.budget_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """The call that came last, if its plan stays. Nothing else is asked of a call that is like it."""

    facts: ModuleFacts
    signature: Signature
    prepared: Prepared


class PlanCache:
    """What is ready for which signature, turn by turn. The ``most`` signatures used last are kept.

    ``settled`` is None after every change.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.settled: Settled | None = None
        self._prepared: OrderedDict[Signature, dict[Turn, Prepared]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prepared)

    def __contains__(self, signature: Signature | None) -> bool:
        return signature in self._prepared

    def __iter__(self) -> Iterator[tuple[Signature, Prepared]]:
        return ((signature, each) for signature, turns in self._prepared.items() for each in turns.values())

    @property
    def latest(self) -> tuple[Signature, Prepared]:
        """An entry of the signature used last."""
        signature, turns = next(reversed(self._prepared.items()))
        return signature, next(iter(turns.values()))

    def use(self, signature: Signature, turn: Turn = ()) -> Prepared | None:
        """The entry of a signature, now used last. What is known of one turn is known of the others, but no plan."""
        turns = self._prepared.get(signature)
        if turns is None:
            return None
        self._prepared.move_to_end(signature)
        return turns.get(turn) or replace(next(iter(turns.values())).without_plan(), turn=turn)

    def alike(self, signature: Signature, names: Sequence[str]) -> list[tuple[int, Plan, bool]]:
        """Size, plan, and whether it is the best that is known, of other sizes' calls, the nearest first."""
        wanted = signature.family
        found = (
            (known.size, prepared.plan, not (prepared.lost_seconds or prepared.rough_seconds))
            for known, prepared in self
            if prepared.plan is not None and known.family == wanted and prepared.plan.chain.names == names
        )
        return sorted(found, key=lambda entry: abs(entry[0] - signature.size))

    def put(self, signature: Signature, prepared: Prepared) -> None:
        """Add or replace an entry; its signature is now used last."""
        self.settled = None
        self._prepared.setdefault(signature, {})[prepared.turn] = prepared
        self._prepared.move_to_end(signature)
        while len(self._prepared) > self._most:
            self._prepared.popitem(last=False)

    def settle(self, signature: Signature, prepared: Prepared, facts: ModuleFacts | None) -> None:
        """Note the call that came last, if nothing about its entry may change by itself; facts are of its module."""
        may_change = prepared.lost_seconds or prepared.rough_seconds or not prepared.is_settled or signature.has_totals
        self.settled = None if facts is None or may_change else Settled(facts, signature, prepared)

    def drop(self, keep: Callable[[Signature], bool]) -> None:
        """Forget signatures that no call can have any more."""
        self.settled = None
        for signature in [signature for signature in self._prepared if not keep(signature)]:
            del self._prepared[signature]

    def unplan(self, keep: Callable[[Plan], bool]) -> None:
        """Drop all plans but those to keep; they are made again when their signatures return."""
        self.settled = None
        for turns in self._prepared.values():
            for turn, prepared in turns.items():
                if prepared.plan is not None and not keep(prepared.plan):
                    turns[turn] = prepared.without_plan()

    def clear(self) -> None:
        """Forget everything."""
        self.settled = None
        self._prepared.clear()


# --------------- Measurements and plans as plain types, so that a checkpoint can hold them, and back on the same model.


Record: TypeAlias = dict[str, Any]


def model_fingerprint(module: nn.Module) -> str:
    """Sixteen hexadecimal digits that name the classes, parameters and buffers of a module, but not their values."""
    modules = [(name, type(each).__module__, type(each).__qualname__) for name, each in module.named_modules()]
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
    return _digest((modules, tensors))


def call_fingerprint(signature: Signature, variants: str) -> str:
    """Sixteen hexadecimal digits of what a measurement holds for: stages before merging, plain settings, device."""
    device, modes = signature.device, signature.modes
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    settings = signature.shapes, signature.kinds, (signature.autocast, modes.training, modes.learning)
    names = [stage.name for stage in signature.cut.stages]
    return _digest((names, (settings, variants), machine, torch.__version__))


def record_of(call: str, prepared: Prepared) -> Record:
    """A measurement and the plan made from it, in plain types."""
    profile, plan = prepared.profile, prepared.plan
    record: Record = {
        "call": call,
        "group_sizes": list(profile.group_sizes),
        "remembered": profile.remembered,
        "chain": _with_sequences(asdict(profile.chain), list),
    }
    if plan is not None:
        record["plan"] = plan.to_plain() | {"solve_seconds": plan.solve_seconds}
    return record


def recalled(record: Record, stages: Sequence[Stage]) -> Prepared | None:
    """What a record says of a model's stages, or None if it cannot be meant for them. It has no executor."""
    try:
        chain = _chain(record["chain"])
        profile = profile_over(stages, chain, group_sizes=record["group_sizes"], remembered=record["remembered"])
        return Prepared(profile, from_plain(record["plan"], chain) if "plan" in record else None)
    except (RotorError, KeyError, TypeError, ValueError, IndexError):
        return None  # of another version of this package, or damaged


def _chain(record: Record) -> Chain:
    record = _with_sequences(record, tuple)
    stages = (StageCost(**{**stage, "options": tuple(map(_option, stage["options"]))}) for stage in record["stages"])
    return Chain(**{**record, "stages": tuple(stages), "skips": tuple(Skip(**skip) for skip in record["skips"])})


def _option(record: Record) -> Option:
    peaks = record["accumulating"]
    return Option(**{**record, "accumulating": None if peaks is None else BackwardPeaks(**peaks)})


def _with_sequences(value: Any, kind: type[list[Any]] | type[tuple[Any, ...]]) -> Any:
    """The value with all lists and tuples in it of one kind."""
    if isinstance(value, dict):
        return {key: _with_sequences(item, kind) for key, item in value.items()}
    return kind(_with_sequences(item, kind) for item in value) if isinstance(value, (list, tuple)) else value


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
