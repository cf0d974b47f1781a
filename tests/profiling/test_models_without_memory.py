"""Models that are built on meta, and their fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_rotor.errors import ModelError
from lightning_rotor.profiling.models_without_memory import build_on_meta, give_fake_tensors


def test_building_with_parameters_alone_on_meta_leaves_torch_as_it_was() -> None:
    register = nn.Module.register_parameter
    model = build_on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert nn.Module.register_parameter is register
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_constructor_that_reads_weights_is_refused() -> None:
    class Reading(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.scale = self.weight.sum().item()

    with pytest.raises(ModelError, match="the model cannot be built without memory"):
        build_on_meta(Reading)


def test_fake_tensors_keep_ties_types_and_gradients() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float16), nn.BatchNorm1d(4))
    net[0].bias = net[1].bias
    net[0].weight.requires_grad_(False)
    net[2].held = torch.ones(3)
    give_fake_tensors(net, FakeTensorMode())
    assert net[0].bias is net[1].bias
    assert isinstance(net[0].bias, nn.Parameter)
    assert not net[0].weight.requires_grad
    assert net[1].weight.dtype is torch.float16
    assert isinstance(net[2].running_mean, FakeTensor)
    assert isinstance(net[2].held, FakeTensor)
