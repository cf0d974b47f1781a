"""Modules whose weights are spread over processes by ``parallelize_module``: what cannot be planned yet trains plainly, to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

from tests.processes import run_python

SCRIPT = """
import json, os, sys, torch, warnings
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
warnings.simplefilter("ignore")
import lightning as L
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader
from lightning_rotor import RotorCallback, RotorError

torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(32, 16), nn.RMSNorm(16), nn.Linear(16, 32, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

TABLE = {"table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(),
         "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
SPREAD = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
    def configure_model(self):
        mesh = self.device_mesh["tensor_parallel"]
        parallelize_module(self.net, mesh, TABLE)
        for block in self.net.blocks:
            parallelize_module(block, mesh, SPREAD)
    def training_step(self, tokens, index):
        return nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)

def fit(callbacks):
    model = Model()
    tokens = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(1))
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo")
    L.Trainer(accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False, strategy=strategy,
              enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks).fit(model, DataLoader(tokens, 4))
    return [p.full_tensor().detach().clone() for p in model.parameters()]

plain, found = fit([]), {}
for limit in ("1GiB", "1KiB"):
    try:
        found[limit] = all(map(torch.equal, plain, fit([RotorCallback(limit, show_table=False)])))
    except RotorError as error:
        found[limit] = type(error).__name__
if int(os.environ["RANK"]) == 0:
    print(json.dumps(found))
"""


def test_an_attempt_that_ends_in_a_spread_table_leaves_it_as_it_was(tmp_path: Path) -> None:
    """Its mask would be found by the next call, which ends in "MaskBuffer has been materialized with conflicting data"."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    printed, _ = run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    found = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert found == {"1GiB": True, "1KiB": "BudgetError"}
