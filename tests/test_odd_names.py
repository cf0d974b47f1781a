"""Names of layers and terminals that most programs never meet: what is only shown is shown, and never ends training."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_rotor import Checkpointable, Plan
from lightning_rotor.shown import printable, rendered, show
from tests.grids import few
from tests.processes import ROOT

NAMES = [
    *(
        "[/b]",
        "[red]x[/red]",
        "[bold",
        "<script>",
        "&amp;",
        "a'b",
        'a"b',
        "a\nb",
        "\x00",
        "\x1b[31m",
        "\u202e",
        "\ud800",
    ),
    *("é", "日本語", "💥", "{x}", "%s", "\\", "class", "self", "a" * 3000, "\t", "0", ":warning:"),
]


def chain_with(name: str, *, in_a_row: bool) -> nn.Module:
    blocks = nn.Sequential()
    for number in range(4):
        blocks._modules[f"{name}{number}"] = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return blocks if in_a_row else nn.Sequential(blocks)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("in_a_row", [True, False])
def test_odd_names_are_printed_as_they_are(name: str, in_a_row: bool, tmp_path: Path) -> None:
    net = Checkpointable(chain_with(name, in_a_row=in_a_row), torch.randn(4, 8))
    plan = net.use("(0-1) 2-7")
    shown = str(plan)
    if len(name) < 30:
        assert printable(name) in shown
    drawing = net.draw()
    xml.dom.minidom.parseString(drawing.encode())
    drawing.save(tmp_path / "chain.svg")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", net.chain).schedule == plan.schedule
    assert rendered(plan.table()) == shown
    net(torch.randn(4, 8)).sum().backward()


def test_a_stream_that_is_closed_does_not_end_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = Path(os.devnull).open("w")  # noqa: SIM115
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    show(Checkpointable(chain_with("x", in_a_row=True), torch.randn(4, 8), "1GiB").plan.table())
    assert "a table could not be shown" in caplog.text


TRAIN = """
import warnings; warnings.filterwarnings("ignore")
import torch, lightning as L
from torch import nn
from lightning_rotor import RotorCallback
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())])
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
rotor = RotorCallback("700KiB")
L.Trainer(max_steps=4, accelerator="cpu", callbacks=[rotor], logger=False, enable_checkpointing=False,
          enable_progress_bar=False, enable_model_summary=False).fit(
    Model(), torch.utils.data.DataLoader(torch.randn(256 * 4, 64), batch_size=256))
print("trained", rotor.plan.recomputed != ())
"""


def printed_here(patch: pytest.MonkeyPatch) -> str:
    """By this process, whose stream and width are those of such a terminal."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    patch.setenv("COLUMNS", "20")
    patch.setattr(sys, "stdout", stream)
    exec(TRAIN, {"__name__": "train"})
    stream.flush()
    return stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]


def printed_by_a_program() -> str:
    """Also without unicode in the names and contents of files."""
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "COLUMNS": "20"}
    environment |= {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", TRAIN], env=environment, capture_output=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode("ascii")


@pytest.mark.parametrize("apart", few([False, True], False))
@pytest.mark.filterwarnings("ignore")
def test_a_terminal_without_unicode_shows_what_it_can(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = printed_by_a_program() if apart else printed_here(monkeypatch)
    assert "trained True" in printed
    assert "Recompute" in printed
