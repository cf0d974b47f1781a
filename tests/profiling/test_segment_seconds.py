"""Seconds that a segment takes of the host beyond what runs in it."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_rotor.profiling import StepMeter, options
from tests.models import CPU


def test_the_rest_of_a_step_fills_the_caches_without_memory_that_counts() -> None:
    def seconds(interlude: Callable[[], object]) -> float:
        start = time.perf_counter()
        interlude()
        return time.perf_counter() - start

    meter = StepMeter(CPU)
    meter.start()
    nothing, near, whole = (options.interlude(CPU, size) for size in (0, 4 * 2**20, 32 * 2**20))
    shortest = [min(seconds(each) for _ in range(5)) for each in (nothing, near, whole)]
    assert meter.stop().peak_bytes == 0
    assert shortest[0] < shortest[1] < shortest[2] < 0.02
