"""What FSDP units add to the costs of a stage, from their sizes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from lightning_rotor.chain import BackwardPeaks, StageCost
from lightning_rotor.private.sharding import UnitSizes
from lightning_rotor.profiling import profile_chain
from lightning_rotor.profiling.unit_costs import cost_with_units
from lightning_rotor.stages.sequential import sequential_stages


@dataclass(frozen=True)
class Unit:
    sizes: UnitSizes


def cost_of_a_layer() -> StageCost:
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    return profile_chain(sequential_stages(net), torch.randn(4, 8, requires_grad=True), repeats=1).chain.stages[0]


def with_units(cost: StageCost, *sizes: UnitSizes) -> StageCost:
    return cost_with_units(cost, cast(Any, [Unit(each) for each in sizes]))


def test_a_unit_on_one_process_costs_nothing() -> None:
    cost = cost_of_a_layer()
    assert with_units(cost, UnitSizes()) is cost


def test_a_unit_takes_its_parameters_twice_in_the_forward_and_leaves_the_shard_of_its_gradients() -> None:
    cost = cost_of_a_layer()
    plain = replace(cost.keep, accumulating=BackwardPeaks(1, 1, 1, 1))
    cost = replace(cost, options=(plain,))
    found = with_units(cost, UnitSizes(gathered_bytes=256, gradient_bytes=256, reduced_bytes=256, shard_bytes=128))
    keep = found.keep
    assert plain.parameter_gradient_bytes == 256
    assert keep.parameter_gradient_bytes == 128
    assert keep.forward_peak_bytes == plain.forward_peak_bytes + 512
    assert keep.unpack_peak_bytes == plain.unpack_peak_bytes + 512
    assert keep.unpack_bytes == plain.unpack_bytes + 256
    assert found.discard_peak_bytes == cost.discard_peak_bytes + 512
    sent = plain.input_gradient_bytes + 256 + 256 - plain.saved_bytes
    assert keep.backward_peak_bytes == max(plain.backward_peak_bytes + 256, sent)
    assert keep.accumulating is None


def test_units_inside_of_one_another_add_up() -> None:
    cost = cost_of_a_layer()
    half = UnitSizes(gathered_bytes=128, gradient_bytes=128, reduced_bytes=128, shard_bytes=64)
    assert with_units(cost, half, half) == with_units(cost, half + half)
