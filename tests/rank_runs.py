"""Trainings on two processes, with and without the callback: ``python -m tests.rank_runs FOLDER CASE ...`` leaves what each process saw.

Lightning's launcher starts the second process. All trainings share the two, since starting them takes longer than training.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import gelu
from torch.utils.data import DataLoader, IterableDataset

from lightning_rotor import BudgetError, RotorBatchSizeAdvice, RotorCallback, is_recomputing
from lightning_rotor.errors import ProfilerBusyError, SampleError
from lightning_rotor.profiling import StepMeter
from tests import grids

WIDTH, BATCH, STEPS = 64, 64, 14
FEW = 7  # steps where none is measured late; every two sizes meet on the ranks
FEWEST = 4  # other sizes meet in the last of them
LIMIT = 500 * 1024  # plain training takes 628 KiB under DDP
LEAST = 1024  # no plan fits
BLOCKS_LIMIT = 9_400_000  # of FSDP2 with a unit for each block: a message that gloo keeps is 1.4 % of it
TIMEOUT = timedelta(seconds=180)
HANGING_SECONDS = 120  # of one case, which takes a tenth of that: it hangs, and says where
GPU_BACKEND = "gloo" if "SIMULATED_DEVICES" in os.environ else "nccl"


class Batches(IterableDataset[torch.Tensor]):
    """Of this process: other values on each, and other sizes too if asked for."""

    def __init__(self, size: int = BATCH, *, steps: int = STEPS, ragged: bool = False, rank: int | None = None) -> None:
        self._size = size
        self._steps = steps
        self._ragged = ragged
        self._rank = rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = dist.get_rank() if self._rank is None else self._rank
        generator = torch.Generator().manual_seed(rank)
        for step in range(self._steps):
            number = step + rank * (1 + step // 3)  # after three steps, other sizes meet
            size = self._size - 8 * (number % 3) if self._ragged else self._size
            yield torch.randn(size, WIDTH, generator=generator)


class Net(L.LightningModule):
    """Blocks in a Sequential, a head beside it."""

    def __init__(
        self, norm: Callable[[int], nn.Module] = nn.LayerNorm, *, absent: bool = False, depth: int = 4
    ) -> None:
        super().__init__()
        blocks = [[nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.GELU(), nn.Dropout(0.1)] for _ in range(depth)]
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


class Twice(Net):
    """Two calls wait for their backward together; beside them, the second process alone takes more than was left."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        both = self(batch) + self(batch.flip(0))
        if self.global_rank == 1 and batch_idx:
            both = both + torch.ones(8 * 1024, requires_grad=True).exp().sum() * 0
        return both.square().mean()


class Sharded(Net):
    """Under FSDP2, in units of these submodules; the last unit is the rest of the model."""

    def __init__(self, *units: str) -> None:
        super().__init__()
        self.units = units

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for module in (*map(self.get_submodule, self.units), self):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


class Block(nn.Module):
    """As in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + self.drop(self.narrow(gelu(self.wide(self.norm(input)))))


class Tower(nn.Module):
    """A transformer written by hand, as far as cutting it is concerned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            input = block(input)
        return self.norm(input)


class Blocks(Sharded):
    """Under FSDP2 as most people use it: each block is a unit, the rest of the model another one."""

    def __init__(self) -> None:
        super().__init__(*(f"body.blocks.{number}" for number in range(6)))
        self.body = Tower()


class Sized(Net):
    """With a batch size to set."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = BATCH


ASKED: list[int] = []  # here, for a forward that runs again sets back what its layers hold


class Shortage(nn.Module):
    """Asks for an exabyte in one forward of one process, as a device does that somebody else has filled."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False
        self.forwards = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.forwards += self.armed and not is_recomputing()
        if self.forwards == 6 and not ASKED and dist.get_rank() == 1:
            ASKED.append(self.forwards)
            torch.empty(2**60, dtype=torch.uint8)
        return input * 1


class Short(Net):
    """With a layer that runs out of memory once, in the second process alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shortage = Shortage()
        self.body.append(self.shortage)

    def on_train_start(self) -> None:
        """Without the callback, running out of memory ends training."""
        self.shortage.armed = any(isinstance(each, RotorCallback) for each in self.trainer.callbacks)


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
    """The allocator's peak of late steps; on the CPU with all that the process holds under DDP added up by hand."""

    def __init__(self) -> None:
        self.late_bytes: list[int] = []
        self._above: list[int] = []  # each peak above the level that its step left behind
        self._meter: StepMeter | None = None

    def on_train_batch_start(self, trainer: L.Trainer, model: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif batch_idx >= STEPS - 6:  # the allocator knows the size of a gradient if it was watched when it was made
            self._base = self._held_bytes(trainer, model, batch)
            meter = StepMeter(torch.device("cpu"))
            # Where plans were made late, the callback still measures; in a later step it does not.
            with suppress(ProfilerBusyError):
                meter.start()
                self._meter = meter

    def on_train_batch_end(self, trainer: L.Trainer, model: L.LightningModule, *_: Any) -> None:
        if model.device.type == "cuda":
            self.late_bytes.append(torch.cuda.max_memory_allocated())
            self._level = torch.cuda.memory_allocated()
            self._above.append(self.late_bytes[-1] - self._level)
        if self._meter is not None:
            self.late_bytes.append(self._base + self._meter.stop().peak_bytes)
            self._meter = None

    @property
    def peak_bytes(self) -> int:
        """Of the last step; 0 before the first."""
        return self.late_bytes[-1] if self.late_bytes else 0

    def on_train_end(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        if model.device.type == "cuda":
            # A thread that multiplies for the first time takes a workspace, on a busy machine in any step, behind its peak or before.
            before = torch.cuda.memory_allocated()
            torch._C._cuda_clearCublasWorkspaces()
            self.without_workspaces = self._level - (before - torch.cuda.memory_allocated()) + max(self._above)

    @staticmethod
    def _held_bytes(trainer: L.Trainer, model: L.LightningModule, batch: Any) -> int:
        parameters = list(model.parameters())
        is_sharded = hasattr(parameters[0], "device_mesh")
        buckets = 0 if is_sharded else sum(p.nbytes for p in parameters)
        in_buckets = getattr(trainer.strategy.model, "gradient_as_bucket_view", False)
        gradients = 0 if in_buckets else sum(_local(p.grad).nbytes for p in parameters if p.grad is not None)
        state = [value for entry in trainer.optimizers[0].state.values() for value in entry.values()]
        held = [*parameters, *model.buffers(), *state, batch]
        return buckets + gradients + sum(_local(tensor).nbytes for tensor in held)


def _local(tensor: Any) -> torch.Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class PlanOfStep(L.Callback):
    """The schedule of each step, the peak that the callback measured last, and its time spent on measuring costs."""

    def __init__(self, rotor: RotorCallback) -> None:
        self.schedules: list[str] = []
        self.measured: list[int | None] = []
        self.measuring_seconds: list[float] = []
        self._rotor = rotor

    def on_train_batch_end(self, *_: Any) -> None:
        self.schedules.append(str(self._rotor.plan.schedule) if self._rotor.plan is not None else "")
        self.measured.append(self._rotor.measured_peak_bytes)
        self.measuring_seconds.append(self._rotor._planner.modules.measuring_seconds)


@dataclass(frozen=True)
class Case:
    make: Callable[[], Net]
    strategy: Callable[[], Strategy]
    ragged: bool = False
    steps: int = STEPS
    limit: int = LIMIT
    measured: bool = False
    batch: int = BATCH
    on_infeasible: Literal["raise", "warn"] = "raise"
    saved: bool = False
    accelerator: str = "cpu"
    below_plain: int | None = None  # limit below the peak of plain training, instead of a fixed one


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
    "synchronized_ragged": Case(lambda: Net(MeanOfAll), ddp(), ragged=True, steps=FEW),
    "twice_synchronized": Case(lambda: Twice(MeanOfAll), ddp(), limit=800 * 1024),
    "inside": Case(Sharded, fsdp2),
    "unit": Case(lambda: Sharded("body"), fsdp2),
    "units": Case(Blocks, fsdp2, limit=BLOCKS_LIMIT, batch=1024, measured=True, saved=True),
    "short": Case(Short, ddp()),
    "beyond": Case(lambda: Net(depth=1), ddp(), ragged=True, steps=FEWEST, limit=LEAST, on_infeasible="warn"),
    "beyond_together": Case(
        lambda: Net(MeanOfAll, depth=1), ddp(), ragged=True, steps=FEWEST, limit=LEAST, on_infeasible="warn"
    ),
}
WIDE = ("twice_synchronized", "beyond")  # `make test` does without them
APART = {
    "ddp_gpus": Case(
        Net,
        ddp(process_group_backend=GPU_BACKEND),
        batch=4096,
        steps=FEW,
        measured=True,
        accelerator="gpu",
        below_plain=5 * 2**20,
    ),
    "infeasible": Case(Net, ddp(), ragged=True, limit=438_000),  # enough for the second process, whose batch is smaller
    "sync_batch_norm": Case(
        lambda: Net(nn.SyncBatchNorm),
        ddp(process_group_backend=GPU_BACKEND),
        steps=FEWEST,
        limit=LEAST,
        on_infeasible="warn",
        accelerator="gpu",
    ),
    "fsdp1": Case(
        Net,
        lambda: FSDPStrategy(timeout=TIMEOUT, process_group_backend=GPU_BACKEND),
        steps=FEWEST,
        limit=LEAST,
        on_infeasible="warn",
        accelerator="gpu",
    ),
}


def fit(
    case: Case, callbacks: list[L.Callback], folder: Path, strategy: Strategy | str | None = None
) -> dict[str, Any]:
    """Weights after a few steps, from fixed seeds; a checkpoint of the end in the folder if the case asks for it."""
    L.seed_everything(3, verbose=False)
    model = case.make()
    trainer = L.Trainer(
        accelerator=case.accelerator, devices=2, strategy=strategy or case.strategy(), max_epochs=1, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, DataLoader(Batches(case.batch, steps=case.steps, ragged=case.ragged), batch_size=None))
    if case.saved:
        trainer.save_checkpoint(folder / "checkpoint")
    state = model.state_dict()
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}


def resumed(case: Case, folder: Path) -> dict[str, Any]:
    """Weights after another epoch without the callback, from the checkpoint in a folder."""
    L.seed_everything(4, verbose=False)
    model = case.make()
    trainer = L.Trainer(
        accelerator=case.accelerator, devices=2, strategy=case.strategy(), max_epochs=2, limit_train_batches=FEWEST, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(
        model, DataLoader(Batches(case.batch, steps=FEWEST), batch_size=None), ckpt_path=str(folder / "checkpoint")
    )
    assert trainer.global_step == STEPS + FEWEST
    return {name: _local(value) for name, value in model.state_dict().items()}


def seen(case: Case, folder: Path) -> dict[str, Any]:
    """What one process saw of one case."""
    before = StepPeak()
    plain = fit(case, [before] if case.below_plain else [], folder)
    limit = before.peak_bytes - case.below_plain if case.below_plain else case.limit
    rotor = RotorCallback(limit, "body", on_infeasible=case.on_infeasible, show_table=False)
    later = [resumed(case, folder)] if case.saved else []
    peak, plans = StepPeak(), PlanOfStep(rotor)
    planned = fit(case, [rotor, plans, *([peak] if case.measured else [])], folder)
    later += [resumed(case, folder)] if case.saved else []
    return {
        "plain": plain, "planned": planned, "schedules": plans.schedules, "limit": rotor.budget_bytes, "peak": peak.peak_bytes,
        "measured": rotor.measured_peak_bytes, "predicted": rotor.predicted_peak_bytes, "measured_at": plans.measured, "resumed": later,
        "measuring_seconds": plans.measuring_seconds, "late": peak.late_bytes,
    }  # fmt: skip


class Undropped(Net):
    """Without dropout, which a pipeline draws for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(each for each in self.body if not isinstance(each, nn.Dropout)))


def piped(folder: Path) -> dict[str, Any]:
    """Weights of one pipeline over two GPUs, and of the same training on one; the most that this process took, and what was predicted."""
    from lightning_rotor.strategies import RotorPipelineStrategy

    gc.collect()  # what earlier runs have left in cycles would count in the peak, or not
    batches, peak = Batches(8192, steps=FEWEST, rank=0), StepPeak()
    strategy = RotorPipelineStrategy("body", micro_batches=4, timeout=TIMEOUT, process_group_backend=GPU_BACKEND)
    L.seed_everything(3, verbose=False)
    model = Undropped()
    trainer = L.Trainer(
        accelerator="gpu", devices=2, strategy=strategy, max_epochs=1, callbacks=[peak], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, DataLoader(batches, batch_size=None))
    L.seed_everything(3, verbose=False)
    alone = Undropped().cuda()
    optimizer = alone.configure_optimizers()
    for batch in batches:
        optimizer.zero_grad()
        alone.training_step(batch.cuda(), 0).backward()
        optimizer.step()
    states = {"piped": model.state_dict(), "alone": alone.state_dict()}
    assert strategy.partition is not None
    return {
        "balance": strategy.partition.balance, "predicted": strategy.partition.simulation.peak_bytes[dist.get_rank()],
        "without_workspaces": peak.without_workspaces,
        **{name: {key: value.cpu() for key, value in state.items()} for name, state in states.items()},
    }  # fmt: skip


def advised(folder: Path) -> dict[str, Any]:
    """What each process is advised, whose limits differ, and the size that it trains with."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    advice = RotorBatchSizeAdvice((800 + 400 * rank) * 1024, "body", set_batch_size=True, show_table=False)
    hopeless = RotorBatchSizeAdvice(2**30 if rank else 1, "body", show_table=False)
    fit(Case(Sized, ddp(), steps=FEWEST), [advice], folder)
    try:
        fit(Case(Sized, ddp(), steps=FEWEST), [hopeless], folder)
    except BudgetError as error:
        refusal = str(error)
    single = RotorBatchSizeAdvice(2**30, "body", show_table=False)
    with pytest.raises(SampleError) as lonely:
        fit(
            Case(Sized, ddp(), ragged=True, steps=FEWEST, batch=9), [single], folder
        )  # one sample on the second process alone
    assert advice.advice is not None
    return {
        "best": advice.advice.best.batch_size, "limit": advice.advice.limit_bytes, "refusal": refusal, "lonely": str(lonely.value),
    }  # fmt: skip


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or the library, which collects garbage, looks through all that is imported
    grids.make_tables_coarse(pytest.MonkeyPatch())
    cases = CASES | APART
    others = {"advice": advised, "piped": piped}
    found = {}
    for name in names:
        if name != "infeasible":
            faulthandler.dump_traceback_later(HANGING_SECONDS, exit=True)
            sys.stderr.write(f"process {os.environ.get('LOCAL_RANK', '0')} begins with {name}\n")
            found[name] = others[name](folder) if name in others else seen(cases[name], folder)
    faulthandler.cancel_dump_traceback_later()
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    if "infeasible" in names:
        seen(cases["infeasible"], folder)  # raises an error on one process, which ends both


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
