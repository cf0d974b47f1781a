"""Schedules that people write by hand, to compare a plan with.

None of them looks at costs. A stage that must not be recomputed is kept, and segments end before it.

    ===================  =================  =====================================================
    name                 over 6 stages      known as
    ===================  =================  =====================================================
    keep_all             0-5                plain training
    per_stage            (0) (1) (2) ... 5  "activation checkpointing" of every block
    periodic, k = 2      (0-2) 3-5          ``torch.utils.checkpoint.checkpoint_sequential(_, k)``
    whole                (0-4) 5            one segment: least retained, one stage's worth of nesting
    halving              ((0) 1-2) 3-5      nested halves: O(log n) boundaries, O(n log n) forwards
    ===================  =================  =====================================================

Source: Chen et al., "Training deep nets with sublinear memory cost", arXiv:1604.06174.
"""

from __future__ import annotations

import math
from itertools import pairwise

from lightning_rotor.chain import Chain, Option
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment


def baselines(chain: Chain) -> dict[str, Schedule]:
    """Every baseline of a chain by name; ``periodic`` for every number of segments."""
    named = {
        "keep_all": keep_all(chain),
        "per_stage": per_stage(chain),
        "whole": whole(chain),
        "halving": halving(chain),
    }
    named.update({f"periodic_{segments}": periodic(chain, segments) for segments in range(2, len(chain))})
    return named


def keep_all(chain: Chain) -> Schedule:
    """Plain training: nothing is recomputed."""
    return Schedule.keep_all(len(chain))


def per_stage(chain: Chain) -> Schedule:
    """Every stage is a segment of its own, but for the last."""
    return _cut(chain, list(range(len(chain))))


def whole(chain: Chain) -> Schedule:
    """Everything but the last stage is one segment."""
    return _cut(chain, [0, len(chain) - 1])


def periodic(chain: Chain, segments: int) -> Schedule:
    """Segments of equal length, the last of which is kept, as ``checkpoint_sequential`` makes them."""
    length = max(len(chain) // segments, 1)
    return _cut(chain, [index * length for index in range(segments) if index * length < len(chain)])


def halving(chain: Chain) -> Schedule:
    """The first half is a segment, which is halved in the same way when it is recomputed."""
    return Schedule(tuple(_halved(chain, 0, len(chain) - 1)))


def _cut(chain: Chain, starts: list[int]) -> Schedule:
    """Segments from each start to the next; what follows the last start is kept."""
    items: list[Item] = []
    for start, following in pairwise(starts):
        items += segments_around(chain, start, following - 1)
    return Schedule((*items, *(Leaf(stage) for stage in range(starts[-1], len(chain)))))


def keep_all_fastest(chain: Chain) -> Schedule:
    """Nothing is recomputed, not even an input from its output; every stage runs under its fastest option."""
    fastest = []
    for stage in chain:
        seconds = [
            math.inf if option.inverts else option.forward_seconds + option.backward_seconds for option in stage.options
        ]
        fastest.append(seconds.index(min(seconds)))
    return Schedule(tuple(Leaf(stage, option) for stage, option in enumerate(fastest)))


def no_schedule_is_faster(chain: Chain) -> bool:
    """Whether :func:`keep_all_fastest` is beyond doubt the fastest of all schedules.

    So it is where dropping and recomputing a stage alone saves no time: that holds for every measured chain, for both
    forwards are timed as one. Only an inverse may come out as faster than keeping, and chains that were made up.
    """
    for stage in chain:
        kept = min(each.forward_seconds + each.backward_seconds for each in stage.options if not each.inverts)
        others = [each.forward_seconds + each.backward_seconds for each in stage.options if each.inverts]
        if stage.recomputable:
            others += [stage.discard_seconds + _again(each) + each.backward_seconds for each in stage.options]
        if min(others, default=kept) < kept:
            return False
    return True


def _again(option: Option) -> float:
    """Least time that the backward spends on a forward in a segment."""
    return min(option.replay_seconds, option.forward_seconds) if option.saved_tensors else 0.0


def segments_around(chain: Chain, first: int, last: int) -> list[Item]:
    """Stages ``first..last`` as one segment, or as several around stages that must be kept."""
    items: list[Item] = []
    run: list[Leaf] = []
    for stage in range(first, last + 1):
        if chain.stages[stage].recomputable:
            run.append(Leaf(stage))
            continue
        items += [Segment(tuple(run))] if run else []
        items.append(Leaf(stage))
        run = []
    return items + ([Segment(tuple(run))] if run else [])


def _halved(chain: Chain, first: int, last: int) -> list[Item]:
    middle = (first + last + 1) // 2
    rest: list[Item] = [Leaf(stage) for stage in range(middle, last + 1)]
    if middle == first:
        return rest
    if not all(chain.stages[stage].recomputable for stage in range(first, middle)):
        return [*segments_around(chain, first, middle - 1), *rest]
    return [Segment(tuple(_halved(chain, first, middle - 1))), *rest]
