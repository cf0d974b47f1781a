"""A module that was compiled as a whole, as one stage for calls that differ in tensors alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_rotor.capture.compiled_call import CompiledCut
from lightning_rotor.private.compiler import compiled_call_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, other: torch.Tensor | None = None) -> torch.Tensor:
        y = self.layer(x) * scale
        return y if other is None else y + other


def cut_of(*args: Any, **kwargs: Any) -> CompiledCut:
    net = Net()
    net.compile(backend="eager")
    call = compiled_call_of(net)
    assert call is not None
    return CompiledCut(net, call, args, kwargs)


def test_the_stage_runs_all_arguments_as_one_value() -> None:
    x, other = torch.ones(2, 3), torch.full((2, 3), 4.0)
    cut = cut_of(x, 2.0, other=other)
    value = cut.bind((x, 2.0), {"other": other})
    assert value is not None
    (stage,) = cut.stages
    (whole,) = stage.calls()
    net: Any = cut.module
    expected = net.layer(x) * 2.0 + other
    assert torch.equal(whole(value), expected)
    assert torch.equal(whole.forward(value), expected)
    assert [id(parameter) for parameter in whole.parameters()] == [id(parameter) for parameter in net.parameters()]


def test_calls_that_differ_in_more_than_tensors_are_others() -> None:
    x = torch.ones(2, 3)
    cut = cut_of(x, 2.0)
    assert cut.bind((torch.ones(5, 3), 2.0), {}) is not None
    assert cut.bind((x, 3.0), {}) is None
    assert cut.bind((x,), {"scale": 2.0}) is None
    assert cut.bind((), {}) is None
