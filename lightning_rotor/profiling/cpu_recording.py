"""Memory of the host as torch's allocator reports it to torch's profiler: every block of every kernel, to the byte.

That is the only source with all bytes. Resident set size is useless, as the allocator keeps freed pages. Dispatch modes
and trackers of storages miss what kernels take for themselves: they saw 0.4 to 0.75 of the true peak.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.autograd.profiler import profile, record_function

from lightning_rotor.errors import ProfilerBusyError
from lightning_rotor.private.torch_names import AllocationLog, allocation_of, is_profiling
from lightning_rotor.profiling.memory_recording import Recording
from lightning_rotor.profiling.ranks import ALONE, Ranks

# Marks are events in the same log as the blocks, since its clock is the only one that orders both.
_MARK = "lightning_rotor::"
_KINETO = "KINETO_LOG_LEVEL"


def require_free(is_taken: bool, ranks: Ranks = ALONE) -> None:
    """Raise ``ProfilerBusyError`` if a meter is taken, here or on a process that measures together with this one."""
    if ranks.any(is_taken):
        where = "" if is_taken else " on another process"
        raise ProfilerBusyError(
            f"memory cannot be measured while torch.profiler is recording{where}: measure before it starts, or start "
            "it a few steps later (schedule=torch.profiler.schedule(wait=2, ...))"
        )


class CpuRecording(Recording):
    """Marks go into the allocator's log, which is read at the end.

    Args:
        of_step: Frees of older blocks count as well. In the recording of a stage they do not: they may be garbage
            cycles.
        older: Sizes by address of older blocks, of which alone frees then count. The allocator's log may know a wrong
            size of an older block: one at the same address was taken under the eyes of an earlier recording, and given
            back behind it (torch 2.14).
    """

    def __init__(self, *, of_step: bool = False, older: Mapping[int, int] | None = None) -> None:
        super().__init__()
        self._log = AllocationLog()
        self._of_step = of_step
        self._older = older
        self._is_running = False
        # Sizes by address of blocks that were taken since the start.
        self._own: dict[int, int] = {}

    def start(self) -> None:
        """Begin; raises :class:`ProfilerBusyError` if another profiler records, for torch has room for one."""
        require_free(is_profiling())
        # The profiler's library writes two lines to stderr at its first start.
        is_set = _KINETO in os.environ
        os.environ.setdefault(_KINETO, "99")
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
        events = _marks_and_blocks(self._log)
        self.timeline.append((0.0, 0))
        for event, block in events:
            if block is None:
                super().mark(event.name.removeprefix(_MARK))
                continue
            self.count(self._counted_bytes(block))
            seconds = (event.start_time_ns - events[0][0].start_time_ns) / 1e9
            self.timeline.append((seconds, self.end_bytes))
        super().mark("")

    def _counted_bytes(self, block: Any) -> int:
        """Bytes by which an event of the allocator changes the level; negative where a block is given back."""
        size_bytes: int = block.alloc_size
        address = block.ptr
        if size_bytes > 0:
            self._own[address] = size_bytes
            return size_bytes
        if address in self._own:
            own_bytes = self._own.pop(address)
            # Where all older blocks count, the log's own word does, for old and new ones alike.
            return size_bytes if self._of_step and self._older is None else -own_bytes
        if not self._of_step:
            return 0
        self.given_back.add(address)
        return size_bytes if self._older is None else -self._older.get(address, 0)


def _marks_and_blocks(log: profile) -> list[tuple[Any, Any]]:
    """Events of the CPU in a log, in order, with the blocks that were taken or (negative sizes) given back."""
    results = log.kineto_results
    assert results is not None
    events = []
    pending = list[Any](results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        block = allocation_of(event)
        is_wanted = event.name.startswith(_MARK) if block is None else block.device.type == "cpu"
        if is_wanted:
            events.append((event, block))
    events.sort(key=_start_of)
    return events


def _start_of(row: tuple[Any, Any]) -> int:
    event, _ = row
    start_ns: int = event.start_time_ns
    return start_ns
