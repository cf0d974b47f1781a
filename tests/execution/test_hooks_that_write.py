"""Hooks that write to buffers which the forward reads: they run again in a recomputation, as they do not only look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor import BudgetError, Checkpointable
from tests.training import assert_same_bits


class Centred(nn.Module):
    def __init__(self, hook: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_forward_pre_hook(hook)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.second((self.first(rows - self.mean)).tanh())


def writes(module: Any, args: Any) -> None:
    module.mean.copy_(args[0].detach().mean(0))


def adds(module: Any, args: Any) -> None:
    module.mean += args[0].detach().mean(0)


def replaces(module: Any, args: Any) -> None:
    module.mean = args[0].detach().mean(0)


class WrittenFromBelow(nn.Module):
    """A hook of a layer writes to a buffer of the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("mean", torch.zeros(64))
        self.first.register_forward_hook(lambda module, args, output: self.note(output))

    def note(self, output: torch.Tensor) -> None:
        self.mean.copy_(output.detach().mean(0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        # Values decide, so that it is one stage.
        if float(hidden.detach().sum()) == 1e9:
            hidden = hidden + 1
        return rows + self.second((hidden - self.mean).tanh())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "writes": lambda: Centred(writes),
    "adds": lambda: Centred(adds),
    "replaces": lambda: Centred(replaces),
    "from below": WrittenFromBelow,
}


def steps(net: nn.Module, trained: nn.Module, number: int) -> None:
    optimizer = torch.optim.SGD(trained.parameters(), 0.05)
    for step in range(number):
        rows = torch.randn(128, 16, generator=torch.Generator().manual_seed(step)) + step
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", LAYERS)
def test_a_hook_that_writes_to_a_buffer_runs_again(kind: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(LAYERS[kind]() for _ in range(4)))

    with pytest.raises(BudgetError) as caught:
        Checkpointable(made(), mem_limit=1, show_progress=False)(torch.randn(128, 16))
    plain, net = made(), made()
    planned = Checkpointable(net, mem_limit=int(1.02 * caught.value.minimum_bytes), show_progress=False)
    steps(plain, plain, 3)
    steps(planned, net, 3)
    assert_same_bits(dict(plain.state_dict()), dict(net.state_dict()))
    assert planned.plan is not None
    assert planned.plan.recomputed
