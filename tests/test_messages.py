"""Messages between processes are seen wherever they are sent: two processes of unequal speed run one plan, to the bits of plain training."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_rotor.planned.agreement import Agreement, _connected
from lightning_rotor.profiling.step_compute import measure_compute
from tests.message_runs import KINDS
from tests.processes import ROOT
from tests.training import assert_same_bits

Seen = list[dict[str, Any]]
SPECIAL = (
    *("other_inputs", "first_message_late", "two_groups", "profiler_on_one function", "profiler_on_one backward"),
    *("chosen_schedules", "callback_again", "silence"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each process saw of all trainings. Starting the two takes longer than training."""
    folder = tmp_path_factory.mktemp("messages")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    common = {
        "PYTHONPATH": path,
        "WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    common |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.message_runs", str(folder)]
    processes, reports = [], [folder / f"report{rank}" for rank in range(2)]
    for rank, report in enumerate(reports):
        environment = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with report.open("w") as output:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output))
    try:
        statuses = [process.wait(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for status, report in zip(statuses, reports, strict=True):
        if status:
            pytest.fail(f"exit status {status}: {report.read_text()[-3000:]}")
    return [torch.load(folder / f"messages{rank}.pt", weights_only=True) for rank in range(2)]


CASES = [f"{name} {way}" for name, kind in KINDS.items() for way in kind.ways]


@pytest.mark.parametrize("case", CASES)
def test_messages_leave_the_bits_of_plain_training(runs: Seen, case: str) -> None:
    for seen in runs:
        assert_same_bits(seen[case]["plain"], seen[case]["planned"])


@pytest.mark.parametrize("case", [case for case in CASES if KINDS[case.split()[0]].together])
def test_processes_that_exchange_messages_run_one_plan(runs: Seen, case: str) -> None:
    first, second = (seen[case] for seen in runs)
    assert first["together"]
    assert second["together"]
    assert first["schedules"] == second["schedules"]
    if case.endswith(" lightning"):  # at the least limit
        assert "(" in first["schedules"][-1]


@pytest.mark.parametrize("case", [case for case in CASES if not KINDS[case.split()[0]].together])
def test_processes_without_messages_plan_for_themselves(runs: Seen, case: str) -> None:
    assert not any(seen[case]["together"] for seen in runs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_sees_messages_and_sends_none(runs: Seen, kind: str) -> None:
    for seen in runs:
        dry = seen[f"{kind} by_hand"]["dry"]  # the run itself checks that nothing was sent
        if kind == "backward" or not KINDS[kind].together:  # no backward runs
            assert dry == {}
        elif kind in ("experts", "objects"):  # the received numbers of rows and bytes end it at the first message
            assert dry == {"": [[0, 1]], "0": [[0, 1]]}
        else:
            assert dry[""] == [[0, 1]]
            assert "1" in dry


@pytest.mark.parametrize("case", SPECIAL)
def test_where_processes_are_not_alike_bits_stay(runs: Seen, case: str) -> None:
    for seen in runs:
        assert_same_bits(seen[case]["plain"], seen[case]["planned"])
        assert_same_bits(seen[case]["plain"], seen[case].get("again", seen[case]["planned"]))


def test_new_inputs_and_late_messages_lead_to_one_plan(runs: Seen) -> None:
    for case in ("other_inputs", "first_message_late"):
        assert runs[0][case]["plan"] == runs[1][case]["plan"] != ""


def test_a_profiler_on_one_process_puts_measuring_off_on_all(runs: Seen) -> None:
    for case in ("profiler_on_one function", "profiler_on_one backward"):
        assert ["on another process" in seen[case]["refusal"] for seen in runs] == [False, True]


def test_a_schedule_that_all_have_chosen_runs(runs: Seen) -> None:
    assert [seen["chosen_schedules"]["ran"] for seen in runs] == [seen["chosen_schedules"]["chosen"] for seen in runs]


def test_a_process_that_does_not_come_is_named_and_not_waited_for_for_ever(runs: Seen) -> None:
    assert "processes [0, 1] exchange messages" in runs[0]["silence"]["refusal"]


# ---------------------------------------------------------------- without processes


def test_processes_that_are_connected_agree() -> None:
    pairs = [frozenset(pair) for pair in ((0, 1), (2, 3), (1, 4))]
    assert _connected(pairs, 0) == _connected(pairs, 4) == {0, 1, 4}
    assert _connected(pairs, 2) == {2, 3}
    assert _connected(pairs, 5) == frozenset()


def test_one_process_looks_for_nothing() -> None:
    ranks = Agreement()
    assert not ranks.watches
    with ranks.watching(), ranks.alike(["0"]):
        assert ranks.common({1, 2}) == {1, 2}
    assert not ranks.together


def test_a_dry_run_still_leaves_data_sets_alone() -> None:
    net = nn.Linear(2, 2)
    net.data = TensorDataset(torch.ones(2, 2))
    found = measure_compute(net, torch.ones(1, 2), lambda copy, batch: copy(batch))
    assert found.total
    assert not found.messages
