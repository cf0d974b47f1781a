"""Boundaries and skips while a step is simulated: who holds which of them, and the bytes that are alive."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightning_rotor.chain import Chain
from lightning_rotor.schedule import Segment


class Boundaries:
    """Who holds the boundaries of a chain, and the bytes of them. The caller holds its input, which counts nothing."""

    def __init__(self, chain: Chain) -> None:
        self.live_bytes = 0
        self.size_bytes = [0, *(stage.output_bytes for stage in chain)]
        self.holders = [1] + [0] * len(chain)  # besides saved tensors
        self.saved_by_producer = [0] * (len(chain) + 1)
        self._saved_by_consumer = [0] * (len(chain) + 1)
        self._dropped = [False] * (len(chain) + 1)  # the stage behind will rebuild it

    def update(
        self,
        boundary: int,
        *,
        holders: int = 0,
        producer: int | None = None,
        consumer: int | None = None,
        dropped: bool | None = None,
    ) -> None:
        """Add holders; say how many bytes of it the stages on either side save; drop it, or rebuild it."""
        # The total is kept up to date, as summing up all boundaries at each step would make a simulation quadratic.
        before = self.bytes(boundary)
        self.holders[boundary] += holders
        if producer is not None:
            self.saved_by_producer[boundary] = producer
        if consumer is not None:
            self._saved_by_consumer[boundary] = consumer
        if dropped is not None:
            self._dropped[boundary] = dropped
        self.live_bytes += self.bytes(boundary) - before

    def bytes(self, boundary: int) -> int:
        """Bytes of it that are alive."""
        size = self.size_bytes[boundary]
        # Whoever holds it holds all of it, and what stages save of it is the same memory.
        if self.holders[boundary]:
            return size
        if self._dropped[boundary]:
            return 0
        return min(size, self.saved_by_producer[boundary] + self._saved_by_consumer[boundary])


class Skips:
    """Who holds the skips of a chain, which of their gradients are alive, and the bytes of both."""

    def __init__(self, chain: Chain) -> None:
        self.live_bytes = 0
        self._all = chain.skips
        self._holders = [0] * len(self._all)
        self._gradient_bytes = [0] * len(self._all)
        # By stage, gradients of skips that the peaks of its backward count; None if they are as large as the skips.
        self._counted_bytes = [stage.skip_gradient_bytes for stage in chain]
        self._slices_bytes = 0
        self.made: list[list[int]] = [[] for _ in chain]
        self._read: list[list[int]] = [[] for _ in chain]
        self.last_use: list[float] = []
        for number, skip in enumerate(self._all):
            self.last_use.append(math.inf if skip.in_output else skip.last_use)
            if skip.born >= 0:
                self.made[skip.born].append(number)
            for stage in skip.uses:
                self._read[stage].append(number)

    def hold(self, skips: Iterable[int], *, holders: int = 1) -> None:
        """Add a holder to each, or more, or remove one."""
        for skip in skips:
            before = self.bytes(skip)
            self._holders[skip] += holders
            self.live_bytes += self.bytes(skip) - before

    def bytes(self, skip: int) -> int:
        """Bytes of it that are alive, without its gradient."""
        return self._all[skip].size_bytes if self._holders[skip] else 0

    def read_by(self, segment: Segment) -> set[int]:
        """Skips made before a segment that it reads."""
        # Most chains have no skips, and this is asked for each segment of each schedule.
        if not self._all:
            return set()
        read: set[int] = set()
        for stage in range(segment.first, segment.last + 1):
            read.update(skip for skip in self._read[stage] if self._all[skip].born < segment.first)
        return read

    def learn_in(self, first: int, last: int) -> bool:
        """True if one of these stages leaves a gradient for something that a stage before them has made."""
        for stage in range(first, last + 1):
            for number in self._read[stage]:
                skip = self._all[number]
                if 0 <= skip.born < first and skip.gradient_bytes[skip.uses.index(stage)] > 0:
                    return True
        return False

    def take_gradients(self, stage: int) -> None:
        """Count no longer what exists when the stage's backward begins, as far as its own peaks count it."""
        ending = (*self.made[stage], *self._read[stage])
        alive = sum(self._gradient_bytes[skip] for skip in ending)
        own = self._counted_bytes[stage]
        if own is None:
            own = sum(self._all[skip].size_bytes or self._gradient_bytes[skip] for skip in ending)
        # Readers that concatenate leave slices of a larger gradient, all of which is alive until the stage has read or
        # replaced the slice: that rest goes in leave_gradients().
        counted = min(alive, own)
        self._slices_bytes = alive - counted
        self.live_bytes -= counted
        for skip in ending:
            self._gradient_bytes[skip] = 0

    def leave_gradients(self, stage: int) -> None:
        """Count what the stage leaves for skips that it read, and no longer what dies with the gradients it found."""
        for number in self._read[stage]:
            skip = self._all[number]
            self._gradient_bytes[number] = skip.gradient_bytes[skip.uses.index(stage)]
        self.live_bytes += sum(self._gradient_bytes[skip] for skip in self._read[stage]) - self._slices_bytes
