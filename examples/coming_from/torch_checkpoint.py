"""``torch.utils.checkpoint`` and ``checkpoint_sequential``, before and after: ``python examples/coming_from/torch_checkpoint.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from comparing import Training, compare
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from lightning_rotor import Checkpointable

LIMIT = "2200KiB"


class Block(nn.Module):
    """A residual block of two layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return x + self.layers(x)


class Checkpointed(nn.Module):
    """Blocks that recompute themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


class Segmented(Checkpointed):
    """Blocks in segments that recompute themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        x = checkpoint_sequential(self.blocks, 3, x, use_reentrant=False)
        return x.square().mean()


class Model(Checkpointed):
    """Blocks alone: what is recomputed is the plan's to say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(make: Callable[[], nn.Module]) -> Training:
    """Six steps of AdamW."""
    torch.manual_seed(0)
    model, training = make(), Training()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(6):
        x = torch.randn(256, 64)
        with training.step():
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return training.ends(model)


def plain() -> Training:
    """Everything is kept."""
    return train(Model)


def before() -> Training:
    """Every block recomputes itself."""
    return train(Checkpointed)


def before_in_segments() -> Training:
    """Segments of two blocks recompute themselves."""
    return train(Segmented)


def after() -> Training:
    """The plan recomputes what the limit asks for."""
    return train(lambda: Checkpointable(Model(), mem_limit=LIMIT))


if __name__ == "__main__":
    ways = {"plain": plain, "checkpoint": before, "checkpoint_sequential": before_in_segments}
    for name, way in ways.items():
        print(name)
        compare(way, after, LIMIT)
