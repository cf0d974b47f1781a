"""What a forward saves is dropped, and is there again when a backward asks for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_rotor import Checkpointable
from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.segment import recomputed
from lightning_rotor.schedule import Schedule


def test_a_second_forward_that_saves_other_tensors_is_an_error() -> None:
    shapes = iter((3, 2))

    def shrinking(x: torch.Tensor) -> torch.Tensor:
        return x[: next(shapes)].sin().sum()

    with pytest.raises(ExecutionError, match=r"the segment ran again .* expected .*float32 of shape \(3,\).*\(2,\)"):
        recomputed(shrinking, torch.ones(3, requires_grad=True), name="the segment").backward()


def test_a_second_forward_that_saves_fewer_tensors_is_an_error() -> None:
    times = iter((2, 1))

    def shorter(x: torch.Tensor) -> torch.Tensor:
        for _ in range(next(times)):
            x = x.sin()
        return x.sum()

    with pytest.raises(ExecutionError, match=r"saved other tensors than before.* received none"):
        recomputed(shorter, torch.ones(3, requires_grad=True)).backward()


def test_saved_tensors_that_a_function_reads_twice_are_an_error() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * (ctx.saved_tensors[0] + ctx.saved_tensors[0])

    with pytest.raises(ExecutionError, match=r"twice .* Read ctx.saved_tensors once"):
        recomputed(Square.apply, torch.ones(3, requires_grad=True)).sum().backward()


def test_code_that_survives_any_error_does_not_go_on_where_the_second_forward_may_end() -> None:
    reached: list[str] = []

    def careful(x: torch.Tensor) -> torch.Tensor:
        try:
            y = x.sin()
        except Exception:
            reached.append("fallback")
            return x
        reached.append("end")
        return y

    x = torch.ones(3, requires_grad=True)
    recomputed(careful, x).sum().backward()
    assert reached == ["end"]
    assert torch.equal(x.grad, torch.ones(3).cos())


def test_what_is_saved_can_be_looked_at_outside_of_a_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    y = recomputed(torch.sin, x)
    for _ in range(2):
        assert torch.equal(y.grad_fn._saved_self, x)


@pytest.mark.parametrize("nested", [False, True])
def test_nothing_is_alive_but_what_a_backward_still_needs(nested: bool) -> None:
    """Without the collector: no node may hold what holds it."""
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def run(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
            alive.add(x)
        return x

    def halves(x: torch.Tensor) -> torch.Tensor:
        return run(net[4:], recomputed(run, net[:4], x) if nested else run(net[:4], x))

    gc.collect()
    gc.disable()
    try:
        output = recomputed(halves, torch.ones(2, 8, requires_grad=True))
        assert list(alive) == [output]
        loss = output.sum()
        del output
        loss.backward()
        assert not alive
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "outer", [lambda run, x: checkpoint(run, x, use_reentrant=False), recomputed], ids=["torch's", "ours"]
)
@pytest.mark.parametrize(
    "inner", [lambda run, x: checkpoint(run, x, use_reentrant=False), recomputed], ids=["torch's", "ours"]
)
def test_it_works_inside_of_torchs_checkpoint_and_around_it(
    outer: Callable[..., Any], inner: Callable[..., Any]
) -> None:
    first, second, third = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Tanh()) for _ in range(3))
    x = torch.randn(4, 8, requires_grad=True)

    def gradients(plain: bool) -> list[torch.Tensor]:
        def middle(x: torch.Tensor) -> torch.Tensor:
            return third(second(first(x)) if plain else inner(second, first(x)))

        torch.manual_seed(0)
        output = middle(x) if plain else outer(middle, x)
        after = torch.rand(1)
        return [after, *torch.autograd.grad(output.square().sum(), [x, *first.parameters(), *second.parameters()])]

    assert all(map(torch.equal, gradients(plain=True), gradients(plain=False)))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_leaf", [False, True])
def test_a_hook_that_a_forward_puts_on_its_input_is_called_once(is_leaf: bool, depth: int) -> None:
    calls: list[bool] = []

    def halve(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(True)
        return gradient / 2

    def run(x: torch.Tensor) -> torch.Tensor:
        assert x.is_leaf == is_leaf
        x.register_hook(halve)
        return x.sin().exp()

    def gradient(function: Callable[..., Any]) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(3, requires_grad=True)
        function(x if is_leaf else 2 * x).sum().backward()
        return x.grad

    expected, received = gradient(run), gradient(lambda x: recomputed(*[recomputed] * (depth - 1), run, x))
    assert torch.equal(expected, received)
    assert len(calls) == 2


def test_a_hook_that_is_called_after_an_error_is_called_again_where_the_model_survives_it() -> None:
    class Falls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    class Survives(nn.Module):
        factor = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.inner = Falls()
            self.inner.register_forward_hook(self.triple, always_call=True)

        def triple(self, *_: Any) -> None:
            self.factor = 3.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with suppress(ValueError):
                self.inner(x)
            return (x * self.factor).sin()

    def gradients(*, recomputing: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        survives = Survives()
        net: nn.Module = nn.Sequential(nn.Linear(4, 4), survives, nn.Linear(4, 4))
        parameters = [*net.parameters()]
        if recomputing:
            net = Checkpointable(net, torch.ones(2, 4), show_progress=False)
            net.use(Schedule.parse("(0-1) 2"))
        survives.factor = 1.0
        net(torch.ones(2, 4)).sum().backward()
        return [parameter.grad for parameter in parameters]

    for one, other in zip(gradients(recomputing=True), gradients(recomputing=False), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_a_hook_for_the_gradients_of_several_parameters_is_called_once_a_backward() -> None:
    # ``torch.autograd.grad``, by which stages are measured, cannot call such hooks.
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)),
        torch.ones(99, 8),
    )
    calls: list[list[torch.Tensor]] = []

    def keep(gradients: Any) -> None:
        calls.append([gradient.clone() for gradient in gradients])

    single = net[0].weight.register_hook(lambda gradient: gradient * 2)
    several = torch.autograd.graph.register_multi_grad_hook(tuple(net.parameters()), keep)
    planned = Checkpointable(net, x)
    planned.use(Schedule.parse("0 (1-3) 4"))
    for run in (net, planned):
        net.zero_grad()
        run(x).sum().backward()
    assert len(calls) == 2
    assert all(map(torch.equal, *calls))
    several.remove()
    single.remove()
    planned(x).sum().backward()
    assert len(calls) == 2
