"""Advice on the batch size, as a callback: what it measures, what it sets, and what it refuses by name."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_rotor.callbacks.batch_size_advice import RotorBatchSizeAdvice
from lightning_rotor.callbacks.trainer_loop import TrainerLoop
from lightning_rotor.errors import BudgetError, ModelError, SampleError


class Net(L.LightningModule):
    """Takes its batch size from an attribute, as BatchSizeFinder wants it."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.spare = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(64, 8), self.batch_size)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.body(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(model: Net, advice: RotorBatchSizeAdvice) -> Net:
    L.Trainer(
        accelerator="cpu",
        max_steps=1,
        callbacks=[advice],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model)
    return model


def advice(**options: Any) -> RotorBatchSizeAdvice:
    return RotorBatchSizeAdvice("1GiB", "body", show_table=False, batch_sizes=[2, 4], **options)


def test_candidates_are_predicted_from_the_batch_and_its_half_and_nothing_is_set() -> None:
    callback = advice()
    model = fit(Net(), callback)
    found = callback.advice
    assert found is not None
    assert found.measured == (4, 8)
    assert [option.batch_size for option in found.options] == [2, 4]
    assert model.batch_size == 8


def test_the_best_size_is_set_where_the_user_asks_for_that() -> None:
    callback = advice(set_batch_size=True)
    model = fit(Net(), callback)
    assert callback.advice is not None
    assert model.batch_size == callback.advice.best.batch_size
    assert model.batch_size in (2, 4)


def test_the_smallest_size_that_any_process_finds_best_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {}

    def told(self: TrainerLoop, own: Any) -> list[Any]:
        if isinstance(own, int):
            others["limit"] = own
            return [own, own // 2]
        return [own]

    monkeypatch.setattr(TrainerLoop, "answers_of_all", told)
    callback = advice()
    fit(Net(), callback)
    assert callback.advice is not None
    assert callback.advice.limit_bytes == others["limit"] // 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_arg_name": "rows", "set_batch_size": True}, ModelError, "there is no attribute 'rows' to set"),
        ({"module": "spare"}, ModelError, "training_step does not call the Sequential that was to be planned"),
        ({"module": "nothing"}, ModelError, "has no submodule 'nothing'"),
        ({"mem_limit": 100}, BudgetError, "below the minimum"),
    ],
)
def test_what_cannot_be_advised_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    settings = {"mem_limit": "1GiB", "module": "body", "show_table": False, **options}
    with pytest.raises(error, match=message):
        fit(Net(), RotorBatchSizeAdvice(**settings))


def test_a_batch_of_one_sample_cannot_be_halved() -> None:
    with pytest.raises(SampleError, match="at least 2"):
        fit(Net(batch_size=1), advice())
