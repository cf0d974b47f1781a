"""Where a stage meets the rest of its chain: which storages it takes and leaves behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rotor.profiling.storages import Scouting, Storage, UnmeasuredSkip
from lightning_rotor.sequential import Stage


@dataclass(frozen=True, slots=True, eq=False)
class StageEnds:
    """Which storages a stage takes and leaves behind, apart from its link.

    Attributes:
        skips: Numbers of the skips that it reads or makes. What is measured speaks of their places in here, so that it serves equal stages.
        inputs: For each leaf of its input, the place of its skip, or None for the link.
        outputs: For each leaf of its output likewise.
        passed: For each leaf of its input, whether it is a skip that somebody reads later.
        link_bytes: What it makes for the next stage alone, or for the caller.
        made_bytes: Sizes of the skips that it makes.
    """

    skips: tuple[int, ...]
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    passed: tuple[bool, ...]
    link_bytes: int
    made_bytes: Mapping[int, int]

    @classmethod
    def of(
        cls, stage: Stage, number: int, seen: Scouting, numbered: Mapping[Storage, tuple[int, UnmeasuredSkip]]
    ) -> StageEnds:
        """What is known of the stage with this number among the merged ones."""
        group = seen.groups[number]
        taken = [storage for read in stage.reads for storage in seen.storages[read]]
        given = [storage for write in stage.writes for storage in seen.storages[write]]
        own = dict.fromkeys(storage for storage in (*taken, *given) if storage is not None and storage in numbered)
        places = {storage: place for place, storage in enumerate(own)}

        def is_read_later(storage: Storage | None) -> bool:
            if storage is None or storage not in numbered:
                return False
            _, skip = numbered[storage]
            return skip.is_needed_after(number)

        made = {storage for storage in given if storage is not None and storage.born in group}
        return cls(
            tuple(numbered[storage][0] for storage in own),
            tuple(None if storage is None else places.get(storage) for storage in taken),
            tuple(None if storage is None else places.get(storage) for storage in given),
            tuple(map(is_read_later, taken)),
            sum(storage.size_bytes for storage in made if storage not in numbered),
            {places[storage]: storage.size_bytes for storage in made if storage in numbered},
        )

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for stages that are alike in this."""
        return self.inputs, self.outputs, self.passed, self.link_bytes, tuple(sorted(self.made_bytes.items()))

    def lasting(self, leaves: Sequence[Any]) -> list[Any]:
        """Those leaves of an input that are skips: somebody else holds them, too."""
        return [leaf for leaf, place in zip(leaves, self.inputs, strict=True) if place is not None]
