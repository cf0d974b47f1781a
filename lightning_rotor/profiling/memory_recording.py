"""A recording: how many bytes are allocated above its start, cut into phases by marks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MeteredPhase:
    """Bytes above the start of a recording, from the mark ``label`` to the next one."""

    label: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int

    def raised(self, size_bytes: int) -> MeteredPhase:
        """The phase with so much more throughout."""
        return MeteredPhase(
            self.label,
            self.start_bytes + size_bytes,
            self.peak_bytes + size_bytes,
            self.end_bytes + size_bytes,
        )

    @property
    def freed_bytes(self) -> int:
        """Bytes by which the level fell from its start to its end."""
        return self.start_bytes - self.end_bytes


class Recording:
    """Bytes above its start, cut into phases by marks. Meters of other devices count in other ways.

    Attributes:
        phases: From each mark to the next.
        timeline: Points ``(seconds, bytes)`` since the start, one a change; empty on CUDA, which gives peaks alone.
        end_bytes: Level now; negative if more was freed than allocated.
        reserved_bytes: The most that a GPU's caching allocator had reserved, blocks kept for reuse included.
        given_back: Addresses of older blocks that the CPU's allocator has reported as given back.
    """

    def __init__(self) -> None:
        self.phases: list[MeteredPhase] = []
        self.timeline: list[tuple[float, int]] = []
        self.end_bytes = 0
        self.reserved_bytes: int | None = None
        self.given_back: set[int] = set()
        # Of the phase that is not over yet.
        self._label = ""
        self.phase_start_bytes = 0
        self.phase_peak_bytes = 0

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End the last phase."""
        self.mark("")

    def pause(self) -> None:
        """Let others measure by the same means until :meth:`resume`. What they leave behind does not count."""

    def resume(self) -> None:
        """Go on after :meth:`pause`."""

    def abandon(self) -> None:
        """End without phases, where an exception came before :meth:`stop`; nothing after it."""

    def mark(self, label: str) -> None:
        """End the current phase and begin the next."""
        self.phases.append(MeteredPhase(self._label, self.phase_start_bytes, self.phase_peak_bytes, self.end_bytes))
        self._label = label
        # A phase that allocates nothing peaks where it starts.
        self.phase_start_bytes = self.end_bytes
        self.phase_peak_bytes = self.end_bytes

    def count(self, size_bytes: int) -> None:
        """Add a block that was taken, or given back if its size is negative."""
        # Also below the start: a step gives back what earlier ones have taken.
        self.end_bytes += size_bytes
        self.phase_peak_bytes = max(self.phase_peak_bytes, self.end_bytes)

    def first(self, label: str) -> MeteredPhase:
        """The first phase with this label."""
        return next(phase for phase in self.phases if phase.label == label)

    @property
    def peak_bytes(self) -> int:
        """Highest level."""
        return max(phase.peak_bytes for phase in self.phases)

    def peak_between(self, begin: str, end: str) -> int:
        """The highest level from the first mark ``begin`` up to the first mark ``end``; 0 without such marks."""
        labels = [phase.label for phase in self.phases]
        if begin not in labels:
            return 0
        between = self.phases[labels.index(begin) : labels.index(end)]
        return max((phase.peak_bytes for phase in between), default=0)
