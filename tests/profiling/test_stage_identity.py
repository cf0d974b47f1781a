"""Stages with equal identities are measured once, so all that changes a cost must change the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.capture.compiled import CompiledModules
from lightning_rotor.profiling.stage_identity import stage_identity
from lightning_rotor.stages.sequential import sequential_stages


def identities(*layers: nn.Module, with_numbers: bool = True) -> list[tuple[Any, ...]]:
    compiled = CompiledModules()
    return [
        stage_identity(stage, compiled, with_numbers=with_numbers)
        for stage in sequential_stages(nn.Sequential(*layers))
    ]


def test_stages_are_compared_by_what_their_attributes_hold() -> None:
    class Layer(nn.Linear):
        def __init__(self, **settings: Any) -> None:
            super().__init__(4, 4)
            self.settings = settings

    layers = nn.Sequential(Layer(a=[1, 2.0]), Layer(a=[1, 2.0]), Layer(a=[1, 3.0]), Layer(a=[True, 2.0]))
    one, same, *others = (stage_identity(stage, CompiledModules()) for stage in sequential_stages(layers))
    assert one == same
    assert hash(one) == hash(same)
    assert one not in others


def frozen(layer: nn.Linear) -> nn.Linear:
    layer.weight.requires_grad_(False)
    return layer


def hooked(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(lambda *_: None)
    return layer


def test_equal_layers_are_equal_wherever_they_stand() -> None:
    one, other = identities(nn.Linear(4, 4), nn.Linear(4, 4))
    assert one == other


@pytest.mark.parametrize(
    "change",
    [
        lambda: nn.Linear(4, 4, bias=False),
        lambda: nn.Linear(4, 4, dtype=torch.float64),
        lambda: nn.Linear(4, 5),
        lambda: frozen(nn.Linear(4, 4)),
        lambda: hooked(nn.Linear(4, 4)),
        lambda: nn.Linear(4, 4).eval(),
        lambda: nn.Bilinear(4, 4, 4),
    ],
    ids=["no bias", "type", "shape", "frozen", "hook", "mode", "class"],
)
def test_what_changes_a_cost_changes_the_identity(change: Callable[[], nn.Module]) -> None:
    one, other = identities(nn.Linear(4, 4), change())
    assert one != other


def test_numbers_in_attributes_can_be_left_out() -> None:
    class Numbered(nn.Linear):
        def __init__(self, number: int) -> None:
            super().__init__(4, 4)
            self.number = number

    one, other = identities(Numbered(1), Numbered(2))
    assert one != other
    one, other = identities(Numbered(1), Numbered(2), with_numbers=False)
    assert one == other
