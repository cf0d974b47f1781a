"""What is known of one module for each signature of its input: plans, measurements, and what follows from those."""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.capture.module_facts import ModuleFacts
from lightning_rotor.chain import BackwardPeaks, Chain, Option, Skip, StageCost, UnlikeChainsError, combined
from lightning_rotor.errors import RotorError
from lightning_rotor.execution.executor import Executor
from lightning_rotor.execution.stopwatch import TIMED_CALLS, Stopwatch
from lightning_rotor.planned.cuts import Signature
from lightning_rotor.planning import Plan
from lightning_rotor.planning.plan import from_plain, with_tuples
from lightning_rotor.private.values import spelled
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.chain import profile_over
from lightning_rotor.profiling.meters import meter_for
from lightning_rotor.profiling.options import segment_seconds, unwatched_seconds
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import seconds_apart, simulate
from lightning_rotor.stages.sequential import Stage, wiring_of

Turn: TypeAlias = tuple[str, ...]
_LEAST_FACTOR, _LEAST_PART, _TINY = 0.1, 0.5, 1e-9
MOST_TIMED = 2
"""Plans of one call that are timed: the first, and one that follows from what it took."""
MAX_PLANS = 64
"""Plans that are kept by default, each for another signature."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Everything that belongs to one input signature."""

    profile: Profile
    plan: Plan | None = None  # until there is one, and once it no longer holds
    executor: Executor | None = None
    estimated: bool = False  # the costs follow from those of other shapes
    runs_plainly: bool = False  # the plan recomputes nothing, and the module's own forward keeps inside it
    turn: Turn = ()  # modules whose calls wait for their backward meanwhile: behind others a call has another plan
    lost_seconds: float = 0.0  # at most, in each step, where the schedule is that of another size
    rough_seconds: float = 0.0  # the same, where the costs may be much too high
    timed: tuple[tuple[Schedule, float], ...] = ()  # schedules that it has run under, and their measured overheads
    is_chosen: bool = False  # the user has chosen the schedule

    def under(self, signature: Signature, plan: Plan) -> Prepared:
        """The same costs with a plan, and an executor for it."""
        profile, cut = self.profile, signature.cut
        executor = Executor(
            profile.stages,
            profile.chain,
            plan.schedule,
            profile.states,
            root=cut.module,
            inputs=cut.inputs,
            watch=Stopwatch(meter_for(signature.device)),
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
        again_seconds, step_seconds = self.executor.watch.again_seconds, self.executor.watch.step_seconds
        if again_seconds is None or step_seconds is None:
            return None
        extra = again_seconds + _seconds_besides(self.plan)
        # Whole calls show what single stages do not: the caches, and the host between them.
        plain = max(step_seconds - extra, _LEAST_PART * self.plan.chain.step_seconds)
        return max(extra / plain, 0.0)

    @property
    def is_settled(self) -> bool:
        """True if what calls have taken changes nothing any more."""
        timed = self.timed
        stays = self.is_chosen or self.estimated or len(timed) == MOST_TIMED
        return stays or bool(timed and timed[-1][0] is self.schedule)

    @property
    def schedule(self) -> Schedule | None:
        """The plan's schedule."""
        return None if self.plan is None else self.plan.schedule

    @property
    def is_timed(self) -> bool:
        """True if all calls have run that tell what the plan costs."""
        watch = None if self.executor is None else self.executor.watch
        return watch is not None and watch.calls > 1 + TIMED_CALLS and self.measured_overhead is not None

    def without_plan(self) -> Prepared:
        """Prepared costs alone."""
        return replace(self, plan=None, executor=None, runs_plainly=False, lost_seconds=0.0, is_chosen=False)


def _seconds_besides(plan: Plan) -> float:
    """Predicted seconds beyond plain training, but for those that a stopwatch sees of recomputations."""
    run_once = sum(event.seconds for event in plan.simulation.events if event.phase != "recompute")
    device = torch.device(plan.chain.device)
    as_measured = replace(plan.chain, segment_seconds=segment_seconds(device, meter_for(device)))
    host_seconds = unwatched_seconds(as_measured, plan.schedule) + seconds_apart(as_measured, plan.schedule)
    return run_once - plan.chain.step_seconds + host_seconds


def corrected(plan: Plan, overhead: float) -> Chain:
    """The plan's chain with costs of segments under which the plan has this overhead."""
    chain, seconds = plan.chain, plan.chain.segment_seconds
    twice = simulate(replace(chain, segment_seconds=2 * seconds), plan.schedule, **plan.conditions)
    factor = 1 + (overhead - plan.overhead) / max(twice.overhead - plan.overhead, _TINY)
    return replace(chain, segment_seconds=max(factor, _LEAST_FACTOR) * seconds)


def _may_run_plainly(signature: Signature, chain: Chain, plan: Plan) -> bool:
    """True if the module's own forward stays within the plan, which recomputes nothing.

    Code that is written out keeps intermediate values in variables until it returns; the members of an
    ``nn.Sequential`` do not. Under autocast it keeps a cast copy of every weight.
    """
    if not plan.schedule.is_plain or any(enabled for enabled, _ in signature.autocast):
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
        may_improve = prepared.lost_seconds or prepared.rough_seconds or signature.has_totals
        stays = not may_improve and (prepared.is_settled or prepared.runs_plainly)
        self.settled = Settled(facts, signature, prepared) if facts is not None and stays else None

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


# ----------------------------------------------- Costs for sizes that were never measured, from those that were.
#
# Bytes and seconds of layers grow with the sizes of their input as polynomials whose coefficients are not negative:
# they rise, and their curve bends upwards. So a line from a smaller to a larger measurement stays above the truth
# between::
#
#     bytes │                ● measured
#           │          x ·     the line, an upper bound
#           │      ·   o       what the size in between takes
#           │  ●     measured
#           └──────────┴───── length
#
# A smaller measurement alone is a bound as well, times the cube of the growth: nothing grows faster than batch times
# length squared. What is half as large again as all that was measured is measured itself.

Shapes: TypeAlias = tuple[tuple[int, ...], ...]

_MOST_MEASURED = 32
_TOLERANCE = 1e-9
_DEGREE = 3
_MOST_GROWTH = 1.5
# Bounds from measurements this near are not much too high: at most 1.33 times the truth, 1.04 times between two.
_NEAR_GROWTH = 1.1
_NEAR_SPAN = 1.5


class Measurements:
    """The measured signatures of one module, those measured last."""

    def __init__(self) -> None:
        self._known: dict[Signature, Profile] = {}

    def add(self, signature: Signature, profile: Profile) -> None:
        """Remember what was measured."""
        self._known.pop(signature, None)
        # For other shapes, and as it is for the next smaller ones: equal stages are then the same objects.
        bare = tuple(replace(stage, takes=()) for stage in profile.chain)
        self._known[signature] = replace(profile, chain=replace(profile.chain, stages=bare))
        for oldest in list(self._known)[:-_MOST_MEASURED]:
            del self._known[oldest]

    def drop(self, keep: Callable[[Signature], bool]) -> None:
        """Forget signatures of layers that are gone."""
        self._known = {signature: profile for signature, profile in self._known.items() if keep(signature)}

    def estimate(self, signature: Signature) -> tuple[Profile, bool] | None:
        """Costs at least as high as would be measured, and True if they are not much higher; None if it must be."""
        wanted = signature.family
        family = [known for known in self._known if known.family == wanted]
        found = chain_at(signature.shapes, [(known.shapes, self._known[known].chain) for known in family])
        if found is None:
            return None
        chain, number, is_close = found
        known = family[number]
        profile = self._known[known]
        try:
            first = replace(chain.stages[0], takes=_taken_by_first(profile.stages, signature))
            chain = replace(chain, stages=(first, *chain.stages[1:]))
            if known.cut is signature.cut:
                return replace(profile, chain=chain), is_close
            told: Any = {"group_sizes": profile.group_sizes, "remembered": profile.remembered, "drawn": profile.drawn}
            return profile_over(signature.cut.stages, chain, **told), is_close
        except (ValueError, IndexError):
            return None


def chain_at(wanted: Shapes, known: Sequence[tuple[Shapes, Chain]]) -> tuple[Chain, int, bool] | None:
    """The least bound for shapes, the number of its measurement, and True if near; None if all are much smaller."""
    # Many are possible, and only the best is put together.
    for _, is_far, number, chain in sorted(_bounds(wanted, known), key=itemgetter(0, 1)):
        with suppress(UnlikeChainsError):  # two that differ in more than sizes
            return chain(), number, not is_far
    return None


def _bounds(
    wanted: Shapes, known: Sequence[tuple[Shapes, Chain]]
) -> Iterator[tuple[float, bool, int, Callable[[], Chain]]]:
    """Bytes of each bound, True if it may be much too high, the number of its smaller measurement, and its costs."""
    totals = [
        sum(stage.output_bytes + stage.keep.saved_bytes + stage.keep.backward_peak_bytes for stage in chain)
        for _, chain in known
    ]
    for number, (shapes, chain) in enumerate(known):
        growth = _growth(shapes, wanted)
        if growth <= _MOST_GROWTH:
            factor = growth**_DEGREE
            is_near = growth <= _NEAR_GROWTH and _growth(wanted, shapes) <= _NEAR_GROWTH
            yield totals[number] * factor, not is_near, number, partial(_scaled, chain, factor)
        for larger, (above, costs) in enumerate(known) if growth > 1 else ():
            share = _share(shapes, wanted, above)
            if share is not None:
                total_bytes = totals[number] + share * max(0, totals[larger] - totals[number])
                is_far = _growth(shapes, above) > _NEAR_SPAN
                yield total_bytes, is_far, number, partial(_between, chain, costs, share)


def _growth(shapes: Shapes, wanted: Shapes) -> float:
    """Factor by which some dimension is larger; 1 if none is. No row costs no more than one row."""
    return max([1.0, *(size / max(least, 1) for least, size in zip(_flat(shapes), _flat(wanted), strict=True))])


def _share(smaller: Shapes, wanted: Shapes, larger: Shapes) -> float | None:
    """Position of the wanted shapes between two others, from 0 to 1; None if they do not lie in between."""
    share = 0.0
    for least, size, most in zip(_flat(smaller), _flat(wanted), _flat(larger), strict=True):
        if not least <= size <= most:
            return None
        if most > least:
            share = max(share, (size - least) / (most - least))
    return share


def _flat(shapes: Shapes) -> list[int]:
    return [size for shape in shapes for size in shape]


def _scaled(chain: Chain, factor: float) -> Chain:
    if factor == 1.0:  # as for every size below all measured ones
        return chain
    return _rounded_up([chain], lambda values: values[0] * factor)


def _between(smaller: Chain, larger: Chain, share: float) -> Chain:
    return _rounded_up([smaller, larger], lambda values: values[0] + share * max(0, values[1] - values[0]))


def _rounded_up(chains: Sequence[Chain], of: Callable[[Sequence[float]], float]) -> Chain:
    return combined(chains, of_bytes=lambda values: math.ceil(of(values) - _TOLERANCE), of_seconds=of)


def _taken_by_first(stages: Sequence[Stage], signature: Signature) -> tuple[str, ...]:
    """Tensors that the first stage reads, for which a plan is made."""
    names = tuple(spelled(kind[0], shape) for kind, shape in zip(signature.kinds, signature.shapes, strict=False))
    reads = wiring_of(stages).wire.reads
    if len(reads) != len(names):  # one value that holds several
        return names
    return tuple(name for read, name in zip(reads, names, strict=True) if read in stages[0].reads)


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
    device = signature.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    settings = signature.shapes, signature.kinds, (signature.autocast, *signature.modes)
    names = [stage.name for stage in signature.cut.stages]
    return _digest((names, (settings, variants), machine, torch.__version__))


def record_of(call: str, prepared: Prepared) -> Record:
    """A measurement and the plan made from it, in plain types."""
    profile, plan = prepared.profile, prepared.plan
    record: Record = {
        "call": call,
        "group_sizes": list(profile.group_sizes),
        "remembered": profile.remembered,
        "drawn": profile.drawn,
        "chain": json.loads(json.dumps(asdict(profile.chain))),  # with lists in the place of tuples
    }
    if plan is not None:
        record["plan"] = plan.to_plain() | {"solve_seconds": plan.solve_seconds}
    return record


SEAL = "seal"
"""Under which key a saved state keeps the digest of the rest."""


def seal_of(saved: Mapping[str, Any]) -> str | None:
    """A digest of a saved state, by which one that was damaged or changed is known; None if it is no plain data."""
    try:
        return _digest(json.dumps({key: value for key, value in saved.items() if key != SEAL}, sort_keys=True))
    except (TypeError, ValueError, RecursionError):
        return None


def recalled(record: Record, stages: Sequence[Stage]) -> Prepared | None:
    """What a record says of a model's stages, or None if it cannot be meant for them. It has no executor."""
    try:
        chain = _chain(record["chain"])
        told = {name: record[name] for name in ("group_sizes", "remembered", "drawn")}
        profile = profile_over(stages, chain, **told)
        return Prepared(profile, from_plain(record["plan"], chain) if "plan" in record else None)
    except (RotorError, KeyError, TypeError, ValueError, IndexError):
        return None  # of another version of this package, or damaged


def _chain(record: Record) -> Chain:
    record = with_tuples(record)
    stages = (StageCost(**{**stage, "options": tuple(map(_option, stage["options"]))}) for stage in record["stages"])
    return Chain(**{**record, "stages": tuple(stages), "skips": tuple(Skip(**skip) for skip in record["skips"])})


def _option(record: Record) -> Option:
    peaks = record["accumulating"]
    return Option(**{**record, "accumulating": None if peaks is None else BackwardPeaks(**peaks)})


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
