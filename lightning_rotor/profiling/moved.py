"""A profile over the stages of another cut, or of another process: costs are numbers, stages are live modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import nn

from lightning_rotor.chain import Chain
from lightning_rotor.profiling.chain import Profile
from lightning_rotor.profiling.storages import merged
from lightning_rotor.sequential import Stage
from lightning_rotor.state import Statistic, state_of


def group_sizes(stages: Sequence[Stage], together: Iterable[Stage]) -> list[int]:
    """How many stages of a cut each stage of its profile was merged from."""
    sizes, rest = [], iter(stages)
    for stage in together:
        modules = len(stage.modules)
        sizes.append(0)
        while modules > 0:
            modules -= len(next(rest).modules)
            sizes[-1] += 1
    return sizes


def remembered_places(profile: Profile) -> list[list[int]]:
    """For each stage, by their places in it, the modules whose buffers a first pass remembers."""
    return [
        [place for place, (_, module) in enumerate(stage.submodules()) if module in state.remembered]
        for stage, state in zip(profile.stages, profile.states, strict=True)
    ]


def profile_over(
    stages: Sequence[Stage], chain: Chain, *, group_sizes: Sequence[int], remembered: Sequence[Sequence[int]]
) -> Profile:
    """Known costs over the stages of a cut.

    Args:
        stages: Of the cut, before any are merged.
        chain: What they cost.
        group_sizes: From :func:`group_sizes`, of the cut that was measured.
        remembered: From :func:`remembered_places`, likewise.
    Raises:
        ValueError: The cut has other stages than the one that was measured.
    """
    starts = [0]
    for size in group_sizes:
        starts.append(starts[-1] + size)
    if starts[-1] != len(stages) or len(chain) != len(starts) - 1:
        raise ValueError("the costs are of other stages than the model has")
    if any(len(cost.options) > 1 for cost in chain):
        raise ValueError("a compiled stage was measured with variants, which only measuring compiles")
    together = merged(stages, [range(start, end) for start, end in pairwise(starts)])
    if chain.names != tuple(stage.name for stage in together):
        raise ValueError("the costs name other stages than the model has")
    scratch: dict[tuple[nn.Module, str], Statistic] = {}
    states = []
    for stage, places in zip(together, remembered, strict=True):
        modules = [module for _, module in stage.submodules()]
        states.append(state_of(stage, [modules[place] for place in places], scratch))
    return Profile(chain, together, tuple(states))
