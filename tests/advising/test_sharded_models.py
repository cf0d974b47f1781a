"""FSDP2 over all devices or over groups of them: what is sent, what is held, and which groups there are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_rotor.advising.choice import Choice
from lightning_rotor.advising.cluster import Cluster
from lightning_rotor.advising.model_costs import ModelCosts, Precision, model_costs
from lightning_rotor.advising.sharded_models import sharded_models
from lightning_rotor.advising.task import Task
from lightning_rotor.profiling.accelerators import GPUS
from lightning_rotor.profiling.input_spec import InputSpec

WIDTH, BLOCKS = 256, 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def costs() -> ModelCosts:
    precision = Precision.of("32-true")
    spec = InputSpec((2, WIDTH))
    return model_costs(Model, [spec], lambda model: [], GPUS["H100"], precision, batch_size=2)


def ways(costs: ModelCosts, cluster: Cluster) -> dict[int, Choice]:
    """By devices of a group, FSDP2 that gives parameters up behind the forward."""
    choices = sharded_models(Task(costs, cluster, 96, 2**30, "32-true", "1GiB"))
    return {choice.shards: choice for choice in choices if choice.reshard}


def test_groups_are_parts_of_a_node_or_all_devices(costs: ModelCosts) -> None:
    assert sorted(ways(costs, Cluster.of("H100", 8))) == [2, 4, 8]
    assert sorted(ways(costs, Cluster.of("H100", 4, 4))) == [2, 4, 16]
    assert sorted(ways(costs, Cluster.of("H100", 6))) == [2, 3, 6]


def test_smaller_groups_hold_more_of_the_parameters(costs: ModelCosts) -> None:
    by_shards = ways(costs, Cluster.of("H100", 8))
    weights = 4 * BLOCKS * (WIDTH * WIDTH + WIDTH)
    assert by_shards[2].peak_bytes > by_shards[4].peak_bytes > by_shards[8].peak_bytes
    # Weights and gradients: a half of them instead of an eighth.
    more = by_shards[2].peak_bytes - by_shards[8].peak_bytes
    # At the peak of the backward not all gradients are there.
    assert weights * (1 / 2 - 1 / 8) < more <= 2 * weights * (1 / 2 - 1 / 8)


def test_over_slow_networks_groups_inside_of_nodes_wait_less(costs: ModelCosts) -> None:
    by_shards = ways(costs, Cluster.of("H100", 4, 4, network=1e9))
    assert by_shards[4].seconds.link < by_shards[16].seconds.link
    assert by_shards[4].name == "FSDP2 of 4, x 4, reshard=True"
    assert by_shards[16].name == "FSDP2, reshard=True"
    assert "(4, 4)" in by_shards[4].lines


def test_copies_add_up_their_shards(costs: ModelCosts) -> None:
    """One group of two devices sends nothing but its own messages; four groups also sum over each other."""
    link = {"link": 1e9, "network": 1e9}
    cluster = Cluster.of("H100", 8, **link)
    alone, together = ways(costs, Cluster.of("H100", 2, **link))[2], ways(costs, cluster)[2]
    shard = 4 * (WIDTH * WIDTH + WIDTH) / 2
    # Of each block, three quarters of the shard go out twice around a ring of four.
    sums = BLOCKS * cluster.sum_seconds(shard, 4, apart=2)
    assert sums > BLOCKS * 2 * 3 / 4 * shard / 1e9
    assert together.seconds.link - alone.seconds.link == pytest.approx(sums, rel=0.1)
