"""Modules that run without their input: boundaries, the guard against drift, gradients, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.errors import ExecutionError, InverseError, RotorWarning
from lightning_rotor.execution.boundary import Output, is_whole
from lightning_rotor.execution.drift_guard import Guard, precision_of, tolerance_of
from lightning_rotor.execution.inversion import Way, can_be_fused, run_inverted
from lightning_rotor.execution.moment import Moment
from lightning_rotor.execution.nested_backward import gradients_for, graph_behind, learning, roots_of
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.stages.inverses import has_fused_backward, is_invertible, require_invertible, require_like
from lightning_rotor.stages.sequential import Stage


class Scale(nn.Module):
    """Multiplies by a number that learns."""

    def __init__(self, drift: float = 0.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.drift = drift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        return x * self.factor

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """The quotient, and an error if there is to be one."""
        return y / self.factor + self.drift


def way_of(module: nn.Module) -> Way:
    return Way(Stage("layer", (module,)), fused=False)


def test_gradients_are_those_of_plain_training() -> None:
    module, x = Scale(), torch.randn(3, requires_grad=True)
    module(x).exp().sum().backward()
    wanted = x.grad, module.factor.grad
    x.grad = module.factor.grad = None
    run_inverted(way_of(module), x).exp().sum().backward()
    assert torch.equal(x.grad, wanted[0])  # type: ignore[arg-type]
    assert torch.equal(module.factor.grad, wanted[1])  # type: ignore[arg-type]


def test_two_in_a_row_hold_one_boundary() -> None:
    first, second, x = Scale(), Scale(), torch.randn(3, requires_grad=True)
    middle = run_inverted(way_of(first), x)
    last = run_inverted(way_of(second), middle)
    boundary = middle.grad_fn.run.output
    assert boundary._held is None
    assert last.grad_fn.run.output._held is not None
    del middle
    last.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 4.0))  # type: ignore[arg-type]


def test_a_second_backward_is_told_the_remedy() -> None:
    output = run_inverted(way_of(Scale()), torch.randn(3, requires_grad=True)).sum()
    output.backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()


def test_without_gradients_it_is_a_plain_call() -> None:
    with torch.no_grad():
        assert run_inverted(way_of(Scale()), torch.ones(2)).grad_fn is None


def test_an_inverse_that_drifts_is_seen() -> None:
    output = run_inverted(way_of(Scale(drift=0.5)), torch.randn(3, requires_grad=True))
    with pytest.raises(InverseError, match=r"the input of 'layer' as rebuilt by its inverse is off by 0\.5"):
        output.sum().backward()


def test_an_error_of_a_low_precision_is_a_warning() -> None:
    x = torch.ones(4, dtype=torch.bfloat16)
    guard = Guard([x], name="layer")
    guard.check([x.clone()], draws_random=False)
    with pytest.warns(RotorWarning, match=r"is off by 0\.5: expected at most 0\.1 in bfloat16"):
        guard.check([x + 0.5], draws_random=False)
    with pytest.raises(InverseError, match="is not finite"):
        guard.check([x * float("nan")], draws_random=False)


def test_the_precision_is_the_coarsest_in_use() -> None:
    assert precision_of([torch.zeros(1), torch.zeros(1, dtype=torch.float64)]) is torch.float32
    assert precision_of([torch.zeros(1, dtype=torch.int64)]) is torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert precision_of([torch.zeros(1)]) is torch.bfloat16
    assert tolerance_of(torch.float8_e4m3fn) == tolerance_of(torch.bfloat16)


def test_an_output_is_lent_and_not_changed_in_place() -> None:
    tensor = torch.ones(2)
    output = Output("layer")
    output.hold([tensor])
    (lent,) = output.lend(for_good=False)
    assert lent.data_ptr() == tensor.data_ptr()
    tensor.add_(1)
    with pytest.raises(ExecutionError, match="the output of 'layer' was changed in place"):
        output.lend(for_good=False)
    fresh = Output("layer")
    fresh.hold([torch.ones(2)])
    fresh.lend(for_good=True)
    with pytest.raises(ExecutionError, match="backward ran a second time through 'layer'"):
        fresh.lend(for_good=True)


def test_dense_tensors_that_fill_their_memory_are_whole() -> None:
    assert is_whole(torch.zeros(2, 3))
    assert not is_whole(torch.zeros(2, 3)[0])
    assert is_whole(torch.zeros(2, 3).T)
    assert not is_whole(torch.zeros(3).expand(2, 3))


def test_gradients_go_to_the_leaves_that_are_asked_for() -> None:
    x, y = learning(torch.ones(2)), learning(torch.ones(2), wanted=False)
    output = (x * 3 + y).exp()
    roots = roots_of([output], [torch.ones(2)])
    assert len(set(graph_behind(edge.node for edge, _ in roots))) >= 3
    received = gradients_for([x, y], roots, name="layer")
    assert torch.equal(received[0], 3 * output.detach())  # type: ignore[arg-type]
    assert received[1] is None
    assert x.grad is None
    assert not learning(torch.ones(2, dtype=torch.int64)).requires_grad


def test_a_gradient_that_would_be_lost_is_an_error() -> None:
    x, other = learning(torch.ones(2)), torch.ones(2, requires_grad=True)
    roots = roots_of([x * other], [torch.ones(2)])
    with pytest.raises(ExecutionError, match="uses a tensor of shape \\(2,\\) that requires a gradient"):
        gradients_for([x], roots, name="layer")


def test_a_moment_gives_again_what_the_first_call_saw() -> None:
    moment = Moment(torch.device("cpu"), SegmentState)
    with moment.first():
        first = torch.rand(2)
    assert moment.draws_random
    torch.rand(5)
    with moment.again():
        assert torch.equal(torch.rand(2), first)
    quiet = Moment(torch.device("cpu"), SegmentState)
    with quiet.first():
        pass
    assert not quiet.draws_random


def test_leaves_stand_in_the_place_of_parameters() -> None:
    module = Scale()
    moment = Moment(torch.device("cpu"), lambda: SegmentState(parametrized=(module,)))
    before = module.factor
    with moment.first():
        module(torch.ones(2))
    with moment.again([before]) as (leaf,):
        assert module.factor is leaf
        assert isinstance(leaf, nn.Parameter)
        assert leaf.data_ptr() == before.data_ptr()
    assert module.factor is before


def test_what_an_invertible_module_is() -> None:
    assert is_invertible(Scale())
    assert not has_fused_backward(Scale())
    assert not can_be_fused(Scale())
    odd: Any = nn.ReLU()
    odd.inverse = nn.Tanh()  # a layer of that name
    assert not is_invertible(odd)
    with pytest.raises(InverseError, match=r"'layer' \(ReLU\) has no inverse"):
        require_invertible(nn.ReLU(), name="layer")
    with pytest.raises(InverseError, match=r"returns a tensor of shape \(3,\) and torch.float32: expected \(2,\)"):
        require_like(torch.zeros(3), [(torch.Size((2,)), torch.float32)], name="layer")
