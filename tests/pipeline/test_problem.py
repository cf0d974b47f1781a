"""The problem of cutting: what follows from chain, devices and schedule, and what is refused."""

from __future__ import annotations

import random

import pytest

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.partition.problem import Link, PipelineDevice, Problem, check_recompute
from tests.strategies import random_chain

CHAIN = random_chain(random.Random(1), 8, "cnn")
FOUR = (PipelineDevice(),) * 4


def test_schedules_say_how_many_micro_batches_are_in_flight() -> None:
    assert Problem(CHAIN, FOUR, 6).in_flight == (4, 3, 2, 1)
    assert Problem(CHAIN, FOUR, 6, schedule="gpipe").in_flight == (6, 6, 6, 6)


def test_stages_go_round_the_devices() -> None:
    devices = (PipelineDevice(speed=1.0), PipelineDevice(speed=2.0))
    problem = Problem(CHAIN, devices, 4, schedule="interleaved", stages_per_device=2)
    assert problem.stages == 4
    assert [problem.device_of(stage).speed for stage in range(4)] == [1.0, 2.0, 1.0, 2.0]


def test_every_device_is_given_all_outputs_and_gradients_of_inputs() -> None:
    problem = Problem(CHAIN, FOUR, 6)
    last, first = CHAIN.stages[-1], CHAIN.stages[0]
    assert problem.results_bytes == 6 * (last.output_bytes + first.keep.input_gradient_bytes)


def test_a_message_takes_latency_and_its_bytes() -> None:
    assert Link(bytes_per_second=100.0, latency_seconds=0.5).seconds(50) == 1.0
    assert Link().seconds(10**9) == 0.0


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(PipelineError, match="9 devices need 9 pipeline stages, but the chain has only 8 stages"):
        Problem(CHAIN, (PipelineDevice(),) * 9, 9)
    with pytest.raises(PipelineError, match="5 devices with 2 stages each need 10 pipeline stages"):
        Problem(CHAIN, (PipelineDevice(),) * 5, 5, schedule="interleaved", stages_per_device=2)
    with pytest.raises(PipelineError, match="state_bytes has 2 entries: expected one for each of the chain's 8"):
        Problem(CHAIN, FOUR, 4, state_bytes=(1, 2))
    with pytest.raises(PipelineError, match=r"recompute is 'some': expected one of 'rotor', 'always'"):
        check_recompute("some")
    with pytest.raises(PipelineError, match="speed is 0: expected a positive number"):
        PipelineDevice(speed=0)
