"""Ways to train with pipelines: numbers of devices and micro-batches that share out a batch, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_rotor.advising.cluster import Cluster
from lightning_rotor.advising.model_costs import ModelCosts, Precision, model_costs
from lightning_rotor.advising.pipelines import objection, pipelines
from lightning_rotor.advising.task import Task
from lightning_rotor.profiling.accelerators import GPUS
from lightning_rotor.profiling.input_spec import InputSpec

WIDTH = 16


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


@pytest.fixture(scope="module")
def costs() -> ModelCosts:
    precision = Precision.of("32-true")
    return model_costs(layers, [InputSpec((4, WIDTH))], lambda model: [], GPUS["H100"], precision, batch_size=2)


def task(costs: ModelCosts, *, devices: int = 4, batch: int = 16, precision: str = "32-true") -> Task:
    return Task(costs, Cluster.of("H100", devices), batch, 2**30, precision, "1GiB")


def test_devices_and_micro_batches_share_out_the_batch(costs: ModelCosts) -> None:
    choices = pipelines(task(costs))
    assert {(choice.stages, choice.copies) for choice in choices} == {(2, 2), (4, 1)}
    assert {choice.schedule for choice in choices if choice.stages == 2} == {"gpipe", "1f1b", "interleaved"}
    # Of four layers, four devices cannot have two stages each.
    assert {choice.schedule for choice in choices if choice.stages == 4} == {"gpipe", "1f1b"}
    for choice in choices:
        assert choice.batch_per_device * choice.copies == 16
        assert choice.batch_per_device % choice.micro_batches == 0
        assert choice.seconds.bubble > 0
        # Copies add up their gradients.
        assert (choice.seconds.link > 0) == (choice.copies > 1)


def test_of_few_samples_each_is_a_micro_batch(costs: ModelCosts) -> None:
    # Three samples a copy, which two devices do not divide.
    choices = pipelines(task(costs, devices=2, batch=3))
    assert choices
    assert {choice.micro_batches for choice in choices} == {3}


def test_what_does_not_fit_is_no_way(costs: ModelCosts) -> None:
    assert not pipelines(replace(task(costs), limit_bytes=100))


def test_a_reason_stands_for_each_model_that_is_refused(costs: ModelCosts) -> None:
    assert objection(task(costs)) == ""
    assert objection(task(costs, devices=1)) == "there is one device"
    assert "divides both the cluster and the batch" in objection(task(costs, devices=3, batch=0))
    assert objection(task(costs, precision="bf16-mixed")) == ""


class Tied(nn.Module):
    """The first and the last of four layers have one weight, the largest by far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 1000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(tokens)))


def test_a_tied_weight_counts_on_each_device_that_uses_it() -> None:
    precision = Precision.of("32-true")
    spec = InputSpec((4,), torch.int64)
    costs = model_costs(Tied, [spec], lambda model: [], GPUS["H100"], precision, batch_size=2)
    weight_bytes = 4 * 1000 * WIDTH
    (shared,) = costs.tensors.shared
    assert (shared.state_bytes, shared.gradient_bytes) == (weight_bytes, weight_bytes)
    by_schedule = {choice.schedule: choice for choice in pipelines(task(costs, devices=2, batch=2))}
    # Weight and gradient once on each device; a message, and the sum of two gradients that was measured.
    assert 2 * weight_bytes < by_schedule["1f1b"].peak_bytes < 5.5 * weight_bytes
