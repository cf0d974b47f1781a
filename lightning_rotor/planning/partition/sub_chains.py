r"""Parts of a chain, each of which is a chain: what one pipeline stage runs.

::

    whole      stage 0 ─► stage 1 ─► stage 2 ─► stage 3 ─► stage 4
                 └──────── skip ────────────────────┘
    cut at 2   stage 0 ─► stage 1 ┊ stage 2 ─► stage 3 ─► stage 4
                 └──────────── out ┊ in ───────────┘

A skip across a cut is a part of the output on one side and of the input on the other: both are the caller's, who holds them until the
backward is done. One that only passes by takes part in what is sent, but in no sub-chain. What is left of a chain's own input is free: in
this package every rank has the batch.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_rotor.chain import Chain, Option, Skip, StageCost
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment, leaves

END = "hand over"
"""Name of the stage that :func:`with_end` adds."""


def sub_chain(chain: Chain, first: int, last: int) -> Chain:
    """Stages ``first..last`` as a chain of their own.

    Args:
        chain: The whole.
        first: Number of the first stage.
        last: Number of the last stage, which belongs to it.
    Returns:
        A chain whose input and output, with the parts of skips that cross its ends, are the caller's.
    """
    if first == 0 and last == len(chain) - 1:
        return chain
    numbers: dict[int, int] = {}
    skips: list[Skip] = []
    handed_bytes = 0  # skips that the last stage makes for stages behind: parts of the output like any other
    for number, skip in enumerate(chain.skips):
        if skip.born == last:
            handed_bytes += skip.size_bytes
            continue
        inside = _inside(skip, first, last)
        if inside is not None:
            numbers[number] = len(skips)
            skips.append(inside)
    stages = [_renumbered(stage, numbers) for stage in chain.stages[first : last + 1]]
    stages[-1] = replace(stages[-1], output_bytes=stages[-1].output_bytes + handed_bytes)
    return replace(
        chain,
        stages=tuple(stages),
        input_bytes=chain.input_bytes if first == 0 else boundary_bytes(chain, first),
        skips=tuple(skips),
    )


def boundary_bytes(chain: Chain, boundary: int) -> int:
    """What crosses a cut before stage ``boundary``: the link and every skip that is needed behind it; at the ends, nothing is sent."""
    if not 0 < boundary < len(chain):
        return 0
    crossing = [skip for skip in chain.skips if skip.born < boundary and (skip.in_output or skip.last_use >= boundary)]
    return chain.stages[boundary - 1].output_bytes + sum(skip.size_bytes for skip in crossing)


def with_end(chain: Chain, *, received: bool = False) -> Chain:
    """The same with a stage that does nothing at its end, so that everything before it may be a segment.

    In a step of its own that would be for nothing, since the backward begins where the forward has ended. In a pipeline other
    micro-batches come between the two. The output is counted as the end's, which the caller holds; a copy that the stage before saves is
    counted apart, which is exact if it is recomputed, and too much by itself if it is kept.

    Args:
        chain: What comes before.
        received: The gradient of the output lies in a buffer that is counted elsewhere.
    """
    last = chain.stages[-1]
    gradient_bytes = 0 if received else last.output_bytes
    keep = Option(
        name="keep",
        saved_bytes=0,
        saved_input_bytes=0,
        saved_output_bytes=0,
        saved_tensors=0,
        forward_peak_bytes=0,
        replay_peak_bytes=0,
        unpack_peak_bytes=gradient_bytes,
        unpack_bytes=gradient_bytes,
        backward_peak_bytes=gradient_bytes,
        backward_segment_peak_bytes=gradient_bytes,
        backward_held_peak_bytes=gradient_bytes,
        input_gradient_bytes=gradient_bytes,
        parameter_gradient_bytes=0,
        forward_seconds=0.0,
        replay_seconds=0.0,
        backward_seconds=0.0,
    )
    end = StageCost(END, last.output_bytes, 0, 0.0, (keep,))
    return replace(chain, stages=(*chain.stages, end))


def without_end(schedule: Schedule) -> Schedule | None:
    """A schedule of a chain with an end for the chain without it; None if it needs the end."""
    items = schedule.items[:-1]
    return Schedule(items) if items and isinstance(items[-1], Leaf) else None


def shifted(item: Item, by: int) -> Item:
    """An item with other stage numbers."""
    match item:
        case Leaf(stage, option):
            return Leaf(stage + by, option)
        case Segment(items):
            return Segment(tuple(shifted(child, by) for child in items))


def counts_forward(item: Item) -> int:
    """How many stages an item runs."""
    return sum(1 for _ in leaves(item))


def _inside(skip: Skip, first: int, last: int) -> Skip | None:
    """The part of a skip within ``first..last``, if it is read or made there; one that ``last`` makes is a part of its output."""
    read = [number for number, use in enumerate(skip.uses) if first <= use <= last]
    uses = tuple(skip.uses[number] - first for number in read)
    gradients = tuple(skip.gradient_bytes[number] for number in read)
    if skip.born < first:
        return Skip(-1, uses, 0, gradients) if uses else None
    if skip.born > last:
        return None
    leaves_here = skip.in_output or skip.last_use > last
    if not uses:  # only handed on: as if the last stage read it; its gradient arrives from outside
        uses, gradients = (last - first,), (0,)
    return Skip(skip.born - first, uses, skip.size_bytes, gradients, in_output=leaves_here)


def _renumbered(stage: StageCost, numbers: dict[int, int]) -> StageCost:
    if not any(option.saved_skips for option in stage.options):
        return stage
    options = tuple(
        replace(option, saved_skips=tuple(numbers[number] for number in option.saved_skips if number in numbers))
        for option in stage.options
    )
    return replace(stage, options=options)
