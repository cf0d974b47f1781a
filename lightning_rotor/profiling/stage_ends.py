"""The ends of a stage in its chain: which storages it takes from other stages, and which it leaves behind."""

from __future__ import annotations

from collections.abc import Container
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
        taken = [storage for read in stage.reads for storage in scan.storages[read]]
        given = [storage for write in stage.writes for storage in scan.storages[write]]
        places: dict[Storage, int] = {}
        for storage in (*taken, *given):
            if storage is not None and storage in scan.skips:
                places.setdefault(storage, len(places))
        numbers = {storage: number for number, storage in enumerate(scan.skips)}
        unused = scan.unused if number == len(scan.groups) - 1 else frozenset()
        used = [storage for place, storage in enumerate(given) if place not in unused]
        made = _made_in(scan.groups[number], used)
        return cls(
            skips=tuple(numbers[storage] for storage in places),
            inputs=tuple(_place_of(storage, places) for storage in taken),
            outputs=tuple(_place_of(storage, places) for storage in given),
            passed=tuple(_is_read_behind(storage, number, scan) for storage in taken),
            link_bytes=sum(storage.size_bytes for storage in made if storage not in places),
            made_bytes=tuple(storage.size_bytes if storage in made else 0 for storage in places),
            unused=unused,
        )


def _place_of(storage: Storage | None, places: dict[Storage, int]) -> int | None:
    return None if storage is None else places.get(storage)


def _made_in(group: Container[int], given: list[Storage | None]) -> set[Storage]:
    """The storages among those given that one of a group of stages has made."""
    return {storage for storage in given if storage is not None and storage.born in group}


def _is_read_behind(storage: Storage | None, number: int, scan: Scan) -> bool:
    """True if a storage is a skip that a stage behind this one reads, or the caller gets."""
    if storage is None or storage not in scan.skips:
        return False
    skip = scan.skips[storage]
    return skip.in_output or skip.last_use > number
