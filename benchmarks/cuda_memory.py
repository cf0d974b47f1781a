"""Peaks of a training step on a GPU, predicted and measured: six models, two precisions, five budgets from all to the least.

    python -m benchmarks.cuda_memory --out benchmarks/results/cuda_memory.md
    python -m tests.cuda_device -m benchmarks.cuda_memory ...    on the simulated device

Bytes are those of ``torch.cuda.max_memory_allocated`` above what was there before the step, without the loss. What a block of more than 1 MiB
leaves of a hole the caching allocator counts as allocated if it is less than 1 MiB; expandable segments have no such remains, so the
comparison runs with them.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lightning_rotor import BudgetError, Checkpointable, Schedule, simulate
from lightning_rotor.profiling.cuda_recording import await_autograd

GPU = torch.device("cuda", 0)
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)


class Block(nn.Module):
    """Of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.mix(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(x)


class UNet(nn.Module):
    """Two levels."""

    def __init__(self) -> None:
        super().__init__()

        def convolutions(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))

        self.first, self.second, self.bottom = convolutions(3, 8), convolutions(8, 16), convolutions(16, 32)
        self.up, self.upper = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.join, self.last = convolutions(32, 16), convolutions(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        bottom = self.bottom(F.max_pool2d(second, 2))
        up = self.join(torch.cat([second, self.up(bottom)], 1))
        return self.head(self.last(torch.cat([first, self.upper(up)], 1)))


def _mlp() -> nn.Module:
    layers = [[nn.Linear(251, 250), nn.GELU(), nn.Linear(250, 251), nn.Dropout(0.1)] for _ in range(5)]
    return nn.Sequential(*(layer for block in layers for layer in block), nn.Linear(251, 10))


def _vgg() -> nn.Module:
    from torchvision.models.vgg import make_layers

    body = make_layers([16, "M", 32, "M", 64, 64, "M"], batch_norm=True)
    return nn.Sequential(body, nn.Flatten(), nn.Linear(64 * 16, 50), nn.ReLU(inplace=True), nn.Linear(50, 10))


def _resnet18() -> nn.Module:
    import torchvision

    return torchvision.models.resnet18(num_classes=10)


def _gpt() -> nn.Module:
    return nn.Sequential(nn.Embedding(97, 64), *(Block(64, 4) for _ in range(4)), nn.LayerNorm(64), nn.Linear(64, 97))


def _vit() -> nn.Module:
    import torchvision

    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=256, dropout=0.1, num_classes=10
    )


def _images(count: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(count, 3, 32, 32, device=GPU)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "MLP (odd sizes)": (_mlp, lambda: torch.randn(1021, 251, device=GPU)),
    "VGG+BN": (_vgg, _images(8)),
    "ResNet-18": (_resnet18, lambda: torch.randn(16, 3, 64, 64, device=GPU)),
    "GPT (attention, dropout)": (_gpt, lambda: torch.randint(0, 97, (4, 64), device=GPU)),
    "U-Net": (UNet, _images(4)),
    "ViT": (_vit, _images(8)),
}


class Loss(torch.autograd.Function):
    """A loss that holds nothing."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        """Zero."""
        ctx.like = output.shape, output.dtype
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """A number for each place."""
        shape, dtype = ctx.like
        return torch.full(shape, 1e-2, dtype=dtype, device=GPU)


def step(net: nn.Module, forward: nn.Module, batch: torch.Tensor, autocast: bool) -> tuple[list[torch.Tensor], int]:
    """Gradients and buffers, and the peak."""
    net.zero_grad()
    torch.manual_seed(1)
    await_autograd(GPU)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
        output = forward(batch)
    Loss.apply(output).backward()
    peak = torch.cuda.max_memory_allocated() - before - 2 * 512  # the loss and its gradient
    return [p.grad.clone() for p in net.parameters() if p.grad is not None], peak


def _least_limit(planned: Checkpointable, autocast: bool) -> int:
    """The least limit, which counts copies of BatchNorm's small buffers, too: the forward may have to run again."""
    try:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return planned.compute_sequence(1).peak_bytes
    except BudgetError as error:
        return error.minimum_bytes


def _rows(name: str, autocast: bool, times: int) -> Iterator[str]:
    make, data = MODELS[name]
    torch.manual_seed(0)
    net, batch = make().to(GPU), torch.cat([data() for _ in range(times)])
    planned = Checkpointable(net, show_progress=False)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        chain = planned.measure(batch)
    least = _least_limit(planned, autocast)
    most = simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
    expected, _ = step(net, net, batch, autocast)
    for share in SHARES:
        limit = int(least + share * (most - least))
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            plan = planned.compute_sequence(limit)
        received, peak = step(net, planned, batch, autocast)
        same = all(map(torch.equal, expected, received))
        yield (
            f"| {name} | {'bf16' if autocast else 'fp32'} | {limit:,} | {plan.peak_bytes:,} | {peak:,} | {peak - plan.peak_bytes:+,} | "
            f"{'yes' if peak <= limit else 'NO'} | {'yes' if same else 'NO'} |"
        )


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--times", type=int, default=1, help="as large batches")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="nvmlDeviceGetGpuFabricInfoV")
    torch.backends.cudnn.deterministic = True
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    lines = [
        f"# Peaks of a step on {torch.cuda.get_device_name()}",
        "",
        f"torch {torch.__version__}. `python -m benchmarks.cuda_memory`: bytes above what was allocated before the step.",
        "",
        "| model | precision | limit | predicted | measured | difference | inside | same gradients |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in options.models:
        for autocast in (False, True):
            for line in _rows(name, autocast, options.times):
                print(line, flush=True)
                lines.append(line)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    _main()
