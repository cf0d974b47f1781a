"""What a process takes that trains under DDP or FSDP2."""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from tests.rank_runs import STEPS, TIMEOUT, WIDTH, Batches, StepPeak, Tower, ddp

# Samples for each process.
ROWS = 1024


class Whole(nn.Module):
    """A tower with a head: what advice is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Tower(), nn.Linear(WIDTH, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(values))


class Training(L.LightningModule):
    """As the lines of Python of an advice train it."""

    def __init__(self, reshard: bool | None, shape: tuple[int, int] | None) -> None:
        super().__init__()
        self.model = Whole()
        self.reshard, self.shape = reshard, shape

    def configure_model(self) -> None:
        if self.reshard is None:
            return
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        if self.shape is not None:
            mesh = init_device_mesh(self.device_mesh.device_type, self.shape, mesh_dim_names=("copies", "shards"))
        for block in self.model.body.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def peak_bytes(rank: int, reshard: bool | None, shape: tuple[int, int] | None = None) -> int:
    """Most that a late step has held, under FSDP2 or, without a choice, DDP. ``shape`` is that of copies and shards."""
    peak = StepPeak()
    devices = 2 if shape is None else shape[0] * shape[1]
    strategy = ddp()()
    if reshard is not None:
        strategy = ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1, timeout=TIMEOUT)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, callbacks=[peak],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Training(reshard, shape), DataLoader(Batches(ROWS, steps=STEPS), batch_size=None))
    return peak.peak_bytes
