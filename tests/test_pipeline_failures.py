"""A process that fails or is killed ends all the others: soon, and with whole checkpoints or none. It raises its own error as it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from pipelines import Failure, Processes, processes
from test_pipeline_strategy import Model, fit

from lightning_rotor.strategies import RotorPipelineStrategy

SECONDS = 30
EVERY_STEP = {"save_top_k": -1, "every_n_train_steps": 1}


@pytest.fixture
def group() -> Iterator[Processes]:
    """Of their own for each test, since some do not survive it."""
    with processes(3) as made:
        yield made


class _Ends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, end: Any) -> torch.Tensor:
        ctx.end = end
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.end()
        return gradients[0], None


class Bad(torch.nn.Tanh):
    """After some steps it breaks, or is killed, there or in the backward."""

    def __init__(self, how: str, mark: str) -> None:
        super().__init__()
        self.how, self.mark, self.calls = how, mark, 0

    def end(self) -> None:
        Path(self.mark).write_text(str(time.monotonic()))
        if self.how == "error":
            raise KeyError("this layer broke")
        os.kill(os.getpid(), signal.SIGKILL)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += torch.is_grad_enabled() and dist.is_initialized() and self.training
        # What is measured in setup counts too; a step has four micro-batches.
        if self.calls > 40 and self.how != "killed in backward":
            self.end()
        return _Ends.apply(super().forward(x), self.end) if self.calls > 40 else super().forward(x)


class Broken(Model):
    def __init__(self, place: int, how: str, mark: str) -> None:
        super().__init__()
        self.net[place] = Bad(how, mark)


def seconds_since(mark: Path) -> float:
    """The clock of all processes is the same."""
    return time.monotonic() - float(mark.read_text())


def failing(rank: int, folder: str, world: int, place: int, how: str, mark: str) -> None:
    strategy = RotorPipelineStrategy("net", micro_batches=4, recompute="never", balance=[3, 3, 2])
    fit(
        folder,
        strategy,
        world,
        kind=lambda _: Broken(place, how, mark),
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, "{step}", **EVERY_STEP)],
        max_epochs=30,
    )


def whole_checkpoints(folder: Path) -> int:
    """How many there are; each can be read, and nothing else is left."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        assert path.suffix == ".ckpt"
        assert {"state_dict", "optimizer_states"} <= set(torch.load(path, weights_only=True))
    return len(files)


@pytest.mark.parametrize(
    ("rank", "place", "how"),
    [
        (0, 1, "killed in forward"),
        pytest.param(2, 7, "killed in backward", marks=pytest.mark.wide),
        (1, 3, "error"),
        pytest.param(0, 1, "error", marks=pytest.mark.wide),
    ],
)
def test_every_process_ends_soon(group: Processes, tmp_path: Path, rank: int, place: int, how: str) -> None:
    killed = how != "error"
    folder, mark = tmp_path / "runs", tmp_path / "mark"
    answers = group.run(3, failing, str(folder), 3, place, how, str(mark), mortal=(rank,) if killed else ())
    assert seconds_since(mark) < SECONDS
    if killed:
        assert answers[rank] == -signal.SIGKILL
    else:
        assert (answers[rank].kind, answers[rank].message) == ("KeyError", "'this layer broke'")
    for other in {0, 1, 2} - {rank}:
        # They find out in talking to it.
        assert isinstance(answers[other], Failure)
        assert "distributed" in answers[other].text
        assert "this layer broke" not in answers[other].text
    assert whole_checkpoints(folder) > 0


# -------------------------------------------------------------------------------------------------- with Lightning's launcher


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_pipeline_failures import Broken
from test_pipeline_strategy import RotorPipelineStrategy, loader, trainer

strategy = RotorPipelineStrategy("net", micro_batches=4, recompute="never", balance=[4, 4])
made = trainer({folder!r}, strategy, 2, enable_checkpointing=True, max_epochs=30)
made.fit(Broken({place}, {how!r}, {mark!r}), loader())
"""


@pytest.mark.parametrize(
    ("place", "how"),
    [
        # Lightning's launcher ends the other processes then, which test_ranks shows, too.
        pytest.param(7, "error", marks=pytest.mark.wide),
        pytest.param(1, "error", marks=pytest.mark.wide),
        # No code of the first process runs any more. Of other processes every_process_ends_soon shows it.
        pytest.param(1, "killed in forward", marks=pytest.mark.wide),
    ],
)
def test_a_job_of_lightnings_launcher_ends(tmp_path: Path, place: int, how: str) -> None:
    script, mark, folder = tmp_path / "script.py", tmp_path / "mark", tmp_path / "runs"
    script.write_text(
        SCRIPT.format(tests=str(Path(__file__).parent), place=place, how=how, mark=str(mark), folder=str(folder))
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250, check=False)
    # Its output ends when the last process does.
    assert mark.exists(), done.stderr
    assert seconds_since(mark) < SECONDS
    assert done.returncode != 0
    if how == "error":
        assert "KeyError: 'this layer broke'" in done.stderr
