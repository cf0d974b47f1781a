"""Options of pipelines: those of other libraries are answered by name, and nothing is ignored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.pipeline import Pipeline
from lightning_rotor.pipeline.pipeline_options import PipelineOptions, check_names
from lightning_rotor.strategies import RotorPipelineStrategy


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chunks", "expected micro_batches"),
        ("n_microbatches", "expected micro_batches"),
        ("devices", "one process for each device"),
        ("checkpoint", "expected recompute"),
        ("find_unused_parameters", "not averaged by DDP"),
        ("micro_batch", "expected micro_batches$"),
        ("mem_limits", "expected mem_limit$"),
        ("wings", "expected one of accelerator, balance, "),
    ],
)
def test_unknown_options_of_the_strategy_are_answered_by_name(name: str, expected: str) -> None:
    with pytest.raises(PipelineError, match=f"no option {name!r}: .*{expected}"):
        RotorPipelineStrategy(**{name: 1})


def test_unknown_options_of_a_plain_loop_are_answered_by_name() -> None:
    for name, expected in (("chunks", "micro_batches"), ("schedules", "schedule$")):
        with pytest.raises(PipelineError, match=f"no option {name!r}: expected {expected}"):
            Pipeline(nn.Linear(2, 2), torch.zeros(4, 2), **{name: 1})


def test_known_options_pass() -> None:
    check_names(["b", "a"], ["a", "b", "c"])
    assert RotorPipelineStrategy("net", process_group_backend="gloo", start_method="spawn").module_name == "net"


def test_defaults_of_ddp_are_no_choice() -> None:
    """LightningCLI hands on every option that a strategy's bases take."""
    options = {"find_unused_parameters": False, "static_graph": False, "bucket_cap_mb": None, "ddp_comm_hook": None}
    assert RotorPipelineStrategy("net", **options).module_name == "net"
    with pytest.raises(PipelineError, match="'static_graph'"):
        RotorPipelineStrategy("net", **{**options, "static_graph": True})


def test_a_balance_is_auto_or_numbers() -> None:
    assert PipelineOptions(balance=[1, 2]).balance == [1, 2]
    with pytest.raises(PipelineError, match=r'balance is \'time\': expected "auto" or numbers'):
        PipelineOptions(balance="time")  # type: ignore[arg-type]
