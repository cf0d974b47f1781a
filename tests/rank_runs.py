"""Trainings on two processes, with and without the callback: ``python -m tests.rank_runs FOLDER`` leaves what each process saw.

Lightning's launcher starts the second process. All trainings share the two, since starting them takes longer than training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.data import DataLoader, IterableDataset

from lightning_rotor import ModelError, RotorCallback
from lightning_rotor.errors import ProfilerBusyError
from lightning_rotor.profiling import StepMeter

WIDTH, BATCH, STEPS = 64, 64, 14
LIMIT = 500 * 1024  # plain training takes 628 KiB under DDP
TIMEOUT = timedelta(seconds=180)


class Batches(IterableDataset[torch.Tensor]):
    """Of this process: other values on each, and other sizes too if asked for."""

    def __init__(self, *, ragged: bool = False) -> None:
        self._ragged = ragged

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(rank)
        for step in range(STEPS):
            size = BATCH - 8 * ((step + rank) % 3) if self._ragged else BATCH
            yield torch.randn(size, WIDTH, generator=generator)


class Net(L.LightningModule):
    """Blocks in a Sequential, a head beside it."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, *, absent: bool = False) -> None:
        super().__init__()
        blocks = [[nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.GELU(), nn.Dropout(0.1)] for _ in range(4)]
        self.body = nn.Sequential(*(layer for block in blocks for layer in block))
        self.head = nn.Linear(WIDTH, 2)
        self.absent = absent

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(values))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        without_body = self.absent and batch_idx % 2 == 0 and self.global_rank == 1
        return (self.head(batch) if without_body else self(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Sharded(Net):
    """Under FSDP2, in units of these submodules; the last unit is the rest of the model."""

    def __init__(self, *units: str) -> None:
        super().__init__()
        self.units = units

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for module in (*map(self.get_submodule, self.units), self):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


class MeanOfAll(nn.Module):
    """What SyncBatchNorm does between processes, on the CPU, where DDP refuses torch's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        sums = all_reduce(torch.cat([input.sum(0), input.new_tensor([len(input)])]))
        mean = sums[:-1] / sums[-1]
        if self.training:
            self.running_mean.lerp_(mean.detach(), 0.1)
        return (input - mean) * self.weight + self.bias


class StepPeak(L.Callback):
    """The allocator's peak of the last step, with all that the process holds under DDP added up by hand."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._meter: StepMeter | None = None

    def on_train_batch_start(self, trainer: L.Trainer, model: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx >= STEPS - 2:  # the allocator knows the size of a gradient if it was watched when it was made
            parameters = list(model.parameters())
            buckets = sum(p.nbytes for p in parameters)
            in_buckets = getattr(trainer.strategy.model, "gradient_as_bucket_view", False)
            gradients = 0 if in_buckets else sum(p.grad.nbytes for p in parameters if p.grad is not None)
            state = [value for entry in trainer.optimizers[0].state.values() for value in entry.values()]
            held = [*parameters, *model.buffers(), *state, batch]
            self._base = buckets + gradients + sum(tensor.nbytes for tensor in held)
            meter = StepMeter(torch.device("cpu"))
            with suppress(ProfilerBusyError):  # the callback still measures, where plans were made late
                meter.start()
                self._meter = meter

    def on_train_batch_end(self, *_: Any) -> None:
        if self._meter is not None:
            self.peak_bytes = self._base + self._meter.stop().peak_bytes
            self._meter = None


class PlanOfStep(L.Callback):
    """The schedule of each step."""

    def __init__(self, rotor: RotorCallback) -> None:
        self.schedules: list[str] = []
        self._rotor = rotor

    def on_train_batch_end(self, *_: Any) -> None:
        self.schedules.append(str(self._rotor.plan.schedule) if self._rotor.plan is not None else "")


@dataclass(frozen=True)
class Case:
    make: Callable[[], Net]
    strategy: Callable[[], Strategy]
    ragged: bool = False
    limit: int = LIMIT
    refused: bool = False
    measured: bool = False


def ddp(**options: Any) -> Callable[[], Strategy]:
    return lambda: DDPStrategy(timeout=TIMEOUT, **options)


def fsdp2() -> Strategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, timeout=TIMEOUT)


CASES = {
    "ddp": Case(Net, ddp(), measured=True),
    "unused": Case(lambda: Net(absent=True), ddp(find_unused_parameters=True), measured=True),
    "static": Case(Net, ddp(static_graph=True), measured=True),
    "views": Case(Net, ddp(gradient_as_bucket_view=True), measured=True),
    "ragged": Case(Net, ddp(), ragged=True),
    "synchronized": Case(lambda: Net(MeanOfAll), ddp()),
    "synchronized_ragged": Case(lambda: Net(MeanOfAll), ddp(), ragged=True),
    "inside": Case(Sharded, fsdp2),
    "unit": Case(lambda: Sharded("body"), fsdp2),
    "units": Case(lambda: Sharded("body.0", "body.4"), fsdp2, refused=True),
}


def fit(
    case: Case, callbacks: list[L.Callback], folder: Path, strategy: Strategy | str | None = None
) -> dict[str, Any]:
    """Weights after a few steps, from fixed seeds."""
    L.seed_everything(3, verbose=False)
    model = case.make()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy or case.strategy(), max_epochs=1, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, DataLoader(Batches(ragged=case.ragged), batch_size=None))
    state = model.state_dict()
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}


def seen(case: Case, folder: Path) -> dict[str, Any]:
    """What one process saw of one case."""
    rotor = RotorCallback(case.limit, "body", show_table=False)
    if case.refused:
        try:
            fit(case, [rotor], folder)
        except ModelError as error:
            return {"error": str(error)}
        return {"error": ""}
    plain = fit(case, [], folder)
    peak, plans = StepPeak(), PlanOfStep(rotor)
    planned = fit(case, [rotor, plans, *([peak] if case.measured else [])], folder)
    return {
        "plain": plain, "planned": planned, "schedules": plans.schedules, "limit": rotor.budget_bytes, "peak": peak.peak_bytes,
        "measured": rotor.measured_peak_bytes,
    }  # fmt: skip


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    found = {name: seen(CASES[name], folder) for name in names or CASES}
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
