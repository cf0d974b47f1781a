"""Storages under the values of a chain.

Values are followed by storage, not by name: a mask returned as it came, or a view of an earlier activation, takes no
memory of its own, but keeps alive what it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_rotor.chain import Skip
from lightning_rotor.private.values import address_of, storage_bytes_of
from lightning_rotor.units import in_blocks


@dataclass(slots=True, eq=False)
class Storage:
    """Memory under some tensors.

    Attributes:
        born: Number of the stage that makes it; -1 for the chain's input.
        size_bytes: Its size.
        uses: Numbers of the stages that read it.
        in_output: It is a part of the chain's output.
    """

    born: int
    size_bytes: int
    uses: set[int] = field(default_factory=set)
    in_output: bool = False


def storages_of(
    leaves: Iterable[Any],
    born: int,
    by_address: dict[int, Storage],
    block_bytes: int,
) -> tuple[Storage | None, ...]:
    """The storage of each leaf; None if it is no tensor.

    Args:
        leaves: Tensors and other objects.
        born: Number of the stage that has made them.
        by_address: Storages that the stage was given; new ones are added.
        block_bytes: Sizes are multiples of it.
    """
    storages: list[Storage | None] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            storages.append(None)
            continue
        address = address_of(leaf)
        # Tensors without memory are all at address 0, and share nothing.
        if not address or address not in by_address:
            by_address[address] = Storage(born, in_blocks(storage_bytes_of(leaf), block_bytes))
        storages.append(by_address[address])
    return tuple(storages)


def skips_between(storages: Mapping[int, tuple[Storage | None, ...]], groups: Sequence[range]) -> dict[Storage, Skip]:
    """Storages that outlive a link between groups of stages, as skips without gradients, in the order of values."""
    # The chain's input is made before all of them.
    group_of = {-1: -1}
    for number, group in enumerate(groups):
        group_of.update(dict.fromkeys(group, number))
    skips: dict[Storage, Skip] = {}
    for leaves in storages.values():
        for storage in leaves:
            if storage is None or storage in skips:
                continue
            born = group_of[storage.born]
            # Within a group nothing is cut, so its own uses are no skips.
            uses = tuple(sorted({group_of[use] for use in storage.uses} - {born}))
            if not uses:
                continue
            # What the next group alone reads is no skip, unless the caller gets it as well.
            is_link = uses == (born + 1,)
            stays_in_output = storage.in_output and storage.size_bytes > 0
            if not is_link or stays_in_output:
                # The caller holds the chain's input, so no plan counts it.
                size_bytes = storage.size_bytes if born >= 0 else 0
                skips[storage] = Skip(born, uses, size_bytes, (0,) * len(uses), storage.in_output)
    return skips
