"""Bytes on a GPU: a step peaks where the plan says, as PyTorch's allocator counts it, and the process stays inside its limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_rotor import Checkpointable, Schedule, simulate
from lightning_rotor.planning import minimum_budget
from lightning_rotor.profiling.meters import await_autograd

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
SCALARS = 2 * 512
"""The loss and the gradient that its backward starts from; each tensor takes a block of its own."""


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.mix(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.inner(x))


def mlp() -> nn.Module:
    """No size is a multiple of a block, and sums over the batch stage their parts."""
    layers = [[nn.Linear(51, 50), nn.GELU(), nn.Linear(50, 51), nn.Dropout(0.1)] for _ in range(3)]
    return nn.Sequential(*(layer for block in layers for layer in block), nn.Linear(51, 3))


def cnn() -> nn.Module:
    body = [nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(inplace=True), *(Residual(7) for _ in range(2))]
    return nn.Sequential(*body, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(7 * 25, 5))


def gpt() -> nn.Module:
    def block() -> nn.Module:
        width = 34
        feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )
        return nn.Sequential(Attention(width, 0.1), feed)

    return nn.Sequential(nn.Embedding(11, 34), *(block() for _ in range(3)), nn.LayerNorm(34), nn.Linear(34, 11))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(301, 51, device=GPU)),
    "cnn": (cnn, lambda: torch.randn(3, 3, 12, 12, device=GPU)),
    "gpt": (gpt, lambda: torch.randint(0, 11, (3, 17), device=GPU)),
}


def step(net: nn.Module, forward: Callable[[Any], Any], batch: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Gradients, and the peak above what was allocated before, without the loss."""
    net.zero_grad()
    torch.manual_seed(1)
    await_autograd(GPU)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = forward(batch)  # the caller holds it
    Mean.apply(output).backward()
    peak = torch.cuda.max_memory_allocated() - before - SCALARS
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None], peak


class Mean(torch.autograd.Function):
    """A loss that holds nothing."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.like = output.shape, output.dtype
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        shape, dtype = ctx.like
        return torch.full(shape, 1e-2, dtype=dtype, device=GPU)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_peaks_are_predicted_to_the_byte(model: str, autocast: bool) -> None:
    torch.backends.cudnn.deterministic = True
    make, data = MODELS[model]
    net, batch = make().to(GPU), data()
    planned = Checkpointable(net)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        chain = planned.measure(batch)

    def under_autocast(forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
                return forward(value)

        return run

    least = minimum_budget(chain).peak_bytes
    most = simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
    assert least < most
    expected, _ = step(net, under_autocast(net), batch)
    for limit in (most, (least + most) // 2, least):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            plan = planned.compute_sequence(limit)
        received, peak = step(net, under_autocast(planned), batch)
        assert all(map(torch.equal, expected, received))
        # Under autocast the order in which gradients are cast may save a block of 512 bytes or two.
        assert plan.peak_bytes - 1024 * autocast <= peak <= plan.peak_bytes <= limit
