"""Bytes that advice foretells, against two processes that train so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_rotor.advising import Cluster, advise
from lightning_rotor.profiling.input_spec import InputSpec
from tests.advice_runs import ROWS, Whole
from tests.processes import ROOT
from tests.rank_runs import WIDTH


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    path: Path = tmp_path_factory.mktemp("advice") / "measured.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "tests.advice_runs", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert path.exists(), done.stderr[-2000:]
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def foretold() -> dict[str, int]:
    advice = advise(
        Whole,
        [InputSpec((ROWS, WIDTH))],
        lambda model: [torch.optim.AdamW(model.parameters())],
        Cluster.of("H100", 2),
        like="cpu",
    )
    assert advice.batch == 2 * ROWS
    found = {}
    for choice in advice.choices:
        if choice.kind in ("DDP", "FSDP2"):
            assert choice.batch_per_device == ROWS
            found["DDP" if choice.kind == "DDP" else f"FSDP2 {choice.reshard}"] = choice.peak_bytes
    return found


@pytest.mark.parametrize("way", ["DDP", "FSDP2 True", "FSDP2 False"])
def test_bytes_a_device_are_those_of_two_processes(
    way: str, foretold: dict[str, int], measured: dict[str, int]
) -> None:
    assert foretold[way] == pytest.approx(measured[way], rel=0.02)
