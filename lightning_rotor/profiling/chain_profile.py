"""A measured chain with the stages that it is about.

Costs are numbers: they can be saved, and sent to other processes. Stages are live modules. :class:`Profile` has both,
and :func:`profile_over` brings costs that are known together with the stages of another cut, or of another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import nn

from lightning_rotor.chain import Chain, Option
from lightning_rotor.devices import kind_of
from lightning_rotor.execution.inversion import can_be_fused
from lightning_rotor.execution.segment_state import SegmentState, Statistic, state_of
from lightning_rotor.profiling.scan import merged
from lightning_rotor.stages.sequential import Stage


# No slots, because of the cached properties.
@dataclass(frozen=True, eq=False)
class Profile:
    """A measured chain and its stages.

    Attributes:
        chain: Costs, one entry a stage.
        stages: The stages to run, some of them merged.
        states: For each stage, what a recomputation must leave alone.
        group_sizes: For each stage, of how many stages of the cut it was merged.
    """

    chain: Chain
    stages: tuple[Stage, ...]
    states: tuple[SegmentState, ...]
    group_sizes: tuple[int, ...]

    def __repr__(self) -> str:
        return f"<Profile of {self.chain!r}>"

    def over(self, chain: Chain) -> Profile:
        """A profile of the same stages with other costs."""
        profile = replace(self, chain=chain)
        # What stages read and change does not depend on their costs. Where each step has another size, adding it up
        # again for each took longer than the copies that it is for.
        profile.__dict__["state"] = self.state
        return profile

    @cached_property
    def state(self) -> SegmentState:
        """State that recomputations of all stages must leave alone."""
        return sum(self.states, SegmentState())

    @cached_property
    def copied_bytes(self) -> int:
        """Bytes of the buffer copies that a forward holds in case it must run again; 0 where torch counts none."""
        kind = kind_of(torch.device(self.chain.device))
        # On the CPU, copies are in NumPy's memory.
        if not kind.tells_allocated:
            return 0
        return self.state.copied_bytes(kind.block_bytes)

    @cached_property
    def draws_random(self) -> bool:
        """True if a forward may draw random numbers."""
        # User code whose attributes are put back may draw from a generator that it keeps in one of them.
        return bool(self.state.attributed) or any(stage.draws_random for stage in self.chain)

    @property
    def remembered(self) -> list[list[int]]:
        """For each stage, the places in it of the modules whose buffers a first pass remembers."""
        places_by_stage = []
        for stage, state in zip(self.stages, self.states, strict=True):
            # Places, and not the modules: they mean the same in a copy of the model, and in another process.
            places = [place for place, (_, module) in enumerate(stage.submodules()) if module in state.remembered]
            places_by_stage.append(places)
        return places_by_stage

    @property
    def drawn(self) -> list[list[str]]:
        """For each stage, the kinds of generators that it draws from."""
        return [list(state.drawn) for state in self.states]


def _can_run(stage: Stage, option: Option) -> bool:
    """True if a stage has what an option needs that inverts it."""
    if not option.inverts:
        return True
    return stage.invertible is not None and (not option.fused or can_be_fused(stage.invertible))


def profile_over(
    stages: Sequence[Stage],
    chain: Chain,
    *,
    group_sizes: Sequence[int],
    remembered: Sequence[Sequence[int]],
    drawn: Sequence[Sequence[str]],
) -> Profile:
    """The profile of known costs over the stages of a cut.

    Args:
        stages: The stages of the cut, before any are merged.
        chain: Costs of the merged stages.
        group_sizes: :attr:`Profile.group_sizes` of the profile that the costs come from.
        remembered: :attr:`Profile.remembered` of that profile.
        drawn: :attr:`Profile.drawn` of that profile.
    Raises:
        ValueError: Other stages were measured.
    """
    starts = [0, *accumulate(group_sizes)]
    if starts[-1] != len(stages) or len(chain) != len(starts) - 1:
        raise ValueError("the costs are of other stages than the model has")
    # All options but the first are inverses, or variants: code that was compiled in the process that measured.
    if any(not option.inverts for cost in chain for option in cost.options[1:]):
        raise ValueError("a compiled stage was measured with variants, which only measuring compiles")
    groups = [range(start, end) for start, end in pairwise(starts)]
    merged_stages = merged(stages, groups)
    if chain.names != tuple(stage.name for stage in merged_stages):
        raise ValueError("the costs name other stages than the model has")
    for stage, cost in zip(merged_stages, chain, strict=True):
        if any(not _can_run(stage, option) for option in cost.options):
            raise ValueError("a stage was measured with an inverse that the model has no more")
    # One for the chain, since equal normalization layers write to it in turn.
    scratch: dict[tuple[nn.Module, str], Statistic] = {}
    states = []
    for stage, places, kinds in zip(merged_stages, remembered, drawn, strict=True):
        modules = [module for _, module in stage.submodules()]
        state = state_of(stage, [modules[place] for place in places], scratch)
        states.append(replace(state, drawn=tuple(map(str, kinds))))
    return Profile(chain, merged_stages, tuple(states), tuple(group_sizes))
