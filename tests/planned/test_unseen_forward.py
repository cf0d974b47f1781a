"""A module that nobody has seen run tells of its first call that trains, and of no other."""

from __future__ import annotations

import copy

import torch
from torch import nn

from lightning_rotor.planned.attachment import attach, detach
from lightning_rotor.planned.unseen_forward import UnseenForward


def waiting() -> tuple[nn.Linear, list[int]]:
    module, calls = nn.Linear(3, 3), list[int]()

    def found() -> None:
        calls.append(1)
        detach(module)

    attach(module, UnseenForward(found))
    return module, calls


def test_its_first_training_call_is_told_before_it_runs() -> None:
    module, calls = waiting()
    x = torch.ones(2, 3)
    assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
    assert module(x).requires_grad
    assert calls == [1]  # its own forward is back, and tells nothing


def test_calls_that_do_not_train_are_not_told() -> None:
    module, calls = waiting()
    with torch.no_grad():
        module(torch.ones(2, 3))
    module.eval()(torch.ones(2, 3))
    module.train().requires_grad_(False)(torch.ones(2, 3))
    copy.deepcopy(module).requires_grad_()(torch.ones(2, 3))
    assert not calls
    module(torch.ones(2, 3, requires_grad=True))
    assert calls == [1]
