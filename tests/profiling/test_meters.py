"""Meters: one for each kind of device, and what holds while they record."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
import torch

from lightning_rotor.errors import ProfilingError
from lightning_rotor.private.torch_names import is_profiling
from lightning_rotor.profiling import AllocatorMeter, CpuMeter, meter_for


def test_each_kind_of_device_has_a_meter() -> None:
    assert isinstance(meter_for(torch.device("cpu")), CpuMeter)
    gpu = meter_for(torch.device("cuda", 1))
    assert isinstance(gpu, AllocatorMeter)
    assert (gpu.block_bytes, gpu.needs_warm_up, gpu.is_taken) == (512, True, False)


def test_a_device_without_a_meter_is_refused_by_name() -> None:
    with pytest.raises(ProfilingError, match="memory on device 'meta' cannot be measured: expected the model on"):
        meter_for(torch.device("meta"))


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_a_meter_records(collects: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with CpuMeter().recording():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        gc.enable() if was_enabled else gc.disable()


def test_an_exception_ends_a_recording() -> None:
    meter = CpuMeter()

    def fail() -> None:
        assert meter.is_taken
        raise ZeroDivisionError("while it records")

    with pytest.raises(ZeroDivisionError, match="while it records"), meter.recording():
        fail()
    assert not is_profiling()
    assert not meter.is_taken


def test_seconds_of_the_cpu_are_the_performance_counters() -> None:
    meter = CpuMeter()
    start = meter.now()
    assert 0 <= meter.seconds_between(start, meter.now()) < 1
    assert meter.seconds_between(1.0, 3.5) == 2.5


def test_seconds_of_a_gpu_are_those_between_events() -> None:
    @dataclass
    class Event:
        milliseconds: float
        waits: int = 0

        def synchronize(self) -> None:
            self.waits += 1

        def elapsed_time(self, other: Event) -> float:
            return other.milliseconds - self.milliseconds

    start, end = Event(10.0), Event(260.0)
    assert AllocatorMeter(torch.device("cuda")).seconds_between(start, end) == 0.25  # type: ignore[arg-type]
    assert (start.waits, end.waits) == (0, 1)
