"""What user code keeps of a dry run does not meet a real step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lightning_rotor import ModelError, RotorCallback
from lightning_rotor.private.torch_names import FakeTensorMode, fake_mode
from lightning_rotor.profiling.remains import drop_remains
from tests.training import assert_same_training, train

WIDTH = 16


@lru_cache(maxsize=8)
def bounded(width: int) -> torch.Tensor:
    return torch.arange(width) / width


@cache
def unbounded(width: int) -> tuple[dict[str, torch.Tensor], int]:
    return {"positions": torch.arange(width) / width}, width


class Tables:
    @staticmethod
    @lru_cache
    def positions(width: int) -> torch.Tensor:
        return torch.arange(width) / width


class Memo:
    """Its class has what all of its objects have computed."""

    seen: ClassVar[dict[int, torch.Tensor]] = {}

    def positions(self, width: int) -> torch.Tensor:
        if width not in self.seen:
            self.seen[width] = torch.arange(width) / width
        return self.seen[width]


memo = Memo()
CACHES: dict[str, Callable[[int], torch.Tensor]] = {
    "bounded": bounded,
    "a tuple of a dict": lambda width: unbounded(width)[0]["positions"],
    "a method of a class": Tables.positions,
}


class Shifted(nn.Module):
    def __init__(self, positions: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.positions = nn.Linear(WIDTH, WIDTH), positions

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(input) * self.positions(input.shape[1]))


class Task(L.LightningModule):
    def __init__(self, positions: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Shifted(positions) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def forget() -> None:
    for function in (bounded, unbounded, Tables.positions):
        function.cache_clear()
    Memo.seen.clear()


@pytest.mark.parametrize("name", list(CACHES))
def test_a_cache_that_a_layer_fills_has_values_in_training(tmp_path: Path, name: str) -> None:
    data = [torch.randn(64, WIDTH)]
    forget()
    plain = train(lambda: Task(CACHES[name]), data, tmp_path, batch_size=16)
    forget()
    rotor = RotorCallback("1GiB", show_table=False)
    planned = train(lambda: Task(CACHES[name]), data, tmp_path, batch_size=16, callback=rotor)
    assert_same_training(plain, planned)
    assert rotor.plan is not None


def test_where_nothing_can_be_put_back_training_ends_before_its_first_step(tmp_path: Path) -> None:
    data = [torch.randn(64, WIDTH)]
    forget()
    with pytest.raises(ModelError, match="left 1 tensors without values in a dict, where nobody could put back"):
        train(lambda: Task(memo.positions), data, tmp_path, batch_size=16, callback=RotorCallback(show_table=False))
    forget()
    plain = train(lambda: Task(memo.positions), data, tmp_path, batch_size=16)
    forget()
    rotor = RotorCallback("1GiB", module="net", show_table=False)
    planned = train(lambda: Task(memo.positions), data, tmp_path, batch_size=16, callback=rotor)
    assert_same_training(plain, planned)


def test_tensors_of_other_modes_and_caches_without_any_stay() -> None:
    forget()
    bounded(3)
    with fake_mode() as other, other:
        kept = torch.empty(3)
    with fake_mode() as mode, mode:
        unbounded(4)
    gc.collect()
    drop_remains(mode)
    assert kept.shape == (3,)
    assert bounded.cache_info().currsize == 1
    assert unbounded.cache_info().currsize == 0


def left_in(mode: FakeTensorMode) -> list[torch.Tensor]:
    with mode:
        return [torch.empty(2), torch.empty(3)]


def test_the_error_counts_what_is_left_and_says_in_what() -> None:
    with fake_mode() as mode:
        left = left_in(mode)
    with pytest.raises(ModelError, match="left 2 tensors without values in a list"):
        drop_remains(mode)
    left.clear()
    drop_remains(mode)
