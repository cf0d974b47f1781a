"""Deep copies without memory: what they keep, what they drop, and which tensors keep their values."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.data import DataLoader

from lightning_rotor.private.torch_names import value_of, with_values
from lightning_rotor.profiling.fake_copies import MOST_KNOWN, fake_copy


def copied(value: Any, replacements: dict[int, Any] | None = None, *, values: bool = False) -> Any:
    with with_values(MOST_KNOWN), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return fake_copy(value, mode, replacements or {}, with_values=values)


def test_ties_stay_and_plain_hooks_go() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    net.register_forward_hook(lambda *_: None)
    copy = copied(net)
    assert copy[0].weight is copy[1].weight
    assert isinstance(copy[0].weight.data, FakeTensor)
    assert not copy._forward_hooks
    assert len(net._forward_hooks) == 1
    assert not isinstance(net[0].weight.data, FakeTensor)


def test_objects_can_be_replaced_and_data_sets_are_shared() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loader, self.thing = DataLoader([1, 2]), object()

    holder, other = Holder(), object()
    copy = copied(holder, {id(holder.thing): other})
    assert copy.loader is holder.loader
    assert copy.thing is other


def test_metrics_give_zero() -> None:
    copy = copied([nn.ModuleDict({"mean": torchmetrics.MeanMetric()})])[0]["mean"]
    copy.update(5.0)
    assert float(copy.compute()) == float(copy(3.0)) == 0.0


def test_small_tensors_keep_their_values_on_demand_and_parameters_never() -> None:
    lengths, large = torch.tensor([3, 1]), torch.zeros(MOST_KNOWN + 1)
    layer = nn.Linear(2, 2)
    known, unknown, parameters = copied((lengths, large, layer), values=True)
    assert torch.equal(value_of(known), lengths)
    assert value_of(unknown) is None
    assert value_of(parameters.weight) is None
    assert value_of(copied((lengths,))[0]) is None
