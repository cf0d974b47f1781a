"""FSDP2 in its modes, tensor parallelism and both on a mesh of processes: bits, limits and refusals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pipelines import PATIENCE_SECONDS, Processes, good, processes

from tests import grids
from tests.mesh_runs import STEPS, seen, steps_beside_a_slow_process
from tests.training import assert_same_bits

# The error comes about in one way; `make test` sees it in units and in layers that are spread.
REFUSED = ("stays whole", "loss of parts")


@pytest.fixture(scope="module")
def group() -> Iterator[Processes]:
    with processes(4, patience_seconds=PATIENCE_SECONDS) as made:
        yield made


def check(group: Processes, number: int, case: str) -> None:
    """A case on so many processes."""
    refused = grids.is_whole or case in REFUSED
    runs = good(group.run(number, seen, case, refused))
    for each in runs:
        assert_same_bits(each["plain"], each["rich"])
        assert_same_bits(each["plain"], each["poor"])
        assert "(" in each["schedules"][-1]
        assert each["schedules"] == runs[0]["schedules"]
        # A message that gloo keeps a moment longer is 3 % of it.
        assert max(each["peaks"][1:]) <= 1.03 * each["limit"]
        if not refused:
            continue
        # All raise the error of the process that needs most, behind the first step.
        assert each["refusal"] == runs[0]["refusal"] > 1024
        assert each["steps before it"] == runs[0]["steps before it"] <= 2


@pytest.mark.feature("Strategies", "FSDP2 with `reshard_after_forward=False`")
def test_units_that_stay_whole_are_planned(group: Processes) -> None:
    check(group, 2, "stays whole")


@pytest.mark.feature("Strategies", "FSDP2 with a mixed precision policy")
def test_units_of_mixed_precision_are_planned(group: Processes) -> None:
    check(group, 2, "mixed precision")


@pytest.mark.feature("Strategies", "FSDP2 with `CPUOffloadPolicy`", note="on the CPU, where nothing moves")
def test_units_that_are_moved_are_planned(group: Processes) -> None:
    check(group, 2, "moved")


@pytest.mark.feature("Strategies", "tensor parallelism with `loss_parallel`")
def test_a_loss_of_spread_logits_is_planned(group: Processes) -> None:
    check(group, 2, "loss of parts")


@pytest.mark.feature("Strategies", "tensor parallelism inside of FSDP2 units, on four processes")
def test_spread_layers_in_units_are_planned(group: Processes) -> None:
    check(group, 4, "two dimensions")


@pytest.mark.feature("Strategies", "HSDP: FSDP2 units with replicas, on four processes")
def test_replicated_units_are_planned(group: Processes) -> None:
    check(group, 4, "replicas")


@pytest.mark.feature("Strategies", "a process that is slower than the others", note="the others wait for it")
def test_a_slow_process_is_waited_for(group: Processes) -> None:
    assert good(group.run(2, steps_beside_a_slow_process)) == [STEPS, STEPS]
