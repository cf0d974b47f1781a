"""The memory of a whole training step, as the allocator saw it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_rotor.errors import ProfilingError
from lightning_rotor.profiling.memory_recording import Recording
from lightning_rotor.profiling.meters import meter_for

END = "end"
"""Label of the phase behind the backward."""


class StepMeter:
    """Measures what code between two calls allocates, on one device.

    Frees of older blocks count, by default of all. The CPU's allocator knows the size only of blocks that it was
    watched to take, so measure consecutive steps, from one without gradients on.

    Args:
        device: A CPU or CUDA device.
    Raises:
        ProfilingError: There is no meter for this kind of device, or another profiler is recording.
    Example:
        >>> meter = StepMeter(torch.device("cpu"))
        >>> meter.start()
        >>> block = torch.empty(1024)
        >>> meter.stop().peak_bytes
        4096
    """

    def __init__(self, device: torch.device) -> None:
        self._meter = meter_for(device)
        self._recording: Recording | None = None

    def start(self, older: Mapping[int, int] | None = None, *, unknown_too: bool = False) -> None:
        """Begin. On CUDA this resets the device's peak statistics.

        Args:
            older: On the CPU, sizes by address of older blocks whose frees count; by default all count.
            unknown_too: Those of other older blocks count as well, as far as the allocator reports them.
        """
        recording = self._meter.new_recording(of_step=True, older=older, unknown_too=unknown_too)
        # Only kept once it runs: if it cannot start, this meter measures nothing.
        recording.start()
        self._recording = recording

    def lap(self, label: str = END) -> None:
        """Begin a phase; without a label, what comes behind the backward."""
        if self._recording is not None:
            self._recording.mark(label)

    def pause(self) -> None:
        """Let others measure until :meth:`resume`."""
        if self._recording is not None:
            self._recording.pause()

    def resume(self) -> None:
        """Go on after :meth:`pause`. Raises ``ProfilingError`` as :meth:`start` does."""
        if self._recording is not None:
            self._recording.resume()

    def stop(self) -> Recording:
        """End and return what was measured."""
        recording = self._recording
        # First, so that a meter whose recording fails to end can be started again.
        self._recording = None
        if recording is None:
            raise ProfilingError("StepMeter.stop() without start(): call start() before the step")
        recording.stop()
        return recording
