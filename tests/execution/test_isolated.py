"""Contexts in which a module runs for real, and leaves everything as it was."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.execution.isolated import draws_seen, kept_attributes, kept_parameters, lent_buffers, undisturbed
from lightning_rotor.execution.passes import is_recomputing
from lightning_rotor.stages.generators import HOST
from lightning_rotor.stages.sequential import Stage

CPU = torch.device("cpu")


class Counting(nn.Module):
    """Counts in an attribute, a buffer and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.register_buffer("count", torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input by the weight."""
        self.calls.append(len(self.calls))
        self.count += 1
        with torch.no_grad():
            self.weight.mul_(2)
        return x * self.weight


def stage_of(module: nn.Module) -> Stage:
    return Stage("stage", (module,))


def test_generators_are_set_back_and_code_is_told_that_it_repeats() -> None:
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    with torch.no_grad(), undisturbed(CPU):
        assert torch.is_grad_enabled()
        assert is_recomputing()
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
    assert not is_recomputing()
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])


def test_saved_tensors_are_kept_plainly_whatever_hooks_are_around() -> None:
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    x = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor), undisturbed(CPU):
        loss = x.exp().sum()
    assert not seen
    loss.backward()
    assert torch.equal(x.grad, x.exp())  # type: ignore[arg-type]


@pytest.mark.parametrize("fails", [False, True])
def test_attributes_and_parameters_are_put_back_also_behind_an_error(fails: bool) -> None:
    module = Counting()
    calls = module.calls
    outcome: Any = pytest.raises(ZeroDivisionError, match="stop") if fails else nullcontext()
    with outcome, lent_buffers(stage_of(module)), kept_attributes(stage_of(module)):
        module(torch.ones(2))
        assert module.calls == [0]
        assert module.weight.tolist() == [2.0, 2.0]
        if fails:
            raise ZeroDivisionError("stop")
    assert module.calls is calls
    assert calls == []
    assert module.weight.tolist() == [1.0, 1.0]
    assert module.count.item() == 0


def test_parameters_that_changed_are_told() -> None:
    module = Counting()
    untouched = nn.Linear(2, 2)
    stage = Stage("stage", (module, untouched))
    before = module.weight
    with kept_parameters(stage) as changed:
        module(torch.ones(2))
        assert changed == []
    assert changed == [before]
    with kept_parameters(stage) as changed:
        module.weight = nn.Parameter(torch.zeros(2))
    assert changed == [before]
    module.weight = before
    with kept_parameters(stage) as changed:
        module.weight.data = torch.zeros(2)
    assert changed == [before]
    assert module.weight.tolist() == [1.0, 1.0]


def test_parameters_that_are_known_to_change_are_put_back_without_a_watch() -> None:
    module = Counting()
    with kept_parameters(stage_of(module), known=[module.weight]) as changed:
        module(torch.ones(2))
    assert changed == [module.weight]
    assert module.weight.tolist() == [1.0, 1.0]


def test_buffers_are_lent_and_two_names_of_one_stay_one() -> None:
    module: Any = Counting()
    module.register_buffer("same", module.count)
    original = module.count
    with lent_buffers(stage_of(module)) as originals:
        assert [(name, buffer is original) for _, name, buffer in originals] == [("count", True), ("same", True)]
        assert module.count is module.same
        assert module.count is not original
        module.count.add_(5)
    assert module.count is module.same is original
    assert original.item() == 0


def test_draws_are_looked_for_where_other_threads_may_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of(nn.Dropout())
    with draws_seen(stage) as kinds:
        stage(torch.ones(4))
    assert kinds == ()  # alone, all generators are set back
    monkeypatch.setattr("lightning_rotor.execution.isolated.others_may_draw", lambda: True)
    with draws_seen(stage) as kinds:
        stage(torch.ones(4))
    assert kinds == {HOST}
    with draws_seen(stage_of(nn.Tanh())) as kinds:
        torch.ones(4).tanh()
    assert kinds == set()
