"""Faults of one process under torchrun, with FSDP2 and DDP: training ends soon, the cause is named, nobody is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

SCRIPT = """
import os, signal, sys, warnings
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
warnings.simplefilter("ignore")
import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset
from lightning_rotor import RotorCallback

torch.set_num_threads(1)
fault, strategy, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
# At once each: what two processes print goes to one pipe, in the pieces in which it is written.
os.write(1, f"process {os.getpid()}\\n".encode())

class Batches(IterableDataset):
    def __iter__(self):
        for step in range(5):
            if step == 3 and rank == 1 and fault == "loader":
                raise OSError("the disk of this process is gone")
            yield torch.randn(32, 32)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(32, 32), 0
    def forward(self, x):
        return nn.functional.gelu(self.linear(x))

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(Layer() for _ in range(4)))
    def configure_model(self):
        if strategy == "fsdp":
            for layer in self.net:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])
    def training_step(self, batch, index):
        if rank == 1 and index == 2 and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and index == 2 and fault == "step":
            raise ValueError("this process has met a bad sample")
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

chosen = DDPStrategy(process_group_backend="gloo")
if strategy == "fsdp":
    chosen = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
limit = 1024 if fault == "limit" and rank == 1 else "1GiB"
trainer = L.Trainer(accelerator="cpu", devices=2, strategy=chosen, max_epochs=1, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
                    callbacks=[RotorCallback(limit, "net", show_table=False)])
trainer.fit(Model(), DataLoader(Batches(), batch_size=None))
os.write(1, f"trained {trainer.global_step}\\n".encode())
"""
SECONDS = 150  # on a busy machine; two are enough on an idle one behind the fault


def ended(folder: Path, fault: str, strategy: str) -> tuple[int, str, str]:
    """Exit status, output and errors of both processes under torchrun; none of them is left."""
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), fault, strategy)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        [sys.executable, *launch], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    try:
        output, errors = running.communicate(timeout=SECONDS)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    for line in output.splitlines():
        if line.startswith("process "):
            assert not Path(f"/proc/{line.split()[1]}").exists()
    return running.returncode, output, errors


@pytest.mark.parametrize(
    ("fault", "strategy", "cause"),
    [
        pytest.param("loader", "fsdp", "OSError: the disk of this process is gone", marks=pytest.mark.wide),
        ("step", "ddp", "ValueError: this process has met a bad sample"),
        pytest.param("killed", "fsdp", "Signal 9 (SIGKILL)", marks=pytest.mark.wide),
        pytest.param("limit", "fsdp", "BudgetError: mem_limit 1.00 KiB is below the minimum", marks=pytest.mark.wide),
        pytest.param("limit", "ddp", "BudgetError: mem_limit 1.00 KiB is below the minimum", marks=pytest.mark.wide),
    ],
)
@pytest.mark.feature("Strategies", "a fault of one process, under torchrun", note="ends all, the cause is named")
def test_a_fault_of_one_process_ends_all(fault: str, strategy: str, cause: str, tmp_path: Path) -> None:
    status, output, errors = ended(tmp_path, fault, strategy)
    assert status
    assert cause in errors
    assert "trained" not in output
