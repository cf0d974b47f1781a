"""Sizes for which measured steps have kept the limit, so that smaller ones need not be measured.

Under one schedule a smaller input takes no more than a larger one, in the planned module and around it. So where a
training meets another length in each step, the steps that are measured become rare: only those larger than all before::

    length   90 ●    40       120 ●    100      30       118      121 ●          ● measured
"""

from __future__ import annotations

from typing import Any

from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planning.size_bounds import Shapes, is_within
from lightning_rotor.schedule import Schedule

# Largest sizes under one schedule, none of them within another: batch and length may grow independently.
_MOST_SIZES = 16


class KeptSizes:
    """The largest sizes that have kept the limit, for each schedule of calls that differ in sizes alone."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[Any, Schedule], list[Shapes]] = {}

    def note(self, signature: Signature, schedule: Schedule, batch_bytes: int) -> None:
        """A measured step with a call of this signature, and a batch of so many bytes, has kept the limit."""
        if self.cover(signature, schedule, batch_bytes):
            return
        size = _size(signature, batch_bytes)
        sizes = self._sizes.setdefault((signature.family, schedule), [])
        # What the new one covers is told by it from now on.
        largest = [other for other in sizes if not is_within(other, size)]
        largest.append(size)
        # Whatever is forgotten is measured once more, so the oldest may go.
        sizes[:] = largest[-_MOST_SIZES:]

    def knows(self, signature: Signature, schedule: Schedule) -> bool:
        """True if some size has kept the limit under the schedule."""
        return (signature.family, schedule) in self._sizes

    def forget(self, signature: Signature, schedule: Schedule) -> None:
        """A step with such a call has exceeded the limit under the schedule: its sizes do not tell what it takes."""
        self._sizes.pop((signature.family, schedule), None)

    def cover(self, signature: Signature, schedule: Schedule, batch_bytes: int) -> bool:
        """True if a step that was at least as large in every dimension has kept the limit under the schedule."""
        size = _size(signature, batch_bytes)
        sizes = self._sizes.get((signature.family, schedule), ())
        return any(is_within(size, other) for other in sizes)


def _size(signature: Signature, batch_bytes: int) -> Shapes:
    """Sizes of a call's tensors, and of the batch, which may have more than goes into the call.

    With what its recording has taken: a size that code reads from values is in no shape, and has its own recording.
    """
    cut = signature.cut
    recorded_bytes = sum(cut.recording.bytes_by_operation) if isinstance(cut, GraphCut) else 0
    return (*signature.shapes, (batch_bytes, recorded_bytes))
