"""Measuring the variants of a stage: what each saves and costs, and whether it computes the same.

A variant is withheld if its bits differ, or by more than rounding where the user allows for that, and if it is nowhere
better than another. A stage that draws random numbers has none, see :mod:`lightning_rotor.capture.compiled`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import get_gradient_edge

from lightning_rotor.capture.compiled import CannotRepeatError, CompiledModules
from lightning_rotor.chain import StageCost
from lightning_rotor.execution.options import kept_attributes, lent_buffers, run_stage
from lightning_rotor.private.values import is_fake, same_bits, tensors_in
from lightning_rotor.profiling.inverted import lost_inverse
from lightning_rotor.profiling.stage import (
    StageMeasurement,
    StageProfiler,
    StageSeconds,
    is_timed,
    seconds_of,
    timed_run,
)
from lightning_rotor.stages.state import GeneratorStates

_log = logging.getLogger(__name__)

_ROUNDS = 3  # as many times the runs of other stages
_CHECKS = 2
_NOISE = 1.25  # of so few runs


class KnownSeconds:
    """Seconds of options by ``kin`` of stages: timed one by one, equal stages differ by chance, and so would plans."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[StageSeconds, ...]] = {}

    def of(self, kin: Any, profilers: Sequence[StageProfiler]) -> tuple[StageSeconds, ...]:
        """Known seconds of a stage that looked alike unless a few runs contradict them, otherwise newly timed ones."""
        # Where other processes run along, times must not decide what is run.
        if (known := self._known.get(kin)) and len(known) == len(profilers) and not profilers[0].in_lockstep:
            now = _total(_in_turns(profilers, lambda runs: len(runs[0]) >= _CHECKS))
            if max(now, _total(known)) <= _NOISE * min(now, _total(known)):
                return known
        patient = replace(profilers[0], repeats=_ROUNDS * profilers[0].repeats)
        self._known[kin] = _in_turns(
            profilers, lambda runs: all(is_timed(patient, list(map(sum, each))) for each in runs)
        )
        return self._known[kin]


def measure(profiler: StageProfiler, compiled: CompiledModules, *, kin: Any, seconds: KnownSeconds) -> StageMeasurement:
    """Measure a stage and, if the user compiled it, its variants; ``seconds`` are known for equal ``kin``."""
    name = profiler.stage.name
    alone = replace(profiler.measure(), not_inverted=lost_inverse(profiler.stage))
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
    outcomes = {variant: _measured(other, expected, alone, exact=exact) for variant, other in others.items()}
    found = {variant: outcome for variant, outcome in outcomes.items() if not isinstance(outcome, str)}
    if found:
        profilers = [profiler, *(others[variant] for variant in found)]
        timed = zip([alone, *found.values()], seconds.of((kin, tuple(found)), profilers), strict=True)
        alone, *taken = [replace(each, cost=seconds_taken.of(each.cost)) for each, seconds_taken in timed]
        found = dict(zip(found, taken, strict=True))
    names = _worthwhile({"keep": alone.cost, **{variant: each.cost for variant, each in found.items()}})[1:]
    _log.info(
        "%r can run under %s%s",
        name,
        ", ".join(names) or "no other activation memory budget that takes less memory",
        "".join(f"; not under {variant}: {reason}" for variant, reason in outcomes.items() if isinstance(reason, str)),
    )
    cost = _joined(alone.cost, {variant: found[variant].cost for variant in names})
    return replace(alone, cost=cost, variants=names)


def _measured(
    profiler: StageProfiler, expected: _Outcome, alone: StageMeasurement, *, exact: bool
) -> StageMeasurement | str:
    """The costs of a variant, or why it must not be used."""
    try:
        outcome = _outcome(profiler)
        if not _agree(outcome, expected, exact=exact):
            return f"outputs, gradients or buffers differ {'in bits' if exact else 'by more than rounding'}"
        with lent_buffers(profiler.stage):  # the next variant starts from the same ones
            measurement = profiler.measure(timed=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler's are of any type
        return str(getattr(error, "inner_exception", error)).partition("\n")[0] or type(error).__name__
    sizes, pinned_bytes = measurement.gradients.skip_bytes, measurement.cost.pinned_bytes
    if sizes != alone.gradients.skip_bytes or pinned_bytes != alone.cost.pinned_bytes:
        return "it leaves other gradients of skips, or other memory that no checkpoint can free"
    return measurement


def _in_turns(
    profilers: Sequence[StageProfiler], enough: Callable[[list[list[tuple[float, float]]]], bool]
) -> tuple[StageSeconds, ...]:
    """Comparable times of one stage's options, measured by turns."""
    runs: list[list[tuple[float, float]]] = [[] for _ in profilers]
    found = []
    while not enough(runs):
        for profiler, each in zip(profilers, runs, strict=True):
            with lent_buffers(profiler.stage):
                each.append(timed_run(profiler))
    for profiler, each in zip(profilers, runs, strict=True):
        with lent_buffers(profiler.stage):
            found.append(seconds_of(profiler, each))
    return tuple(found)


def _total(seconds: Sequence[StageSeconds]) -> float:
    return sum(each.forward + each.backward for each in seconds)


# -------------------------------------------------------------------- the same results


_Outcome: TypeAlias = list[Sequence[torch.Tensor | None]]
"""What one run of a stage makes for given gradients: its outputs, the gradients, and each buffer by itself."""


def _agree(one: _Outcome, other: _Outcome, *, exact: bool = True) -> bool:
    """True if all bits are equal; if not ``exact``, sums of some thousand numbers in two orders may differ as they do.

    The scale is the largest entry of a group: a gradient that is zero but for rounding (a bias before a normalization)
    has none.
    """
    for some, others in zip_longest(one, other, fillvalue=()):
        entries = (float(tensor.detach().abs().max()) for tensor in others if tensor is not None and tensor.numel())
        largest = 0.0 if exact else max(entries, default=0.0)
        if not all(_within(mine, theirs, largest) for mine, theirs in zip_longest(some, others)):
            return False
    return True


def _within(mine: torch.Tensor | None, theirs: torch.Tensor | None, largest: float) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    if same_bits(mine, theirs):
        return True
    alike = (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
    if not alike or not largest or not mine.is_floating_point():
        return False
    tolerance: float = torch.finfo(mine.dtype).eps ** (2 / 3)
    return float((mine - theirs).detach().abs().max()) <= tolerance * largest


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
        learning += [get_gradient_edge(parameter) for parameter in stage.parameters() if parameter.requires_grad]
        outputs = tensors_in(run_stage(stage, value, profiler.option))
        roots = [output for output in outputs if output.requires_grad]
        generator = torch.Generator(outputs[0].device).manual_seed(0)
        # Equal ones would hide a difference: the gradient of a normalization is then zero.
        given = [torch.randn(root.shape, dtype=root.dtype, device=root.device, generator=generator) for root in roots]
        gradients = torch.autograd.grad(roots, learning, given, allow_unused=True) if roots and learning else ()
        return [outputs, gradients, *([module._buffers[name]] for module, name, _ in slots)]


# -------------------------------------------------------------------- options


def _joined(cost: StageCost, others: Mapping[str, StageCost]) -> StageCost:
    """One stage with the options of several that were measured one by one."""
    costs = {"keep": cost, **others}
    options = (
        replace(each.keep, name=name, discard_peak_bytes=each.discard_peak_bytes) for name, each in costs.items()
    )
    largest = max(each.discard_peak_bytes for each in costs.values())
    return replace(cost, options=tuple(options), discard_peak_bytes=largest)


def _worthwhile(costs: Mapping[str, StageCost]) -> tuple[str, ...]:
    """Names of the options, given by falling budget, that take less memory in some respect than all before them.

    The first stays, one that a later one beats in memory and time goes. Times alone decide nothing: they differ by
    chance.
    """
    sizes = {name: _sizes(cost) for name, cost in costs.items()}
    seconds = {name: cost.keep.forward_seconds + cost.keep.backward_seconds for name, cost in costs.items()}

    def beats(one: str, other: str) -> bool:
        return all(mine <= theirs for mine, theirs in zip(sizes[one], sizes[other], strict=True)) and (
            set(costs[one].keep.saved_skips) <= set(costs[other].keep.saved_skips)
        )

    first, *names = costs
    chosen = [first]
    for name in names:
        if not any(beats(better, name) for better in chosen):
            chosen[1:] = [each for each in chosen[1:] if not (beats(name, each) and seconds[name] <= seconds[each])]
            chosen.append(name)
    return tuple(chosen)


def _sizes(cost: StageCost) -> tuple[int, ...]:
    option = cost.keep
    saved = option.saved_bytes + option.saved_input_bytes + option.saved_output_bytes
    peaks = option.backward_peak_bytes, option.backward_segment_peak_bytes, option.backward_held_peak_bytes
    return saved, cost.discard_peak_bytes, option.forward_peak_bytes, *(saved + peak for peak in peaks)
