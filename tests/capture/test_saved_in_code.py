"""What autograd saves while a call is recorded is dropped, but for code that goes back through itself."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.capture.operations import UntraceableError
from lightning_rotor.capture.saved_in_code import SavedInCode


def test_code_goes_back_through_itself_while_it_runs() -> None:
    kept, input = SavedInCode(), torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(kept.save, kept.get):
        with kept.running():
            output = input.exp().square().sum()
            (gradient,) = torch.autograd.grad(output, input, create_graph=True)
            (second,) = torch.autograd.grad(gradient.sum(), input, retain_graph=True)
        torch.testing.assert_close(gradient, 2 * (2 * input).exp())
        torch.testing.assert_close(second, 4 * (2 * input).exp())
        with pytest.raises(UntraceableError, match="computes gradients in its forward"):
            gradient.sum().backward()


def test_nothing_is_held_outside_of_code_and_behind_it() -> None:
    kept, input = SavedInCode(), torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(kept.save, kept.get):
        outside = input.exp()
        with kept.running():
            inside = input.cos().exp()
    tensor = torch.ones(2)
    alive = ref(tensor)
    saved = kept.save(tensor)
    del tensor
    gc.collect()
    assert alive() is None
    assert saved.tensor is None
    for output in (outside, inside):
        with pytest.raises(UntraceableError, match="computes gradients in its forward"):
            output.sum().backward()
