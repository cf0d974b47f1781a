"""A plain loop with autocast, accumulation and GradScaler, before and after: ``python examples/coming_from/plain_loop.py``."""

from __future__ import annotations

import torch
from comparing import Training, compare
from torch import nn

from lightning_rotor import Checkpointable

LIMIT = "2600KiB"
ACCUMULATED, BATCHES = 2, 8


def network() -> nn.Module:
    """A small convolutional network with dropout."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.Dropout2d(0.1))
        for _ in range(6)
    ]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    )


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random images and classes."""
    torch.manual_seed(1)
    return [(torch.randn(4, 3, 32, 32), torch.randint(4, (4,))) for _ in range(BATCHES)]


def loop(model: nn.Module) -> Training:
    """Your loop, which stays as it is."""
    training = Training()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for number, (images, classes) in enumerate(data()):
        with training.step():
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(images), classes)
            scaler.scale(loss / ACCUMULATED).backward()
        if (number + 1) % ACCUMULATED == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return training.ends(model)


def before() -> Training:
    """Train as always."""
    model = network()
    return loop(model)


def after() -> Training:
    """Train inside the limit: one line more."""
    model = network()
    model = Checkpointable(model, mem_limit=LIMIT)
    return loop(model)


if __name__ == "__main__":
    compare(before, after, LIMIT)
