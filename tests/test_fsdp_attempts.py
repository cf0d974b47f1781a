"""Attempts to plan a module under FSDP2 leave its units as they were, whether they stay whole after a forward or not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from pipelines import PATIENCE_SECONDS, Processes, good, processes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_rotor import RotorCallback, is_recomputing


@pytest.fixture(scope="module")
def group() -> Iterator[Processes]:
    with processes(2, patience_seconds=PATIENCE_SECONDS) as made:
        yield made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Net(nn.Module):
    def __init__(self, *, refuses: bool) -> None:
        super().__init__()
        self.blocks, self.refuses = nn.ModuleList(Block() for _ in range(4)), refuses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if self.refuses:  # in the middle of a recording, which then fails
            is_recomputing()
        return x


class Model(L.LightningModule):
    def __init__(self, *, refuses: bool, reshard: bool, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.reshard, self.whole = Net(refuses=refuses), reshard, whole

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for unit in [*self.net.blocks, *([self.net] if self.whole else [])]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=self.reshard)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def fit(callbacks: list[L.Callback], **options: bool) -> list[torch.Tensor]:
    model = Model(**options)
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    L.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False, strategy=strategy,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
    ).fit(model, DataLoader(rows, 8))  # fmt: skip
    whole = [getattr(weight, "full_tensor", lambda weight=weight: weight)() for weight in model.parameters()]
    return [weight.detach().clone() for weight in whole]


def training(rank: int, options: dict[str, bool]) -> tuple[bool, bool]:
    """Has training the bits of a plain one, and is there a plan."""
    warnings.simplefilter("ignore")
    plain = fit([], **options)
    rotor = RotorCallback("1GiB", show_table=False)
    planned = fit([rotor], **options)
    return all(map(torch.equal, plain, planned)), rotor.plan is not None


@pytest.mark.parametrize(
    ("refuses", "reshard", "whole"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.wide)
            for each in ((False, False, False), (True, False, False), (True, False, True))
        ),
        (True, True, True),
    ],
)
def test_training_is_what_it_was_without_the_attempt(
    group: Processes, refuses: bool, reshard: bool, whole: bool
) -> None:
    options = {"refuses": refuses, "reshard": reshard, "whole": whole}
    assert good(group.run(2, training, options)) == [(True, True)] * 2
