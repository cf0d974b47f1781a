"""What the pipeline takes for granted of :mod:`torch.distributed.pipelining`: a new release breaks a test here first.

The memory that torch's loops hold on to is compared with real processes in test_pipeline_runner.py.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed import pipelining

from lightning_rotor.pipeline.micro_batch_stage import MicroBatchStage
from lightning_rotor.private.pipelining import sent_outputs_linger

OPERATIONS = [f"get_{way}_{what}_ops" for way in ("fwd", "bwd") for what in ("recv", "send")]
CALLED = ["forward_one_chunk", "backward_one_chunk", "clear_runtime_states", *OPERATIONS]
LOCAL = ["set_local_fwd_input", "get_local_bwd_output", "set_local_bwd_input"]


@pytest.mark.parametrize("name", CALLED + LOCAL)
def test_the_stage_overrides_what_torch_has_under_this_name(name: str) -> None:
    """With the names of the arguments that schedules give."""
    theirs = inspect.signature(getattr(pipelining.PipelineStage, name)).parameters
    mine = inspect.signature(MicroBatchStage.__dict__[name]).parameters
    assert list(mine)[:2] == list(theirs)[:2]


def test_outputs_linger_before_torch_2_15() -> None:
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    assert sent_outputs_linger() == (version < (2, 15))
