"""Stages that compute something else than their module are refused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.errors import ModelError
from lightning_rotor.profiling.same_results import _is_same, require_same

X = torch.randn(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.one(x).tanh()))


def cut_of(net: nn.Module) -> Any:
    return sequentialize(net, (X,), {})


def with_another_stage(cut: Any, layer: nn.Module) -> Any:
    first, *rest = cut.stages
    return replace(cut, stages=(replace(first, modules=(layer,)), *rest))


def test_a_recording_that_computes_the_same_passes_and_changes_nothing() -> None:
    net = Net()
    before, state = net.state_dict()["norm.running_mean"].clone(), torch.get_rng_state()
    require_same(net, cut_of(net), (X,), {})
    assert torch.equal(net.norm.running_mean, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_other_bits_are_refused() -> None:
    net = Net()
    cut = with_another_stage(cut_of(net), nn.Linear(8, 8))
    with pytest.raises(ModelError, match="the trace of Net does not compute what the module does"):
        require_same(net, cut, (X,), {})


def test_a_module_that_does_not_repeat_itself_is_compared_with_nothing() -> None:
    class Moody(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * next(NUMBERS)

    net = Net()
    cut = with_another_stage(cut_of(net), nn.Linear(8, 8))
    require_same(Moody(), cut, (X,), {})


NUMBERS = iter(range(1, 1000))


def test_an_input_that_the_module_refuses_is_refused_by_the_module() -> None:
    net = Net()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        require_same(net, with_another_stage(cut_of(net), nn.Linear(5, 5)), (torch.randn(4, 7),), {})


def test_objects_are_compared_by_their_class_and_never_by_a_method_of_the_users() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert not _is_same(Liar(1), Liar(2))
    assert _is_same(Liar(1), Liar(1))
    assert not _is_same(1, 1.0)
    assert _is_same(None, None)
    assert not _is_same(torch.ones(1), random)
