"""The ends of a stage in its chain: which storages it takes from other stages, and which it leaves behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_rotor.profiling.scan import Scan
from lightning_rotor.profiling.storages import Storage
from lightning_rotor.stages.sequential import Stage


@dataclass(frozen=True, slots=True)
class StageEnds:
    """Storages that a stage takes and leaves behind; equal for stages that can share a measurement.

    A skip is named by its place in ``skips``, since its number in the chain differs between equal stages. None stands
    for the stage's link, and for what is no tensor.

    Attributes:
        skips: Numbers in the chain of the skips that the stage takes or gives.
        inputs: For each leaf of the input, the place of its skip, or None.
        outputs: For each leaf of the output, the place of its skip, or None.
        passed: For each leaf of the input, True if it is a skip that a later stage reads, too.
        link_bytes: Storages that the stage makes for the next one alone.
        made_bytes: For each skip, its bytes if this stage makes it, else 0.
        unused: Leaves of the output of the last stage that the chain's caller lets go of, and learns nothing from.
    """

    skips: tuple[int, ...] = field(compare=False)
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    passed: tuple[bool, ...]
    link_bytes: int
    made_bytes: tuple[int, ...]
    unused: frozenset[int] = frozenset()

    @classmethod
    def of(cls, stage: Stage, number: int, scan: Scan) -> StageEnds:
        """The ends of the stage with this number among the merged ones."""
        taken = _storages_in(stage.reads, scan)
        given = _storages_in(stage.writes, scan)
        # In the order of first use, so that equal stages give a skip the same place.
        places: dict[Storage, int] = {}
        for storage in (*taken, *given):
            if storage is not None and storage in scan.skips:
                places.setdefault(storage, len(places))
        unused: frozenset[int] = frozenset()
        if number == len(scan.groups) - 1:
            unused = scan.unused
        # What the caller lets go of at once is left behind for nobody.
        made = set()
        for place, storage in enumerate(given):
            if storage is not None and place not in unused and storage.born in scan.groups[number]:
                made.add(storage)
        # Storages that several leaves show count once, and those of skips for the skip.
        link_bytes = 0
        for storage in made:
            if storage not in places:
                link_bytes += storage.size_bytes
        numbers = {storage: place for place, storage in enumerate(scan.skips)}
        return cls(
            skips=tuple(numbers[storage] for storage in places),
            inputs=_places_of(taken, places),
            outputs=_places_of(given, places),
            passed=tuple(_is_read_behind(storage, number, scan) for storage in taken),
            link_bytes=link_bytes,
            made_bytes=tuple(storage.size_bytes if storage in made else 0 for storage in places),
            unused=unused,
        )


def _storages_in(values: Iterable[int], scan: Scan) -> list[Storage | None]:
    """The storages of all leaves of some values; None for a leaf that is no tensor."""
    storages: list[Storage | None] = []
    for value in values:
        storages += scan.storages[value]
    return storages


def _places_of(storages: Iterable[Storage | None], places: Mapping[Storage, int]) -> tuple[int | None, ...]:
    """For each leaf, the place of its skip; None for one of the link, and for what is no tensor."""
    places_of_leaves: list[int | None] = []
    for storage in storages:
        places_of_leaves.append(None if storage is None else places.get(storage))
    return tuple(places_of_leaves)


def _is_read_behind(storage: Storage | None, number: int, scan: Scan) -> bool:
    """True if a storage is a skip that a stage behind this one reads, or the caller gets."""
    if storage is None or storage not in scan.skips:
        return False
    skip = scan.skips[storage]
    return skip.in_output or skip.last_use > number
