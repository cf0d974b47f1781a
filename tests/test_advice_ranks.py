"""Bytes that advice foretells, against two processes that train so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pipelines import PATIENCE_SECONDS, Processes, good, processes

from lightning_rotor.advising import Cluster, advise
from lightning_rotor.profiling.input_spec import InputSpec
from tests.advice_runs import ROWS, Whole, peak_bytes
from tests.grids import few
from tests.rank_runs import WIDTH

WAYS = {"DDP": None, "FSDP2 True": True, "FSDP2 False": False}


@pytest.fixture(scope="module")
def group() -> Iterator[Processes]:
    with processes(2, patience_seconds=PATIENCE_SECONDS) as made:
        yield made


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


@pytest.mark.parametrize("way", few(WAYS, "DDP", "FSDP2 True"))
def test_bytes_a_device_are_those_of_two_processes(way: str, foretold: dict[str, int], group: Processes) -> None:
    measured = good(group.run(2, peak_bytes, WAYS[way]))[0]
    assert foretold[way] == pytest.approx(measured, rel=0.02)


@pytest.mark.wide
def test_bytes_a_device_are_those_of_two_groups_of_two_processes() -> None:
    advice = advise(
        Whole, [InputSpec((ROWS, WIDTH))], lambda model: [torch.optim.AdamW(model.parameters())],
        Cluster.of("H100", 4), like="cpu",
    )  # fmt: skip
    (foretold,) = [choice.peak_bytes for choice in advice.choices if choice.shards == 2 and choice.reshard]
    with processes(4, patience_seconds=PATIENCE_SECONDS) as group:
        measured = good(group.run(4, peak_bytes, True, (2, 2)))
    assert foretold == pytest.approx(measured[0], rel=0.02)
