"""Faults of one process under torchrun, with FSDP2 and DDP: training ends soon, the cause is named, nobody is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.imported_python import ImportedPython
from tests.processes import ROOT

SCRIPT = """
import os, signal, sys, time, warnings
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
        if rank == 1 and fault == "slow":
            time.sleep(0.3)
        if rank == 1 and index == 2 and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and index == 2 and fault == "step":
            raise ValueError("this process has met a bad sample")
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

def train(*told):
    global fault, strategy, rank
    fault, strategy, rank = *told, int(os.environ["RANK"])
    # At once each: what two processes print goes to one pipe, in the pieces in which it is written.
    os.write(1, f"process {os.getpid()}\\n".encode())
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
UNDER_TORCHRUN = SCRIPT + "train(*sys.argv[1:])\n"

# The agent of torchrun in a process for each fault, and its workers, forked from one that has imported all. The command itself
# starts Python three times, each of which takes ten seconds of a processor.
FORKED = (
    SCRIPT
    + """
import gc, json, traceback
from pathlib import Path
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def worker(*told):
    try:
        train(*told)
    except BaseException:
        traceback.print_exc()  # as the interpreter does at the end of a script
        raise

def agent(number, *told):
    os.setsid()
    signal.alarm(SECONDS)
    for descriptor, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, run_id=str(number), rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", max_restarts=0, start_method="fork")
    elastic_launch(config, worker)(*told)

gc.collect()
gc.freeze()
ends = []
for number, told in enumerate(FAULTS):
    process = os.fork()
    if not process:
        status = 1
        try:
            agent(number, *told)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(process, 0)
    output, errors = (Path(f"{number}.{name}").read_text() for name in ("output", "errors"))
    workers = [line.split()[1] for line in output.splitlines() if line.startswith("process ")]
    left = [worker for worker in workers if Path(f"/proc/{worker}").exists()]
    ends.append([os.waitstatus_to_exitcode(status), output, errors, left])
    for each in left:
        os.kill(int(each), signal.SIGKILL)
print(json.dumps(ends))
"""
)
SECONDS = 150  # on a busy machine; two are enough on an idle one behind the fault


class End(NamedTuple):
    """Exit status, output and errors of both processes, and those that are left."""

    status: int
    output: str
    errors: str
    left: list[str]


def ended(folder: Path, fault: str, strategy: str) -> End:
    """Under the command itself."""
    script = folder / "train.py"
    script.write_text(UNDER_TORCHRUN, encoding="utf-8")
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
    workers = [line.split()[1] for line in output.splitlines() if line.startswith("process ")]
    return End(running.returncode, output, errors, [each for each in workers if Path(f"/proc/{each}").exists()])


CAUSES = {
    ("killed", "fsdp"): "Signal 9 (SIGKILL)",
    ("loader", "fsdp"): "OSError: the disk of this process is gone",
    ("step", "ddp"): "ValueError: this process has met a bad sample",
    ("limit", "fsdp"): "BudgetError: mem_limit 1.00 KiB is below the minimum",
    ("limit", "ddp"): "BudgetError: mem_limit 1.00 KiB is below the minimum",
}
SLOW = ("slow", "fsdp")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory, imported_python: ImportedPython) -> dict[tuple[str, str], End]:
    """Of all faults, whose agents and workers import nothing anew."""
    faults = [*CAUSES, SLOW]
    code = f"FAULTS, SECONDS = {faults!r}, {SECONDS}\n{FORKED}"
    printed = imported_python.run(code, cwd=tmp_path_factory.mktemp("faults"))
    return {fault: End(*end) for fault, end in zip(faults, json.loads(printed.splitlines()[-1]), strict=True)}


def assert_ended(end: End, cause: str) -> None:
    assert end.status
    assert cause in end.errors
    assert "trained" not in end.output
    assert end.output.count("process ") == 2
    assert not end.left


@pytest.mark.parametrize("fault", CAUSES, ids="-".join)
@pytest.mark.feature("Strategies", "a fault of one process, under torchrun", note="ends all, the cause is named")
def test_a_fault_of_one_process_ends_all(fault: tuple[str, str], ends: dict[tuple[str, str], End]) -> None:
    assert_ended(ends[fault], CAUSES[fault])


@pytest.mark.wide
def test_a_process_that_is_killed_ends_all_under_the_command(tmp_path: Path) -> None:
    assert_ended(ended(tmp_path, "killed", "fsdp"), "Signal 9 (SIGKILL)")


@pytest.mark.feature("Strategies", "a process that is slower than the others", note="the others wait for it")
def test_a_slow_process_is_waited_for(ends: dict[tuple[str, str], End]) -> None:
    end = ends[SLOW]
    assert not end.status, end.errors
    assert end.output.count("trained 5") == 2
    assert not end.left
