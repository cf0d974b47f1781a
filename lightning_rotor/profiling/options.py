"""A stage under each of its options: kept, as variants that a compiler made, and inverted; and a segment's own seconds.

A variant is withheld if its bits differ, or by more than rounding where the user allows for that, and if it takes no
less memory than another. A stage that draws random numbers has none, see :mod:`lightning_rotor.capture.compiled`.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from lightning_rotor.capture.compiled import CannotRepeatError, CompiledModules
from lightning_rotor.chain import BackwardPeaks, Chain, Option, StageCost
from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.boundary import is_whole
from lightning_rotor.execution.inversion import Way
from lightning_rotor.execution.isolated import kept_attributes, lent_buffers
from lightning_rotor.execution.passes import repeating, run_stage
from lightning_rotor.execution.segment import recomputed
from lightning_rotor.execution.stopwatch import typical
from lightning_rotor.private.values import address_of, is_fake, same_bits, tensors_in
from lightning_rotor.profiling.complaints import WORTH_MENTIONING_BYTES
from lightning_rotor.profiling.gradient_layouts import memories_elsewhere
from lightning_rotor.profiling.interruptions import Interruptions
from lightning_rotor.profiling.meters import CpuMeter, CudaMeter, Meter, meter_for
from lightning_rotor.profiling.stage_profiler import StageMeasurement, StageProfiler
from lightning_rotor.schedule import Schedule
from lightning_rotor.stages.generators import GeneratorStates

_log = logging.getLogger(__name__)

# -------------------------------------------------------------------- Seconds of a stage as it is kept.

_ENOUGH_SECONDS = 0.5
"""Seconds in which the noise of a busy machine evens out."""
_SHORT_SECONDS = 0.01
"""Seconds so few that one interruption decides what a few runs take."""
_MORE = 3


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a forward, of its part up to the last saved tensor, and of a backward."""

    forward: float
    replay: float
    backward: float

    def of(self, cost: StageCost) -> StageCost:
        """The costs of a stage that takes so long."""
        keep = replace(
            cost.keep, forward_seconds=self.forward, replay_seconds=self.replay, backward_seconds=self.backward
        )
        # The discarded forward runs the same kernels. Timed by itself it may seem faster by chance, and a plan would
        # recompute for nothing.
        return replace(cost, options=(keep,), discard_seconds=self.forward)


_MOST_INTERRUPTED = 4
"""So many times as many runs are made again at most, because other work has interrupted them."""


def measure(profiler: StageProfiler) -> StageMeasurement:
    """Bytes and seconds of a stage."""
    # First runs may differ, and a compiler may compile the backward only when it is first asked for.
    if profiler.meter.needs_warm_up or profiler.is_compiled:
        profiler.recorded_run(hold_input=False, hold_output=False)
    seconds = seconds_by_turns([profiler])[0]
    found = profiler.measure()
    return replace(found, cost=seconds.of(found.cost))


def look_for_messages(profiler: StageProfiler) -> None:
    """Run a stage once, with its backward, before the clock decides how often it runs."""
    with profiler.ranks.watching(marks=False):
        _timed_run(profiler)


def seconds_by_turns(profilers: Sequence[StageProfiler]) -> tuple[StageSeconds, ...]:
    """Comparable seconds of one stage's options, which run by turns."""
    runs: list[list[tuple[float, float]]] = [[] for _ in profilers]
    spare = [_MOST_INTERRUPTED * profiler.repeats for profiler in profilers]
    while not all(map(_is_timed, profilers, runs)):
        for number, (profiler, each) in enumerate(zip(profilers, runs, strict=True)):
            with lent_buffers(profiler.stage):
                interruptions = Interruptions(profiler.meter)
                found_seconds = _timed_run(profiler)
            # In lockstep all processes run as often.
            if spare[number] and not profiler.ranks.together and interruptions.any():
                spare[number] -= 1
            else:
                each.append(found_seconds)
    found = []
    for profiler, each in zip(profilers, runs, strict=True):
        forward, backward = map(typical, zip(*each, strict=True))
        with lent_buffers(profiler.stage):
            found.append(StageSeconds(forward, forward * _replayed_part(profiler), backward))
    return tuple(found)


def _is_timed(profiler: StageProfiler, runs: Sequence[tuple[float, float]]) -> bool:
    """True after ``repeats`` runs, of long ones fewer and of short ones more. Together, their number alone counts."""
    seconds, together = sum(map(sum, runs)), profiler.ranks.together
    if not together and seconds >= _ENOUGH_SECONDS:
        return True
    return len(runs) >= profiler.repeats * (1 if together or seconds >= _SHORT_SECONDS else _MORE)


def _timed_run(profiler: StageProfiler) -> tuple[float, float]:
    """Seconds of a forward and its backward."""
    profiler.rewind()
    value = profiler.boundary.fresh()
    profiler.interlude()
    start = profiler.meter.now()
    output = profiler.run(value)
    forward = profiler.meter.seconds_between(start, profiler.meter.now())
    run = profiler.backward_of(value, output, memories_elsewhere(profiler.layouts))
    del value, output
    profiler.interlude()
    run.gradients()
    return forward, run.seconds


def _replayed_part(profiler: StageProfiler) -> float:
    """The share of a forward that is over at its last saved tensor, from 0 to 1."""
    interruptions = Interruptions(profiler.meter)
    share = _replayed_part_once(profiler)
    for _ in range(0 if profiler.ranks.together else _MOST_INTERRUPTED):
        if not interruptions.any():
            break
        interruptions = Interruptions(profiler.meter)
        share = _replayed_part_once(profiler)
    return share


def _replayed_part_once(profiler: StageProfiler) -> float:
    profiler.rewind()
    value = profiler.boundary.fresh()
    times = [profiler.meter.now()]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        times.append(profiler.meter.now())
        return tensor.detach()  # an output would hold the node that holds it, and no backward frees this one

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        profiler.run(value)
    last_save = profiler.meter.seconds_between(times[0], times[-1])
    total = profiler.meter.seconds_between(times[0], profiler.meter.now())
    return min(max(last_save / total, 0.0), 1.0) if total > 0 else 1.0


# ----------- What the other stages of a step do to the one that is timed, and what a segment costs the host among them.


_NEAR_BYTES, _ALL_BYTES = 4 * 2**20, 32 * 2**20
"""More than the caches of one processor core hold, and as much as all of its caches hold."""
_LINE_BYTES = 64
_ROUNDS = 12


def interlude(device: torch.device, swept_bytes: int = _NEAR_BYTES) -> Callable[[], object]:
    """A function that fills the processor's caches with something else, as what comes between two runs in a step does.

    A run repeated at once finds its code and data there, which in a step it seldom does: a segment around next to
    nothing takes 0.08 ms of the host's time, and 0.5 ms behind another model's step, or a sweep through 32 MiB (one
    core of an EPYC). Plans would get too many short segments. Other devices queue kernels, so that caches matter less.
    """
    # NumPy's memory, so that torch's allocator does not count it; one number of each line.
    lines = np.ones(swept_bytes // 8 if device.type == "cpu" else 0)[:: _LINE_BYTES // 8]
    return lines.sum


SAVED_TENSOR, _UNWATCHED = 0.02, 0.2
"""Shares of a segment's time: for each tensor that autograd would save in it, and what a :class:`.Stopwatch` does not
see, for it comes around what runs again. 10 and 105 of 525 µs (one core of an EPYC).
"""


def unwatched_seconds(chain: Chain, schedule: Schedule) -> float:
    """Seconds of a schedule's segments that a stopwatch does not see in a step."""
    return _UNWATCHED * chain.segment_seconds * schedule.segments


def segment_seconds(device: torch.device, meter: Meter) -> float:
    """Time that a segment takes of the host beyond what runs in it, as measured first: models do not matter."""
    return _known(device) if type(meter) in (CpuMeter, CudaMeter) else _measured(device, meter)


@cache
def _known(device: torch.device) -> float:
    return _measured(device, meter_for(device))


class _ThreadClock(CpuMeter):
    """Counts the processor time of this thread."""

    def now(self) -> float:
        """Seconds for which this thread has run."""
        return time.thread_time()


def _measured(device: torch.device, meter: Meter) -> float:
    """Seconds of a segment around next to nothing, behind other work, beyond those of the same without a segment."""
    tensor = torch.zeros(1, device=device, requires_grad=True)
    sweep = interlude(device, _ALL_BYTES)
    flushing: list[float] = []
    # All of it is work of this thread, of which its processor time tells whatever else runs on the machine.
    clock: Meter = _ThreadClock() if type(meter) is CpuMeter else meter

    def flush() -> None:
        start = clock.now()
        sweep()
        flushing.append(clock.seconds_between(start, clock.now()))

    def operation(value: torch.Tensor) -> torch.Tensor:
        flush()
        return value.tanh()

    def seconds(*, segmented: bool) -> float:
        sweep()
        flushing.clear()
        start = clock.now()
        if segmented:
            output = recomputed(operation, tensor, draws_random=False)
        else:
            with torch.no_grad():
                operation(tensor)
            output = operation(tensor)
        flush()
        torch.autograd.grad(output, tensor)
        return clock.seconds_between(start, clock.now()) - sum(flushing)

    with repeating(False), torch.enable_grad():  # as in a step
        # By turns, so that a disturbance of the machine meets both; the first time warms up.
        _, *times = [(seconds(segmented=True), seconds(segmented=False)) for _ in range(1 + _ROUNDS)]
    segmented, plain = map(statistics.median, zip(*times, strict=True))
    return float(max(segmented - plain, 0.0))


# -------------------------------------------------------------------- Variants that a compiler made.


_MORE_ROUNDS = 3  # as many times the runs of other stages


def _joined(cost: StageCost, more: Iterable[Option]) -> StageCost:
    """The stage's costs with more options, each of which has a discard peak of its own."""
    kept = (replace(each, discard_peak_bytes=cost.discard_peak_of(each)) for each in cost.options)
    options = (*kept, *more)
    return replace(cost, options=options, discard_peak_bytes=max(each.discard_peak_bytes or 0 for each in options))


def with_variants(
    profiler: StageProfiler,
    alone: StageMeasurement,
    compiled: CompiledModules,
    kin: Any,
    known: dict[Any, tuple[StageSeconds, ...]],
) -> StageMeasurement:
    """Costs of a compiled stage with its variants, timed once for ``kin`` of equal sizes: chance must not decide."""
    name = profiler.stage.name
    try:
        variants = compiled.variants(profiler.stage)
        if not variants or any(is_fake(tensor) for tensor in tensors_in(profiler.boundary.leaves)):
            return alone
        expected = _repeatable_outcome(profiler)
    except CannotRepeatError as error:
        _log.info("%r runs under no other activation memory budget: %s", name, error)
        return alone
    _log.info("compiling %r under %d more activation memory budgets", name, len(variants))
    profiler = replace(profiler, stage=replace(profiler.stage, variants=tuple(variants.values())))
    others = {variant: replace(profiler, option=option) for option, variant in enumerate(variants, 1)}
    exact = compiled.choice == "exact"
    outcomes = {variant: _measured_variant(other, expected, alone, exact=exact) for variant, other in others.items()}
    found = {variant: outcome for variant, outcome in outcomes.items() if not isinstance(outcome, str)}
    names = _worthwhile({"keep": alone.cost, **found})[1:]
    _log.info(
        "%r can run under %s%s",
        name,
        ", ".join(names) or "no other activation memory budget that takes less memory",
        "".join(f"; not under {variant}: {reason}" for variant, reason in outcomes.items() if isinstance(reason, str)),
    )
    if not names:
        return alone
    all_costs = [alone.cost, *(found[name] for name in names)]
    key = kin, names, tuple(map(_sizes, all_costs))
    if key not in known:
        timed = [profiler, *(others[name] for name in names)]
        known[key] = seconds_by_turns([replace(each, repeats=_MORE_ROUNDS * each.repeats) for each in timed])
    cost, *costs = map(StageSeconds.of, known[key], all_costs)
    more = zip(names, costs, strict=True)
    options = (replace(each.keep, name=one, discard_peak_bytes=each.discard_peak_bytes) for one, each in more)
    return replace(alone, cost=_joined(cost, options))


def _measured_variant(
    profiler: StageProfiler, expected: _Outcome, alone: StageMeasurement, *, exact: bool
) -> StageCost | str:
    """The costs of a variant, or why it must not be used."""
    try:
        outcome = _outcome(profiler)
        if not _agree(outcome, expected, exact=exact):
            return f"outputs, gradients or buffers differ {'in bits' if exact else 'by more than rounding'}"
        with lent_buffers(profiler.stage):  # the next variant starts from the same ones
            measurement = profiler.measure()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler's are of any type
        return str(getattr(error, "inner_exception", error)).partition("\n")[0] or type(error).__name__
    sizes, pinned_bytes = measurement.gradients.skip_bytes, measurement.cost.pinned_bytes
    if sizes != alone.gradients.skip_bytes or pinned_bytes != alone.cost.pinned_bytes:
        return "it leaves other gradients of skips, or other memory that no checkpoint can free"
    return measurement.cost


_Outcome: TypeAlias = list[Sequence[torch.Tensor | None]]
"""What one run of a stage makes for given gradients: its outputs, the gradients, and each buffer by itself."""


def _agree(one: _Outcome, other: _Outcome, *, exact: bool = True) -> bool:
    """True if all bits are equal; if not ``exact``, sums of many numbers in two orders may differ as they do."""
    # The scale is a group's largest entry: a gradient that is zero but for rounding (before a normalization) has none.
    for some, others in zip_longest(one, other, fillvalue=()):
        entries = (float(tensor.detach().abs().max()) for tensor in others if tensor is not None and tensor.numel())
        largest = 0.0 if exact else max(entries, default=0.0)
        if not all(_within(mine, theirs, largest) for mine, theirs in zip_longest(some, others)):
            return False
    return True


def _within(mine: torch.Tensor | None, theirs: torch.Tensor | None, largest: float) -> bool:
    if mine is None or theirs is None or not largest or not mine.is_floating_point() or mine.dtype != theirs.dtype:
        return mine is theirs or (mine is not None and theirs is not None and same_bits(mine, theirs))
    tolerance = torch.finfo(mine.dtype).eps ** (2 / 3) * largest
    return mine.shape == theirs.shape and torch.allclose(mine, theirs, rtol=0.0, atol=tolerance, equal_nan=True)


def _repeatable_outcome(profiler: StageProfiler) -> _Outcome:
    device = tensors_in(profiler.boundary.leaves)[0].device
    profiler.rewind()
    before = GeneratorStates(device)
    outcome = _outcome(profiler)
    if not before.equals(GeneratorStates(device)):
        raise CannotRepeatError("it draws random numbers, which torch would draw anew where it recomputes")
    if not _agree(outcome, _outcome(profiler)):
        raise CannotRepeatError("its gradients differ in bits from run to run")
    return outcome


def _outcome(profiler: StageProfiler) -> _Outcome:
    stage = profiler.stage
    profiler.rewind()
    with kept_attributes(stage), lent_buffers(stage) as slots:
        value = profiler.boundary.fresh()
        learning = [get_gradient_edge(leaf) for leaf in tensors_in(value) if leaf.requires_grad]
        learning += map(get_gradient_edge, stage.learning())
        outputs = tensors_in(run_stage(stage, value, profiler.option))
        roots = [output for output in outputs if output.requires_grad]
        generator = torch.Generator(outputs[0].device).manual_seed(0)
        # Equal ones would hide a difference: the gradient of a normalization is then zero.
        given = [torch.randn(root.shape, dtype=root.dtype, device=root.device, generator=generator) for root in roots]
        gradients = torch.autograd.grad(roots, learning, given, allow_unused=True) if roots and learning else ()
        return [outputs, gradients, *([module._buffers[name]] for module, name, _ in slots)]


def _worthwhile(costs: Mapping[str, StageCost]) -> tuple[str, ...]:
    """Names of the options, given by falling budget, that take less memory in some respect than each before them."""
    sizes = {name: _sizes(cost) for name, cost in costs.items()}

    def beats(one: str, other: str) -> bool:
        return all(mine <= theirs for mine, theirs in zip(sizes[one], sizes[other], strict=True)) and (
            set(costs[one].keep.saved_skips) <= set(costs[other].keep.saved_skips)
        )

    chosen: list[str] = []
    for name in costs:
        if not any(beats(better, name) for better in chosen):
            chosen.append(name)
    return tuple(chosen)


def _sizes(cost: StageCost) -> tuple[int, ...]:
    option, saved = cost.keep, cost.keep.kept_bytes  # no times, which differ by chance
    peaks = option.backward_peak_bytes, option.backward_segment_peak_bytes, option.backward_held_peak_bytes
    return saved, cost.discard_peak_bytes, option.forward_peak_bytes, *(saved + peak for peak in peaks)


# ---------------------------------------------------------- Inverting, and finding out whether a stage may be inverted.


def with_inverse(profiler: StageProfiler, found: StageMeasurement) -> StageMeasurement:
    """Costs of a stage that has an inverse with that option, or with the reason why there is none."""
    assert profiler.way is not None
    option = _objection(profiler, found.cost) or _inverted(profiler, profiler.way, found.cost)
    if isinstance(option, str):
        return replace(found, cost=replace(found.cost, not_inverted=option))
    return replace(found, cost=_joined(found.cost, [option]))


def _objection(profiler: StageProfiler, cost: StageCost) -> str:
    """Why a stage with an inverse cannot be inverted where it is; empty if it can."""
    leaves, ends = profiler.boundary.leaves, profiler.ends
    if any(place is not None for place in ends.inputs):
        return "its input is the caller's, or is read elsewhere, too"
    if any(place is not None for place in ends.outputs):
        return "its output is read by more than the next stage"
    if not any(profiler.boundary.requires_grad):
        return "nothing before it learns"
    if not all(map(is_whole, leaves)) or len(set(map(address_of, leaves))) < len(leaves):
        return "its input is a part of something larger"
    if not cost.recomputable:
        return "it gives other bits when it runs again"
    if cost.pinned_bytes >= WORTH_MENTIONING_BYTES:
        return f"it stores {cost.pinned_bytes} bytes on its graph, which nobody can drop"
    if not cost.keep.saved_tensors:
        return "it saves nothing anyway"
    return ""


def _inverted(profiler: StageProfiler, way: Way, cost: StageCost) -> Option | str:
    """The costs as an option, or why there is none."""
    keep = cost.keep
    try:
        alone, peaks = _run_inverted(profiler)
    except ExecutionError as error:  # it uses a tensor whose gradient would be lost
        return str(error)
    if alone.saved_input_bytes or alone.saved_output_bytes != profiler.ends.link_bytes:
        return "its graph keeps hold of the input"
    # Less is possible: autograd may leave slices where this leaves gradients that fill their memory.
    fewer_bytes = alone.input_gradient_bytes <= keep.input_gradient_bytes
    if not fewer_bytes or alone.parameter_gradient_bytes != keep.parameter_gradient_bytes:
        return f"its {'fused ' * way.fused}backward leaves other gradients"
    accumulating = None
    if keep.accumulating is not None:
        _, accumulating = _run_inverted(replace(profiler, gradients_exist=True))
    return replace(
        alone,
        name="invert, fused" if way.fused else "invert",
        saved_bytes=max(alone.saved_bytes - cost.pinned_bytes, 0),  # those count whatever the option
        saved_tensors=1,
        replay_peak_bytes=alone.forward_peak_bytes,
        backward_peak_bytes=peaks.plain_bytes,
        backward_segment_peak_bytes=peaks.segment_bytes,
        backward_held_peak_bytes=peaks.held_bytes,
        # The same kernels: timed by itself either may seem faster by chance.
        forward_seconds=keep.forward_seconds,
        replay_seconds=keep.forward_seconds,
        backward_seconds=max(seconds_by_turns([profiler])[0].backward, keep.backward_seconds),
        accumulating=accumulating,
        discard_peak_bytes=alone.forward_peak_bytes,
        needs_exact_output=False,
        inverts=True,
        fused=way.fused,
    )


def _run_inverted(profiler: StageProfiler) -> tuple[Option, BackwardPeaks]:
    """Bytes of a run, and peaks of the backward, in which the rebuilt input is for the stage alone, or for others."""
    alone, held = (profiler.recorded_run(hold_input=each, hold_output=profiler.last)[0] for each in (False, True))
    plain_bytes, held_bytes = alone.backward_peak_bytes, held.backward_peak_bytes
    return alone, BackwardPeaks(plain_bytes, held_bytes, held_bytes, plain_bytes)
