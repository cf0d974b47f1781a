"""Warnings about measured chains, from costs and behaviours alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.chain import StageCost
from lightning_rotor.profiling import profile_chain
from lightning_rotor.profiling.complaints import WORTH_MENTIONING_BYTES, stage_complaints, structure_complaints
from lightning_rotor.profiling.stage_behaviour import Behaviour
from lightning_rotor.stages.sequential import sequential_stages

PLAIN = Behaviour(False, True, False, False, (), ())


@cache
def plain_cost() -> StageCost:
    stages = sequential_stages(nn.Sequential(nn.Linear(4, 4)))
    return profile_chain(stages, torch.randn(2, 4), repeats=1).chain.stages[0]


def cost(**changes: Any) -> StageCost:
    return replace(plain_cost(), name="net.0", **changes)


def test_a_plain_stage_is_not_complained_about() -> None:
    assert not list(stage_complaints([cost()], [PLAIN]))


def test_a_stage_with_other_bits_is_named() -> None:
    (message,) = stage_complaints([cost(recomputable=False)], [PLAIN])
    assert message.startswith("stage 'net.0' gives other bits when it runs again")


def test_pinned_memory_is_told_unless_the_user_wants_to_see_it() -> None:
    pinned = cost(pinned_bytes=WORTH_MENTIONING_BYTES)
    (message,) = stage_complaints([pinned], [PLAIN])
    assert f"keeps {WORTH_MENTIONING_BYTES} bytes in its graph" in message
    assert not list(stage_complaints([pinned], [PLAIN._replace(leaves_traces=True)]))
    assert not list(stage_complaints([cost(pinned_bytes=WORTH_MENTIONING_BYTES - 1)], [PLAIN]))


def test_stages_that_call_checkpoint_are_told_in_one_message() -> None:
    behaviour = PLAIN._replace(calls_checkpoint=True)
    (message,) = stage_complaints([cost(), replace(cost(), name="net.1")], [behaviour, behaviour])
    assert message.startswith("'net.0', 'net.1': each is one stage. It calls torch.utils.checkpoint by itself")


def test_why_a_stage_is_not_inverted_goes_to_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert not list(stage_complaints([cost(not_inverted="it saves nothing anyway")], [PLAIN]))
    assert "'net.0' is not inverted: it saves nothing anyway" in caplog.text


def test_one_stage_of_several_layers_leaves_nothing_to_plan() -> None:
    stages = sequential_stages(nn.Sequential(nn.Linear(4, 4)))
    (message,) = structure_complaints(3, stages)
    assert message.startswith("all 3 layers were merged into one stage")
    assert not list(structure_complaints(1, stages))


def test_shared_parameters_matter_under_autocast_alone() -> None:
    layer = nn.Linear(4, 4)
    stages = sequential_stages(nn.Sequential(layer, nn.Tanh(), layer))
    assert not list(structure_complaints(3, stages))
    with torch.autocast("cpu", torch.bfloat16):
        (message,) = structure_complaints(3, stages)
    assert message.startswith("stages share parameters under autocast")
