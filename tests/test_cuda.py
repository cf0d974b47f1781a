"""The same promises on a GPU, where there is one: bits, and the caching allocator's peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor import Checkpointable, Schedule, simulate
from lightning_rotor.planning import minimum_budget

pytestmark = pytest.mark.gpu


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 32, 64, 64):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.1),
        ]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 10)).cuda()


def step(net: nn.Module, forward: Callable[[Any], Any], batch: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Gradients, and the peak above what was allocated before."""
    net.zero_grad()
    torch.manual_seed(1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward(batch).square().mean().backward()
    peak = torch.cuda.max_memory_allocated() - before
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None], peak


@pytest.mark.parametrize("autocast", [False, True])
def test_bits_and_peak_on_a_gpu(autocast: bool) -> None:
    torch.backends.cudnn.deterministic = True
    net, batch = make_net(), torch.randn(8, 3, 32, 32, device="cuda")
    planned = Checkpointable(net)

    def under_autocast(forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                return forward(value).float()

        return run

    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        chain = planned.measure(batch)
    least = minimum_budget(chain).peak_bytes
    most = simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
    assert least < most
    step(net, under_autocast(net), batch)  # workspaces
    expected, _ = step(net, under_autocast(net), batch)
    for limit in (most, (least + most) // 2, least):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            plan = planned.compute_sequence(limit)
        received, peak = step(net, under_autocast(planned), batch)
        assert all(map(torch.equal, expected, received))
        assert peak <= 1.03 * plan.peak_bytes + 2**20
        assert peak >= 0.9 * plan.peak_bytes - 2**20


def test_generators_of_the_gpu_are_left_alone() -> None:
    net, batch = make_net(), torch.randn(8, 3, 32, 32, device="cuda")
    state = torch.cuda.get_rng_state()
    chain = Checkpointable(net).measure(batch)
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert chain.device == "cuda:0"
    assert chain.rng_state_bytes == 0
    assert any(stage.draws_random for stage in chain)
