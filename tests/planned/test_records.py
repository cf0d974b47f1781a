"""Measurements and plans of an earlier training, taken over by an equal model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor import Checkpointable
from lightning_rotor.invertible import AdditiveCoupling
from lightning_rotor.planned import call_profiler


def couplings() -> nn.Sequential:
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()) for _ in range(12)]
    blocks = [AdditiveCoupling(*branches[number : number + 2]) for number in range(0, 12, 2)]
    return nn.Sequential(nn.Linear(32, 32), *blocks, nn.Linear(32, 1))


def test_an_invertible_model_that_is_resumed_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 32)
    first = Checkpointable(couplings())
    first(x).sum().backward()
    assert first.chain is not None
    least_bytes = first.frontier().points[0].peak_bytes
    first.compute_sequence(int(1.02 * least_bytes))
    assert first.plan is not None
    assert first.plan.inverted
    records = json.loads(json.dumps(first._planned.plans.records()))  # as a checkpoint holds them

    def measured(*_: Any, **__: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(call_profiler, "profile_chain", measured)
    resumed = Checkpointable(couplings(), mem_limit=int(1.02 * least_bytes))
    resumed._planned.plans.recall(records)
    resumed(x).sum().backward()
    assert resumed.plan is not None
    assert resumed.plan.inverted == first.plan.inverted
    # Inversion is equal to plain training up to rounding, and to itself under one plan to the bit.
    first.zero_grad()
    first(x).sum().backward()
    for mine, theirs in zip(resumed.parameters(), first.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
