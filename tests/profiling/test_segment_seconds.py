"""Seconds that a segment takes of the host beyond what runs in it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_rotor.profiling import StepMeter
from lightning_rotor.profiling.meters import CpuMeter
from lightning_rotor.profiling.segment_seconds import interlude, segment_seconds
from tests.models import CPU


def test_the_rest_of_a_step_fills_the_caches_without_memory_that_counts() -> None:
    def seconds(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    meter = StepMeter(CPU)
    meter.start()
    nothing, near, whole = (interlude(CPU, CpuMeter(), size) for size in (0, 4 * 2**20, 32 * 2**20))
    shortest = [min(seconds(each) for _ in range(5)) for each in (nothing, near, whole)]
    assert meter.stop().peak_bytes == 0
    assert shortest[0] < shortest[1] < shortest[2] < 0.02


def test_other_devices_are_not_swept() -> None:
    assert interlude(torch.device("cuda"), CpuMeter())() == interlude(CPU, CpuMeter(), 0)() == 0.0


def test_a_segment_takes_time_of_the_host_which_is_measured_once() -> None:
    first = segment_seconds(CPU, CpuMeter())
    assert 0.0 < first < 0.1
    assert segment_seconds(CPU, CpuMeter()) == first
