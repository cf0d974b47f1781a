"""Segments give their inputs up once they are recomputed, and only then."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.passes import repeating
from lightning_rotor.execution.segment import recomputed
from lightning_rotor.profiling import StepMeter

WIDTH, BATCH = 512, 64
BOUNDARY_BYTES = WIDTH * BATCH * 4


def layers() -> tuple[nn.Module, nn.Module, nn.Module]:
    """The second one does not save its input, so that nobody but the segment needs it in the backward."""
    torch.manual_seed(0)
    return nn.Linear(8, WIDTH), nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.GELU()), nn.Linear(WIDTH, 1)


CASES: dict[str, tuple[int, Callable[[nn.Module], tuple[torch.Tensor, ...]]]] = {
    # boundaries that a segment gives up, and what it is given
    "link": (1, lambda first: (first(torch.ones(BATCH, 8)),)),
    "link and skip": (2, lambda first: (first(torch.ones(BATCH, 8)), first(torch.full((BATCH, 8), 2.0)))),
    "link and mask without gradient": (2, lambda first: (first(torch.ones(BATCH, 8)), torch.ones(BATCH, WIDTH))),
    # Nothing tells whether another backward comes.
    "link that nobody trains": (0, lambda first: (first(torch.ones(BATCH, 8)).detach(),)),
}


def step(
    case: str = "link", *, giving_up: bool = True, backwards: int = 1, accumulated: int = 1
) -> tuple[int, list[torch.Tensor | None]]:
    """Peak of the last of several steps that add up their gradients, and these."""
    modules = layers()
    for _ in range(accumulated):
        gc.collect()
        meter = StepMeter(torch.device("cpu"))
        meter.start()
        one_step(modules, case, giving_up=giving_up, backwards=backwards)
        trace = meter.stop()
    return trace.peak_bytes, [weight.grad for module in modules for weight in module.parameters()]


def one_step(modules: tuple[nn.Module, ...], case: str, *, giving_up: bool, backwards: int) -> None:
    first, second, last = modules
    inputs = CASES[case][1](first)
    # A segment inside another one leaves its input to that one.
    with nullcontext() if giving_up else repeating():
        output = recomputed(lambda *inputs: second(functools.reduce(torch.add, inputs)), *inputs)
    del inputs
    loss = last(output).square().sum()
    del output
    for _ in range(backwards - 1):
        loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("backwards", "accumulated"), [(1, 1), (2, 1), (1, 2)])
def test_step_goes_without_the_inputs_and_has_the_same_bits(case: str, backwards: int, accumulated: int) -> None:
    held_bytes, expected = step(case, giving_up=False, backwards=backwards, accumulated=accumulated)
    peak_bytes, received = step(case, backwards=backwards, accumulated=accumulated)
    assert peak_bytes == held_bytes - CASES[case][0] * BOUNDARY_BYTES
    assert_same(expected, received)


def assert_same(expected: Sequence[torch.Tensor | None], received: Sequence[torch.Tensor | None]) -> None:
    """Bit by bit."""
    for left, right in zip(expected, received, strict=True):
        assert (left is None) == (right is None)
        assert left is None or right is None or torch.equal(left, right)


def test_step_after_one_that_failed_in_the_backward_is_clean() -> None:
    _, expected = step()
    modules = layers()
    broken = modules[0].weight.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("in the backward")))
    with pytest.raises(RuntimeError, match="in the backward"):
        one_step(modules, "link", giving_up=True, backwards=1)
    broken.remove()
    for module in modules:
        module.zero_grad()
    torch.manual_seed(0)
    layers()  # draws as the expected step did before it
    one_step(modules, "link", giving_up=True, backwards=1)
    assert_same(expected, [weight.grad for module in modules for weight in module.parameters()])


# ---------------------------------------------------------------------------------------------------- several backwards


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("partial", [False, True])
def test_two_heads_that_read_one_input_each_go_back_one_after_the_other(order: tuple[int, int], partial: bool) -> None:
    """As they do without a segment: neither meets what the other has freed."""

    def gradients(*, segment: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        left, right, *heads = (nn.Linear(8, 8) for _ in range(4))

        def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return heads[0](x).sin().sum(), heads[1](y).sin().sum()

        x, y = left(torch.ones(4, 8)), right(torch.ones(4, 8))
        outputs = recomputed(both, x, y) if segment else both(x, y)
        trained = [left, right, *heads]
        for number in order:
            chosen = [trained[number].weight, heads[number].bias] if partial else None
            outputs[number].backward(inputs=chosen)
        return [weight.grad for module in trained for weight in module.parameters()]

    assert_same(gradients(segment=False), gradients(segment=True))


@pytest.mark.parametrize("retain", [False, True])
def test_gradients_of_gradients_are_the_same(retain: bool) -> None:
    def gradients(*, segment: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        first, second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU())
        data = torch.ones(4, 8, requires_grad=True)
        x = first(data)
        output = recomputed(second, x) if segment else second(x)
        (slope,) = torch.autograd.grad(output.square().sum(), data, create_graph=True)
        penalty = slope.square().sum() + output.sum()
        penalty.backward(retain_graph=retain)
        if retain:
            penalty.backward()
        return [data.grad, *(weight.grad for module in (first, second) for weight in module.parameters())]

    assert_same(gradients(segment=False), gradients(segment=True))


def test_autocast_casts_again_what_the_recomputation_needs() -> None:
    def gradients(*, segment: bool) -> list[torch.Tensor | None]:
        first, second, last = layers()
        with torch.autocast("cpu", torch.bfloat16):
            x = first(torch.ones(BATCH, 8))
            loss = last(recomputed(second, x) if segment else second(x)).float().square().sum()
        loss.backward()
        return [weight.grad for module in (first, second, last) for weight in module.parameters()]

    assert_same(gradients(segment=False), gradients(segment=True))


def test_two_heads_can_go_back_one_after_the_other_through_a_frozen_input() -> None:
    """No backward frees what made the input, so either may come last."""
    _, second, _ = layers()
    outputs = recomputed(lambda x: (second(x), second(2 * x)), torch.ones(BATCH, WIDTH))
    for output in outputs:
        output.sum().backward()
    assert all(weight.grad is not None for weight in second.parameters())


def test_partial_backward_that_stops_in_the_segment_leaves_its_input_for_the_next() -> None:
    first, second, _ = layers()
    inside, outside = second[1].weight, first.weight
    left, right = recomputed(lambda x: (second(x).sum(), x.square().sum()), first(torch.ones(BATCH, 8)))
    (gradient,) = torch.autograd.grad(left, [inside])
    assert gradient.abs().sum() > 0
    (gradient,) = torch.autograd.grad(right, [outside])
    assert gradient.abs().sum() > 0


def test_second_backward_after_the_graph_is_gone_says_what_to_do() -> None:
    first, second, _ = layers()
    # Neither way through the segment meets a node that the other one has freed before the segment is recomputed.
    left, right = recomputed(lambda x: (second(x).sum(), x.square().sum()), first(torch.ones(BATCH, 8)))
    left.backward()
    with pytest.raises(ExecutionError, match="pass retain_graph=True to all but the last backward"):
        right.backward()


def test_users_hooks_for_saved_tensors_see_the_input() -> None:
    first, second, _ = layers()
    boundary = first(torch.ones(BATCH, 8))
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.data_ptr()) or x, lambda x: x):
        output = recomputed(second, boundary)
    assert boundary.data_ptr() in seen
    output.sum().backward()


def test_inputs_can_wait_on_the_host() -> None:
    """torch's own hooks around a whole step."""
    _, expected = step()
    modules = layers()
    with torch.autograd.graph.save_on_cpu():
        one_step(modules, "link", giving_up=True, backwards=1)
    assert_same(expected, [weight.grad for module in modules for weight in module.parameters()])
