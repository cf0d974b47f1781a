"""Trainings on a mesh of processes, plain and planned."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy, silu
from torch.utils.data import DataLoader, IterableDataset

from lightning_rotor import BudgetError, RotorCallback
from tests import grids

WIDTH, WORDS, STEPS = 32, 32, 5


class Feed(nn.Module):
    """Of a transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH, bias=False), nn.Linear(8 * WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(silu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Feed() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_units(net: Net, mesh: DeviceMesh, **options: Any) -> None:
    """FSDP2, a unit for each block."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)


def in_columns(net: Net, mesh: DeviceMesh, *, spread_logits: bool = False) -> None:
    """Tensor parallelism."""
    head = (
        ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        if spread_logits
        else ColwiseParallel(output_layouts=Replicate())
    )
    parallelize_module(net, mesh, {"head": head})
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def units(**options: Any) -> Callable[[Net, DeviceMesh], None]:
    return lambda net, mesh: in_units(net, mesh["data_parallel"], **options)


def columns_in_units(net: Net, mesh: DeviceMesh) -> None:
    in_columns(net, mesh["tensor_parallel"])
    in_units(net, mesh["data_parallel"])


def replicated_units(net: Net, mesh: DeviceMesh) -> None:
    """HSDP: each pair of processes has all shards."""
    in_units(net, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


class Model(L.LightningModule):
    def __init__(self, spread: Callable[[Net, DeviceMesh], None]) -> None:
        super().__init__()
        self.net = Net()
        self.spread = spread

    def configure_model(self) -> None:
        self.spread(self.net, self.device_mesh)

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


class Slow(Model):
    """Its second process takes its time."""

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            time.sleep(0.3)
        return super().training_step(tokens, batch_idx)


class LossOfParts(Model):
    """Its loss is computed from spread logits."""

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with loss_parallel():
            return super().training_step(tokens, batch_idx)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with loss_parallel():
            loss.backward(*args, **kwargs)


class Batches(IterableDataset[torch.Tensor]):
    """The same for processes that share a batch."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self._number)
        for _ in range(STEPS):
            yield torch.randint(WORDS, (16, 32), generator=generator)


@dataclass(frozen=True)
class Case:
    make: Callable[[], Model]
    batches: int  # processes that have batches of their own
    parts: int = 1  # processes that share each of these
    below_plain: float = 0.6  # limit, as a part of what a plan that saves nothing takes


CASES = {
    "stays whole": Case(lambda: Model(units(reshard_after_forward=False)), 2),
    "mixed precision": Case(
        lambda: Model(units(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))), 2
    ),
    "moved": Case(lambda: Model(units(offload_policy=CPUOffloadPolicy(pin_memory=False))), 2),
    "loss of parts": Case(lambda: LossOfParts(lambda net, mesh: in_columns(net, mesh["tensor_parallel"], spread_logits=True)), 1, 2),
    "two dimensions": Case(lambda: Model(columns_in_units), 2, 2),
    "replicas": Case(lambda: Model(replicated_units), 4),
}  # fmt: skip


class Peaks(L.Callback):
    """The callback's measured peak and schedule of each step."""

    def __init__(self, rotor: RotorCallback) -> None:
        self.rotor, self.peaks, self.schedules = rotor, list[int](), list[str]()

    def on_train_batch_end(self, *_: Any) -> None:
        self.peaks.append(self.rotor.measured_peak_bytes or 0)
        self.schedules.append("" if self.rotor.plan is None else str(self.rotor.plan.schedule))


def fit(case: Case, callbacks: list[L.Callback]) -> dict[str, torch.Tensor]:
    """Weights after some steps, from fixed seeds."""
    L.seed_everything(3, verbose=False)
    model = case.make()
    strategy = ModelParallelStrategy(
        data_parallel_size=case.batches, tensor_parallel_size=case.parts, process_group_backend="gloo"
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=case.batches * case.parts, strategy=strategy, max_epochs=1, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(Batches(int(os.environ["RANK"]) // case.parts), batch_size=None))
    state = model.state_dict()
    return {name: getattr(value, "full_tensor", lambda value=value: value)().clone() for name, value in state.items()}


def seen(rank: int, name: str, refused: bool) -> dict[str, Any]:
    """What a process sees of one case: plain, with room, within a limit below what that has taken, and if asked for within one that none keeps."""
    warnings.simplefilter("ignore")
    grids.make_tables_coarse(pytest.MonkeyPatch())
    case = CASES[name]
    plain = fit(case, [])
    roomy = Peaks(RotorCallback("1GiB", show_table=False))
    rich = fit(case, [roomy.rotor, roomy])
    tight = Peaks(RotorCallback(int(case.below_plain * least_of_all(roomy.peaks[-1])), show_table=False))
    poor = fit(case, [tight.rotor, tight])
    refusal = None
    last = Peaks(RotorCallback(1024, show_table=False))
    try:
        if refused:
            fit(case, [last.rotor, last])
    except BudgetError as error:
        refusal = error.minimum_bytes
    return {
        "plain": plain, "rich": rich, "poor": poor, "limit": tight.rotor.budget_bytes, "peaks": tight.peaks,
        "schedules": tight.schedules, "refusal": refusal, "steps before it": len(last.peaks),
    }  # fmt: skip


def steps_beside_a_slow_process(rank: int) -> int:
    """How many steps a process trains."""
    warnings.simplefilter("ignore")
    grids.make_tables_coarse(pytest.MonkeyPatch())
    followed = Peaks(RotorCallback("1GiB", "net", show_table=False))
    fit(Case(lambda: Slow(units()), 2), [followed.rotor, followed])
    return len(followed.peaks)


def least_of_all(size: int) -> int:
    """The least of any process."""
    told = torch.tensor(size)
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MIN)
    return int(told)
