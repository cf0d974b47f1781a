"""Inputs of stages: copies that share and fill memory as in training, sizes and keys."""

from __future__ import annotations

import torch

from lightning_rotor.profiling.stage_input import NOTHING, Boundary


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_fresh_copy_keeps_the_nesting_and_what_requires_gradients() -> None:
    x, y = torch.randn(2, 3, requires_grad=True), torch.arange(3)
    boundary = Boundary.of({"x": [x, 5], "y": (y, None)})
    copy = boundary.fresh()
    assert copy["x"][1] == 5
    assert copy["y"][1] is None
    assert torch.equal(copy["x"][0], x)
    assert (copy["x"][0].requires_grad, copy["y"][0].requires_grad) == (True, False)
    assert address(copy["x"][0]) != address(x)
    # No leaf, so a stage may change it in place.
    copy["x"][0].mul_(2)


def test_a_slice_of_what_a_stage_made_holds_all_of_it_and_the_callers_does_not() -> None:
    whole = torch.randn(4, 8)
    left, right = whole[:, :4], whole[:, 4:]
    copies = Boundary.of((left, right), whole_storages=True).fresh()
    assert address(copies[0]) == address(copies[1])
    assert copies[0].untyped_storage().nbytes() == 128
    assert torch.equal(copies[1], right)
    own = Boundary.of((left, right)).fresh()
    assert [copy.untyped_storage().nbytes() for copy in own] == [64, 64]


def test_gradients_reach_a_slice() -> None:
    whole = torch.randn(4, 8, requires_grad=True)
    copy = Boundary.of(whole[:, :4], whole_storages=True).fresh()
    (gradient,) = torch.autograd.grad(copy.sum(), copy)
    assert torch.equal(gradient, torch.ones(4, 4))


def test_sizes_are_those_of_elements_in_blocks() -> None:
    boundary = Boundary.of((torch.randn(4, 8)[:, :4], torch.arange(3), "text"))
    assert boundary.size_bytes(1) == 64 + 24
    assert boundary.size_bytes(512) == 1024
    assert boundary.tensors == ("float32[4, 4]", "int64[3]")


def test_signatures_tell_what_a_cost_depends_on() -> None:
    x = torch.randn(4, 4)
    signature = Boundary.of(x).signature
    assert signature == Boundary.of(torch.randn(4, 4)).signature
    others = (x.t(), x.double(), x[:2], (x,), x.clone().requires_grad_(), [x, 1], [x, 2])
    assert len({signature, *(Boundary.of(other).signature for other in others)}) == 1 + len(others)


def test_several_values_are_a_tuple_and_one_stays_as_it_is() -> None:
    one, other = Boundary.of(torch.ones(2)), Boundary.of([torch.zeros(3), "text"], whole_storages=True)
    assert Boundary.packed([one]) is one
    packed = Boundary.packed([one, other])
    copy = packed.fresh()
    assert isinstance(copy, tuple)
    assert copy[1][1] == "text"
    assert packed.whole_storages == (False, True, True)
    assert NOTHING.fresh() == ()
