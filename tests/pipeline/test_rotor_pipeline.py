"""Arguments of the strategy, which are checked when it is made and when devices are known; trainings are elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_rotor.errors import PipelineError, UnitError
from lightning_rotor.strategies.pipeline_settings import PipelineSettings
from lightning_rotor.strategies.rotor_pipeline import RotorPipelineStrategy


def test_the_strategy_is_known_by_its_name() -> None:
    assert StrategyRegistry[RotorPipelineStrategy.strategy_name]["strategy"] is RotorPipelineStrategy


def test_nothing_is_cut_before_setup() -> None:
    strategy = RotorPipelineStrategy(module="net", micro_batches=4, mem_limit="1GiB")
    assert strategy.partition is None
    assert strategy.module_name == "net"
    assert RotorPipelineStrategy().module_name is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"micro_batches": 0}, PipelineError, "micro_batches is 0: expected a positive integer"),
        ({"schedule": "zigzag"}, PipelineError, "schedule is 'zigzag': expected one of"),
        ({"balance": "even"}, PipelineError, "balance is 'even': expected \"auto\" or numbers"),
        ({"recompute": "some"}, PipelineError, "recompute is 'some'"),
        ({"pipeline_stages": -1}, PipelineError, "devices is -1: expected a positive integer"),
        ({"mem_limit": "lots"}, UnitError, "memory limit 'lots' cannot be read"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RotorPipelineStrategy(**arguments)


def test_numbers_of_devices_that_make_no_pipelines_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"pipeline_stages is 2, but there are 3 devices: .* such as devices=2"):
        PipelineSettings().check_devices(3, 2)
    with pytest.raises(PipelineError, match=r"micro_batches is 2 for 4 devices: .* Use micro_batches=4"):
        PipelineSettings(micro_batches=2).check_devices(4, 4)
    PipelineSettings(micro_batches=2, schedule="gpipe").check_devices(4, 4)


def test_batches_need_a_row_for_each_micro_batch() -> None:
    settings = PipelineSettings(micro_batches=4)
    settings.check_rows(torch.ones(4, 2), "the batch")
    with pytest.raises(PipelineError, match=r"the batch has 3 rows for 4 micro-batches: .* or micro_batches=3"):
        settings.check_rows(torch.ones(3, 2), "the batch")


def test_stages_on_each_device_follow_from_schedule_and_balance() -> None:
    assert PipelineSettings().options(2).stages_per_device == 1
    assert PipelineSettings(schedule="interleaved").options(2).stages_per_device == 2
    by_hand = PipelineSettings(schedule="interleaved", balance=[1] * 6)
    assert by_hand.options(2).stages_per_device == 3
