"""What only Linux has is asked for when it is used: the package imports, plans and trains where it is hidden."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.grids import few
from tests.imported_python import ImportedPython

# Run before the package is imported; torch and Lightning, which ask for some of it themselves, are there by then.
HIDING = """
import mmap, os, sys
import lightning, torch
for name in {modules}:
    sys.modules[name] = None
for owner, names in ((os, {functions}), (mmap, ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_HUGEPAGE"))):
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(arguments[0])

sys.addaudithook(refuse)
"""
WINDOWS = ["fork", "getloadavg", "getpgid", "getuid", "killpg", "nice", "pread", "preadv", "pwrite", "pwritev"]
WINDOWS += ["sched_getaffinity", "setsid", "sysconf", "uname"]
SYSTEMS = {
    "macOS": HIDING.format(modules=["psutil"], functions=["sched_getaffinity"]),
    "Windows": HIDING.format(modules=["fcntl", "grp", "psutil", "pwd", "resource", "termios"], functions=WINDOWS),
}
PROGRAM = """
import copy
from torch import nn
import lightning_rotor
from lightning_rotor import Checkpointable, ProfilingError, plan, profile_chain, sequential_stages

torch.manual_seed(0)
net = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())])
plain, x = copy.deepcopy(net), torch.randn(256, 64)
chain = profile_chain(sequential_stages(net), x).chain
least = plan(chain, 2**30).frontier().points[0].peak_bytes
assert plan(chain, least).recomputed

for offload in (None, f"disk:{folder}"):
    planned = Checkpointable(copy.deepcopy(net), mem_limit=least + least // 4, offload=offload)
    planned(x).sum().backward()
    plain.zero_grad()
    plain(x).sum().backward()
    pairs = zip(planned.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
print("planned and trained")

try:
    Checkpointable(net, mem_limit="80%")(x)
except ProfilingError as error:
    print(error)
"""


CALLBACK = """
import warnings
from torch import nn
from torch.utils.data import DataLoader
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning_rotor import RotorCallback

class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))

warnings.simplefilter("ignore")
rotor = RotorCallback(mem_limit="1GiB")
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(max_steps=2, accelerator="cpu", callbacks=[rotor], **options)
trainer.fit(Model(), DataLoader(RandomDataset(32, 64), batch_size=8))
print(rotor.plan.overhead)
"""


# Windows lacks what macOS lacks, and more.
@pytest.mark.parametrize("system", few(SYSTEMS, "Windows"))
def test_it_imports_plans_and_trains_without_what_other_systems_lack_and_so_does_the_callback(
    system: str, tmp_path: Path, imported_python: ImportedPython
) -> None:
    moved, cwd = tmp_path / "moved", tmp_path / "here"
    moved.mkdir()
    cwd.mkdir()
    program = f"{SYSTEMS[system]}\nfolder = {str(moved)!r}\n{PROGRAM}{CALLBACK}"
    planned, error, *_, overhead = imported_python.run(program, cwd=cwd).splitlines()
    assert planned == "planned and trained"
    assert error == "this machine's memory cannot be read: install psutil, or give the memory limit in bytes"
    assert not list(moved.iterdir())
    assert overhead == "0.0"


@pytest.mark.wide
def test_the_command_line_plans_there(imported_python: ImportedPython) -> None:
    options = ["plan", "--model", "torch.nn.TransformerEncoderLayer", "--input", "3x4x8", "--budget", "1GiB"]
    options += ["--model-arg", "d_model=8", "--model-arg", "nhead=2"]
    program = f"{SYSTEMS['Windows']}\nfrom lightning_rotor.report.command_line import main\nsys.exit(main({options}))"
    assert "Recomputation plan" in imported_python.run(program)
