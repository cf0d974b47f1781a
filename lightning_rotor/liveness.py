"""What is alive while a step is simulated: who holds which boundaries and skips of a chain, and what that takes."""

from __future__ import annotations

import math

from lightning_rotor.chain import Chain
from lightning_rotor.schedule import Segment


class Boundaries:
    """Who holds the boundaries of a chain. The caller holds its input, which counts nothing."""

    def __init__(self, chain: Chain) -> None:
        self._size_bytes = [0, *(stage.output_bytes for stage in chain)]
        self._holders = [1] + [0] * len(chain)
        self._saved_by_producer = [0] * (len(chain) + 1)
        self._saved_by_consumer = [0] * (len(chain) + 1)
        self._dropped = [False] * (len(chain) + 1)

    def is_held(self, boundary: int) -> bool:
        """Whether somebody holds it besides saved tensors."""
        return self._holders[boundary] > 0

    def is_saved_by_producer(self, boundary: int) -> bool:
        """Whether the stage that made it has saved some of it."""
        return self._saved_by_producer[boundary] > 0

    def hold(self, boundary: int) -> int:
        """One holder more; returns the bytes that this brings to life."""
        before = self._live_bytes(boundary)
        self._holders[boundary] += 1
        return self._live_bytes(boundary) - before

    def release(self, boundary: int) -> int:
        """One holder less; returns the bytes that this frees."""
        before = self._live_bytes(boundary)
        self._holders[boundary] -= 1
        return before - self._live_bytes(boundary)

    def save(self, boundary: int, *, producer: int | None = None, consumer: int | None = None) -> int:
        """From now on the stages on either side save so many bytes of it; returns by how much this makes it grow."""
        before = self._live_bytes(boundary)
        if producer is not None:
            self._saved_by_producer[boundary] = producer
        if consumer is not None:
            self._saved_by_consumer[boundary] = consumer
        return self._live_bytes(boundary) - before

    def drop(self, boundary: int) -> int:
        """The stage behind it will rebuild it: what saved it goes without it meanwhile. Returns the bytes that this frees."""
        before = self._live_bytes(boundary)
        self._dropped[boundary] = True
        return before - self._live_bytes(boundary)

    def rebuild(self, boundary: int) -> int:
        """It is there again for what saved it; returns the bytes that this brings to life."""
        self._dropped[boundary] = False
        return self._live_bytes(boundary)

    def _live_bytes(self, boundary: int) -> int:
        size = self._size_bytes[boundary]
        if self._holders[boundary]:
            return size
        if self._dropped[boundary]:
            return 0
        return min(size, self._saved_by_producer[boundary] + self._saved_by_consumer[boundary])


class Skips:
    """Who holds the skips of a chain, and which of their gradients are alive."""

    def __init__(self, chain: Chain) -> None:
        self._all = chain.skips
        self._holders = [0] * len(self._all)
        self._gradient_bytes = [0] * len(self._all)
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

    def hold(self, skip: int) -> int:
        """One holder more; returns the bytes that this brings to life."""
        self._holders[skip] += 1
        return self._all[skip].size_bytes if self._holders[skip] == 1 else 0

    def release(self, skip: int) -> int:
        """One holder less; returns the bytes that this frees."""
        self._holders[skip] -= 1
        return self._all[skip].size_bytes if self._holders[skip] == 0 else 0

    def read_by(self, segment: Segment) -> set[int]:
        """What a segment reads of what was made before it."""
        if not self._all:
            return set()
        stages = range(segment.first, segment.last + 1)
        return {skip for stage in stages for skip in self._read[stage] if self._all[skip].born < segment.first}

    def learn_in(self, first: int, last: int) -> bool:
        """Whether one of these stages leaves a gradient for something that it reads and a stage before them has made."""
        read = ((self._all[number], stage) for stage in range(first, last + 1) for number in self._read[stage])
        return any(0 <= skip.born < first and skip.gradient_bytes[skip.uses.index(stage)] > 0 for skip, stage in read)

    def take_gradients(self, stage: int) -> int:
        """Bytes of gradients that exist when the stage's backward begins, and that its own peaks count."""
        ending = (*self.made[stage], *self._read[stage])
        if not ending:
            self._slices_bytes = 0
            return 0
        alive = sum(self._gradient_bytes[skip] for skip in ending)
        own = self._counted_bytes[stage]
        if own is None:
            own = sum(self._all[skip].size_bytes or self._gradient_bytes[skip] for skip in ending)
        # Those that are slices may hold more than themselves until the stage has read or replaced them.
        counted = min(alive, own)
        self._slices_bytes = alive - counted
        for skip in ending:
            self._gradient_bytes[skip] = 0
        return counted

    def leave_gradients(self, stage: int) -> int:
        """Bytes of gradients for skips that the stage read, which it leaves behind, less what dies with those that it found."""
        if not self._read[stage]:
            return -self._slices_bytes
        for number in self._read[stage]:
            skip = self._all[number]
            self._gradient_bytes[number] = skip.gradient_bytes[skip.uses.index(stage)]
        return sum(self._gradient_bytes[skip] for skip in self._read[stage]) - self._slices_bytes
