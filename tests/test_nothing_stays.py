"""Tensors go when nobody needs them any more, whether or not a backward came: autograd's nodes may hold what holds them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_rotor import Checkpointable
from lightning_rotor.execution.executor import Executor
from lightning_rotor.invertible import AdditiveCoupling, invertible_checkpoint
from lightning_rotor.profiling import profile_chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.stages.sequential import sequential_stages

WIDTH = 8


class Block(nn.Module):
    """Its operations save what they return."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.tanh(self.linear(x).relu()))


class Smooth(Block):
    """Its backward can do with an output that was rebuilt."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(super().forward(x))


def coupling() -> AdditiveCoupling:
    return AdditiveCoupling(Block(WIDTH // 2), Block(WIDTH // 2))


def more_tensors_after(run: Callable[[], object]) -> int:
    """How many tensors a third run adds to those that two of them left: caches are full then."""
    counts = []
    for _ in range(3):
        run()
        gc.collect()
        counts.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
    return counts[2] - counts[1]


def test_measuring_leaves_no_tensor() -> None:
    net, batch = nn.Sequential(Block(), coupling(), Block()), torch.randn(4, WIDTH)
    assert more_tensors_after(lambda: Checkpointable(net).measure(batch)) == 0


@pytest.mark.parametrize("schedule", ["0 1-2:1 3 4:1", "(0 1-2:1) 3 4:1", "0 1-2 (3) 4"])
def test_a_forward_leaves_no_tensor_if_no_backward_comes(schedule: str) -> None:
    net, batch = nn.Sequential(Smooth(), coupling(), coupling(), Smooth(), coupling()), torch.randn(4, WIDTH)
    profile = profile_chain(sequential_stages(net), batch, repeats=1)
    run = Executor(profile.stages, profile.chain, Schedule.parse(schedule), profile.states)
    assert more_tensors_after(lambda: run(batch)) == 0
    assert more_tensors_after(lambda: invertible_checkpoint([net[1], net[2]], batch)) == 0
    assert more_tensors_after(lambda: run(batch).sum().backward()) == 0
