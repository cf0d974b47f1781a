"""A look at a chain before it is measured: each stage runs once, and decides where the chain can be cut.

A stage whose output is a view of its input, or that changes its input in place, is merged with its neighbour: between
the two there is no memory that a plan could free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from lightning_rotor.chain import Skip
from lightning_rotor.profiling.ranks import ALONE, Ranks
from lightning_rotor.profiling.stage_behaviour import Behaviour, look_at, outputs_of
from lightning_rotor.profiling.stage_input import Boundary
from lightning_rotor.profiling.storages import Storage, skips_between, storages_of
from lightning_rotor.stages.sequential import Stage, merge, wiring_of


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """Findings of one run of each stage.

    Attributes:
        storages: Of each value by leaf; None if it is no tensor.
        behaviours: Of each stage.
        groups: Numbers of the stages to merge.
        skips: Storages that outlive a link between the groups, without gradients.
        unused: Leaves of the chain's output that its caller lets go of, and learns nothing from.
    """

    storages: Mapping[int, tuple[Storage | None, ...]]
    behaviours: tuple[Behaviour, ...]
    groups: tuple[range, ...]
    skips: Mapping[Storage, Skip]
    unused: frozenset[int] = frozenset()


def scan(
    stages: Sequence[Stage],
    inputs: Mapping[int, Boundary],
    device: torch.device,
    *,
    block_bytes: int = 1,
    ranks: Ranks = ALONE,
    unused: Collection[int] = (),
) -> Scan:
    """Run every stage, look at what it does and follow the storages.

    Args:
        stages: The stages of a cut.
        inputs: The chain's input, by numbers of values.
        device: To run on.
        block_bytes: Sizes of storages are multiples of it.
        ranks: Processes that scan the same stages now; a chain is cut where all can cut it.
        unused: Numbers of the tensors in the chain's output that its caller lets go of, and learns nothing from.
    Raises:
        ModelError: A stage cannot be measured.
    """
    wiring = wiring_of(stages)
    values = dict(inputs)
    storages = {}
    for number, value in inputs.items():
        storages[number] = storages_of(value.leaves, -1, {}, block_bytes)
    behaviours: list[Behaviour] = []
    # Numbers of the stages before which the chain can be cut.
    cuts = set(range(len(stages) + 1))
    for index, stage in enumerate(stages):
        boundary = Boundary.packed([values[number] for number in stage.reads])
        taken = [storage for number in stage.reads for storage in storages[number]]
        for storage in taken:
            if storage is not None:
                storage.uses.add(index)
        # Not only the first stage may read what the chain is called with.
        is_first = not inputs.keys().isdisjoint(stage.reads)
        look = look_at(stage, index, boundary, taken, device, block_bytes, is_first=is_first, ranks=ranks)
        behaviours.append(look.behaviour)
        values.update(zip(stage.writes, look.outputs, strict=True))
        storages.update(zip(stage.writes, look.storages, strict=True))
        made = [storage for leaves in look.storages for storage in leaves if storage is not None]
        # It makes nothing of its own, so between it and its neighbour there is no memory that a plan could free.
        if all(storage.born < index for storage in made):
            cuts.discard(_cut_at_views(stages, index, made))
        # All between the stage that made a storage and the one that changes it would be recomputed from other values.
        for storage in look.changed:
            cuts -= set(range(storage.born + 1, index + 1))
        for number in wiring.dead[index]:
            # Few values are held at a time, so that a chain can be measured that does not fit.
            values.pop(number, None)
    given = [storage for number in stages[-1].writes for storage in storages[number]]
    unused_leaves = _places_of_tensors(given, unused)
    for place, storage in enumerate(given):
        # What the caller lets go of is not held until the backward.
        if storage is not None and place not in unused_leaves:
            storage.in_output = True
    # Processes that exchange messages must have the same stages, so a cut that one cannot make is made by none.
    starts = sorted({*ranks.common(cuts), 0, len(stages)})
    groups = tuple(range(start, end) for start, end in pairwise(starts))
    return Scan(storages, tuple(behaviours), groups, skips_between(storages, groups), unused_leaves)


def _places_of_tensors(leaves: Sequence[Storage | None], numbers: Collection[int]) -> frozenset[int]:
    """Places among all leaves of the tensors with these numbers."""
    tensors = [place for place, storage in enumerate(leaves) if storage is not None]
    return frozenset(tensors[number] for number in numbers if number < len(tensors))


def _cut_at_views(stages: Sequence[Stage], index: int, made: Sequence[Storage]) -> int:
    """The cut that goes where a stage makes nothing but views: the one before the stage, or the one behind it."""
    if index == len(stages) - 1:
        return index
    # A view may join either neighbour. But nothing comes before one of the chain's input, and whatever joins an
    # invertible stage takes its inverse away.
    is_of_input = all(storage.born < 0 for storage in made)
    if is_of_input or stages[index - 1].invertible is not None:
        return index + 1
    return index


def walk(stages: Sequence[Stage], inputs: Mapping[int, Boundary]) -> Iterator[tuple[int, Boundary]]:
    """The numbers of stages with their inputs. A stage runs when the next one's turn comes, so few values are held."""
    dead = wiring_of(stages).dead
    values = dict(inputs)
    for number, stage in enumerate(stages):
        boundary = Boundary.packed([values[read] for read in stage.reads])
        yield number, boundary
        if number < len(stages) - 1:
            values.update(zip(stage.writes, outputs_of(stage, boundary), strict=True))
            for value in dead[number]:
                del values[value]


def merged(stages: Sequence[Stage], groups: Sequence[range]) -> tuple[Stage, ...]:
    """The stages, with each group made one."""
    # A merged stage hands on the values that later ones read, and the output.
    needed = set(stages[-1].writes)
    merged_stages: list[Stage] = []
    # From behind, as what a stage hands on is decided by those that come after it.
    for group in reversed(groups):
        members = [stages[index] for index in group]
        merged_stages.append(merge(members, frozenset(needed)))
        for stage in members:
            needed.update(stage.reads)
    return tuple(reversed(merged_stages))
