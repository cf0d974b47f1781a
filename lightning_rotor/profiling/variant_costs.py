"""Costs of a stage that the user has compiled, under other activation memory budgets of the compiler.

Each budget makes a variant, an option of the stage. A variant is withheld if its bits differ, or by more than rounding
where the user allows for that, and if it takes no less memory than another. A stage that draws random numbers has none,
see :mod:`lightning_rotor.capture.compiled`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from lightning_rotor.capture.compiled import CannotRepeatError, CompiledModules
from lightning_rotor.chain import StageCost
from lightning_rotor.execution.isolated import kept_attributes, lent_buffers
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.private.values import is_fake, same_bits, tensors_in
from lightning_rotor.profiling.stage_profiler import StageMeasurement, StageProfiler
from lightning_rotor.profiling.stage_seconds import StageSeconds, seconds_by_turns
from lightning_rotor.stages.generators import GeneratorStates

_log = logging.getLogger(__name__)

# As many times the runs of other stages: a variant and the stage differ by little, and chance must not choose.
_MORE_ROUNDS = 3


def with_variants(
    profiler: StageProfiler,
    alone: StageMeasurement,
    compiled: CompiledModules,
    kin: Any,
    known_seconds: dict[Any, tuple[StageSeconds, ...]],
) -> StageMeasurement:
    """Costs of a compiled stage with its variants.

    Args:
        profiler: Of the stage.
        alone: Its measurement as it is.
        compiled: Makes the variants.
        kin: A key of stages that may take the same time, for all that can be told without numbers in their attributes.
        known_seconds: Seconds of such stages. Those of equal sizes are timed once: else plans would mix the options of
            equal blocks by chance. Grows.
    """
    name = profiler.stage.name
    try:
        variants = compiled.variants(profiler.stage)
        # Without values nobody can tell whether a variant computes the same.
        if not variants or any(is_fake(tensor) for tensor in tensors_in(profiler.boundary.leaves)):
            return alone
        # Only a stage that repeats itself to the bit can tell whether a variant computes the same.
        expected = _repeatable_outcome(profiler, may_draw=compiled.saving is not None)
    except CannotRepeatError as error:
        _log.info("%r runs under no other activation memory budget: %s", name, error)
        compiled.objections[name] = str(error)
        return alone
    _log.info("compiling %r under %d more activation memory budgets", name, len(variants))
    profiler = replace(profiler, stage=replace(profiler.stage, variants=tuple(variants.values())))
    profilers = {}
    costs = {}
    objections = {}
    # Option 0 is the stage as it is.
    for option, variant in enumerate(variants, start=1):
        profilers[variant] = replace(profiler, option=option)
        cost = _measured_variant(profilers[variant], expected, alone, exact=compiled.choice == "exact")
        if isinstance(cost, str):
            objections[variant] = cost
        else:
            costs[variant] = cost
    compiled.objections.update(objections)
    # The stage as it is comes first, and always stays.
    _, *chosen = _worthwhile({"keep": alone.cost, **costs})
    _log.info(
        "%r can run under %s%s",
        name,
        ", ".join(chosen) or "no other activation memory budget that takes less memory",
        "".join(f"; not under {variant}: {reason}" for variant, reason in objections.items()),
    )
    if not chosen:
        return alone
    all_profilers = [profiler, *(profilers[variant] for variant in chosen)]
    all_costs = [alone.cost, *(costs[variant] for variant in chosen)]
    # With the sizes, since those of other code differ.
    key = kin, tuple(chosen), tuple(map(_sizes, all_costs))
    # By turns and with the stage itself among them, since what a plan compares are differences.
    if key not in known_seconds:
        longer = [replace(one, repeats=_MORE_ROUNDS * one.repeats) for one in all_profilers]
        known_seconds[key] = seconds_by_turns(longer)
    timed = list(map(StageSeconds.of, known_seconds[key], all_costs))
    options = []
    for variant, cost in zip(chosen, timed[1:], strict=True):
        options.append(replace(cost.keep, name=variant, discard_peak_bytes=cost.discard_peak_bytes))
    return replace(alone, cost=timed[0]).with_options(options)


def _measured_variant(
    profiler: StageProfiler,
    expected: _Outcome,
    alone: StageMeasurement,
    *,
    exact: bool,
) -> StageCost | str:
    """The costs of a variant, or why it must not be used."""
    try:
        if not _agree(_outcome(profiler), expected, exact=exact):
            return f"outputs, gradients or buffers differ {'in bits' if exact else 'by more than rounding'}"
        # The next variant starts from the same buffers.
        with lent_buffers(profiler.stage):
            measurement = profiler.measure()
    # No fault of the variant's, which may fit another time.
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # A compiler's are of any type.
        reason = str(getattr(error, "inner_exception", error))
        return reason.partition("\n")[0] or type(error).__name__
    leaves_other_gradients = measurement.gradients.skip_bytes != alone.gradients.skip_bytes
    if leaves_other_gradients or measurement.cost.pinned_bytes != alone.cost.pinned_bytes:
        return "it leaves other gradients of skips, or other memory that no checkpoint can free"
    return measurement.cost


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Results of one run of a stage for given gradients."""

    outputs: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]
    buffers: Sequence[torch.Tensor | None]

    @property
    def groups(self) -> list[Sequence[torch.Tensor | None]]:
        """Tensors whose entries are of one scale: all outputs, all gradients, and each buffer by itself."""
        return [self.outputs, self.gradients, *([buffer] for buffer in self.buffers)]


def _agree(one: _Outcome, other: _Outcome, *, exact: bool = True) -> bool:
    """True if all bits are equal; if not ``exact``, sums of many numbers in two orders may differ as they do."""
    for mine, theirs in zip_longest(one.groups, other.groups, fillvalue=()):
        # The scale is a group's largest entry: a gradient that is zero but for rounding (before a normalization) has
        # none of its own.
        scale = 0.0 if exact else _largest_entry(theirs)
        if not all(_is_close(tensor, expected, scale) for tensor, expected in zip_longest(mine, theirs)):
            return False
    return True


def _largest_entry(tensors: Sequence[torch.Tensor | None]) -> float:
    largest = 0.0
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            largest = max(largest, float(tensor.detach().abs().max()))
    return largest


def _is_close(
    tensor: torch.Tensor | None,
    expected: torch.Tensor | None,
    scale: float,
) -> bool:
    """True if two tensors differ by no more than rounding at this scale; by no bit if the scale is 0."""
    if tensor is None or expected is None:
        return tensor is expected
    if not scale or not tensor.is_floating_point() or tensor.dtype != expected.dtype:
        return same_bits(tensor, expected)
    tolerance = torch.finfo(tensor.dtype).eps ** (2 / 3) * scale
    return tensor.shape == expected.shape and torch.allclose(tensor, expected, rtol=0.0, atol=tolerance, equal_nan=True)


def _repeatable_outcome(profiler: StageProfiler, *, may_draw: bool = False) -> _Outcome:
    """The outcome of a stage as it is; raises CannotRepeatError if there may be another one next time."""
    device = tensors_in(profiler.boundary.leaves)[0].device
    profiler.rewind()
    before = GeneratorStates(device)
    outcome = _outcome(profiler)
    if not may_draw and not before.equals(GeneratorStates(device)):
        raise CannotRepeatError("it draws random numbers, which torch would draw anew where it recomputes")
    if not _agree(outcome, _outcome(profiler)):
        raise CannotRepeatError("its gradients differ in bits from run to run")
    return outcome


def _outcome(profiler: StageProfiler) -> _Outcome:
    """The outcome of one run, from the same buffers and random numbers each time."""
    stage = profiler.stage
    profiler.rewind()
    with kept_attributes(stage), lent_buffers(stage) as slots:
        value = profiler.boundary.fresh()
        edges = [get_gradient_edge(leaf) for leaf in tensors_in(value) if leaf.requires_grad]
        edges += map(get_gradient_edge, stage.learning())
        outputs = tensors_in(run_stage(stage, value, profiler.option))
        roots = [output for output in outputs if output.requires_grad]
        gradients: Sequence[torch.Tensor | None] = ()
        if roots and edges:
            gradients = torch.autograd.grad(roots, edges, _random_gradients(roots), allow_unused=True)
        buffers = [module._buffers[name] for module, name, _ in slots]
        return _Outcome(outputs, gradients, buffers)


def _random_gradients(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of outputs, which are random."""
    # Equal ones would hide a difference: the gradient of a normalization is then zero.
    # From a generator of its own, as the model's must not move.
    generator = torch.Generator(roots[0].device).manual_seed(0)
    return [torch.randn(root.shape, dtype=root.dtype, device=root.device, generator=generator) for root in roots]


def _worthwhile(costs: Mapping[str, StageCost]) -> tuple[str, ...]:
    """Names of the options, given by falling budget, that take less memory in some respect than each before them."""
    # By falling budget, so that of two that take the same memory the one that recomputes less stays.
    chosen: list[str] = []
    for name, cost in costs.items():
        if not any(_takes_no_more(costs[better], cost) for better in chosen):
            chosen.append(name)
    return tuple(chosen)


def _takes_no_more(cost: StageCost, other: StageCost) -> bool:
    """True if a variant takes at most as much memory as another one in every respect."""
    # A skip that is saved is held beyond its readers, whatever else takes less.
    if not set(cost.keep.saved_skips) <= set(other.keep.saved_skips):
        return False
    return all(mine <= theirs for mine, theirs in zip(_sizes(cost), _sizes(other), strict=True))


def _sizes(cost: StageCost) -> tuple[int, ...]:
    """All sizes that a plan may gain by."""
    # No times, which differ by chance.
    option = cost.keep
    saved_bytes = option.kept_bytes
    return (
        saved_bytes,
        cost.discard_peak_bytes,
        option.forward_peak_bytes,
        saved_bytes + option.backward_peak_bytes,
        saved_bytes + option.backward_segment_peak_bytes,
        saved_bytes + option.backward_held_peak_bytes,
    )
