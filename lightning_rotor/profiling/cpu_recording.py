"""Memory of the host as torch's allocator reports it to torch's profiler: every block of every kernel, to the byte.

That is the only source with all bytes. Resident set size is useless, as the allocator keeps freed pages. Dispatch modes
and trackers of storages miss what kernels take for themselves: they saw 0.4 to 0.75 of the true peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_rotor.errors import ProfilerBusyError
from lightning_rotor.private.torch_names import AllocationLog, blocks_in, is_profiling
from lightning_rotor.profiling.memory_recording import Recording
from lightning_rotor.profiling.ranks import ALONE, Ranks

# A mark is a block of this size that is taken and given back at once: the log's clock is the only one that orders marks
# and blocks, and the log has blocks alone. Nobody else takes so odd a size where a mark has found its block.
_MARK_BYTES = 97


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
        unknown_too: Other older blocks count all the same, with the sizes of the log.
    """

    def __init__(
        self,
        *,
        of_step: bool = False,
        older: Mapping[int, int] | None = None,
        unknown_too: bool = False,
    ) -> None:
        super().__init__()
        # One, and another one after each pause.
        self._logs: list[AllocationLog] = []
        # Labels and addresses of marks.
        self._marks: list[tuple[str, int]] = []
        self._of_step = of_step
        self._older = older or {}
        self._unknown_too = unknown_too or older is None
        self._is_running = False
        # Sizes by address of blocks that were taken since the start.
        self._own: dict[int, int] = {}

    def start(self) -> None:
        """Begin; raises :class:`ProfilerBusyError` if another profiler records, for torch has room for one."""
        require_free(is_profiling())
        self._is_running = True
        self._logs.append(AllocationLog())
        self._logs[-1].__enter__()

    def pause(self) -> None:
        """Give the profiler away until :meth:`resume`. What is taken and given back in between does not count."""
        self.abandon()

    def resume(self) -> None:
        """Go on."""
        self.start()

    def abandon(self) -> None:
        """End the profiler if this is the one that runs."""
        if self._is_running and is_profiling():
            self._logs[-1].__exit__(None, None, None)
        self._is_running = False

    def mark(self, label: str) -> None:
        """End the current phase and begin the next."""
        # No tensor, which a mode of the user's would see.
        block = torch.UntypedStorage(_MARK_BYTES)
        self._marks.append((label, block.data_ptr()))

    def stop(self) -> None:
        """End, and fill the phases and the timeline from the log."""
        self.abandon()
        # The profiler has its events only when it is over, so nothing can be counted before.
        events = [event for log in self._logs for event in blocks_in(log)]
        self.timeline.append((0.0, 0))
        marks = iter(self._marks)
        label, mark_address = next(marks, ("", None))
        is_in_mark = False
        for time_ns, block in events:
            if is_in_mark:
                # Its end: a mark's block is given back at once.
                is_in_mark = False
                continue
            if block.ptr == mark_address and block.alloc_size == _MARK_BYTES:
                super().mark(label)
                label, mark_address = next(marks, ("", None))
                is_in_mark = True
                continue
            self.count(self._counted_bytes(block))
            seconds = (time_ns - events[0][0]) / 1e9
            self.timeline.append((seconds, self.end_bytes))
        super().mark("")

    def _counted_bytes(self, block: Any) -> int:
        """Bytes by which an event of the allocator changes the level; negative where a block is given back."""
        size_bytes: int = block.alloc_size
        address = block.ptr
        if size_bytes > 0:
            # Where a block of this recording was, it was given back in a pause.
            unseen_bytes = self._own.get(address, 0)
            self._own[address] = size_bytes
            return size_bytes - unseen_bytes
        if address in self._own:
            own_bytes = self._own.pop(address)
            # Where all older blocks count, the log's own word does, for old and new ones alike.
            if self._of_step and self._unknown_too:
                return size_bytes
            return -own_bytes
        if not self._of_step:
            return 0
        self.given_back.add(address)
        known_bytes = self._older.get(address)
        if known_bytes is not None:
            return -known_bytes
        return size_bytes if self._unknown_too else 0
