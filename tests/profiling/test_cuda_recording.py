"""Bytes of a GPU from its caching allocator's statistics."""

from __future__ import annotations

import pytest
import torch

from lightning_rotor.profiling.cuda_recording import CudaRecording

KIB = 1024


def record_two_phases(recording: CudaRecording, device: torch.device) -> None:
    recording.start()
    recording.mark("large")
    large = torch.empty(64 * KIB, dtype=torch.uint8, device=device)
    del large
    recording.mark("small")
    small = torch.empty(8 * KIB, dtype=torch.uint8, device=device)
    recording.mark("end")
    del small
    recording.stop()


@pytest.mark.gpu
def test_each_phase_of_a_stage_has_its_own_peak() -> None:
    device = torch.device("cuda", 0)
    recording = CudaRecording(device, of_step=False)
    record_two_phases(recording, device)
    levels = [(phase.label, phase.start_bytes, phase.peak_bytes, phase.end_bytes) for phase in recording.phases[1:]]
    assert levels == [("large", 0, 64 * KIB, 0), ("small", 0, 8 * KIB, 8 * KIB), ("end", 8 * KIB, 8 * KIB, 0)]
    assert recording.reserved_bytes is not None
    assert recording.reserved_bytes >= 64 * KIB


@pytest.mark.gpu
def test_a_step_leaves_the_users_statistics_as_they_grow() -> None:
    device = torch.device("cuda", 0)
    recording = CudaRecording(device, of_step=True)
    base = torch.cuda.memory_allocated(device)
    record_two_phases(recording, device)
    assert torch.cuda.max_memory_allocated(device) == base + 64 * KIB
    # A lower peak is behind the highest one, so a phase shows the levels at its ends.
    assert [phase.peak_bytes for phase in recording.phases[1:]] == [64 * KIB, 8 * KIB, 8 * KIB]


@pytest.mark.gpu
def test_what_is_measured_in_a_pause_of_a_step_does_not_count() -> None:
    device = torch.device("cuda", 0)
    recording = CudaRecording(device, of_step=True)
    recording.start()
    recording.mark("step")
    before = torch.empty(16 * KIB, dtype=torch.uint8, device=device)
    gone = torch.empty(16 * KIB, dtype=torch.uint8, device=device)
    del gone
    recording.pause()
    inner = CudaRecording(device, of_step=False)
    inner.start()
    left = torch.empty(256 * KIB, dtype=torch.uint8, device=device)
    inner.stop()
    recording.resume()
    after = torch.empty(8 * KIB, dtype=torch.uint8, device=device)
    recording.mark("end")
    recording.stop()
    step = recording.first("step")
    assert (step.start_bytes, step.peak_bytes, step.end_bytes) == (0, 32 * KIB, 24 * KIB)
    assert inner.peak_bytes == 256 * KIB
    del before, left, after
