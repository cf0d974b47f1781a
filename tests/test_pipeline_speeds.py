"""Devices of unequal speed: what is measured, what counts as noise, and what a slow process is given to do."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from pipelines import Processes, good, processes
from torch import nn

from lightning_rotor.pipeline.device_speeds import speeds_beside_first
from lightning_rotor.pipeline.pipeline_options import PipelineOptions
from lightning_rotor.pipeline.pipelined import pipelined
from lightning_rotor.pipeline.processes import PipelineProcesses
from tests.grids import few


@pytest.fixture(scope="module")
def group() -> Iterator[Processes]:
    with processes(2) as made:
        yield made


class Sleepy(nn.Linear):
    """A layer that takes at least so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(4, 4)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def cut(rank: int, seconds: tuple[float, ...]) -> tuple[tuple[int, ...], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Sleepy(seconds[rank]) for _ in range(6)))
    made = pipelined(
        model,
        model,
        ((torch.randn(2, 4),), {}),
        options=PipelineOptions(8, "1f1b"),
        kept=lambda tensors: 0,
        processes=PipelineProcesses(torch.device("cpu")),
    )
    return made.partition.balance, [device.speed for device in made.partition.problem.devices]


# Long enough that a busy machine, which wakes sleepers late, does not change the picture.
@pytest.mark.parametrize(
    "seconds", few([(0.03, 0.03), (0.03, 0.09), (0.09, 0.03)], (0.03, 0.09)), ids=["equal", "slow", "fast"]
)
def test_a_slow_process_gets_less_to_do(group: Processes, seconds: tuple[float, float]) -> None:
    answers = good(group.run(2, cut, seconds))
    assert answers[0] == answers[1]
    (first, second), speeds = answers[0]
    assert (first > second, first < second) == (seconds[0] < seconds[1], seconds[0] > seconds[1])
    assert speeds == pytest.approx([1, seconds[0] / seconds[1]], rel=0.35)


@pytest.mark.parametrize(
    ("ratios", "speeds"),
    [
        ((1, 1.14, 0.88), (1, 1, 1)),  # noise
        ((1, 2, 2.2, 4, 0.5), (1, 1 / 2, 1 / 2.2, 1 / 4, 2)),
        ((1, 1.1, 1.2), (1, 1, 1 / 1.2)),
    ],
)
def test_small_differences_of_speed_are_none(ratios: tuple[float, ...], speeds: tuple[float, ...]) -> None:
    stages = (0.3, 0.1, 0.4)
    assert speeds_beside_first([[ratio * each for each in stages] for ratio in ratios]) == pytest.approx(speeds)


def test_an_interruption_slows_nobody() -> None:
    stages = [0.1, 0.2, 0.3, 0.1, 0.2]
    interrupted = [0.1, 0.2, 0.3, 5.0, 0.2]
    assert speeds_beside_first([stages, interrupted]) == [1, 1]
    assert speeds_beside_first([interrupted[::-1], [2 * each for each in stages[::-1]]]) != [1, 1]


def test_durations_too_short_to_tell_say_nothing() -> None:
    assert speeds_beside_first([[0.001, 0.002], [0.003, 0.006]]) == [1, 1]
    assert speeds_beside_first([[0.0, 0.1], [0.0, 0.3]]) == pytest.approx([1, 1 / 3])
