"""benchmarks/gpu.py, which is for the day on which a GPU is at hand, runs until then on the simulated device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cuda_device import missing

ROOT = Path(__file__).resolve().parents[1]


def written(folder: Path, *options: str) -> str:
    """The table that the command writes."""
    command = [] if torch.cuda.is_available() else ["-m", "tests.cuda_device"]
    command += ["-m", "benchmarks.gpu", "--small", "--to", str(folder / "gpu.md"), *options]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    text = (folder / "gpu.md").read_text()
    assert "**Ended with" not in text, text
    assert "**Not finished" not in text, text
    assert "`python -m benchmarks.gpu --small`" in text.split("\n## ")[0]
    return text


def assert_peaks(part: str) -> None:
    rows = [line for line in part.splitlines() if line.startswith("| U-Net")]
    assert len(rows) == 10
    assert all(row.endswith("| yes | yes |") for row in rows)


NEEDED = pytest.mark.skipif(
    not torch.cuda.is_available() and bool(missing()), reason="neither a GPU nor a simulated one"
)


@pytest.mark.wide
@NEEDED
def test_the_command_for_a_gpu_writes_a_part_of_its_table(tmp_path: Path) -> None:
    _, peaks = written(tmp_path, "--parts", "peaks").split("\n## ")
    assert_peaks(peaks)


@pytest.mark.wide
@NEEDED
def test_the_command_for_a_gpu_writes_all_of_its_table(tmp_path: Path) -> None:
    _, tests, peaks, race, overhead = written(tmp_path).split("\n## ")
    assert " passed" in tests
    assert "failed" not in tests
    assert_peaks(peaks)
    assert "| checkpoint every block |" in race
    assert "| lightning-rotor |" in race
    assert "| 200 layers in an nn.Sequential |" in overhead
