"""Costs that are measured while other work has the processor are measured again."""

from __future__ import annotations

import itertools
import threading
import time

import torch
from torch import nn

from lightning_rotor import Checkpointable

SLEEP = 0.02


class Interrupted(nn.Module):
    """Sleeps in most of its forwards, as when another process has the processor meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if next(CALLS) % 4:
            time.sleep(SLEEP)
        return self.computed(x)

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().sum()) == 12345.0:  # no recording leaves its code out
            x = x + 1
        return torch.tanh(self.linear(x))


CALLS = itertools.count()  # not put back after a run, as the state of a machine is not


def test_interrupted_runs_are_no_costs() -> None:
    net = Checkpointable(nn.Sequential(*[Interrupted() for _ in range(3)]), torch.randn(8, 16))
    stages = list(net.chain)
    assert all(stage.keep.forward_seconds < SLEEP / 4 for stage in stages)
    assert all(stage.keep.backward_seconds < SLEEP / 4 for stage in stages)


class Waiting(Interrupted):
    """Waits in each forward for a thread of its own: what it costs is what it takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=time.sleep, args=(SLEEP / 4,))
        thread.start()
        thread.join()
        return self.computed(x)


def test_a_layer_that_always_waits_is_measured_with_its_waits() -> None:
    net = Checkpointable(nn.Sequential(Waiting(), Waiting()), torch.randn(8, 16))
    assert net.chain.stages[-1].keep.forward_seconds > SLEEP / 5  # the first one's code is recorded without the wait
