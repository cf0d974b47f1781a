"""A meter that follows storages, and a clock that counts operations."""

from __future__ import annotations

import torch

from lightning_rotor.profiling.accelerators import Accelerator
from lightning_rotor.profiling.estimating_meter import EstimatingMeter

SLOW = Accelerator("slow", 2**30, bandwidth=1e6, flops=1e6, half_flops=1e6)


def test_the_meter_sees_storages_live_and_die() -> None:
    with EstimatingMeter(SLOW) as meter, meter.recording() as recording:
        first = torch.empty(256)
        recording.mark("second")
        second = first + 1
        view = second[:10]
        del first, second
        recording.mark("none")
        del view
    assert [(phase.label, phase.start_bytes, phase.peak_bytes, phase.end_bytes) for phase in recording.phases] == [
        ("", 0, 1024, 1024),
        ("second", 1024, 2048, 1024),
        ("none", 1024, 1024, 0),
    ]
    assert meter.now() > 0


def test_views_take_no_time_and_what_writes_in_place_does() -> None:
    with EstimatingMeter(SLOW) as meter:
        x = torch.ones(1000)
        made = meter.now()
        x.view(10, 100).t()
        assert meter.now() == made
        x.mul_(2)
        in_place = meter.now() - made
    assert in_place > 4000 / 1e6


def test_products_take_the_time_of_their_arithmetic() -> None:
    with EstimatingMeter(SLOW) as meter:
        x = torch.ones(100, 100)
        start = meter.now()
        x @ x
        product = meter.now() - start
    assert product > 2 * 100**3 / 1e6


def test_sizes_are_multiples_of_blocks() -> None:
    with EstimatingMeter(SLOW, block_bytes=512) as meter, meter.recording() as recording:
        block = torch.empty(1)
    assert block.numel() == 1
    assert recording.end_bytes == 512
