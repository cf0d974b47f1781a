"""The memory of whole steps, on the CPU."""

from __future__ import annotations

import pytest
import torch

from lightning_rotor.errors import ProfilingError
from lightning_rotor.profiling.step_meter import StepMeter
from tests.models import CPU


def test_step_meter_measures_what_a_step_leaves_and_takes() -> None:
    meter = StepMeter(CPU)
    meter.start()
    kept, gone = torch.empty(1000), torch.empty(500)
    del gone
    trace = meter.stop()
    assert (trace.peak_bytes, trace.end_bytes) == (6000, 4000)
    assert [level for _, level in trace.timeline] == [0, 4000, 6000, 4000]
    meter.start()
    del kept  # from the step before, which was measured too
    assert meter.stop().end_bytes == -4000


def test_step_meter_takes_no_older_block_for_one_that_lay_at_its_address_before() -> None:
    meter = StepMeter(CPU)
    for older in (None, {1: 1}):
        meter.start()
        blocks = [torch.empty(200_000 + number) for number in range(20)]
        meter.stop()
        blocks.clear()
        others = [torch.empty(100_000) for _ in range(40)]  # not watched, some of them where a block was
        meter.start(older)
        others.clear()
        freed_bytes = -meter.stop().end_bytes
        if older is None and freed_bytes == 0:
            pytest.fail("no address was used again, so this test shows nothing")
    assert freed_bytes == 0


def test_step_meter_counts_the_older_blocks_that_it_is_told_of() -> None:
    meter = StepMeter(CPU)
    meter.start()
    told, untold = torch.empty(1000), torch.empty(500)
    meter.stop()
    address = told.data_ptr()
    meter.start(older={address: 4000})
    del told, untold
    recording = meter.stop()
    assert recording.end_bytes == -4000
    assert address in recording.given_back


def test_step_meter_refuses_wrong_use() -> None:
    with pytest.raises(ProfilingError, match="without start"):
        StepMeter(CPU).stop()
    with pytest.raises(ProfilingError, match="'meta' cannot be measured"):
        StepMeter(torch.device("meta"))


def test_laps_are_phases() -> None:
    meter = StepMeter(CPU)
    meter.lap("before the start, of nothing")
    meter.start()
    block = torch.empty(1000)
    meter.lap("free")
    del block
    meter.lap()
    first, second, last = meter.stop().phases
    assert (first.label, first.end_bytes) == ("", 4000)
    assert (second.label, second.start_bytes, second.end_bytes) == ("free", 4000, 0)
    assert (last.label, last.peak_bytes) == ("end", 0)
