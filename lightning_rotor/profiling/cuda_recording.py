"""Memory of a GPU from the statistics of its caching allocator, which keeps the highest level since the last reset."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from lightning_rotor.profiling.memory_recording import Recording


class CudaRecording(Recording):
    """Reads the allocator at every mark. Allocation happens on the host, so nothing has to be synchronized.

    The statistics of a step are the user's as well, so they are reset once, at its start. A phase then shows its own
    peak if that is the highest so far; of another it shows the levels at its ends.
    """

    def __init__(self, device: torch.device, *, of_step: bool) -> None:
        super().__init__()
        self._device = device
        self._of_step = of_step
        self._base_bytes = 0
        self._highest_bytes = 0

    def start(self) -> None:
        """Begin."""
        await_autograd(self._device)
        if torch.distributed.is_initialized() and not self._of_step:
            _await_messages(self._device)
        self._base_bytes = read_levels(self._device).allocated_bytes
        torch.cuda.reset_peak_memory_stats(self._device)

    def mark(self, label: str) -> None:
        """End the current phase and begin the next."""
        levels = read_levels(self._device)
        peak_bytes = levels.peak_bytes - self._base_bytes
        self.reserved_bytes = levels.peak_reserved_bytes
        self.end_bytes = levels.allocated_bytes - self._base_bytes
        is_own_peak = not self._of_step or peak_bytes > self._highest_bytes
        self._highest_bytes = max(self._highest_bytes, peak_bytes)
        self._peak_bytes = max(self._start_bytes, self.end_bytes)
        if is_own_peak:
            self._peak_bytes = max(self._peak_bytes, peak_bytes)
        super().mark(label)
        if not self._of_step:
            torch.cuda.reset_peak_memory_stats(self._device)


class Levels(NamedTuple):
    """Bytes of a device that its allocator has given out, the most of them, and the most that it has reserved."""

    allocated_bytes: int
    peak_bytes: int
    peak_reserved_bytes: int


def read_levels(device: torch.device) -> Levels:
    """Levels of a GPU's allocator now and since the last reset of its statistics."""
    # ``torch.cuda.memory_allocated`` and its like flatten and sort 160 figures for each answer: 0.1 to 0.5 ms beside an
    # H200, and a watched step of a ResNet-18 asked 75 times.
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    if not statistics:  # nothing has used the device yet
        return Levels(0, 0, 0)
    allocated = statistics["allocated_bytes"]["all"]
    return Levels(allocated["current"], allocated["peak"], statistics["reserved_bytes"]["all"]["peak"])


def await_autograd(device: torch.device) -> None:
    """Wait until autograd's GPU thread lets go of the last backward, whose results it may hold beyond its end."""
    # It lets go of one task's results when it takes the next.
    with torch.enable_grad():
        nothing = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(nothing.view(0), nothing, nothing.detach())


def _await_messages(device: torch.device) -> None:
    """Wait until the level stays for a millisecond, since other threads free what they have sent."""
    level_bytes = read_levels(device).allocated_bytes
    while True:
        time.sleep(1e-3)
        before_bytes, level_bytes = level_bytes, read_levels(device).allocated_bytes
        if level_bytes == before_bytes:
            return
