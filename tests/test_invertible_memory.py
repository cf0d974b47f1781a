"""What a run of invertible modules holds: one activation, however deep."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from lightning_rotor.invertible import AdditiveCoupling, InvertibleSequential, invertible_checkpoint
from lightning_rotor.profiling.meters import CpuMeter
from tests.invertible import Unfused

ROWS, CHANNELS = 4096, 8


def coupling() -> AdditiveCoupling:
    half = CHANNELS // 2
    return AdditiveCoupling(
        *(nn.Sequential(nn.Linear(half, half), nn.BatchNorm1d(half), nn.ReLU(), nn.Linear(half, half)) for _ in "fg")
    )


def held_and_peak(net: nn.Module, *, one_by_one: bool = False) -> tuple[float, float]:
    """Bytes above model, input and gradients at the end of the forward and at most, in units of the input."""
    x = torch.randn(ROWS, CHANNELS, requires_grad=True)
    for tensor in (x, *net.parameters()):
        tensor.grad = torch.zeros_like(tensor)
    gc.collect()
    with CpuMeter().recording() as recording:
        recording.mark("forward")
        if one_by_one:
            output = x
            for block in net.children():
                output = invertible_checkpoint(block, output)
        else:
            output = invertible_checkpoint(net, x)
        recording.mark("backward")
        output.backward(torch.ones(()).expand_as(output))
        recording.mark("end")
    phases = {phase.label: phase for phase in recording.phases}
    peak = max(phase.peak_bytes for phase in phases.values())
    return phases["forward"].end_bytes / x.nbytes, peak / x.nbytes


@pytest.mark.parametrize("depth", [16, 64, 256])
def test_depth_costs_nothing(depth: int):
    held, peak = held_and_peak(InvertibleSequential(*(coupling() for _ in range(depth))))
    assert 1 <= held < 1.1  # samples for the guard: 32 bytes a block
    assert peak < 7.5


def test_without_a_fused_backward():
    held, peak = held_and_peak(InvertibleSequential(*(Unfused(coupling()) for _ in range(64))))
    assert 1 <= held < 1.05
    assert peak < 8


def test_several_calls_hold_one_output():
    held, _ = held_and_peak(InvertibleSequential(*(coupling() for _ in range(64))), one_by_one=True)
    assert 1 <= held < 1.05
