"""Training without inputs leaves what plain training leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from benchmarks.pipeline_models import Counting
from lightning_rotor.errors import ExecutionError, InverseError, ModelError, RotorWarning
from lightning_rotor.invertible import AdditiveCoupling, InvertibleSequential, check_inverse, invertible_checkpoint
from tests.invertible import (
    CHANNELS,
    MAKERS,
    Unfused,
    assert_same_step,
    batch,
    branch,
    exact_coupling,
    network,
    of_few_bits,
    step,
)


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from(sorted(MAKERS)), min_size=1, max_size=4),
    st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-5)]),
    st.booleans(),
    st.sampled_from(["none", "prefix", "suffix", "all"]),
    st.booleans(),
)
def test_a_step_leaves_what_a_plain_one_leaves(
    kinds: list[str], precision: tuple[torch.dtype, float], input_learns: bool, frozen: str, training: bool
):
    torch.manual_seed(0)
    net = network(kinds, precision[0]).train(training)
    parameters = list(net.parameters())
    middle = len(parameters) // 2
    for parameter in {"none": [], "prefix": parameters[:middle], "suffix": parameters[middle:]}.get(frozen, parameters):
        parameter.requires_grad_(False)
    x = batch(precision[0]).requires_grad_(input_learns)
    plain = step(net, net, x)
    assert_same_step(plain, step(net, lambda x: invertible_checkpoint(net, x), x), precision[1])


def one_by_one(net: InvertibleSequential, x: torch.Tensor) -> torch.Tensor:
    for module in net:
        x = invertible_checkpoint(module, x)
    return x


def test_ways_to_call():
    net = network()
    x = batch().requires_grad_()
    plain = step(net, net, x)
    assert_same_step(plain, step(net, lambda x: invertible_checkpoint(list(net), x), x), 1e-12)
    assert_same_step(plain, step(net, lambda x: one_by_one(net, x), x), 1e-12)


@pytest.mark.parametrize("way", ["one segment", "two segments"])
def test_inside_of_checkpoints(way: str):
    net = network()
    x = batch().requires_grad_()
    parts = [net] if way == "one segment" else [net[:3], net[3:]]

    def checkpointed(run: Any) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            for part in parts:
                x = checkpoint(run, part, x, use_reentrant=False)
            return x

        return forward

    # Not plain training: torch's checkpoint counts a batch twice in running statistics.
    expected = step(net, checkpointed(lambda part, x: part(x)), x)
    assert_same_step(expected, step(net, checkpointed(invertible_checkpoint), x), 1e-12)


def test_saved_tensors_on_the_cpu():
    net = network()
    x = batch().requires_grad_()
    plain = step(net, net, x)
    with torch.autograd.graph.save_on_cpu():
        assert_same_step(plain, step(net, lambda x: invertible_checkpoint(net, x), x), 1e-12)


def test_bfloat16_autocast():
    net = network(dtype=torch.float32)
    x = batch(torch.float32).requires_grad_()

    def under_autocast(forward: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                output: torch.Tensor = forward(x)
            return output

        return run

    plain = step(net, under_autocast(net), x)
    # A rebuilt input differs in its last bit, which now and then rounds to another bfloat16.
    assert_same_step(plain, step(net, under_autocast(lambda x: invertible_checkpoint(net, x)), x), 1e-2)


@pytest.mark.parametrize("wrap", [Unfused, lambda block: block], ids=["unfused", "fused"])
def test_bfloat16_autocast_is_that_of_the_forward(wrap: Any):
    """Where the input is rebuilt to the bit, so are the casts of a plain step, and the gradients."""
    torch.manual_seed(0)
    net = InvertibleSequential(*(wrap(exact_coupling()) for _ in range(2)))
    x = of_few_bits((16, CHANNELS), steps=4).requires_grad_()
    steps = []
    for forward in (net, lambda x: invertible_checkpoint(net, x)):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(net.inverse(net(x)), x)
        steps.append(step(net, torch.autocast("cpu", torch.bfloat16)(forward), x))  # the backward is outside of it
    assert_same_step(*steps, 1e-5)


@pytest.mark.parametrize(("wrap", "evaluations"), [(Unfused, 3), (lambda block: block, 2)], ids=["unfused", "fused"])
def test_a_fused_backward_evaluates_each_branch_once(wrap: Any, evaluations: int):
    net = InvertibleSequential(*(wrap(MAKERS["dropout"]()) for _ in range(3)))
    calls: list[str] = []
    for name, module in net.named_modules():
        if name.endswith((".f", ".g")):
            # No hook: those that only look are not called again.
            module.forward = lambda x, name=name, forward=module.forward: calls.append(name) or forward(x)
    invertible_checkpoint(net, batch(torch.float32).requires_grad_()).sum().backward()
    assert len(calls) == evaluations * len(set(calls)) == evaluations * 6


def test_accumulated_gradients_and_hooks():
    net = network(["additive", "unfused"])
    x = batch().requires_grad_()
    calls: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda gradient, name=name: calls.append(name) or gradient * 2)
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(f"{name} done"))
    plain = step(net, lambda x: net(x) + net(x), x)
    expected, calls[:] = sorted(calls), []
    twice = step(net, lambda x: invertible_checkpoint(net, x) + invertible_checkpoint(net, x), x)
    assert_same_step(plain, twice, 1e-12)
    assert sorted(calls) == expected


def test_the_input_may_have_other_readers():
    net = network(["dropout"])
    x = batch().requires_grad_()

    def twice_read(run: Any) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            inner = run(net, x)
            return x * 2 + inner.tanh() + run(net, inner) * inner + run(net, inner)

        return forward

    plain = step(net, twice_read(lambda net, x: net(x)), x)
    assert_same_step(plain, step(net, twice_read(invertible_checkpoint), x), 1e-12)


def test_autograd_grad_for_some():
    net = network(["additive", "affine", "unfused"])
    x = batch().requires_grad_()
    wanted = [x, *list(net[1].parameters())[:2]]
    plain = torch.autograd.grad(net(x).square().sum(), wanted)
    torch.manual_seed(1)
    plain = torch.autograd.grad(net(x).square().sum(), wanted)
    torch.manual_seed(1)
    found = torch.autograd.grad(invertible_checkpoint(net, x).square().sum(), wanted)
    assert all(torch.allclose(left, right, rtol=1e-10, atol=1e-12) for left, right in zip(plain, found, strict=True))
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_backward_that_leaves_out_what_took_the_output_is_refused():
    net = network(["additive", "unfused", "affine"]).eval()
    x = batch().requires_grad_()
    middle = invertible_checkpoint(net[0], x)
    last = invertible_checkpoint(net[1:], middle)
    with pytest.raises(ExecutionError, match=r"has not passed '1 \(Unfused\)'"):
        torch.autograd.grad(middle.square().sum(), x, retain_graph=True)
    (both,) = torch.autograd.grad(middle.square().sum() + last.square().sum(), x)
    middle = net[0](x)
    (plain,) = torch.autograd.grad(middle.square().sum() + net[1:](middle).square().sum(), x)
    assert torch.allclose(both, plain, rtol=1e-11)


def test_requires_grad_is_truthful():
    block = MAKERS["additive"]()
    assert invertible_checkpoint(block, batch(torch.float32)).requires_grad
    with torch.no_grad():
        assert not invertible_checkpoint(block, batch(torch.float32)).requires_grad
    block.requires_grad_(False)
    assert not invertible_checkpoint(block, batch(torch.float32)).requires_grad
    assert invertible_checkpoint(block, batch(torch.float32).requires_grad_()).requires_grad


def test_a_second_backward():
    net = network(["additive", "unfused", "affine"])
    x = batch().requires_grad_()
    output = invertible_checkpoint(net, x).square().sum()
    (first,) = torch.autograd.grad(output, x, retain_graph=True)
    (second,) = torch.autograd.grad(output, x)
    assert torch.equal(first, second)
    output = invertible_checkpoint(net, x)
    output.backward(torch.ones_like(output))
    with pytest.raises(ExecutionError, match=r"a second time through '2 \(AffineCoupling\)'.*retain_graph=True"):
        output.backward(torch.ones_like(output))


def test_a_gradient_of_a_gradient():
    x = batch().requires_grad_()
    output = invertible_checkpoint(network(["additive"]), x).square().sum()
    with pytest.raises(ExecutionError, match=r"gradients of the gradients of '0 \(AdditiveCoupling\)'"):
        torch.autograd.grad(output, x, create_graph=True)


def test_an_output_changed_in_place():
    output = invertible_checkpoint(network(["additive"]), batch().requires_grad_())
    total = output.mul_(2).sum()
    with pytest.raises(ExecutionError, match=r"output of '0 \(AdditiveCoupling\)' was changed in place"):
        total.backward()


@pytest.mark.parametrize("wrap", [Unfused, lambda block: block], ids=["unfused", "fused"])
def test_a_tensor_from_elsewhere(wrap: Any):
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * scale

    scale = torch.ones(CHANNELS // 2, 1, requires_grad=True)
    output = invertible_checkpoint(wrap(AdditiveCoupling(Scaled(), Scaled())), batch(torch.float32).requires_grad_())
    with pytest.raises(ExecutionError, match=r"tensor of shape \(4, 1\) that requires a gradient and is neither"):
        output.sum().backward()


class Tuples(nn.Module):
    """A coupling of two streams, and a count that is no number to differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> Any:
        first, rest = x
        return first * 1, {"y": rest["y"] + self.f(first), "count": rest["count"] + 1}

    def inverse(self, output: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> Any:
        first, rest = output
        return first * 1, {"y": rest["y"] - self.f(first), "count": rest["count"] - 1}


def test_tensors_in_tuples_and_dicts():
    blocks = nn.ModuleList([Tuples(), Tuples()]).double()
    first, second = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    outputs: list[Any] = []
    for run in (lambda x: blocks[1](blocks[0](x)), lambda x: invertible_checkpoint(list(blocks), x)):
        blocks.zero_grad()
        one, rest = run((first, {"y": second, "count": torch.tensor(3)}))
        gradients = torch.autograd.grad((one * rest["y"]).sum(), [first, second, *blocks.parameters()])
        outputs.append([one, rest["y"], rest["count"], *gradients])
    assert outputs[1][2] == 5
    assert all(torch.allclose(left, right, rtol=1e-12) for left, right in zip(*outputs, strict=True))


class Wild(nn.Module):
    """Scales far beyond what float32 undoes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1e-6 + 1

    def inverse(self, output: torch.Tensor) -> torch.Tensor:
        return (output - 1) * 1e6


def test_drift_is_an_error_with_numbers():
    output = invertible_checkpoint(Wild(), batch(torch.float32).requires_grad_())
    with pytest.raises(
        InverseError, match=r"the input of 'Wild' as rebuilt .* off by .*: expected at most .* in float32"
    ) as caught:
        output.sum().backward()
    assert caught.value.error is not None
    assert caught.value.error > 1e-3


def test_drift_in_pure_bfloat16_is_a_warning_with_numbers():
    output = invertible_checkpoint(Wild(), batch(torch.bfloat16).requires_grad_())
    with pytest.warns(
        RotorWarning, match=r"'Wild' as rebuilt by its inverse is off by .*: expected at most .* in bfloat16"
    ):
        output.sum().backward()


@pytest.mark.gpu
def test_on_a_gpu():
    net = network(dtype=torch.float32).cuda()
    x = batch(torch.float32).cuda().requires_grad_()
    results = []
    for run in (lambda net, x: net(x), invertible_checkpoint):
        torch.manual_seed(3)
        gradients = torch.autograd.grad(run(net, x).square().sum(), [x, *net.parameters()])
        results.append((gradients, torch.get_rng_state(), torch.cuda.get_rng_state()))
    (plain, *generators), (found, *found_generators) = results
    scale = max(float(gradient.abs().max()) for gradient in plain)
    assert all(float((left - right).abs().max()) <= 1e-4 * scale for left, right in zip(plain, found, strict=True))
    assert all(map(torch.equal, generators, found_generators))


class Handing(nn.Module):
    """Hands one part through, and may reshape the other."""

    def __init__(self, *, flat: bool = False) -> None:
        super().__init__()
        self.f = branch(CHANNELS)
        self.flat = flat

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = (part.view(4, CHANNELS, 5) for part in pair)
        made = right, left + self.f(right)
        return (made[0].flatten(1), made[1]) if self.flat else made

    def inverse(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        right, made = pair[0].view(4, CHANNELS, 5), pair[1]
        return made - self.f(right), right


def test_parts_that_are_handed_through_and_reshapes():
    report = check_inverse(Handing().double(), (batch(), batch()))
    assert report.shares_memory
    assert not check_inverse(network(["additive"]), batch()).shares_memory
    net = nn.ModuleList([Handing(), Handing(), Handing(flat=True)]).double()
    x = batch().requires_grad_()

    def plainly(x: torch.Tensor) -> torch.Tensor:
        pair = (x * 2, x.sin())
        for module in net:
            pair = module(pair)
        return pair[0].view_as(pair[1]) * pair[1]

    def inverting(x: torch.Tensor) -> torch.Tensor:
        pair = invertible_checkpoint(list(net), (x * 2, x.sin()))
        return pair[0].view_as(pair[1]) * pair[1]

    assert_same_step(step(net, plainly, x), step(net, inverting, x), 1e-10)


class Weighing(nn.Module):
    """A second value that never requires a gradient, be it integers or not."""

    def __init__(self, weights: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.f, self.weights = branch(CHANNELS // 2), weights

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = pair[0].chunk(2, 1)
        return torch.cat([left, right + self.f(left)], 1), self.weights(pair[1])

    def inverse(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = pair[0].chunk(2, 1)
        return torch.cat([left, right - self.f(left)], 1), self.weights(pair[1])


@pytest.mark.parametrize("weights", [torch.neg, lambda value: value.detach()], ids=["made", "handed through"])
@pytest.mark.parametrize("learning", [(True, False), (False, False), (True, True)])
def test_each_output_requires_a_gradient_as_in_a_plain_call(weights: Any, learning: tuple[bool, bool]):
    net = InvertibleSequential(Weighing(weights), Weighing(weights)).double()
    pair = tuple(batch().requires_grad_(each) for each in learning)
    plain, inverted = net(pair), invertible_checkpoint(net, pair)
    assert [each.requires_grad for each in inverted] == [each.requires_grad for each in plain]
    for made in (plain, inverted):
        made[0].square().sum().backward()
    assert all(map(torch.equal, plain, inverted))


def test_a_run_holds_one_activation_though_a_part_does_not_learn():
    blocks = [Weighing(torch.neg).double() for _ in range(3)]
    pair = batch().requires_grad_(), batch()
    made = [invertible_checkpoint(blocks[0], pair)]
    held = StorageWeakRef(made[0][0].untyped_storage())
    second = invertible_checkpoint(blocks[1], made.pop())
    assert held.expired()
    second[0].sum().backward()


class Pairing(nn.Module):
    """Takes and returns two tensors, and a third one that only its inverse needs."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Dropout(0.5))

    def forward(self, a: torch.Tensor, b: torch.Tensor, sign: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a + sign * self.f(b), b * 2, sign * 1

    def inverse(self, a: torch.Tensor, b: torch.Tensor, sign: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a - sign * self.f(b / 2), b / 2, sign * 1


@pytest.mark.parametrize("how", ["invert", "checkpoint", "plain"])
def test_a_call_takes_several_arguments_and_says_how_to_run(how: Any):
    torch.manual_seed(0)
    row = [Pairing().double(), Pairing().double()]
    inputs = [torch.randn(4, CHANNELS, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    sign = torch.randn(4, 1, dtype=torch.float64).sign()
    found = []
    for run in (None, how):
        modules = copy.deepcopy(row)
        torch.manual_seed(1)
        if run is None:
            a, b, _ = modules[1](*modules[0](*inputs, sign))
        else:
            a, b = invertible_checkpoint(modules, *inputs, sign, how=run, num_outputs=2)
        for tensor in inputs:
            tensor.grad = None
        (a.square().sum() + b.sum()).backward()
        gradients = [tensor.grad for tensor in (*inputs, *(p for each in modules for p in each.parameters()))]
        found.append([a, b, *gradients, *(buffer for each in modules for buffer in each.buffers())])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(
            other, plain, rtol=1e-12 if how == "invert" else 0, atol=1e-12 if how == "invert" else 0
        )


def test_what_is_checkpointed_needs_no_inverse_and_runs_again():
    layer, x = Counting(), batch().requires_grad_()
    invertible_checkpoint([nn.Tanh(), layer], x, how="checkpoint").sum().backward()
    assert layer.taken() == [1, 1]
    with torch.no_grad():
        assert torch.equal(invertible_checkpoint(layer, x, how="checkpoint"), layer(x))
    assert layer.taken() == [2, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"how": "swap"}, "how is 'swap': expected one of 'invert', 'checkpoint', 'plain'"),
        ({"how": "plain", "num_outputs": 2}, "num_outputs is 2, and the module returned 1 output: expected a tuple"),
        ({"how": "plain", "num_outputs": 0}, "num_outputs is 0"),
    ],
)
def test_a_call_that_cannot_be_made_says_why(options: Any, message: str):
    with pytest.raises(ModelError, match=message):
        invertible_checkpoint(nn.Linear(2, 2), torch.randn(2, 2), **options)
