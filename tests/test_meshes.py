"""FSDP2 in its modes, tensor parallelism and both on a mesh of processes: bits, limits and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import run_python
from tests.training import assert_same_bits

Seen = list[dict[str, Any]]


def launched(folder: Path, processes: int, *cases: str) -> Seen:
    """What each process saw of the cases."""
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    run_python(*launch, "-m", "tests.mesh_runs", str(folder), *cases)
    return [torch.load(folder / f"mesh{rank}.pt", weights_only=True) for rank in range(processes)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return launched(tmp_path_factory.mktemp("pair"), 2, "stays whole", "mixed precision", "moved", "loss of parts")


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return launched(tmp_path_factory.mktemp("square"), 4, "two dimensions", "replicas")


def check(runs: Seen, case: str) -> None:
    for seen in (each[case] for each in runs):
        assert_same_bits(seen["plain"], seen["rich"])
        assert_same_bits(seen["plain"], seen["poor"])
        assert "(" in seen["schedules"][-1]
        assert seen["schedules"] == runs[0][case]["schedules"]
        # A message that gloo keeps a moment longer is 3 % of it.
        assert max(seen["peaks"][1:]) <= 1.03 * seen["limit"]
        # All raise the error of the process that needs most, behind the first step.
        assert seen["refusal"] == runs[0][case]["refusal"] > 1024
        assert seen["steps before it"] == runs[0][case]["steps before it"] <= 2


@pytest.mark.feature("Strategies", "FSDP2 with `reshard_after_forward=False`")
def test_units_that_stay_whole_are_planned(pair: Seen) -> None:
    check(pair, "stays whole")


@pytest.mark.feature("Strategies", "FSDP2 with a mixed precision policy")
def test_units_of_mixed_precision_are_planned(pair: Seen) -> None:
    check(pair, "mixed precision")


@pytest.mark.feature("Strategies", "FSDP2 with `CPUOffloadPolicy`", note="on the CPU, where nothing moves")
def test_units_that_are_moved_are_planned(pair: Seen) -> None:
    check(pair, "moved")


@pytest.mark.feature("Strategies", "tensor parallelism with `loss_parallel`")
def test_a_loss_of_spread_logits_is_planned(pair: Seen) -> None:
    check(pair, "loss of parts")


@pytest.mark.feature("Strategies", "tensor parallelism inside of FSDP2 units, on four processes")
def test_spread_layers_in_units_are_planned(square: Seen) -> None:
    check(square, "two dimensions")


@pytest.mark.feature("Strategies", "HSDP: FSDP2 units with replicas, on four processes")
def test_replicated_units_are_planned(square: Seen) -> None:
    check(square, "replicas")
