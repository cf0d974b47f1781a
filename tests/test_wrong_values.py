"""Values of options, arguments and modules that cannot be meant: each gets an error of its own type, with the remedy."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor import (
    BudgetError,
    Checkpointable,
    ModelError,
    OptionError,
    RotorBatchSizeAdvice,
    RotorCallback,
    SampleError,
    frontier,
    plan,
    profile_chain,
    sequential_stages,
    sequentialize,
)
from lightning_rotor.planning.solver import minimum_budget

X = torch.ones(2, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).relu()


@pytest.mark.parametrize("value", ["many", 0, -5, 2.5, True, None])
@pytest.mark.parametrize("option", ["slots", "max_plans"])
def test_a_number_that_counts_nothing_is_refused_where_it_is_given(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"{option} is {value!r}: expected a positive integer, such as the default"):
        RotorCallback("1GiB", **{option: value})
    if option == "slots":
        with pytest.raises(OptionError, match=f"slots is {value!r}: expected a positive integer"):
            Checkpointable(Net(), slots=value)
        chain = profile_chain(sequential_stages(Net().layers), X).chain
        with pytest.raises(OptionError, match=f"slots is {value!r}: expected a positive integer"):
            plan(chain, 10**6, slots=value)


@pytest.mark.parametrize("value", [nn.Linear(4, 4), nn.Linear, 3, [], [nn.Linear(4, 4)], ("layers", 3)], ids=str)
def test_a_module_in_the_place_of_its_name_is_refused(value: Any) -> None:
    with pytest.raises(
        ModelError, match=r"module is a .*: expected the dotted name of a module, .*, or a list of names"
    ):
        RotorCallback("1GiB", module=value)
    with pytest.raises(ModelError, match=r'module is a .*: expected the dotted name .* module="net.blocks"$'):
        RotorBatchSizeAdvice("1GiB", module=value)


def test_names_of_modules_are_taken_as_they_are() -> None:
    for value in (None, "layers", ["layers", "other"], ("layers",)):
        RotorCallback("1GiB", module=value)
    with pytest.raises(ModelError, match=r"module is a list of 1"):
        RotorBatchSizeAdvice("1GiB", module=["layers"])


@pytest.mark.parametrize("make", [Net, lambda: Net().layers])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_without_values_is_refused_with_the_way_to_give_it_some(make: Any, device: str) -> None:
    with torch.device("meta"):
        net = make()
    planned = Checkpointable(net, mem_limit="1MiB")
    with pytest.raises(
        ModelError, match=r"parameter '.*weight' is on the meta device, without values: expected .* to_empty"
    ):
        planned(X.to(device))
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    assert planned(X).shape == (2, 4)


def test_what_is_no_chain_is_refused_with_the_way_to_get_one() -> None:
    profile = profile_chain(sequential_stages(Net().layers), X)
    for function in (minimum_budget, frontier):
        with pytest.raises(
            ModelError, match=r"the chain is a Profile: expected a Chain .*profile_chain\(stages, x\)\.chain"
        ):
            function(profile)
    with pytest.raises(ModelError, match=r"the chain is a Sequential: expected a Chain"):
        plan(Net().layers, 10**6)
    with pytest.raises(ModelError, match=r"a stage is a Linear: expected stages, such as sequential_stages\(net\)"):
        profile_chain(Net().layers, X)
    with pytest.raises(
        SampleError, match=r"args is a Tensor: expected a tuple of positional arguments, such as \(x,\)"
    ):
        sequentialize(Net(), X)
    with pytest.raises(ModelError, match=r"module is a str: expected an nn.Module"):
        sequentialize("layers", (X,))


@pytest.mark.parametrize(("limit", "count"), [(1, "1 is one byte"), ("16", "16 is 16 bytes")])
def test_a_limit_that_lacks_its_unit_is_said_to_count_bytes(limit: Any, count: str) -> None:
    hint = rf'A number without a unit counts bytes: {count}, "\d+GiB" has a unit, and 1\.0 is all of a device'
    with pytest.raises(BudgetError, match=hint):
        Checkpointable(Net().layers, mem_limit=limit)(X)


def test_a_limit_with_a_unit_is_not_doubted() -> None:
    with pytest.raises(BudgetError, match="is below this chain's minimum") as found:
        Checkpointable(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), mem_limit="2KiB")(torch.ones(2, 64))
    assert "without a unit" not in str(found.value)


def test_the_error_for_an_option_is_a_value_error_that_pickles() -> None:
    error = OptionError("slots is 0")
    assert isinstance(error, ValueError)
    assert str(pickle.loads(pickle.dumps(error))) == "slots is 0"
