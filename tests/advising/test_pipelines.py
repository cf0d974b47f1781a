"""Ways to train with pipelines: numbers of devices and micro-batches that share out a batch, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
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
    mixed = task(costs, precision="bf16-mixed")
    assert objection(mixed) == ""
    recorded = replace(mixed, costs=replace(costs, is_sequential=False))
    assert "do not run under autocast" in objection(recorded)
