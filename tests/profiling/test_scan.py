"""Where a chain can be cut, from one run of each stage."""

from __future__ import annotations

from collections.abc import Set

import pytest
import torch
from torch import nn

from lightning_rotor.invertible.layers import AdditiveCoupling
from lightning_rotor.profiling.ranks import ALONE, Ranks
from lightning_rotor.profiling.scan import Scan, merged, scan, walk
from lightning_rotor.profiling.stage_input import Boundary
from lightning_rotor.stages.sequential import sequential_stages

CPU = torch.device("cpu")


def scanned(*layers: nn.Module, ranks: Ranks = ALONE) -> Scan:
    return scan(sequential_stages(nn.Sequential(*layers)), {0: Boundary.of(torch.randn(4, 8))}, CPU, ranks=ranks)


def coupling() -> nn.Module:
    return AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        ((nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), [1, 1, 1]),
        # Nothing comes before a view of the input, so it joins the next one.
        ((nn.Flatten(), nn.Linear(8, 8), nn.Tanh()), [2, 1]),
        ((nn.Linear(8, 8), nn.Identity(), nn.Tanh()), [2, 1]),
        ((nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Tanh()), [2, 1]),
        ((nn.Linear(8, 8), nn.Identity(), nn.ReLU(inplace=True)), [3]),
        # Joining an invertible stage would take its inverse away.
        ((nn.Linear(8, 8), coupling(), nn.Identity(), nn.Tanh()), [1, 1, 2]),
    ],
    ids=["plain", "view of the input", "view", "in place", "view in place", "behind an invertible stage"],
)
def test_views_and_changes_in_place_are_merged(layers: tuple[nn.Module, ...], groups: list[int]) -> None:
    findings = scanned(*layers)
    assert [len(group) for group in findings.groups] == groups
    assert len(findings.behaviours) == len(layers)


def test_a_chain_is_cut_where_all_processes_can_cut_it() -> None:
    class Others(Ranks):
        def common(self, numbers: Set[int]) -> Set[int]:
            return numbers - {1}

    findings = scanned(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), ranks=Others())
    assert [len(group) for group in findings.groups] == [2, 1]


def test_the_output_is_known() -> None:
    findings = scanned(nn.Linear(8, 8), nn.Tanh())
    last = findings.storages[max(findings.storages)]
    assert [storage.in_output for storage in last if storage is not None] == [True]


def test_a_walk_gives_each_stage_its_input() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(3, 8)
    seen = list(walk(sequential_stages(net), {0: Boundary.of(x)}))
    assert [number for number, _ in seen] == [0, 1, 2]
    assert torch.equal(seen[2][1].leaves[0], net[:2](x))


def test_merged_stages_compute_the_same() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    first, second = merged(sequential_stages(net), [range(2), range(2, 3)])
    assert (first.name, second.name) == ("0 … 1", "2")
    x = torch.randn(3, 8)
    assert torch.equal(second(first(x)), net(x))
