"""Meters: exact bytes from the allocator, and a clock that knows the device.

Marks cut a recording into phases, whose levels count from its start. On the CPU they come from the events that torch's
allocator reports to its profiler: every block of every kernel. (Resident set size is useless: the allocator keeps freed
pages.) On CUDA they come from the statistics of the caching allocator.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from rich.console import Console
from rich.errors import LiveError
from rich.progress import Progress
from torch.autograd.profiler import profile, record_function

from lightning_rotor.errors import ProfilerBusyError, ProfilingError
from lightning_rotor.private.torch_names import AllocationLog, allocation_of, is_profiling
from lightning_rotor.private.undoing import undone
from lightning_rotor.profiling.ranks import ALONE, Ranks
from lightning_rotor.units import BLOCK_BYTES

_MARK, _KINETO = "lightning_rotor::", "KINETO_LOG_LEVEL"


@dataclass(frozen=True, slots=True)
class MeteredPhase:
    """Bytes above the start of a recording, from the mark ``label`` to the next one."""

    label: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int

    def raised(self, size_bytes: int) -> MeteredPhase:
        """The phase with so much more throughout."""
        levels = (level + size_bytes for level in (self.start_bytes, self.peak_bytes, self.end_bytes))
        return MeteredPhase(self.label, *levels)

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
        self.given_back: set[int] = set()
        self.phases: list[MeteredPhase] = []
        self.timeline: list[tuple[float, int]] = []
        self.reserved_bytes: int | None = None
        self._label, self._start, self._peak, self.end_bytes = "", 0, 0, 0

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End the last phase."""
        self.mark("")

    def abandon(self) -> None:
        """End without phases, where an exception came before :meth:`stop`; nothing after it."""

    def mark(self, label: str) -> None:
        """End the current phase and begin the next."""
        self.phases.append(MeteredPhase(self._label, self._start, self._peak, self.end_bytes))
        self._label, self._start, self._peak = label, self.end_bytes, self.end_bytes

    def count(self, size_bytes: int) -> None:
        """Add a block that was taken, or given back if its size is negative."""
        self.end_bytes += size_bytes
        self._peak = max(self._peak, self.end_bytes)

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


class Meter(Protocol):
    """Measures bytes and seconds on one device."""

    needs_warm_up: bool = False  # an operator's first run allocates what later ones do not, such as workspaces of CUDA
    block_bytes: int = 1  # the size of each block is counted as a multiple of this

    @property
    def is_taken(self) -> bool:
        """True if somebody else measures by the same means now."""
        return False

    def new_recording(self, *, of_step: bool = False) -> Recording:
        """A recording that has not begun, of a whole step or of one stage."""

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record until the context ends. No garbage is collected: CUDA would count what older cycles give back."""
        recording, collects = self.new_recording(), gc.isenabled()

        def put_back() -> None:
            recording.abandon()
            if collects:
                gc.enable()

        with undone(put_back):
            gc.disable()
            recording.start()
            yield recording
            recording.stop()

    def now(self) -> Any:
        """A point in time on the device: by default seconds of the performance counter."""
        return time.perf_counter()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from ``start`` to ``end``."""
        return float(end - start)


def require_free(is_taken: bool, ranks: Ranks = ALONE) -> None:
    """Raise ``ProfilerBusyError`` if a meter is taken, here or on a process that measures together with this one."""
    if ranks.any(is_taken):
        where = "" if is_taken else " on another process"
        raise ProfilerBusyError(
            f"memory cannot be measured while torch.profiler is recording{where}: measure before it starts, or start "
            "it a few steps later (schedule=torch.profiler.schedule(wait=2, ...))"
        )


def meter_for(device: torch.device) -> Meter:
    """The meter of a device.

    Raises:
        ProfilingError: There is none for this kind of device.
    """
    match device.type:
        case "cpu":
            return CpuMeter()
        case "cuda":
            return CudaMeter(device)
        case kind:
            raise ProfilingError(f"memory on device {kind!r} cannot be measured: expected the model on 'cpu' or 'cuda'")


class CpuMeter(Meter):
    """Bytes from the allocator's events, seconds from the performance counter."""

    @property
    def is_taken(self) -> bool:
        """True while torch's profiler records: there is room for one."""
        return is_profiling()

    def new_recording(self, *, of_step: bool = False) -> Recording:
        """A recording that has not begun."""
        return _CpuRecording(of_step)


_IDLE_SECONDS, _IDLE_SHARE = 5e-5, 0.1
"""So long, and for such a part of a run, a thread waits without having been interrupted: for others that compute."""


class Interruptions:
    """Tells whether other work has had the processor during a run, by processor time beside the clock.

    Of the CPU's meter: the host of another device waits for it anyway.
    """

    def __init__(self, meter: Meter) -> None:
        self._is_told = isinstance(meter, CpuMeter)
        self._clock, self._worked = time.perf_counter(), time.thread_time()

    def any(self) -> bool:
        """True if there was one since this was made."""
        seconds = time.perf_counter() - self._clock
        idle = seconds - (time.thread_time() - self._worked)
        return self._is_told and idle > max(_IDLE_SECONDS, _IDLE_SHARE * seconds)


class CudaMeter(Meter):
    """Bytes from the caching allocator's statistics, seconds from events on the current stream.

    Recording resets the device's peak statistics (``torch.cuda.max_memory_allocated``): there is no other way to read a
    peak.
    """

    needs_warm_up = True
    block_bytes = BLOCK_BYTES["cuda"]

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_recording(self, *, of_step: bool = False) -> Recording:
        """A recording that has not begun."""
        return _CudaRecording(self._device, of_step)

    def now(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Time on the device; waits for the later event."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class _CpuRecording(Recording):
    """Marks go into the allocator's log, which is read at the end. Of a step, frees of older blocks count as well.

    The allocator's log may know a wrong size of an older block: one at the same address was taken under the eyes of an
    earlier recording, and given back behind it (torch 2.14). With ``older``, sizes by address, only these count.
    """

    def __init__(self, of_step: bool) -> None:
        super().__init__()
        self._log = AllocationLog()
        self._of_step = of_step
        self._is_running = False
        self.older: Mapping[int, int] | None = None

    def start(self) -> None:
        """Begin; raises :class:`ProfilerBusyError` if another profiler records, for torch has room for one."""
        require_free(is_profiling())
        is_set = _KINETO in os.environ
        os.environ.setdefault(_KINETO, "99")  # the profiler's library writes two lines to stderr at its first start
        self._is_running = True
        self._log.__enter__()
        if not is_set:
            del os.environ[_KINETO]

    def abandon(self) -> None:
        """End the profiler if this is the one that runs."""
        if self._is_running and is_profiling():
            self._log.__exit__(None, None, None)
        self._is_running = False

    def mark(self, label: str) -> None:
        """End the current phase and begin the next."""
        with record_function(_MARK + label):
            pass

    def stop(self) -> None:
        """End, and fill the phases and the timeline from the log."""
        self.abandon()
        events, own = _marks_and_blocks(self._log), dict[int, int]()
        self.timeline.append((0.0, 0))
        for event, block in events:
            if block is None:
                super().mark(event.name.removeprefix(_MARK))
                continue
            size_bytes = block.alloc_size
            if size_bytes > 0:
                own[block.ptr] = size_bytes
            elif not self._of_step:  # older blocks may be garbage cycles
                size_bytes = -own.pop(block.ptr, 0)
            else:
                if block.ptr not in own:
                    self.given_back.add(block.ptr)
                older_bytes = own.pop(block.ptr, None)
                if self.older is not None:
                    size_bytes = -(self.older.get(block.ptr, 0) if older_bytes is None else older_bytes)
            self.count(size_bytes)
            self.timeline.append(((event.start_time_ns - events[0][0].start_time_ns) / 1e9, self.end_bytes))
        super().mark("")


def _marks_and_blocks(log: profile) -> list[tuple[Any, Any]]:
    """Events of the CPU in a log, in order, with the blocks that were taken or (negative sizes) given back."""
    results = log.kineto_results
    assert results is not None
    found, pending = [], list[Any](results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        block = allocation_of(event)
        if event.name.startswith(_MARK) if block is None else block.device.type == "cpu":
            found.append((event, block))
    return sorted(found, key=lambda each: each[0].start_time_ns)


class _CudaRecording(Recording):
    """Reads the allocator at every mark. Allocation happens on the host, so nothing has to be synchronized.

    A step's statistics are the user's as well, reset once: a phase shows its own peak if that is the highest so far.
    """

    def __init__(self, device: torch.device, of_step: bool) -> None:
        super().__init__()
        self._device, self._of_step = device, of_step
        self._base = self._highest = 0

    def start(self) -> None:
        """Begin."""
        await_autograd(self._device)
        if torch.distributed.is_initialized() and not self._of_step:
            level = None
            while level != (level := self._read().allocated_bytes):  # other threads free what they sent
                time.sleep(1e-3)
        self._base = self._read().allocated_bytes
        torch.cuda.reset_peak_memory_stats(self._device)

    def mark(self, label: str) -> None:
        """End the current phase and begin the next."""
        levels = self._read()
        peak = levels.peak_bytes - self._base
        self.reserved_bytes = levels.peak_reserved_bytes
        self.end_bytes = levels.allocated_bytes - self._base
        seen = not self._of_step or peak > self._highest
        self._highest = max(self._highest, peak)
        self._peak = max(self._start, self.end_bytes, peak if seen else self.end_bytes)
        super().mark(label)
        if not self._of_step:
            torch.cuda.reset_peak_memory_stats(self._device)

    def _read(self) -> _Levels:
        # ``torch.cuda.memory_allocated`` and its like flatten and sort 160 figures for each answer: 0.1 to 0.5 ms beside
        # an H200, and a watched step of a ResNet-18 asked 75 times.
        statistics = torch.cuda.memory_stats_as_nested_dict(self._device)
        if not statistics:  # nothing has used the device yet
            return _Levels(0, 0, 0)
        allocated, reserved = statistics["allocated_bytes"]["all"], statistics["reserved_bytes"]["all"]
        return _Levels(allocated["current"], allocated["peak"], reserved["peak"])


class _Levels(NamedTuple):
    """Bytes of a device, and the most of them since the last reset."""

    allocated_bytes: int
    peak_bytes: int
    peak_reserved_bytes: int


def await_autograd(device: torch.device) -> None:
    """Wait until autograd's GPU thread lets go of the last backward, whose results it may hold beyond its end."""
    with torch.enable_grad():
        nothing = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(nothing.view(0), nothing, nothing.detach())


# -------------------------------------------------------- The memory of a whole training step, as the allocator saw it.

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

    def start(self, older: Mapping[int, int] | None = None) -> None:
        """Begin. On CUDA this resets the device's peak statistics.

        Args:
            older: On the CPU, sizes by address of older blocks whose frees count, and no others; by default all count.
        """
        recording = self._meter.new_recording(of_step=True)
        if isinstance(recording, _CpuRecording):
            recording.older = older
        recording.start()
        self._recording = recording

    def lap(self, label: str = END) -> None:
        """Begin a phase; without a label, what comes behind the backward."""
        if self._recording is not None:
            self._recording.mark(label)

    def stop(self) -> Recording:
        """End and return what was measured."""
        recording, self._recording = self._recording, None
        if recording is None:
            raise ProfilingError("StepMeter.stop() without start(): call start() before the step")
        recording.stop()
        return recording


# ------------------------------------- A progress bar for measuring, which stays out of sight while measuring is quick.


_LONG_SECONDS = 2.0


@contextmanager
def measuring_progress(
    *, enabled: bool = True, clock: Callable[[], float] = time.monotonic, console: Console | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Show how many stages are measured once that takes long, on the error stream by default, until the end."""
    started, shown = clock(), ExitStack()
    bar: Progress | None = None

    def show(done: int, total: int) -> None:
        nonlocal bar, enabled
        if enabled and bar is None and clock() - started >= _LONG_SECONDS:
            bar = Progress(console=console or Console(stderr=True), transient=True)
            bar.add_task("measuring stages", total=total)
            try:
                shown.enter_context(bar)
            except LiveError:  # another live display, such as the trainer's own bar, has the terminal
                enabled, bar = False, None
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done, total=total)

    with shown:
        yield show
