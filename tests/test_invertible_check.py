"""Whether a module is invertible: the protocol, the check, and every way to fail it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.errors import InverseError, RotorError
from lightning_rotor.invertible import (
    AdditiveCoupling,
    Invertible,
    Reversible,
    check_inverse,
    has_fused_backward,
    invertible_checkpoint,
    is_invertible,
)
from lightning_rotor.invertible.check import try_inverse
from tests.invertible import MAKERS, batch, branch


class Odd(nn.Module):
    """A module whose forward and inverse a test gives."""

    def __init__(self, forward: Callable[[Any], Any], inverse: Callable[[Any], Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self._forward = forward
        self._inverse = inverse

    def forward(self, x: Any) -> Any:
        return self._forward(x)

    def inverse(self, output: Any) -> Any:
        return self._inverse(output)


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


def noise_taken(x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    return x - torch.randn_like(x)


WRONG_INVERSES = {
    "number": (lambda y: (y / 2, y), "returns 2 tensors: expected 1"),
    "nothing": (lambda y: None, "is NoneType: expected a tensor"),
    "shape": (lambda y: y[:1] / 2, r"returns a tensor of shape \(1, 8, 5\) .* expected \(4, 8, 5\)"),
    "dtype": (lambda y: (y / 2).float(), r"returns .* torch\.float32: expected .* torch\.float64"),
}
WRONG_FORWARDS = {
    "smaller": (lambda x: x[:2] * 2, "returns less than it takes, 640 of 1280 bytes"),
    "in place": (lambda x: x.mul_(2) * 1, "changes its input in place"),
    "no tensor": (lambda x: (x * 2, 3), "is tuple: expected a tensor"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_the_modules_pass(kind: str):
    report = check_inverse(MAKERS[kind]().double(), batch())
    assert report.error < 1e-12
    assert report.draws_random == (kind in ("dropout", "unfused", "unfused affine"))
    assert report.fused_agrees is (True if kind in ("additive", "dropout", "affine") else None)


def test_the_protocol_needs_no_base_class():
    assert is_invertible(Odd(twice, half))
    assert isinstance(Odd(twice, half), Invertible)
    assert not has_fused_backward(Odd(twice, half))
    assert isinstance(AdditiveCoupling(branch(), branch()), Reversible)
    assert not is_invertible(nn.Linear(1, 1))


def test_no_inverse():
    for run in (check_inverse, invertible_checkpoint):
        with pytest.raises(InverseError, match=r"'Linear' \(Linear\) has no inverse: expected a method"):
            run(nn.Linear(2, 2), torch.randn(2, 2))
    with pytest.raises(InverseError, match=r"'1 \(Linear\)'"):
        invertible_checkpoint([Odd(twice, half), nn.Linear(2, 2)], torch.randn(2, 2))


@pytest.mark.parametrize("kind", WRONG_INVERSES)
def test_an_inverse_that_returns_something_else(kind: str):
    inverse, message = WRONG_INVERSES[kind]
    module = Odd(lambda x: twice(x) * module.scale.detach(), inverse)
    with pytest.raises(InverseError, match=f"the inverse of 'Odd' {message}") as caught:
        check_inverse(module, batch())
    assert caught.value.stage == "Odd"
    output = invertible_checkpoint(module, batch().requires_grad_(), name="layers.3")
    with pytest.raises(InverseError, match=rf"the inverse of 'layers.3 \(Odd\)' {message}"):
        output.sum().backward()


@pytest.mark.parametrize("kind", WRONG_FORWARDS)
def test_a_forward_that_cannot_go_without_its_input(kind: str):
    forward, message = WRONG_FORWARDS[kind]
    x = batch()
    before = x.clone()
    with pytest.raises(InverseError, match=f"'Odd' {message}"):
        check_inverse(Odd(forward, half), x)
    assert torch.equal(x, before)
    with pytest.raises(InverseError, match=rf"'7 \(Odd\)' {message}"):
        invertible_checkpoint(Odd(forward, half), batch().requires_grad_() * 1, name="7")


def test_an_inverse_that_is_off():
    with pytest.raises(InverseError, match=r"the inverse of 'Odd' is off by 0\.1: expected at most") as caught:
        check_inverse(Odd(twice, lambda y: y / 2 + 0.1), batch())
    assert caught.value.error == pytest.approx(0.1)
    assert caught.value.tolerance is not None
    assert caught.value.tolerance < 0.1
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, RotorError)
    assert (str(again), again.stage, again.error) == (str(caught.value), "Odd", caught.value.error)
    assert check_inverse(Odd(twice, lambda y: y / 2 + 0.1), batch(), atol=0.2).error == pytest.approx(0.1)


def test_an_inverse_that_draws_other_numbers_is_told_so():
    assert check_inverse(Odd(noise, lambda y: y - torch.randn_like(y)), batch()).draws_random
    with pytest.raises(InverseError, match=r"'Odd' is off by .*\(RNG\)"):
        check_inverse(Odd(noise, noise_taken), batch())
    output = invertible_checkpoint(Odd(noise, noise_taken), batch().requires_grad_(), name="4")
    with pytest.raises(InverseError, match=r"'4 \(Odd\)' .* is off by .*\(RNG\)"):
        output.sum().backward()
    output = invertible_checkpoint(Odd(twice, lambda y: y), batch().requires_grad_(), name="4")
    with pytest.raises(InverseError, match=r"'4 \(Odd\)' .* is off by (?!.*\(RNG\))"):
        output.sum().backward()


def test_a_forward_that_does_not_repeat_itself():
    calls: list[int] = []

    def counting(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    with pytest.raises(InverseError, match="'Odd' gives another output when it runs again"):
        check_inverse(Odd(counting, half), batch())


def test_an_inverse_in_place():
    with pytest.raises(InverseError, match="the inverse of 'Odd' changes the output in place"):
        check_inverse(Odd(twice, lambda y: y.div_(2)), batch())


@pytest.mark.parametrize("where", ["input", "output", "inverse"])
def test_values_that_are_not_finite(where: str):
    x = batch()
    if where == "input":
        x[0, 0, 0] = torch.inf
    forward = (lambda x: x / 0) if where == "output" else twice
    inverse = (lambda y: y * torch.nan) if where == "inverse" else half
    with pytest.raises(InverseError, match=f"the {where} of 'Odd' holds values that are not finite"):
        check_inverse(Odd(forward, inverse), x)
    if where != "input":  # that of a step whose loss overflows is not the inverse's fault
        loss = invertible_checkpoint(Odd(forward, inverse), x.requires_grad_(), name="5").sum()
        with pytest.raises(InverseError, match=r"the input of '5 \(Odd\)' as rebuilt by its inverse is not finite"):
            loss.backward()


def test_an_odd_dimension_to_split():
    with pytest.raises(InverseError, match=r"AdditiveCoupling cannot split a tensor of shape \(2, 3\) .* dimension 1"):
        check_inverse(AdditiveCoupling(nn.Linear(2, 2), nn.Linear(2, 2)), torch.randn(2, 3))
    with pytest.raises(InverseError, match=r"'0 \(AdditiveCoupling\)': .* dimension 1") as caught:
        invertible_checkpoint([AdditiveCoupling(nn.Linear(2, 2), nn.Linear(2, 2))], torch.randn(2, 3))
    assert caught.value.stage == "0 (AdditiveCoupling)"


def test_a_wrong_fused_backward_is_found():
    class Wrong(AdditiveCoupling):
        def reversible_backward(self, output: torch.Tensor, gradient: torch.Tensor) -> Any:
            rebuilt, for_input = super().reversible_backward(output, gradient)
            return rebuilt, for_input * 1.01

    report = check_inverse(Wrong(branch(), branch()).double(), batch())
    assert report.fused_agrees is False
    assert report.fused_error == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("position", [0, -1])
def test_a_gradient_that_is_not_finite_agrees_with_none_wherever_it_stands(position: int, value: float) -> None:
    class Broken(AdditiveCoupling):
        def reversible_backward(self, output: torch.Tensor, gradient: torch.Tensor) -> Any:
            made = super().reversible_backward(output, gradient)
            list(self.parameters())[position].grad.view(-1)[-1] = value
            return made

    module = Broken(branch(), branch()).double()
    report = check_inverse(module, batch())
    assert report.fused_agrees is False
    assert report.fused_error == float("inf")
    _, objection = try_inverse(module, batch(), name="broken")
    assert objection == "its fused backward is not used: it differs from autograd's by values that are not finite"


def test_the_check_leaves_everything_as_it_was():
    module = MAKERS["dropout"]().double()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(module.state_dict())
    x, generator = batch().requires_grad_(), torch.get_rng_state()
    original = x.detach().clone()
    generator = torch.get_rng_state()
    check_inverse(module, x)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(bool((parameter.grad == 1).all()) for parameter in module.parameters() if parameter.grad is not None)
    assert torch.equal(x, original)
    assert x.grad is None


def test_a_planner_is_told_what_speaks_against_an_inverse() -> None:
    x = torch.randn(2, 3)
    assert try_inverse(Odd(twice, lambda output: output / 2), x, name="odd") == ("", "")
    objection, _ = try_inverse(Odd(twice, twice), x, name="odd")
    assert "the inverse of 'odd' is off by" in objection
