"""The backward that runs: its number, its end, and hooks for tensors that it saves."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.private.running_backward import (
    at_end_of_backward,
    backward_number,
    hooks_for_saved_tensors,
    leaf_of_node,
    name_of_node,
)


def test_a_backward_has_a_number_and_an_end() -> None:
    seen: list[object] = []
    x = torch.ones(2, requires_grad=True)

    def note(gradient: torch.Tensor) -> None:
        seen.append(backward_number())
        at_end_of_backward(lambda: seen.append("end"))

    y = x * 2
    y.register_hook(note)
    assert backward_number() is None
    y.sum().backward()
    assert backward_number() is None
    number, end = seen
    assert isinstance(number, int)
    assert end == "end"


def test_hooks_for_saved_tensors_are_those_around() -> None:
    assert hooks_for_saved_tensors() is None

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with saved_tensors_hooks(pack, pack):
        assert hooks_for_saved_tensors() == (pack, pack)
    assert hooks_for_saved_tensors() is None


def test_a_leaf_is_found_by_its_node() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert y.grad_fn is not None
    ((node, _),) = [pair for pair in y.grad_fn.next_functions if pair[0] is not None]
    assert leaf_of_node(node) is x
    assert leaf_of_node(y.grad_fn) is None
    assert "Mul" in name_of_node(y.grad_fn)
