"""Which storages a stage takes and leaves behind, from a scan of a small network with a shortcut."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.profiling.scan import Scan, merged, scan
from lightning_rotor.profiling.stage_ends import StageEnds
from lightning_rotor.profiling.stage_input import Boundary
from lightning_rotor.stages.sequential import Stage, wiring_of
from lightning_rotor.stages.wiring import unpacked

SIZE = 4 * 8 * 4


class Shortcut(nn.Module):
    """What the first layer makes is read by the second and by the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        return self.three(self.two(x).sigmoid() + x)


def scanned(net: nn.Module, x: torch.Tensor) -> tuple[tuple[Stage, ...], Scan]:
    cut = sequentialize(net, (x,), {})
    value: Any = cut.bind((x,), {})
    reads = wiring_of(cut.stages).wire.reads
    values = zip(reads, unpacked(value, len(reads)), strict=True)
    inputs = {number: Boundary.of(each) for number, each in values}
    findings = scan(cut.stages, inputs, torch.device("cpu"))
    return merged(cut.stages, findings.groups), findings


def test_ends_tell_skips_from_links() -> None:
    stages, findings = scanned(Shortcut(), torch.randn(4, 8))
    ends = [StageEnds.of(stage, number, findings) for number, stage in enumerate(stages)]
    first = ends[0]
    # Nobody but skips' readers takes what the first layer makes.
    assert (first.outputs, first.link_bytes, first.made_bytes) == ((0,), 0, (SIZE,))
    second = ends[1]
    assert (second.inputs, second.passed) == ((0,), (True,))
    assert (second.link_bytes, second.made_bytes) == (SIZE, (0,))
    joining = next(end for end in ends[2:] if end.skips)
    assert not any(joining.passed)
    assert joining.skips == first.skips


def test_equal_ends_are_equal_whatever_the_numbers_of_their_skips() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Shortcut() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    stages, findings = scanned(Twice(), torch.randn(4, 8))
    ends = [StageEnds.of(stage, number, findings) for number, stage in enumerate(stages)]
    making = [end for end in ends if any(end.made_bytes)]
    assert len(making) == 2
    assert making[0].skips != making[1].skips
    assert making[0] == making[1]


def test_a_chain_without_shortcuts_has_links_alone() -> None:
    stages, findings = scanned(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8))
    for number, stage in enumerate(stages):
        ends = StageEnds.of(stage, number, findings)
        assert (ends.skips, ends.inputs, ends.passed, ends.link_bytes) == ((), (None,), (False,), SIZE)
