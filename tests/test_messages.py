"""Messages between processes are seen wherever they are sent: two processes of unequal speed run one plan, to the bits of plain training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from pipelines import PATIENCE_SECONDS, good, processes
from torch import nn
from torch.utils.data import TensorDataset

from lightning_rotor.planned.agreement import Agreement, _connected
from lightning_rotor.profiling.step_compute import measure_compute
from tests.grids import few
from tests.message_runs import KINDS, SPECIAL, training
from tests.training import assert_same_bits


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """What each process saw of a case, which several tests read."""
    folder = tmp_path_factory.mktemp("messages")
    with processes(2, patience_seconds=PATIENCE_SECONDS) as group:

        @cache
        def seen(case: str) -> list[dict[str, Any]]:
            return good(group.run(2, training, case, folder))

        yield seen


CASES = [f"{name} {way}" for name, kind in KINDS.items() for way in kind.ways]
# Whatever sends, the dispatcher sees the same operators with a group among their arguments. So it is enough to see them once by
# an object and once by its name, in the backward alone, in place, in layers that are not recorded, in a group of one process,
# which nobody else hears of, and where a dry run must end, as pickled objects are values; and how the callback comes to one plan.
NEEDED = [
    "helper lightning",
    *(f"{name} by_hand" for name in ("functional", "backward", "in_place", "in_a_row", "group_of_one", "objects")),
]


def few_cases(*, together: bool | None = None) -> list[Any]:
    """Cases, of which those that show nothing else are wide."""
    return few([case for case in CASES if together in (None, KINDS[case.split()[0]].together)], *NEEDED)


@pytest.mark.parametrize("case", few_cases())
def test_messages_leave_the_bits_of_plain_training(seen: Callable[[str], Any], case: str) -> None:
    for each in seen(case):
        assert_same_bits(each["plain"], each["planned"])


@pytest.mark.parametrize("case", few_cases(together=True))
def test_processes_that_exchange_messages_run_one_plan(seen: Callable[[str], Any], case: str) -> None:
    first, second = seen(case)
    assert first["together"]
    assert second["together"]
    assert first["schedules"] == second["schedules"]
    if case.endswith(" lightning"):  # at the least limit
        assert "(" in first["schedules"][-1]


@pytest.mark.parametrize("case", few_cases(together=False))
def test_processes_without_messages_plan_for_themselves(seen: Callable[[str], Any], case: str) -> None:
    assert not any(each["together"] for each in seen(case))


@pytest.mark.parametrize("kind", few(KINDS, *(kind for kind in KINDS if f"{kind} by_hand" in NEEDED)))
def test_a_dry_run_sees_messages_and_sends_none(seen: Callable[[str], Any], kind: str) -> None:
    for each in seen(f"{kind} by_hand"):
        dry = each["dry"]  # the run itself checks that nothing was sent
        if kind == "backward" or not KINDS[kind].together:  # no backward runs
            assert dry == {}
        elif kind in ("experts", "objects"):  # the received numbers of rows and bytes end it at the first message
            assert dry == {"": [[0, 1]], "0": [[0, 1]]}
        else:
            assert dry[""] == [[0, 1]]
            assert "1" in dry


# Groups that are connected, and a second training of one process, have tests of their own.
@pytest.mark.parametrize("case", few(SPECIAL, *(set(SPECIAL) - {"two_groups", "callback_again"})))
def test_where_processes_are_not_alike_bits_stay(seen: Callable[[str], Any], case: str) -> None:
    for each in seen(case):
        assert_same_bits(each["plain"], each["planned"])
        assert_same_bits(each["plain"], each.get("again", each["planned"]))


def test_new_inputs_and_late_messages_lead_to_one_plan(seen: Callable[[str], Any]) -> None:
    for case in ("other_inputs", "first_message_late"):
        first, second = seen(case)
        assert first["plan"] == second["plan"] != ""


def test_a_profiler_on_one_process_puts_measuring_off_on_all(seen: Callable[[str], Any]) -> None:
    for case in ("profiler_on_one function", "profiler_on_one backward"):
        assert ["on another process" in each["refusal"] for each in seen(case)] == [False, True]


def test_a_schedule_that_all_have_chosen_runs(seen: Callable[[str], Any]) -> None:
    for each in seen("chosen_schedules"):
        assert each["ran"] == each["chosen"]


def test_a_process_that_does_not_come_is_named_and_not_waited_for_for_ever(seen: Callable[[str], Any]) -> None:
    assert "processes [0, 1] exchange messages" in seen("silence")[0]["refusal"]


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
