"""Reading what a meter has recorded, by the labels of its marks."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_rotor.profiling.meters import MeteredPhase


class Phases:
    """Finds the phases of a recording by their labels."""

    def __init__(self, phases: Sequence[MeteredPhase]) -> None:
        self._phases = phases
        self._labels = [phase.label for phase in phases]

    def first(self, label: str) -> MeteredPhase:
        """The first phase with this label."""
        return self._phases[self._labels.index(label)]

    def between(self, begin: str, end: str) -> Sequence[MeteredPhase]:
        """From the first phase labelled ``begin`` up to the first labelled ``end``, without it."""
        if begin not in self._labels:
            return ()
        return self._phases[self._labels.index(begin) : self._labels.index(end)]

    def until_last_save(self) -> Sequence[MeteredPhase]:
        """The forward up to its last saved tensor; nothing if it saves none."""
        saves = [index for index, label in enumerate(self._labels) if label == "save"]
        return self._phases[self._labels.index("forward") : saves[-1]] if saves else ()


def peak_bytes_of(phases: Sequence[MeteredPhase]) -> int:
    """Highest level in several phases; 0 if there are none."""
    return max((phase.peak_bytes for phase in phases), default=0)
