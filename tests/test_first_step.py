"""What is planned where the dry run cannot follow a step: what ran before that line, and what the first step calls behind it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_rotor import RotorCallback
from lightning_rotor.planning.joint_chain import StepPlan
from tests.test_callback import Recorder, assert_equal_runs, fit, least_limit, seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def layers(width: int = 24, inner: int = 48, depth: int = 3) -> nn.Sequential:
    """Wide in the middle of each block, so that a recomputation has something to save."""
    blocks = [(nn.Linear(width, inner), nn.GELU(), nn.Dropout(0.1), nn.Linear(inner, width)) for _ in range(depth)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


def no_dry_run(value: torch.Tensor) -> None:
    """A line that no run without values can follow."""
    torch.nested.nested_tensor([value.detach()])


class Steps(L.LightningModule):
    """An encoder, a line of some kind, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers(), layers(inner=40)
        self.unused = layers()
        self.unused.requires_grad_(False)

    def between(self, hidden: torch.Tensor) -> None:
        no_dry_run(hidden)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.encoder(batch)
        self.between(hidden)
        return self.logged(self.decoder(hidden))

    def logged(self, output: torch.Tensor) -> torch.Tensor:
        loss = output.square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        raise AssertionError("no batch is validated here")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class FirstLine(Steps):
    """Nothing can be counted."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        no_dry_run(batch)
        return super().training_step(batch, batch_idx)


class InsideOfAModule(Steps):
    """The line is in a module, between equal blocks, and the module cannot be recorded as a whole."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(layers(depth=1) for _ in range(8))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for number, block in enumerate(self.blocks):
                hidden = hidden + block(hidden)
                if number == 3 and hidden.sum() > 1e9:  # a branch on values
                    raise AssertionError("diverged")
                if number == 3:
                    no_dry_run(hidden)
            return hidden

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(24, 24), nn.Linear(24, 24)
        self.net = self.Blocks()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.logged(self.decoder(self.net(self.encoder(batch))))


class PartsCalledDirectly(Steps):
    """The step calls parts of a module, and never the module."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers(), layers(inner=40)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(batch))

    def __init__(self) -> None:
        super().__init__()
        del self.encoder, self.decoder
        self.pair = self.Pair()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        no_dry_run(batch)
        return self.logged(self.pair.second(self.pair.first(batch)))


class OneCall(Steps):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        no_dry_run(batch)
        return self.logged(self.encoder(batch))


def batches() -> DataLoader[torch.Tensor]:
    return DataLoader(torch.randn(6 * 96, 24, generator=torch.Generator().manual_seed(3)), 96)


def run(kind: type[Steps], folder: Path, *callbacks: L.Callback) -> Any:
    return fit([*callbacks], folder, model=seeded(kind, {}), data=batches())


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type[Steps]], tuple[Any, Recorder, int]]:
    """A plain training of a kind, what it took, and the least limit; all limits share them."""

    @cache
    def known(kind: type[Steps]) -> tuple[Any, Recorder, int]:
        folder, recorder = tmp_path_factory.mktemp(kind.__name__), Recorder(measured=(4,))
        trained = run(kind, folder, recorder)
        return trained, recorder, least_limit(folder, model=seeded(kind, {}), data=batches())

    return known


@pytest.mark.parametrize(
    ("kind", "planned", "share"),
    [
        (Steps, ["encoder", "decoder"], 0.0),
        (PartsCalledDirectly, ["pair.first", "pair.second"], 0.0),
        (OneCall, ["encoder"], 0.5),
        *(
            pytest.param(*case, marks=pytest.mark.wide)
            for case in (
                *((Steps, ["encoder", "decoder"], share) for share in (0.5, 4.0)),
                *((FirstLine, ["encoder", "decoder"], share) for share in (0.0, 0.5, 4.0)),
                *(
                    (InsideOfAModule, [f"net.blocks.{number}" for number in range(8)], share)
                    for share in (0.0, 0.5, 4.0)
                ),
                *((PartsCalledDirectly, ["pair.first", "pair.second"], share) for share in (0.5, 4.0)),
                *((OneCall, ["encoder"], share) for share in (0.0, 4.0)),
            )
        ),
    ],
)
def test_what_the_dry_run_does_not_reach_is_planned_from_the_first_step_on(
    kind: type[Steps], planned: list[str], share: float, tmp_path: Path, known: Callable[[type[Steps]], Any]
) -> None:
    expected, plain, least = known(kind)
    limit = int(least + share * (plain.peaks[4] - least))
    rotor, recorder = RotorCallback(limit, show_table=False), Recorder()
    trained = run(kind, tmp_path, rotor, recorder)
    assert rotor.plan is not None
    names = rotor.plan.names if isinstance(rotor.plan, StepPlan) else [m for m in planned if len(planned) == 1]
    assert list(names) == planned
    assert rotor.measured_peak_bytes is not None
    assert rotor.measured_peak_bytes <= limit
    assert bool(rotor.plan.recomputed) == (share < 1)
    assert_equal_runs(expected, trained, plain, recorder)
    for module in trained[1].modules():
        assert "forward" not in module.__dict__
