"""Hooks, which can be set in public and not looked at."""

import torch
from torch import nn

from lightning_rotor.private.hooks import gradient_hooks, has_backward_hooks, has_forward_hooks, hook_tables


def test_hooks_of_a_module_are_told_by_what_they_follow() -> None:
    module = nn.Linear(1, 1)
    assert not has_forward_hooks(module)
    assert not has_backward_hooks(module)
    module.register_forward_hook(print)
    assert has_forward_hooks(module)
    assert not has_backward_hooks(module)
    module.register_full_backward_hook(print)
    assert has_backward_hooks(module)
    hooks = [hook for table in hook_tables(module) for hook in table.values()]
    assert hooks.count(print) == 2


def test_hooks_of_a_tensor_are_listed_in_their_order() -> None:
    x = torch.zeros(1, requires_grad=True)
    assert gradient_hooks(x) == []
    x.register_hook(abs)
    x.register_hook(print)
    assert gradient_hooks(x) == [abs, print]
