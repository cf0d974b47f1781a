"""Runs of stages as chains of their own, as each device of a pipeline has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

from lightning_rotor.chain import Chain, Option, Skip, StageCost
from lightning_rotor.pipeline.partition.problem import SharedTensors
from lightning_rotor.schedule import Leaf, Schedule

END = "hand over"
"""Name of the stage that :func:`with_end` adds."""
_GRADIENT_COSTS = (
    "unpack_peak_bytes",
    "backward_peak_bytes",
    "backward_segment_peak_bytes",
    "backward_held_peak_bytes",
    "unpack_bytes",
    "input_gradient_bytes",
)
"""Costs of an option that are the gradient's bytes if nothing else is there."""


def sub_chain(
    chain: Chain,
    first: int,
    last: int,
    *,
    shared: Sequence[SharedTensors] = (),
) -> Chain:
    """Stages ``first..last`` as a chain whose input, output and parts of skips that cross its ends are the caller's.

    Of tensors that several stages share, it has a gradient of its own.
    """
    if first == 0 and last == len(chain) - 1:
        return chain
    # By number of the skip in the whole chain, what of it is inside. Skips that the last stage makes for stages behind
    # are parts of the output like any other.
    inside: dict[int, Skip] = {}
    handed_bytes = 0
    for number, skip in enumerate(chain.skips):
        if skip.born == last:
            handed_bytes += skip.size_bytes
            continue
        part = _inside(skip, first, last)
        if part is not None:
            inside[number] = part
    new_numbers = {number: place for place, number in enumerate(inside)}
    stages = [_with_skips_renumbered(stage, new_numbers) for stage in chain.stages[first : last + 1]]
    for tensors in shared:
        _give_own_gradient(stages, first, tensors)
    output_bytes = stages[-1].output_bytes + handed_bytes
    stages[-1] = replace(stages[-1], output_bytes=output_bytes)
    input_bytes = chain.input_bytes
    if first > 0:
        input_bytes = boundary_bytes(chain, first)
    skips = tuple(inside.values())
    return replace(chain, stages=tuple(stages), input_bytes=input_bytes, skips=skips)


def _with_skips_renumbered(stage: StageCost, new_numbers: Mapping[int, int]) -> StageCost:
    """A stage whose options name the skips that they save by new numbers; skips without one are left out."""
    if not any(option.saved_skips for option in stage.options):
        return stage
    options = []
    for option in stage.options:
        saved = [new_numbers[number] for number in option.saved_skips if number in new_numbers]
        options.append(replace(option, saved_skips=tuple(saved)))
    return replace(stage, options=tuple(options))


def _give_own_gradient(stages: list[StageCost], first: int, shared: SharedTensors) -> None:
    """Let the gradient of shared tensors appear and wait among some stages, of which the first has a number.

    In the whole chain it appears in the last stage that uses them, and waits until the first one's backward is done.
    Peaks of backwards stay as they were measured there, where two gradients may be added: an upper bound.
    """
    readers = [number - first for number in shared.stages if 0 <= number - first < len(stages)]
    for place, stage in enumerate(stages):
        waits_in_all = shared.stages[0] < first + place <= shared.stages[-1]
        waits_here = bool(readers) and readers[0] < place <= readers[-1]
        change = shared.gradient_bytes * (waits_here - waits_in_all)
        if change:
            waiting_bytes = max(0, stage.waiting_gradient_bytes + change)
            stages[place] = replace(stage, waiting_gradient_bytes=waiting_bytes)
    # In the whole chain the last user makes the gradient; where that lies elsewhere, the last one in here does.
    if readers and first + readers[-1] != shared.stages[-1]:
        last_reader = stages[readers[-1]]
        options = []
        for option in last_reader.options:
            gradient_bytes = option.parameter_gradient_bytes + shared.gradient_bytes
            options.append(replace(option, parameter_gradient_bytes=gradient_bytes))
        stages[readers[-1]] = replace(last_reader, options=tuple(options))


def boundary_bytes(chain: Chain, boundary: int) -> int:
    """Bytes that cross a cut before a stage: its input and every skip that is needed behind it; nothing at the ends."""
    if not 0 < boundary < len(chain):
        return 0
    crossing_bytes = chain.stages[boundary - 1].output_bytes
    for skip in chain.skips:
        is_needed = skip.in_output or skip.last_use >= boundary
        if skip.born < boundary and is_needed:
            crossing_bytes += skip.size_bytes
    return crossing_bytes


def with_end(chain: Chain, *, received: bool = False) -> Chain:
    """A chain with a stage that does nothing at its end, so that everything before it may be a segment.

    In a pipeline other micro-batches come between forward and backward. The output counts as the end's, which the
    caller holds; a copy saved by the stage before counts apart: exact if recomputed, too much if kept. ``received``
    says that the output's gradient lies in a buffer that is counted elsewhere.
    """
    last = chain.stages[-1]
    gradient_bytes = last.output_bytes
    if received:
        gradient_bytes = 0
    # An option that keeps nothing, whatever fields options have: only the gradient passes through it.
    costs: dict[str, Any] = {field.name: 0 for field in fields(Option) if field.default is MISSING}
    costs["name"] = "keep"
    for name in _GRADIENT_COSTS:
        costs[name] = gradient_bytes
    # Without saved tensors: a stage that saves nothing needs no recomputation.
    end = StageCost(END, last.output_bytes, 0, 0.0, (Option(**costs),))
    return replace(chain, stages=(*chain.stages, end))


def without_end(schedule: Schedule) -> Schedule | None:
    """A schedule of a chain with an end for the chain without it; None if it needs the end."""
    items = schedule.items[:-1]
    # A schedule must not end in a segment: there the end is what is kept behind it.
    if items and isinstance(items[-1], Leaf):
        return Schedule(items)
    return None


def _inside(skip: Skip, first: int, last: int) -> Skip | None:
    """Part of a skip within ``first..last``, if it is read or made there before ``last``."""
    readers = [place for place, use in enumerate(skip.uses) if first <= use <= last]
    uses = tuple(skip.uses[place] - first for place in readers)
    gradients = tuple(skip.gradient_bytes[place] for place in readers)
    if skip.born < first:
        # It comes with the input, whose bytes count it.
        return Skip(-1, uses, 0, gradients) if uses else None
    if skip.born > last:
        return None
    leaves_here = skip.in_output or skip.last_use > last
    if not uses:
        # Only handed on: as if the last stage read it. Its gradient arrives from outside.
        uses, gradients = (last - first,), (0,)
    return Skip(skip.born - first, uses, skip.size_bytes, gradients, in_output=leaves_here)
