"""Kinds of programs that benchmarks/projects.py has found in other packages, in small."""

from __future__ import annotations

import gc
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

from lightning_rotor import RotorCallback
from lightning_rotor.errors import ModelError
from lightning_rotor.profiling.step_compute import measure_compute
from tests.training import assert_same_training, tight_limit, train


class Bundle:
    """A container that is registered without names for its parts, as darts registers its batches."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


register_pytree_node(Bundle, lambda bundle: (list(bundle.parts), None), lambda parts, _: Bundle(*parts))


class TakesBundles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)])

    def forward(self, bundle: Bundle) -> torch.Tensor:
        (first, second), scale = bundle.parts
        return self.layers(first + scale * second)


class Bundled(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = TakesBundles()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        return self.net(Bundle((rows, rows.square()), 2.0)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_containers_that_are_registered_without_names_are_taken(tmp_path: Path) -> None:
    rows = [torch.randn(64, 16, generator=torch.Generator().manual_seed(1))]
    limit = tight_limit(Bundled, rows, tmp_path, batch_size=16)
    callback = RotorCallback(limit, show_table=False)
    assert_same_training(
        train(Bundled, rows, tmp_path, batch_size=16), train(Bundled, rows, tmp_path, callback=callback, batch_size=16)
    )
    assert callback.plan is not None
    assert callback.plan.recomputed


class Reversible(nn.Module):
    """Normalizes at its first call, and undoes that at its second: statistics wait in attributes that it had not before."""

    def forward(self, rows: torch.Tensor, mode: str) -> torch.Tensor:
        if mode == "norm":
            self.mean = rows.mean(0).detach()
            self.deviation = rows.std(0).detach() + 1
            return (rows - self.mean) / self.deviation
        return rows * self.deviation + self.mean


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Reversible()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(self.norm(rows, "norm")), "denorm")


class Forecasting(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Forecaster()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        return self.net(rows).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_parts_are_planned_of_a_module_whose_stages_need_those_before_them(tmp_path: Path) -> None:
    rows = [torch.randn(1024, 16, generator=torch.Generator().manual_seed(1))]
    limit = tight_limit(Forecasting, rows, tmp_path, batch_size=256)
    callback = RotorCallback(limit, show_table=False)
    assert_same_training(
        train(Forecasting, rows, tmp_path, batch_size=256),
        train(Forecasting, rows, tmp_path, callback=callback, batch_size=256),
    )
    assert callback.plan is not None
    assert callback.plan.recomputed


def test_the_error_of_such_a_module_says_what_to_do_if_it_was_named(tmp_path: Path) -> None:
    rows = [torch.randn(64, 16)]
    with pytest.raises(ModelError, match=r"cannot be measured stage by stage: .* has no attribute .*skippable"):
        train(Forecasting, rows, tmp_path, callback=RotorCallback("1GiB", "net", show_table=False))


class Copying(L.LightningModule):
    """Makes deep copies in its step, as metrics do of the defaults of their states."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.total = torch.zeros(3)

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        state = deepcopy({"sum": torch.tensor(0.0), "total": self.total, "rows": rows})
        before = deepcopy(self.net)
        return self.net(state["rows"]).square().mean() + before(rows).mean() + state["sum"]


def test_a_dry_run_follows_a_step_that_makes_deep_copies() -> None:
    found = measure_compute(Copying(), torch.randn(8, 16), lambda model, rows: model.training_step(rows, 0))
    gc.collect()  # a broken copy ends the process here
    assert not found.stopped_at
    assert 0.4 < found.share("net") < 0.6
