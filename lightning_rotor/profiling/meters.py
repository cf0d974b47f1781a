"""Meters: exact bytes from the allocator, and a clock that knows the device.

A meter makes recordings, whose marks cut them into phases. ``AllocatorMeter`` serves each kind of device whose
allocator tells levels and peaks (``devices``). A kind without has a meter of its own here, chosen in ``meter_for``, and
a recording beside ``cpu_recording`` and ``cuda_recording``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from lightning_rotor.devices import HOST, TRAINING, expected_kinds, kind_of
from lightning_rotor.errors import ProfilingError
from lightning_rotor.private.torch_names import is_profiling
from lightning_rotor.private.undoing import undone
from lightning_rotor.profiling.cpu_recording import CpuRecording
from lightning_rotor.profiling.cuda_recording import CudaRecording
from lightning_rotor.profiling.memory_recording import Recording


class Meter(Protocol):
    """Measures bytes and seconds on one device.

    Attributes:
        needs_warm_up: An operator's first run allocates what later ones do not, such as workspaces of CUDA.
        repeats_itself: Its clock says the same of every run of the same operators, so that one run is enough.
        block_bytes: The size of each block is counted as a multiple of this.
    """

    needs_warm_up: bool = False
    repeats_itself: bool = False
    block_bytes: int = 1

    @property
    def is_taken(self) -> bool:
        """True if somebody else measures by the same means now."""
        return False

    def new_recording(
        self,
        *,
        of_step: bool = False,
        older: Mapping[int, int] | None = None,
        unknown_too: bool = False,
    ) -> Recording:
        """A recording that has not begun, of a whole step or of one stage.

        ``older`` has sizes by address of older blocks whose frees count in a step; None: all count. ``unknown_too``:
        others count as well, as the allocator reports them.
        """

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record until the context ends. No garbage is collected meanwhile."""
        recording = self.new_recording()
        # Whoever has switched the collector off finds it switched off.
        collects_garbage = gc.isenabled()

        def put_back() -> None:
            recording.abandon()
            if collects_garbage:
                gc.enable()

        with undone(put_back):
            # CUDA would count what older cycles give back.
            gc.disable()
            recording.start()
            yield recording
            # Not behind an exception: then :meth:`Recording.abandon` ends it without reading a log.
            recording.stop()

    def now(self) -> Any:
        """A point in time on the device: by default seconds of the performance counter."""
        return time.perf_counter()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from ``start`` to ``end``."""
        return float(end - start)


class CpuMeter(Meter):
    """Bytes from the allocator's events, seconds from the performance counter."""

    @property
    def is_taken(self) -> bool:
        """True while torch's profiler records: there is room for one."""
        return is_profiling()

    def new_recording(
        self,
        *,
        of_step: bool = False,
        older: Mapping[int, int] | None = None,
        unknown_too: bool = False,
    ) -> Recording:
        """A recording that has not begun."""
        return CpuRecording(of_step=of_step, older=older, unknown_too=unknown_too)


class AllocatorMeter(Meter):
    """Bytes from the caching allocator's statistics, seconds from events on the current stream.

    It serves any kind of device whose class in ``devices`` tells levels and peaks.

    Recording resets the device's peak statistics (``torch.cuda.max_memory_allocated``): there is no other way to read a
    peak.
    """

    needs_warm_up = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kind = kind_of(device)
        self.block_bytes = self._kind.block_bytes

    def new_recording(
        self,
        *,
        of_step: bool = False,
        older: Mapping[int, int] | None = None,
        unknown_too: bool = False,
    ) -> Recording:
        """A recording that has not begun. The statistics count all older blocks, whose sizes the allocator knows."""
        return CudaRecording(self._device, of_step=of_step)

    def now(self) -> Any:
        """An event on the current stream."""
        # The host runs ahead of the device, so its own clock says nothing.
        return self._kind.time_point(self._device)

    def seconds_between(self, start: Any, end: Any) -> float:
        """Time on the device; waits for the later event."""
        return self._kind.seconds_between(start, end)


def meter_for(device: torch.device) -> Meter:
    """The meter of a device.

    Raises:
        ProfilingError: There is none for this kind of device.
    """
    if device.type not in TRAINING:
        raise ProfilingError(
            f"memory on device {device.type!r} cannot be measured: expected the model on {expected_kinds()}"
        )
    if kind_of(device) is HOST:
        return CpuMeter()
    # Of any kind whose allocator tells levels. One that does not refuses the first recording.
    return AllocatorMeter(device)
