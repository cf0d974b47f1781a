"""Bad inverses in a plan: withheld with the reason, or refused with the stage's name; the model stays as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor import Checkpointable
from lightning_rotor.chain import StageCost
from lightning_rotor.errors import InverseError, RotorWarning
from lightning_rotor.execution.executor import Executor
from lightning_rotor.invertible import AdditiveCoupling
from lightning_rotor.planning import minimum_budget
from lightning_rotor.private.values import same_bits
from lightning_rotor.profiling import profile_chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.stages.sequential import sequential_stages
from tests.grids import few
from tests.invertible import Unfused
from tests.test_invertible_check import Odd

WIDTH = 8


class Spoiled(AdditiveCoupling):
    """What it rebuilds can be spoiled, and its input too."""

    def __init__(self, spoil: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__(nn.Linear(WIDTH // 2, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH // 2))
        self.spoil = spoil
        self.in_place = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2) if self.in_place else x)

    def inverse(self, output: torch.Tensor) -> Any:
        return self.spoil(super().inverse(output))

    def reversible_backward(self, output: torch.Tensor, gradient: torch.Tensor) -> Any:
        rebuilt, for_input = super().reversible_backward(output, gradient)
        return self.spoil(rebuilt), for_input


class WronglyFused(Spoiled):
    def reversible_backward(self, output: torch.Tensor, gradient: torch.Tensor) -> Any:
        return super().reversible_backward(output, gradient, "more")  # type: ignore[call-arg]


def odd(forward: Callable[[Any], Any] = torch.sinh, inverse: Callable[..., Any] = torch.asinh) -> Callable[[], Odd]:
    return lambda: Odd(forward, inverse)


def narrow(x: torch.Tensor) -> torch.Tensor:
    return torch.sinh(x[:, ::2])


def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.sinh(x) + torch.randn_like(x)


PART = "Odd is but a part of it"
WITHHELD = {
    "forward in place": (odd(lambda x: x.mul_(2).sinh()), PART),
    "output a view of the input": (odd(lambda x: x.view(-1, WIDTH)), PART),
    "output the input itself": (odd(lambda x: x), PART),
    "output smaller": (odd(narrow), "'2' returns less than it takes, 256 of 512 bytes"),
    "output not finite": (odd(lambda x: x.sinh() / 0), "the output of '2' holds values that are not finite"),
    "inverse in place": (odd(inverse=torch.Tensor.asinh_), "the inverse of '2' changes the output in place"),
    "inverse of several": (odd(inverse=lambda y: (y, y)), "the inverse of '2' returns 2 tensors: expected 1"),
    "inverse of nothing": (odd(inverse=lambda y: None), "the inverse of '2' is NoneType: expected a tensor"),
    "inverse of another shape": (odd(inverse=lambda y: y[:1]), "returns a tensor of shape (1, 8)"),
    "inverse of another dtype": (odd(inverse=torch.Tensor.double), "and torch.float64: expected (16, 8) and"),
    "inverse not finite": (odd(inverse=lambda y: y / 0), "the inverse of '2' holds values that are not finite"),
    "inverse off": (odd(inverse=lambda y: y.asinh() + 1), "the inverse of '2' is off by 1"),
    "inverse of other random numbers": (odd(noise), "The module draws random numbers (RNG)"),
    "inverse that fails": (odd(inverse=lambda y: y @ y), "'2' raises RuntimeError in inverse(output)"),
    "inverse of two arguments": (odd(inverse=lambda y, z: y), "'2' raises TypeError in inverse(output)"),
    "fused backward that fails": (WronglyFused, "'2' raises TypeError in reversible_backward(output, gradient)"),
}


def network(bad: nn.Module, width: int = WIDTH, made: int = WIDTH) -> nn.Sequential:
    """With a buffer, and random numbers, that a trial might change."""
    torch.manual_seed(0)
    before = (nn.Linear(WIDTH, width), nn.BatchNorm1d(width))
    return nn.Sequential(*before, bad, nn.Dropout(0.5), nn.Linear(made, WIDTH), nn.Tanh())


def snapshot(net: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    attributes = {name: {**module.__dict__} for name, module in net.named_modules()}
    for found in attributes.values():
        found.update({name: len(found[name]) for name in (*hooks, "_parameters", "_buffers", "_modules")})
    return {
        "attributes": attributes,
        "state": [value.clone() for value in net.state_dict().values()],
        "gradients": [None if each.grad is None else each.grad.clone() for each in net.parameters()],
        "generator": torch.get_rng_state(),
    }


def assert_untouched(net: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(net)
    assert after["attributes"] == before["attributes"]
    assert all(map(same_bits, after["state"], before["state"]))
    assert all(each is None for each in after["gradients"])
    assert torch.equal(after["generator"], before["generator"])


def step(net: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    torch.manual_seed(1)
    output = forward(batch)
    output.square().sum().backward()
    return [output.detach(), *(each.grad for each in net.parameters() if each.grad is not None)]


def options_of(stage: StageCost) -> list[str]:
    return [option.name for option in stage.options]


@pytest.mark.parametrize(
    "kind",
    few(
        WITHHELD,
        *("forward in place", "output smaller", "inverse in place", "inverse of nothing", "inverse off"),
        *("inverse of other random numbers", "fused backward that fails"),
    ),
)
def test_it_is_withheld_with_the_reason_and_the_plan_does_without(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = WITHHELD[kind]
    made = WIDTH // 2 if kind == "output smaller" else WIDTH
    net, batch = network(make(), made=made), torch.randn(16, WIDTH)
    before, original = snapshot(net), batch.clone()
    with caplog.at_level(logging.INFO, "lightning_rotor"):
        chain = Checkpointable(net).measure(batch)
    stage = next(each for each in chain if each.name.endswith("2"))
    assert options_of(stage) == ["keep"]
    assert reason in stage.not_inverted
    assert f"{stage.name!r} is not inverted: {stage.not_inverted}" in caplog.text
    assert_untouched(net, before)
    assert torch.equal(batch, original)
    planned = Checkpointable(net, batch, minimum_budget(chain).peak_bytes)
    assert all(map(same_bits, step(net, net, batch), step(net, planned, batch)))


@pytest.mark.parametrize("make", [odd(), Spoiled], ids=["invert", "invert, fused"])
def test_what_is_not_bad_is_not_withheld(make: Callable[[], nn.Module]) -> None:
    net = network(make())
    stage = Checkpointable(net).measure(torch.randn(16, WIDTH)).stages[2]
    assert options_of(stage)[1].startswith("invert")
    assert not stage.not_inverted


class Traced(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH - 1), inside, nn.Linear(WIDTH - 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(torch.tanh(self.first(x))))


@pytest.mark.parametrize(("make", "name"), [(lambda block: network(block, WIDTH - 1), "2"), (Traced, "block")])
def test_an_odd_dimension_to_split_is_refused_with_the_stages_name(make: Callable[..., nn.Module], name: str) -> None:
    net = make(AdditiveCoupling(nn.Linear(3, 3), nn.Linear(3, 3)))
    batch, before = torch.randn(16, WIDTH), snapshot(net)
    with pytest.raises(InverseError, match=rf"^'{name}': AdditiveCoupling cannot split .* dimension 1") as caught:
        Checkpointable(net, batch, "1MiB")
    assert caught.value.stage == name
    assert_untouched(net, before)


LATER = {
    "number": (lambda x: (x, x), "returns 2 tensors: expected 1"),
    "nothing": (lambda x: None, "is NoneType: expected a tensor"),
    "shape": (lambda x: x[:1], r"returns a tensor of shape \(1, 8\)"),
    "dtype": (torch.Tensor.double, r"and torch\.float64: expected \(16, 8\) and"),
    "not finite": (lambda x: x / 0 - x / 0, "as rebuilt by its inverse is not finite"),
    "off": (lambda x: x + 0.5, r"as rebuilt by its inverse is off by 0\.5"),
}


@pytest.mark.parametrize("kind", ["invert", "invert, fused"])
def test_what_turns_bad_after_planning_is_refused_with_the_stages_name(kind: str) -> None:
    bad = Spoiled()
    net, batch = network(Unfused(bad) if kind == "invert" else bad), torch.randn(16, WIDTH)
    profile = profile_chain(sequential_stages(net), batch, repeats=1)
    assert options_of(profile.chain.stages[2]) == ["keep", kind]
    run = Executor(profile.stages, profile.chain, Schedule.parse("0-1 2:1 3-5"), profile.states)
    expected = step(net, net, batch)
    for spoil, message in LATER.values():
        bad.spoil = spoil
        with pytest.raises(InverseError, match=f"'2' .*{message}") as caught:
            step(net, run, batch)
        assert caught.value.stage == "2"
    bad.spoil, bad.in_place = (lambda x: x), True
    with pytest.raises(InverseError, match="'2' changes its input in place"):
        step(net, run, batch)
    bad.in_place = False
    torch.testing.assert_close(expected, step(net, run, batch), rtol=1e-4, atol=1e-5)


def test_drift_in_pure_bfloat16_is_a_warning_with_numbers() -> None:
    """A user who chose that precision may have chosen what it loses: training goes on, and says so."""
    bad = Spoiled()
    net, batch = network(bad).bfloat16(), torch.randn(16, WIDTH, dtype=torch.bfloat16)
    profile = profile_chain(sequential_stages(net), batch, repeats=1)
    kind = len(options_of(profile.chain.stages[2])) - 1
    assert kind, profile.chain.stages[2].not_inverted
    run = Executor(profile.stages, profile.chain, Schedule.parse(f"0-1 2:{kind} 3-5"), profile.states)
    bad.spoil = lambda x: x + 1
    with pytest.warns(RotorWarning, match=r"the input of '2' as rebuilt .* is off by .*: expected .* in bfloat16"):
        step(net, run, batch)
