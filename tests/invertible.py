"""Invertible networks for tests, and everything that a training step with them leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lightning_rotor.invertible import AdditiveCoupling, AffineCoupling, InvertibleSequential

CHANNELS = 8


def branch(channels: int = CHANNELS // 2, *, made: int | None = None, dropout: float = 0.0) -> nn.Sequential:
    layers = [nn.Conv1d(channels, channels, 3, padding=1), nn.BatchNorm1d(channels), nn.Tanh()]
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, *drop, nn.Conv1d(channels, made or channels, 1))


class Unfused(nn.Module):
    """A module without its fused backward."""

    draws_by_parts = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        return self.module(x)

    def inverse(self, output: Any) -> Any:
        return self.module.inverse(output)  # type: ignore[operator]


class Mixing(nn.Module):
    """Mixes channels by a triangle with ones on its diagonal, undone by a solver, in float32 at least."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CHANNELS, CHANNELS) / CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            triangle = self._triangle(x.dtype)
            # Not "@", which gives other last bits where no gradient is wanted.
            return torch.bmm(triangle.expand(len(x), -1, -1), x.to(triangle.dtype)).to(x.dtype)

    def inverse(self, output: torch.Tensor) -> torch.Tensor:
        with torch.autocast(output.device.type, enabled=False):
            triangle = self._triangle(output.dtype)
            return torch.linalg.solve_triangular(triangle, output.to(triangle.dtype), upper=False).to(output.dtype)

    def _triangle(self, dtype: torch.dtype) -> torch.Tensor:
        weight = self.weight.to(torch.promote_types(dtype, torch.float32))
        return weight.tril(-1) + torch.eye(CHANNELS, dtype=weight.dtype, device=weight.device)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "additive": lambda: AdditiveCoupling(branch(), branch()),
    "dropout": lambda: AdditiveCoupling(branch(dropout=0.3), branch(dropout=0.3)),
    "affine": lambda: AffineCoupling(branch(made=CHANNELS)),
    "convolution": Mixing,
    "unfused": lambda: Unfused(AdditiveCoupling(branch(dropout=0.3), branch(dropout=0.3))),
    "unfused affine": lambda: Unfused(AffineCoupling(branch(made=CHANNELS, dropout=0.3))),
}


def network(kinds: Iterable[str] = MAKERS, dtype: torch.dtype = torch.float64) -> InvertibleSequential:
    return InvertibleSequential(*(MAKERS[kind]() for kind in kinds)).to(dtype)


def batch(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(4, CHANNELS, 5, dtype=dtype)


def of_few_bits(shape: tuple[int, ...], *, steps: int) -> torch.Tensor:
    """Numbers between -2 and 2 of which sums and products are exact."""
    return torch.randint(-2 * steps, 2 * steps + 1, shape) / steps


def exact_coupling() -> AdditiveCoupling:
    """Numbers of few bits are rebuilt to the bit, under bf16 autocast too: what differs in its gradients is no rounding error of the input."""
    half = CHANNELS // 2
    block = AdditiveCoupling(*(nn.Sequential(nn.Linear(half, half, bias=False), nn.ReLU()) for _ in "fg"))
    for parameter in block.parameters():
        parameter.data = of_few_bits((half, half), steps=8)
    return block


def step(net: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """One forward and backward; buffers start anew, so that a step can be repeated."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
    net.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    torch.manual_seed(7)
    output = forward(x)
    if output.requires_grad:
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    left = {"output": output.detach(), "generator": torch.get_rng_state()}
    left |= {f"buffer {name}": buffer.clone() for name, buffer in net.named_buffers()}
    left |= {f"gradient {name}": p.grad for name, p in net.named_parameters() if p.grad is not None}
    if x.grad is not None:
        left["gradient of the input"] = x.grad
    return left


def assert_same_step(plain: dict[str, torch.Tensor], invertible: dict[str, torch.Tensor], tolerance: float) -> None:
    """Gradients to within a tolerance, relative to the largest of all; the rest bit for bit."""
    assert plain.keys() == invertible.keys()
    scale = max((float(left.abs().max()) for name, left in plain.items() if "gradient" in name), default=1.0)
    for name, left in plain.items():
        if "gradient" in name:
            assert float((left - invertible[name]).abs().max()) <= tolerance * scale, name
        else:
            assert torch.equal(left, invertible[name]), name
