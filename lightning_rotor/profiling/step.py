"""The memory of a whole training step, as the allocator saw it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch
from rich.console import Console
from rich.errors import LiveError
from rich.progress import Progress

from lightning_rotor.errors import ProfilingError
from lightning_rotor.profiling.meters import AllocatorLog, await_autograd

_LAP = "lap"


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Memory between :meth:`StepMeter.start` and :meth:`StepMeter.stop`.

    Attributes:
        peak_bytes: Highest level above that at the start.
        lap_peak_bytes: The same until the first :meth:`StepMeter.lap`, or of all of it if there was none.
        end_bytes: Level at the end above that at the start; negative if more was freed than allocated.
        reserved_bytes: What a GPU's caching allocator had reserved at most, blocks that it keeps for reuse included; None on the CPU.
        timeline: Points ``(seconds, bytes)`` since the start, one for each change. Empty on CUDA, whose allocator gives the peak alone.
    """

    peak_bytes: int
    lap_peak_bytes: int
    end_bytes: int
    timeline: tuple[tuple[float, int], ...]
    reserved_bytes: int | None = None


class StepMeter:
    """Measures what code between two calls allocates, on one device.

    Frees of older blocks count, for gradients from the step before go away in the middle of this one. On the CPU the allocator knows the
    size of a block only if it was watched when it was taken, so measure consecutive steps, from one without gradients on.

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
        if device.type not in ("cpu", "cuda"):
            raise ProfilingError(f"memory on device {device.type!r} cannot be measured: expected 'cpu' or 'cuda'")
        self._device = device
        self._log: AllocatorLog | None = None
        self._base = 0
        self._lap_peak: int | None = None

    def start(self) -> None:
        """Begin. On CUDA this resets the device's peak statistics."""
        self._lap_peak = None
        if self._device.type == "cuda":
            await_autograd(self._device)
            self._base = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            log = AllocatorLog()
            log.start()
            self._log = log

    def lap(self) -> None:
        """Note the peak so far: the end of the backward, say. Only the first lap counts."""
        if self._device.type == "cuda":
            if self._lap_peak is None:
                self._lap_peak = torch.cuda.max_memory_allocated(self._device) - self._base
        elif self._log is not None:
            self._log.mark(_LAP)

    def stop(self) -> StepTrace:
        """End and return what was measured."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) - self._base
            until_lap = peak if self._lap_peak is None else self._lap_peak
            end = torch.cuda.memory_allocated(self._device) - self._base
            return StepTrace(peak, until_lap, end, (), torch.cuda.max_memory_reserved(self._device))
        if self._log is None:
            raise ProfilingError("StepMeter.stop() without start(): call start() before the step")
        log, self._log = self._log, None
        log.stop()
        level, timeline = 0, [(0.0, 0)]
        origin = log.events[0].nanoseconds if log.events else 0
        peak = 0
        lap_peak: int | None = None
        for event in log.events:
            if event.label == _LAP and lap_peak is None:
                lap_peak = peak
            if event.label is None:
                level += event.size_bytes
                peak = max(peak, level)
                timeline.append(((event.nanoseconds - origin) / 1e9, level))
        return StepTrace(peak, peak if lap_peak is None else lap_peak, level, tuple(timeline))


# ----------------------------------------------------------------------------------------------------
# A progress bar for measuring, which stays out of sight while measuring is quick.


class MeasuringProgress:
    """Shows how many stages are measured once that takes longer than a delay, and vanishes at the end.

    Args:
        enabled: False never shows anything.
        delay_seconds: How long to wait.
        clock: Seconds, for tests.
        console: Where to draw; by default the error stream, so that piped output stays clean.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        delay_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self._enabled = enabled
        self._delay_seconds = delay_seconds
        self._clock = clock
        self._console = console or Console(stderr=True)
        self._started = 0.0
        self._bar: Progress | None = None

    def __enter__(self) -> MeasuringProgress:
        self._started = self._clock()
        return self

    def __call__(self, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` stages are measured."""
        if self._enabled and self._bar is None and self._clock() - self._started >= self._delay_seconds:
            self._bar = Progress(console=self._console, transient=True)
            self._bar.add_task("measuring stages", total=total)
            try:
                self._bar.start()
            except LiveError:  # another live display, such as the trainer's own bar, has the terminal
                self._enabled, self._bar = False, None
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
