"""Modules whose weights are spread over processes by ``parallelize_module``: planned between tensors that are not spread."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from pipelines import PATIENCE_SECONDS, Processes, good, processes
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_rotor import RotorCallback, RotorError
from tests import grids


@pytest.fixture(scope="module")
def group() -> Iterator[Processes]:
    with processes(2, patience_seconds=PATIENCE_SECONDS) as made:
        yield made


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.out = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention, self.norm2, self.feed = nn.RMSNorm(32), Attention(), nn.RMSNorm(32), Feed()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.drop(self.feed(self.norm2(x)))


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(32, 32), nn.RMSNorm(32), nn.Linear(32, 32, bias=False)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def spread(net: Net, mesh: Any, *, sequence: bool) -> None:
    """Weights over the processes; of sequence parallelism, parts of the sequence between the blocks' halves."""
    inner = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    inner |= {"feed.up": ColwiseParallel()}
    if sequence:
        parts_to_whole = partial(PrepareModuleInput, input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        outer = {
            "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        inner |= {
            "norm": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": parts_to_whole(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "feed": parts_to_whole(),
            "feed.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    else:
        outer = {"head": ColwiseParallel(output_layouts=Replicate())}
        inner |= {"attention.out": RowwiseParallel(), "feed.down": RowwiseParallel()}
    parallelize_module(net, mesh, outer)
    for block in net.blocks:
        parallelize_module(block, mesh, inner)


class Model(L.LightningModule):
    def __init__(self, *, sequence: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sequence = sequence
        self.net = Net(0.0 if sequence else 0.1)

    def configure_model(self) -> None:
        spread(self.net, self.device_mesh["tensor_parallel"], sequence=self.sequence)

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def fit(callbacks: list[L.Callback], precision: Any, *, sequence: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = Model(sequence=sequence)
    tokens = torch.randint(32, (48, 64), generator=torch.Generator().manual_seed(1))
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo")
    L.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False, strategy=strategy,
        precision=precision, enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
    ).fit(model, DataLoader(tokens, 16))  # fmt: skip
    whole = [getattr(weight, "full_tensor", lambda weight=weight: weight)() for weight in model.parameters()]
    return [weight.detach().clone() for weight in whole]


@cache
def fit_plainly(precision: Any, *, sequence: bool) -> list[torch.Tensor]:
    """Weights after a training without the callback, in this process."""
    return fit([], precision, sequence=sequence)


def training(rank: int, limit: str, precision: str, sequence: bool) -> Any:
    """Has training the bits of a plain one, and does its plan recompute; or the name of an error."""
    warnings.simplefilter("ignore")
    grids.make_tables_coarse(pytest.MonkeyPatch())
    plain = fit_plainly(precision, sequence=sequence)
    callback = RotorCallback(limit, show_table=False)
    try:
        trained = fit([callback], precision, sequence=sequence)
    except RotorError as error:
        return type(error).__name__
    plan = callback.plan
    return [all(map(torch.equal, plain, trained)), plan is not None and not plan.schedule.is_plain]


def found(group: Processes, limit: str, *, precision: str = "32-true", sequence: bool) -> Any:
    """What both processes saw."""
    first, second = good(group.run(2, training, limit, precision, sequence))
    assert first == second
    return first


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        pytest.param("1GiB", [True, False], marks=pytest.mark.wide),
        pytest.param("1KiB", "BudgetError", marks=pytest.mark.wide),
        ("2.5MiB", [True, True]),
    ],
)
def test_parts_of_a_sequence_are_planned_to_the_same_bits(group: Processes, limit: str, expected: Any) -> None:
    """Beside a spread table that cannot be recorded.

    The mask that an attempt leaves there would be found by the next call, which ends in "MaskBuffer has been
    materialized with conflicting data".
    """
    assert found(group, limit, sequence=True) == expected


@pytest.mark.wide  # test_meshes has dropout beside spread weights, too
@pytest.mark.parametrize(("precision", "limit"), [("32-true", "2.5MiB"), ("bf16-true", "2MiB")])
def test_dropout_and_other_precisions_keep_their_bits(group: Processes, precision: str, limit: str) -> None:
    assert found(group, limit, precision=precision, sequence=False) == [True, True]
