"""A loop with accelerate, before and after: ``python examples/coming_from/accelerate_loop.py``."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from comparing import Training, compare
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_rotor import Checkpointable

LIMIT = "1200KiB"


def encoder() -> nn.Module:
    """Four layers of a transformer with dropout."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(32, 8))


def data() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Random rows of 32 vectors, and a class for each vector."""
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(32, 32, 32), torch.randint(8, (32, 32))), batch_size=4)


def loop(model: nn.Module) -> Training:
    """Your loop, which stays as it is."""
    training = Training()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), data())
    for rows, classes in batches:
        with accelerator.accumulate(model):
            with training.step():
                loss = nn.functional.cross_entropy(model(rows).flatten(0, 1), classes.flatten())
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return training.ends(accelerator.unwrap_model(model))


def before() -> Training:
    """Train as always."""
    model = encoder()
    return loop(model)


def after() -> Training:
    """Train inside the limit: one line more, before ``prepare``."""
    model = encoder()
    model = Checkpointable(model, mem_limit=LIMIT)
    return loop(model)


if __name__ == "__main__":
    compare(before, after, LIMIT)
