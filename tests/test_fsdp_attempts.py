"""Attempts to plan a module under FSDP2 leave its units as they were, whether they stay whole after a forward or not."""

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
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from lightning_rotor import RotorCallback, is_recomputing

torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))

class Net(nn.Module):
    def __init__(self, refuses):
        super().__init__()
        self.blocks, self.refuses = nn.ModuleList(Block() for _ in range(4)), refuses
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if self.refuses:  # in the middle of a recording, which then fails
            is_recomputing()
        return x

class Model(L.LightningModule):
    def __init__(self, refuses, reshard, whole):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.options, self.whole = Net(refuses), {"reshard_after_forward": reshard}, whole
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh, **self.options)
        if self.whole:
            fully_shard(self.net, mesh=mesh, **self.options)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)

def weights(model):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]

def fit(callbacks, *options):
    model = Model(*options)
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    L.Trainer(accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False, strategy=strategy,
              enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks).fit(model, DataLoader(rows, 8))
    return [w.detach().clone() for w in weights(model)]

found = {}
for refuses, reshard, whole in [(False, False, False), (True, False, False), (True, False, True), (True, True, True)]:
    plain = fit([], refuses, reshard, whole)
    rotor = RotorCallback("1GiB", show_table=False)
    planned = fit([rotor], refuses, reshard, whole)
    same = all(torch.equal(one, other) for one, other in zip(plain, planned))
    found[f"{refuses} {reshard} {whole}"] = [same, rotor.plan is not None, str(rotor._last.target if rotor._last else None)]
if torch.distributed.get_rank() == 0:
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    script: Path = tmp_path_factory.mktemp("fsdp") / "train.py"
    script.write_text(SCRIPT)
    printed, _ = run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


@pytest.mark.parametrize("case", ["False False False", "True False False", "True False True", "True True True"])
def test_training_is_what_it_was_without_the_attempt(found: Any, case: str) -> None:
    same, is_planned, _ = found[case]
    assert same
    assert is_planned
