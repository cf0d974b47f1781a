"""benchmarks/gpu.py, which is for the day on which a GPU is at hand, runs until then on the simulated device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cuda_device import missing

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(not torch.cuda.is_available() and bool(missing()), reason="neither a GPU nor a simulated one")
def test_the_command_for_a_gpu_writes_all_of_its_table(tmp_path: Path) -> None:
    command = [] if torch.cuda.is_available() else ["-m", "tests.cuda_device"]
    command += ["benchmarks/gpu.py", "--small", "--to", str(tmp_path / "gpu.md")]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    text = (tmp_path / "gpu.md").read_text()
    assert "**Ended with" not in text, text
    assert "**Not finished" not in text, text
    head, tests, peaks, race, overhead = text.split("\n## ")
    assert "`python benchmarks/gpu.py --small`" in head
    assert " passed" in tests
    assert "failed" not in tests
    rows = [line for line in peaks.splitlines() if line.startswith("| U-Net")]
    assert len(rows) == 10
    assert all(row.endswith("| yes | yes |") for row in rows)
    assert "| checkpoint every block |" in race
    assert "| lightning-rotor |" in race
    assert "| 200 layers in an nn.Sequential |" in overhead
