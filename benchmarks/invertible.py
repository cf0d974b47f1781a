"""Memory of deep reversible networks: plain, recomputed block by block, and without inputs.

    python -m benchmarks.invertible

Depth blocks of :class:`AdditiveCoupling`, each branch Linear, BatchNorm1d, ReLU, Linear. Bytes are the allocator's above model, input and
(existing) gradients: *held* at the end of the forward, the output included, and *peak* of the step, in units of one activation (the input's size).
"""

from __future__ import annotations

import gc
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_rotor.invertible import AdditiveCoupling, InvertibleSequential, invertible_checkpoint
from lightning_rotor.profiling.meters import CpuMeter

RESULTS = Path(__file__).parent / "results"
DEPTHS = (16, 64, 256)
BATCH, CHANNELS = 4096, 16
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Unfused(nn.Module):
    """A block without its fused backward."""

    def __init__(self, block: AdditiveCoupling) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's."""
        return self.block(x)

    def inverse(self, output: torch.Tensor) -> torch.Tensor:
        """The block's."""
        return self.block.inverse(output)


def checkpointed(net: InvertibleSequential, x: torch.Tensor) -> torch.Tensor:
    """Every block recomputed from its input."""
    for block in net:
        x = checkpoint(block, x, use_reentrant=False)
    return x


FORWARDS: dict[str, Forward] = {
    "plain": lambda net, x: net(x),
    "checkpointed": checkpointed,
    "invertible": lambda net, x: invertible_checkpoint([Unfused(block) for block in net], x),
    "invertible, fused": invertible_checkpoint,
}


def main() -> None:
    """Measure, and write the table."""
    rows = [row for depth in DEPTHS for row in measure(depth)]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "invertible.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "invertible.md").write_text(table(rows))
    print(table(rows))


def measure(depth: int) -> list[dict[str, Any]]:
    """Bytes of each way at one depth."""
    torch.manual_seed(0)
    net = InvertibleSequential(*(AdditiveCoupling(branch(CHANNELS // 2), branch(CHANNELS // 2)) for _ in range(depth)))
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(BATCH, CHANNELS, requires_grad=True)
    x.grad = torch.zeros_like(x)
    return [{"depth": depth, "way": name, **held_and_peak(forward, net, x)} for name, forward in FORWARDS.items()]


def held_and_peak(forward: Forward, net: Any, x: torch.Tensor) -> dict[str, float]:
    """Of one step, in units of the input."""
    gc.collect()
    with CpuMeter().recording() as recording:
        recording.mark("forward")
        output = forward(net, x)
        recording.mark("backward")
        output.backward(torch.ones(()).expand_as(output))
        recording.mark("end")
    phases = {phase.label: phase for phase in recording.phases}
    peak = max(phase.peak_bytes for phase in phases.values())
    return {
        "held": round(phases["forward"].end_bytes / x.nbytes, 2),
        "peak": round(peak / x.nbytes, 2),
        "input_bytes": x.nbytes,
    }


def branch(channels: int) -> nn.Sequential:
    """What a coupling adds to a half."""
    return nn.Sequential(
        nn.Linear(channels, channels), nn.BatchNorm1d(channels), nn.ReLU(), nn.Linear(channels, channels)
    )


def table(rows: list[dict[str, Any]]) -> str:
    """For people."""
    lines = [
        "# Deep reversible networks",
        "",
        f"{platform.machine()}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, "
        f"torch {torch.__version__}; `python -m benchmarks.invertible`. One activation is {rows[0]['input_bytes'] / 2**10:.0f} KiB, "
        f"{BATCH} x {CHANNELS} in float32.",
        "Held at the end of the forward (the output included) and peak of the step, in activations.",
        "",
        "| blocks | way | held | peak |",
        "|--:|---|--:|--:|",
    ]
    lines += [f"| {row['depth']} | {row['way']} | {row['held']:.2f} | {row['peak']:.2f} |" for row in rows]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
