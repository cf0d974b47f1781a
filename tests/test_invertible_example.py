"""The example of reversible networks, with tiny settings."""

from __future__ import annotations

import logging
import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "invertible" / "train.py"
SIZES = {"KiB": 2**10, "MiB": 2**20}


@pytest.mark.wide
def test_the_example_trains_in_three_ways_and_draws_memory_against_depth(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    picture = tmp_path / "depth.png"
    arguments = "--depths 1 4 --batch-size 32 --train-depth 1 --epochs 1 --output"
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), *arguments.split(), str(picture)])
    with caplog.at_level(logging.ERROR, "lightning.pytorch"):  # which it sets
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    losses = dict(re.findall(r"(plain|recompute|invert) +last loss ([\d.]+)", printed))
    assert losses["plain"] == losses["recompute"]
    assert abs(float(losses["plain"]) - float(losses["invert"])) < 0.1  # rounding errors grow while it trains
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)%", printed)]
    assert len(accuracies) == 3
    assert min(accuracies) > 30  # chance: 10
    shallow, deep = (
        {way: float(size) * SIZES[unit] for way, size, unit in re.findall(r"(\w+) ([\d.]+) (KiB|MiB)", line)}
        for line in printed.splitlines()
        if "peak of a step:" in line
    )
    assert deep["plain"] > 2 * shallow["plain"]
    assert deep["invert"] < 1.15 * shallow["invert"]  # gradients of the weights
    assert deep["invert"] < deep["recompute"] < deep["plain"]
    assert picture.stat().st_size > 10_000
