"""Bytes of the host from the allocator's events: which blocks count, and when the profiler is somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_rotor.errors import ProfilerBusyError
from lightning_rotor.private.profiler import is_profiling
from lightning_rotor.profiling.cpu_recording import CpuRecording, require_free
from lightning_rotor.profiling.meters import CpuMeter
from lightning_rotor.profiling.ranks import Ranks


def test_cpu_recording_counts_kernel_temporaries_and_ignores_older_blocks() -> None:
    old = [torch.empty(1000)]
    with CpuMeter().recording() as recording:
        recording.mark("allocate")
        block = torch.empty(2000)
        recording.mark("free")
        old.clear()
        del block
        recording.mark("end")
    allocate, free = recording.phases[1:3]
    assert (allocate.start_bytes, allocate.peak_bytes, allocate.end_bytes) == (0, 8000, 8000)
    assert (free.label, free.peak_bytes, free.end_bytes) == ("free", 8000, 0)


def test_a_recording_of_a_stage_ignores_older_blocks_and_one_of_a_step_counts_them() -> None:
    before = CpuRecording(of_step=True)
    before.start()
    blocks = [torch.empty(1000) for _ in range(2)]
    before.stop()
    addresses = [block.data_ptr() for block in blocks]
    of_stage = CpuRecording()
    of_stage.start()
    del blocks[0]
    of_stage.stop()
    assert (of_stage.end_bytes, of_stage.given_back) == (0, set())
    of_step = CpuRecording(of_step=True)
    of_step.start()
    blocks.clear()
    of_step.stop()
    assert (of_step.end_bytes, of_step.given_back) == (-4000, {addresses[1]})


def test_a_block_that_went_in_a_pause_counts_no_more_once_its_place_is_taken() -> None:
    recording = CpuRecording(of_step=True, older={})

    def counted_bytes(address: int, size_bytes: int) -> int:
        return recording._counted_bytes(SimpleNamespace(ptr=address, alloc_size=size_bytes))

    assert counted_bytes(1, 100) == 100
    assert counted_bytes(1, 120) == 20
    assert counted_bytes(1, -120) == -120
    assert counted_bytes(1, 80) == 80


def test_marks_are_no_blocks_of_the_users() -> None:
    with CpuMeter().recording() as recording:
        recording.mark("nothing")
        recording.mark("two")
        blocks = [torch.UntypedStorage(97) for _ in range(2)]
        recording.mark("end")
    levels = [(phase.label, phase.start_bytes, phase.peak_bytes, phase.end_bytes) for phase in recording.phases]
    assert levels == [("", 0, 0, 0), ("nothing", 0, 0, 0), ("two", 0, 194, 194), ("end", 194, 194, 194)]
    del blocks


def test_an_abandoned_recording_gives_the_profiler_back() -> None:
    recording = CpuRecording()
    recording.start()
    assert is_profiling()
    recording.abandon()
    assert not is_profiling()
    recording.abandon()


def test_a_recording_leaves_the_environment_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in (None, "3"):
        monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
        if level is not None:
            monkeypatch.setenv("KINETO_LOG_LEVEL", level)
        with CpuMeter().recording():
            pass
        assert os.environ.get("KINETO_LOG_LEVEL") == level


def test_a_profiler_of_the_users_is_in_the_way() -> None:
    with torch.autograd.profiler.profile(), pytest.raises(ProfilerBusyError, match=r"torch\.profiler is recording:"):
        CpuRecording().start()


def test_a_profiler_on_another_process_is_in_the_way_where_processes_measure_together() -> None:
    class Together(Ranks):
        def any(self, is_so: bool) -> bool:
            return True

    require_free(is_taken=False)
    with pytest.raises(ProfilerBusyError, match="is recording on another process: measure before"):
        require_free(is_taken=False, ranks=Together())


def test_recording_writes_nothing_to_stderr() -> None:
    """The profiler's library would, about each start, in a process where nobody has used it before."""
    code = (
        "import torch\n"
        "from lightning_rotor.private.torch_names import AllocationLog\n"
        "for _ in range(2):\n"
        "    with AllocationLog():\n"
        "        torch.ones(4)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
