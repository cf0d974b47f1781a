"""How much of the package one batch goes through: what a reader must hold in the head."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18

from lightning_rotor import BudgetError, RotorCallback
from tests.processes import ROOT

PACKAGE = str(ROOT / "lightning_rotor")
BATCH, FIRST, STEADY = 16, 0, 24
MOST_AT_FIRST, MOST_LATER = 45, 10


class Way:
    """Notes the code of the package that is entered, while it is on."""

    def __init__(self) -> None:
        self._entered: dict[str, set[CodeType]] = {"first": set(), "steady": set()}

    def note(self, step: str | None) -> None:
        if step is None:
            sys.setprofile(None)
            return
        add = self._entered[step].add
        sys.setprofile(lambda frame, event, _: add(frame.f_code) if event == "call" else None)

    def files(self, step: str) -> list[str]:
        names = {code.co_filename for code in self._entered[step]}
        return sorted(name.removeprefix(PACKAGE) for name in names if name.startswith(PACKAGE))


class Images(Dataset):
    """Its batches begin the steps, so that what callbacks do at their start counts as well."""

    def __init__(self, way: Way) -> None:
        self.way = way

    def __len__(self) -> int:
        return BATCH * (STEADY + 2)

    def __getitem__(self, index: int) -> Any:
        if index % BATCH == 0:
            self.way.note({FIRST: "first", STEADY: "steady"}.get(index // BATCH))
        return torch.randn(3, 64, 64), index % 10


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = resnet18(num_classes=10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(folder: Path, limit: int, way: Way) -> RotorCallback:
    rotor = RotorCallback(limit, slots=20, show_table=False)  # a finer table takes long to watch
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[rotor],
    )  # fmt: skip
    try:
        trainer.fit(Classifier(), DataLoader(Images(way), batch_size=BATCH))
    finally:
        sys.setprofile(None)
    return rotor


@pytest.mark.wide  # watching every call takes long
def test_the_first_batch_and_a_steady_step_go_through_few_files(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as error:
        fit(tmp_path, 1000, Way())
    way = Way()
    rotor = fit(tmp_path, int(1.05 * error.value.minimum_bytes), way)
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    assert len(way.files("first")) <= MOST_AT_FIRST, way.files("first")
    assert len(way.files("steady")) <= MOST_LATER, way.files("steady")
