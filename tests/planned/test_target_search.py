"""Submodules around modules that are planned, told apart by identity."""

from __future__ import annotations

import torch
import torchmetrics
from torch import nn

from lightning_rotor.planned.target_search import _outermost, holds


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class WithMetric(nn.Module):
    """A block that keeps a metric, which equals any module."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanSquaredError()
        self.block = block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.planned, self.other, self.plain = WithMetric(), WithMetric(), block()


def test_a_metric_hides_no_module_from_those_that_are_left_out() -> None:
    model = Several()
    assert [name for name, _ in _outermost(model, [model.planned])] == ["other", "plain"]
    assert [name for name, _ in _outermost(model, [model.plain])] == ["planned", "other"]
    assert not holds(model.planned, model.plain)
    assert holds(model, model.plain)


def test_what_lies_in_a_planned_module_or_around_one_is_no_choice() -> None:
    model = Several()
    names = [name for name, _ in _outermost(model, [model.planned.block])]
    assert names[-2:] == ["other", "plain"]
    assert not {"planned", "planned.block"} & set(names)
