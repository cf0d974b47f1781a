"""Copies of optimizers without values: what they keep, and that the optimizer stays as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_rotor.memory.optimizer_copies import copy_on_meta, fake_copy_of, stand_in_for, take_step

MODE = FakeTensorMode(allow_non_fake_inputs=True)


def copied(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return fake_copy_of(optimizer, MODE, {id(parameter): stand_in_for(parameter, MODE) for parameter in parameters})


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    clone = copied(optimizer)
    with MODE, torch.no_grad():
        take_step(clone)
    return clone


def test_a_copy_steps_without_the_optimizer_and_its_hooks() -> None:
    weight, steps = nn.Parameter(torch.ones(4)), []
    optimizer = torch.optim.Adam([weight], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    clone = stepped(optimizer)
    assert not steps
    assert not optimizer.state
    assert torch.equal(weight.detach(), torch.ones(4))
    ((stand_in, state),) = clone.state.items()
    assert isinstance(stand_in, FakeTensor)
    assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]


def test_settings_without_a_shape_rule_are_off() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(4))], fused=True)
    group = copied(optimizer).param_groups[0]
    assert (group["fused"], group["differentiable"], group["capturable"]) == (False, False, False)
    assert optimizer.param_groups[0]["fused"]


def test_marks_of_parameters_and_frozen_ones_stay() -> None:
    weight, frozen = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), requires_grad=False)
    weight.is_embedding = True  # type: ignore[attr-defined]
    for copy in (copied(torch.optim.SGD([weight, frozen])), copy_on_meta(copied(torch.optim.SGD([weight, frozen])))):
        first, second = copy.param_groups[0]["params"]
        assert first.is_embedding
        assert first.grad is not None
        assert second.grad is None
        assert not second.requires_grad


def test_on_meta_a_late_step_is_about_to_come() -> None:
    moved = copy_on_meta(stepped(torch.optim.RAdam([nn.Parameter(torch.ones(4))], foreach=None)))
    ((parameter, state),) = moved.state.items()
    assert parameter is moved.param_groups[0]["params"][0]
    assert parameter.is_meta
    assert state["exp_avg"].is_meta
    assert float(state["step"]) == 1000.0
    # On a CPU torch chooses no foreach by itself.
    assert moved.param_groups[0]["foreach"] is False


def test_a_step_that_needs_a_closure_gets_one() -> None:
    losses: list[Any] = []

    class Closing(torch.optim.SGD):
        def step(self, closure: Any) -> None:  # type: ignore[override]
            losses.append(closure())

    take_step(copied(Closing([nn.Parameter(torch.ones(4))], lr=0.1)))
    assert float(losses[0]) == 0.0
