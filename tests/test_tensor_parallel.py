"""Modules whose weights are spread over processes by ``parallelize_module``: planned between tensors that are not spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_python

SCRIPT = """
import json, os, sys, torch, warnings
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
warnings.simplefilter("ignore")
import lightning as L
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                                     parallelize_module)
from torch.utils.data import DataLoader
from lightning_rotor import RotorCallback, RotorError

torch.set_num_threads(1)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.out = nn.Linear(32, 32, bias=False)
    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).flatten(2))

class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False)
    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.norm2, self.feed = nn.RMSNorm(32), Attention(), nn.RMSNorm(32), Feed()
        self.drop = nn.Dropout(0.1 if KIND == "whole sequence" else 0.0)
    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.drop(self.feed(self.norm2(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(32, 32), nn.RMSNorm(32), nn.Linear(32, 32, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

KIND = sys.argv[1]
INNER = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")} | {"feed.up": ColwiseParallel()}
if KIND == "sequence":  # sequence parallel: parts of the sequence between the blocks' halves
    TABLE = {"table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(),
             "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    PARTS = {"norm": SequenceParallel(), "norm2": SequenceParallel(), "attention.out": RowwiseParallel(output_layouts=Shard(1)),
             "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
             "feed": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
             "feed.down": RowwiseParallel(output_layouts=Shard(1))} | INNER
else:
    TABLE = {"head": ColwiseParallel(output_layouts=Replicate())}
    PARTS = {"attention.out": RowwiseParallel(), "feed.down": RowwiseParallel()} | INNER

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
    def configure_model(self):
        mesh = self.device_mesh["tensor_parallel"]
        parallelize_module(self.net, mesh, TABLE)
        for block in self.net.blocks:
            parallelize_module(block, mesh, PARTS)
    def training_step(self, tokens, index):
        return nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)

def fit(callbacks, precision):
    torch.manual_seed(1)
    model = Model()
    tokens = torch.randint(32, (80, 64), generator=torch.Generator().manual_seed(1))
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo")
    L.Trainer(accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False, strategy=strategy, precision=precision,
              enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks).fit(model, DataLoader(tokens, 16))
    return [p.full_tensor().detach().clone() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]

precision = "bf16-true" if KIND == "sequence, bf16" else "32-true"
KIND = KIND.split(",")[0]
plain, found = fit([], precision), {}
for limit in sys.argv[2:]:
    callback = RotorCallback(limit, show_table=False)
    try:
        trained = fit([callback], precision)
        plan = callback.plan
        found[limit] = [all(map(torch.equal, plain, trained)), plan is not None and not plan.schedule.is_plain]
    except RotorError as error:
        found[limit] = type(error).__name__
with open(__file__ + os.environ["RANK"], "w") as answer:
    json.dump(found, answer)
"""


def found(folder: Path, kind: str, *limits: str) -> dict[str, Any]:
    """By limit: has training the bits of a plain one, and does its plan recompute; or the name of an error."""
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run_python(*launch, str(script), kind, *limits)
    first, second = (json.loads((folder / f"train.py{rank}").read_text(encoding="utf-8")) for rank in (0, 1))
    assert first == second
    return dict(first)


def test_parts_of_a_sequence_are_planned_to_the_same_bits(tmp_path: Path) -> None:
    """Beside a spread table that cannot be recorded.

    The mask that an attempt leaves there would be found by the next call, which ends in "MaskBuffer has been
    materialized with conflicting data".
    """
    assert found(tmp_path, "sequence", "1GiB", "1KiB", "5MiB") == {
        "1GiB": [True, False],
        "1KiB": "BudgetError",
        "5MiB": [True, True],
    }


@pytest.mark.parametrize("kind", ["whole sequence", "sequence, bf16"])
def test_dropout_and_other_precisions_keep_their_bits(kind: str, tmp_path: Path) -> None:
    assert found(tmp_path, kind, "4.6MiB") == {"4.6MiB": [True, True]}
