"""Measuring the options of a stage beside keeping it: variants that a compiler made, and inverting it.

A variant is withheld if its bits differ, or by more than rounding where the user allows for that, and if it takes no
less memory than another. A stage that draws random numbers has none, see :mod:`lightning_rotor.capture.compiled`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import get_gradient_edge

from lightning_rotor.capture.compiled import CannotRepeatError, CompiledModules
from lightning_rotor.chain import BackwardPeaks, Option, StageCost
from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.inversion import Way, is_whole
from lightning_rotor.execution.isolated import kept_attributes, lent_buffers
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.private.values import address_of, is_fake, same_bits, tensors_in
from lightning_rotor.profiling.seconds import StageSeconds, seconds_by_turns
from lightning_rotor.profiling.stage import WORTH_MENTIONING_BYTES, StageMeasurement, StageProfiler
from lightning_rotor.stages.generators import GeneratorStates

_log = logging.getLogger(__name__)

_ROUNDS = 3  # as many times the runs of other stages


def _joined(cost: StageCost, more: Iterable[Option]) -> StageCost:
    """The stage's costs with more options, each of which has a discard peak of its own."""
    kept = (replace(each, discard_peak_bytes=cost.discard_peak_of(each)) for each in cost.options)
    options = (*kept, *more)
    return replace(cost, options=options, discard_peak_bytes=max(each.discard_peak_bytes or 0 for each in options))


# -------------------------------------------------------------------- Variants that a compiler made.


def with_variants(
    profiler: StageProfiler,
    alone: StageMeasurement,
    compiled: CompiledModules,
    kin: Any,
    known: dict[Any, tuple[StageSeconds, ...]],
) -> StageMeasurement:
    """Costs of a compiled stage with its variants, whose seconds are ``known`` for stages of equal ``kin`` and sizes.

    Timed one by one, equal stages differ by chance, and so would plans.
    """
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
    outcomes = {variant: _measured(other, expected, alone, exact=exact) for variant, other in others.items()}
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
        known[key] = seconds_by_turns([replace(each, repeats=_ROUNDS * each.repeats) for each in timed])
    cost, *costs = map(StageSeconds.of, known[key], all_costs)
    more = zip(names, costs, strict=True)
    options = (replace(each.keep, name=one, discard_peak_bytes=each.discard_peak_bytes) for one, each in more)
    return replace(alone, cost=_joined(cost, options))


def _measured(profiler: StageProfiler, expected: _Outcome, alone: StageMeasurement, *, exact: bool) -> StageCost | str:
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
        learning += [get_gradient_edge(parameter) for parameter in stage.parameters() if parameter.requires_grad]
        outputs = tensors_in(run_stage(stage, value, profiler.option))
        roots = [output for output in outputs if output.requires_grad]
        generator = torch.Generator(outputs[0].device).manual_seed(0)
        # Equal ones would hide a difference: the gradient of a normalization is then zero.
        given = [torch.randn(root.shape, dtype=root.dtype, device=root.device, generator=generator) for root in roots]
        gradients = torch.autograd.grad(roots, learning, given, allow_unused=True) if roots and learning else ()
        return [outputs, gradients, *([module._buffers[name]] for module, name, _ in slots)]


def _worthwhile(costs: Mapping[str, StageCost]) -> tuple[str, ...]:
    """Names of the options, given by falling budget, that take less memory in some respect than each before them.

    Times decide nothing: they differ by chance.
    """
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
    option, saved = cost.keep, cost.keep.kept_bytes
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
