"""Memory of a GPU from the statistics of its caching allocator, which keeps the highest level since the last reset."""

from __future__ import annotations

import time

import torch

from lightning_rotor.devices import kind_of
from lightning_rotor.profiling.memory_recording import Recording


class CudaRecording(Recording):
    """Reads the allocator at every mark. Allocation happens on the host, so nothing has to be synchronized.

    The statistics of a step are the user's as well, so they are reset once, at its start. A phase then shows its own
    peak if that is the highest so far; of another it shows the levels at its ends.
    """

    def __init__(self, device: torch.device, *, of_step: bool) -> None:
        super().__init__()
        self._device = device
        self._kind = kind_of(device)
        self._of_step = of_step
        self._base_bytes = 0
        self._highest_bytes = 0

    def start(self) -> None:
        """Begin."""
        await_autograd(self._device)
        # Else what another thread frees meanwhile would count as the stage's.
        if torch.distributed.is_initialized() and not self._of_step:
            _await_messages(self._device)
        self._base_bytes = self._kind.levels(self._device).allocated_bytes
        self._kind.reset_peaks(self._device)

    def pause(self) -> None:
        """Note the levels, for others reset the statistics."""
        self._note_levels()

    def resume(self) -> None:
        """Go on from the levels that were noted."""
        # What was taken in the pause and is still there belongs to whoever took it.
        self._base_bytes = self._kind.levels(self._device).allocated_bytes - self.end_bytes
        self._kind.reset_peaks(self._device)

    def mark(self, label: str) -> None:
        """End the current phase and begin the next."""
        self._note_levels()
        super().mark(label)
        if not self._of_step:
            self._kind.reset_peaks(self._device)

    def _note_levels(self) -> None:
        """Add the levels of this moment to the current phase."""
        levels = self._kind.levels(self._device)
        peak_bytes = levels.peak_bytes - self._base_bytes
        self.reserved_bytes = max(self.reserved_bytes or 0, levels.peak_reserved_bytes)
        self.end_bytes = levels.allocated_bytes - self._base_bytes
        self.phase_peak_bytes = max(self.phase_peak_bytes, self.end_bytes)
        # Since no mark of a step resets the statistics, a peak that is no higher than before may be an earlier phase's.
        if not self._of_step or peak_bytes > self._highest_bytes:
            self.phase_peak_bytes = max(self.phase_peak_bytes, peak_bytes)
        self._highest_bytes = max(self._highest_bytes, peak_bytes)


def await_autograd(device: torch.device) -> None:
    """Wait until autograd's GPU thread lets go of the last backward, whose results it may hold beyond its end."""
    # It lets go of one task's results when it takes the next.
    with torch.enable_grad():
        nothing = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(nothing.view(0), nothing, nothing.detach())


def _await_messages(device: torch.device) -> None:
    """Wait until the level stays for a millisecond, since other threads free what they have sent."""
    kind = kind_of(device)
    level_bytes = kind.levels(device).allocated_bytes
    while True:
        time.sleep(1e-3)
        before_bytes = level_bytes
        level_bytes = kind.levels(device).allocated_bytes
        if level_bytes == before_bytes:
            return
