"""A watched module that changes is seen, at the next call, whatever changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.capture.module_facts import ModuleFacts
from lightning_rotor.capture.watch import Watch


class Net(nn.Module):
    """A module with attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.rate = 0.5
        self.names = ["a", "b"]
        self.table = {"x": [1]}


def set_new(net: Any) -> None:
    net.another = 1


def resize(net: Any) -> None:
    net.layer.weight.data = torch.zeros(3, 2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "number": lambda net: setattr(net, "rate", 0.25),
    "list": lambda net: net.names.append("c"),
    "list in a dict": lambda net: net.table["x"].append(2),
    "new attribute": set_new,
    "attribute gone": lambda net: delattr(net, "rate"),
    "mode": lambda net: net.eval(),
    "child": lambda net: setattr(net, "layer", nn.Linear(2, 2)),
    "new child": lambda net: net.add_module("more", nn.ReLU()),
    "buffer of another type": lambda net: setattr(net, "mean", torch.zeros(2, dtype=torch.float64)),
    "parameter of another shape": resize,
    "hook": lambda net: net.layer.register_forward_hook(lambda *_: None),
    "class": lambda net: setattr(net, "__class__", nn.Module),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    net = Net()
    watch = Watch(net, net.modules())
    assert watch.holds()  # the slow comparison
    assert watch.holds()  # the quick one
    CHANGES[name](net)
    assert not watch.holds()


def test_other_values_of_tensors_are_no_change() -> None:
    net = Net()
    watch, strict = Watch(net, net.modules()), Watch(net, net.modules(), tensors=True)
    net.mean = torch.ones(2)
    net.layer.weight = nn.Parameter(torch.ones(2, 2))
    assert watch.holds()
    assert strict.changed() is net
    assert strict.changed(besides=[net]) is net.layer


def test_numbers_that_are_inputs_may_change_and_are_told() -> None:
    net = Net()
    watch = Watch(net, [net], inputs=[(net, "rate")])
    net.rate = 0.25
    assert watch.holds()
    net.rate = "fast"
    assert not watch.holds()
    plain = Watch(net := Net(), [net])
    assert plain.changed_numbers() == []
    net.rate = 1.5
    assert plain.changed_numbers() == [(net, "rate")]
    net.rate = 1
    assert plain.changed_numbers() == []  # an int is read otherwise


def test_what_is_outside_is_asked_each_time() -> None:
    answers = iter((True, False))
    watch = Watch(nn.ReLU(), [], outside=lambda: next(answers))
    assert watch.holds()
    assert not watch.holds()


FACTS: dict[str, Callable[[Any], object]] = {
    "mode": lambda net: net.layer.eval(),
    "child": lambda net: setattr(net, "layer", nn.Linear(2, 2)),
    "hook": lambda net: net.layer.register_forward_hook(lambda *_: None),
    "parameter": lambda net: setattr(net.layer, "bias", nn.Parameter(torch.zeros(2))),
    "frozen": lambda net: net.layer.bias.requires_grad_(False),
    "type": lambda net: net.double(),
    "forward": lambda net: setattr(net.layer, "forward", lambda value: value),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_a_module_are_told_in_microseconds(name: str) -> None:
    net = Net()
    facts = ModuleFacts(net)
    assert facts.holds()
    net.rate = 3.0  # no fact: attributes are watched elsewhere
    assert facts.holds()
    FACTS[name](net)
    assert not facts.holds()


def test_of_watched_modules_parameters_alone_are_facts() -> None:
    net = Net()
    facts = ModuleFacts(net, besides=[net.layer])
    net.layer.eval()
    assert facts.holds()
    net.layer.weight = nn.Parameter(torch.zeros(2, 2))
    assert not facts.holds()
