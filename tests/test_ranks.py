"""Two processes: the same weights as without the callback, one plan, each inside the limit, and nobody waits in vain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_rotor import RotorCallback
from tests.rank_runs import CASES, LIMIT, TIMEOUT, fit
from tests.training import assert_same_bits

ROOT = Path(__file__).parents[1]
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each process saw of all cases. Lightning's own launcher (popen) starts the second one."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "tests.rank_runs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.fail(f"exit status {done.returncode}: {done.stderr[-2000:]}")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("ddp", marks=pytest.mark.feature("Strategies", "DDP, launched by subprocesses (popen)"), id="ddp"),
        pytest.param(
            "unused",
            marks=pytest.mark.feature(
                "Strategies", "DDP with `find_unused_parameters=True`", note="a rank may skip the planned module"
            ),
            id="unused",
        ),
        pytest.param("static", marks=pytest.mark.feature("Strategies", "DDP with `static_graph=True`"), id="static"),
        pytest.param(
            "views", marks=pytest.mark.feature("Strategies", "DDP with `gradient_as_bucket_view=True`"), id="views"
        ),
        pytest.param(
            "ragged", marks=pytest.mark.feature("Strategies", "DDP, other shapes on each rank and step"), id="ragged"
        ),
        pytest.param(
            "synchronized",
            marks=pytest.mark.feature(
                "Strategies",
                "layers that communicate in their forward, under DDP",
                note="as SyncBatchNorm does, which torch refuses on the CPU",
            ),
            id="synchronized",
        ),
        pytest.param(
            "synchronized_ragged",
            marks=pytest.mark.feature("Strategies", "the same with other shapes on each rank and step"),
            id="synchronized_ragged",
        ),
        pytest.param(
            "inside",
            marks=pytest.mark.feature("Strategies", "FSDP2 (ModelParallelStrategy), planned module inside a unit"),
            id="inside",
        ),
        pytest.param(
            "unit",
            marks=pytest.mark.feature("Strategies", "FSDP2 (ModelParallelStrategy), planned module is a unit"),
            id="unit",
        ),
    ],
)
def test_two_processes_train_as_without_the_callback(runs: Seen, case: str) -> None:
    for seen in runs:
        assert_same_bits(seen[case]["plain"], seen[case]["planned"])
        assert "[" in seen[case]["schedules"][-1] or "(" in seen[case]["schedules"][-1]  # it recomputes
        assert seen[case]["limit"] == LIMIT
    assert_same_bits(runs[0][case]["planned"], runs[1][case]["planned"])


@pytest.mark.parametrize("case", ["ddp", "unused", "static", "views", "synchronized", "synchronized_ragged", "inside"])
def test_ranks_run_one_plan(runs: Seen, case: str) -> None:
    first, second = (seen[case]["schedules"] for seen in runs)
    assert first[-1] == second[-1] != ""
    if case.startswith("synchronized"):
        assert first == second  # at every step, or the recomputation would not communicate in step


@pytest.mark.parametrize("case", ["ddp", "unused", "static", "views"])
def test_the_limit_holds_on_each_rank_with_the_buckets_of_ddp(runs: Seen, case: str) -> None:
    for seen in runs:
        assert 0.8 * LIMIT < seen[case]["peak"] <= LIMIT
        assert seen[case]["measured"] <= LIMIT


@pytest.mark.feature("Strategies", "FSDP2 units inside the planned module are refused with a remedy")
def test_units_inside_the_planned_module_are_refused(runs: Seen) -> None:
    for seen in runs:
        assert "holds 2 FSDP units (the first is '0')" in seen["units"]["error"]
        assert "the unit itself, such as '0'" in seen["units"]["error"]


@pytest.mark.feature("Strategies", "DDP, launched by spawned processes")
def test_spawned_processes_train_as_launched_ones(runs: Seen, tmp_path: Path) -> None:
    strategy = DDPStrategy(start_method="spawn", timeout=TIMEOUT)
    rotor = RotorCallback(LIMIT, "body", show_table=False)
    assert_same_bits(runs[0]["ddp"]["plain"], fit(CASES["ddp"], [rotor], tmp_path, strategy))
