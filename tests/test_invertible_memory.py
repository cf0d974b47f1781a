"""What a run of invertible modules holds: one activation, however deep."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.invertible import Forward, held_and_peak
from lightning_rotor.execution.executor import Executor
from lightning_rotor.invertible import AdditiveCoupling, InvertibleSequential, invertible_checkpoint
from lightning_rotor.profiling import profile_chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from lightning_rotor.stages.sequential import sequential_stages
from tests.grids import few
from tests.invertible import Unfused

ROWS, CHANNELS = 4096, 8


def coupling() -> AdditiveCoupling:
    half = CHANNELS // 2
    return AdditiveCoupling(
        *(nn.Sequential(nn.Linear(half, half), nn.BatchNorm1d(half), nn.ReLU(), nn.Linear(half, half)) for _ in "fg")
    )


def measured(net: InvertibleSequential, forward: Forward = invertible_checkpoint) -> tuple[float, float]:
    """Bytes above model, input and gradients at the end of the forward and at most, in units of the input."""
    x = torch.randn(ROWS, CHANNELS, requires_grad=True)
    for tensor in (x, *net.parameters()):
        tensor.grad = torch.zeros_like(tensor)
    found = held_and_peak(forward, net, x)
    return found["held"], found["peak"]


def one_by_one(net: InvertibleSequential, x: torch.Tensor) -> torch.Tensor:
    for block in net:
        x = invertible_checkpoint(block, x)
    return x


@pytest.mark.parametrize("depth", few([16, 64, 256], 64))
def test_depth_costs_nothing(depth: int):
    held, peak = measured(InvertibleSequential(*(coupling() for _ in range(depth))))
    assert 1 <= held < 1.1  # samples for the guard: 32 bytes a block
    assert peak < 7.5


def test_without_a_fused_backward():
    held, peak = measured(InvertibleSequential(*(Unfused(coupling()) for _ in range(64))))
    # Samples for the guard, 32 bytes a block; and as it is none of ours, it might read the statistics of its two normalizations.
    statistics = 2 * (2 * 4 * CHANNELS // 2 + 8)
    assert held == pytest.approx(1 + 64 * (32 + statistics) / (4 * ROWS * CHANNELS), abs=0.006)
    assert peak < 8


def test_several_calls_hold_one_output():
    held, _ = measured(InvertibleSequential(*(coupling() for _ in range(64))), one_by_one)
    assert 1 <= held < 1.05


@pytest.mark.parametrize("depth", few([16, 64], 16))
def test_depth_costs_nothing_in_a_plan(depth: int):
    """What a plan holds between forward and backward, as simulated and as the allocator has it."""
    block = coupling()
    net = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), *[block] * depth)  # equal stages are measured once
    x = torch.randn(ROWS, CHANNELS)
    profile = profile_chain(sequential_stages(net), x, repeats=1)
    stages = profile.chain.stages
    # The last option is the fused one; how many are before it is a matter of measured seconds.
    inverted = " ".join(f"{number}:{len(stages[number].options) - 1}" for number in range(1, depth + 1))
    schedule = Schedule.parse(f"(0) {inverted}")
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = held_and_peak(
        lambda _, x: Executor(profile.stages, profile.chain, schedule, profile.states)(x), net, x.requires_grad_()
    )
    simulated = simulate(profile.chain, schedule, gradients_exist=True)
    assert found["held"] == pytest.approx(simulated.held_bytes / x.nbytes, abs=0.01)
    assert 1 <= found["held"] < 1.1  # samples for the guard: 32 bytes a block
    assert found["peak"] < 7.5
