"""Steps that collect what they have seen in attributes of the planned module, which its forward does not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lightning_rotor import RotorCallback
from lightning_rotor.planned.known_cuts import KnownCuts
from tests.grids import few
from tests.training import assert_same_training, train


class Collecting(L.LightningModule):
    """Plans its own forward, and keeps losses until the epoch ends, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])
        self.step_losses: list[torch.Tensor] = []
        self.scales = [1.0]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows).tanh() + self.scales[0]
        return rows

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self(batch[0]).square().mean()
        self.step_losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class ReadAsWell(Collecting):
    """Reads what it has collected in its forward, too."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * (2 if len(self.step_losses) > 9 else 1)


class ReadByComputedName(Collecting):
    """Reads it under a name that stands nowhere in its code."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        kept = getattr(self, "_".join(("step", "losses")))
        return super().forward(rows) * (2 if len(kept) > 9 else 1)


class KeepsParameters(Collecting):
    """Holds its parameters in a list as well, as the recurrent layers of torch do."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [layer.weight for layer in self.layers]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            rows = (rows @ weight).tanh()
        return rows


def recordings(
    make: Callable[[], L.LightningModule], folder: Path, monkeypatch: pytest.MonkeyPatch, change: Any = None
) -> int:
    """Times that a module was recorded in 12 steps, once they are compared with plain training."""
    count = 0
    cut = KnownCuts._cut

    def counted(self: KnownCuts, *call: Any) -> Any:
        nonlocal count
        count += 1
        return cut(self, *call)

    monkeypatch.setattr(KnownCuts, "_cut", counted)
    rows = [torch.randn(12 * 8, 16, generator=torch.Generator().manual_seed(1))]
    planned = train(
        make, rows, folder, callback=RotorCallback("1GiB", show_table=False), callbacks=[*filter(None, [change])]
    )
    assert_same_training(train(make, rows, folder, callbacks=[*filter(None, [change])]), planned)
    return count


@pytest.mark.parametrize("make", [Collecting, KeepsParameters])
def test_what_a_step_collects_is_recorded_for_twice_at_most(
    make: Callable[[], L.LightningModule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recordings(make, tmp_path, monkeypatch) == 2


@pytest.mark.filterwarnings("ignore:.*was recorded 12 times")
@pytest.mark.parametrize("make", few([ReadAsWell, ReadByComputedName], ReadByComputedName))
def test_what_the_forward_reads_is_seen_whenever_it_changes(
    make: Callable[[], L.LightningModule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recordings(make, tmp_path, monkeypatch) == 12


class Scaling(L.Callback):
    """Changes another attribute, which the forward reads, when the collected ones have long been left aside."""

    def on_train_batch_start(self, trainer: L.Trainer, model: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 7:
            model.scales.append(0.0)
            model.scales[0] = 2.0


def test_what_it_reads_counts_also_where_other_attributes_were_left_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The operations are others then, so that twice is once more.
    assert recordings(Collecting, tmp_path, monkeypatch, Scaling()) == 4
