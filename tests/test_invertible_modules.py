"""The invertible modules themselves."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from lightning_rotor.errors import InverseError, ModelError
from lightning_rotor.invertible import (
    AdditiveCoupling,
    AffineCoupling,
    InvertibleSequential,
    check_inverse,
    invertible_checkpoint,
    reverse,
)
from tests.invertible import CHANNELS, MAKERS, assert_same_step, batch, branch, network, step


def test_the_coupling_is_the_reversible_block():
    f, g = branch().double(), branch().double()
    x = batch()
    first, second = x.chunk(2, 1)
    first = first + f(second)
    expected = torch.cat([first, second + g(first)], 1)
    assert torch.equal(AdditiveCoupling(f, g)(x), expected)


def test_a_coupling_that_draws_nothing_leaves_the_generators_alone():
    block, x = MAKERS["additive"]().double(), batch()
    before = torch.get_rng_state()
    block.inverse(block(x))
    assert torch.equal(torch.get_rng_state(), before)


def test_masks_of_the_branches_differ():
    block = AdditiveCoupling(nn.Dropout(0.5), nn.Dropout(0.5))
    x = torch.ones(1, 200)
    first, second = (block(x) - x).chunk(2, 1)
    assert not torch.equal(first == 0, second == 0)
    assert not torch.equal(block(x), block(x))


@pytest.mark.parametrize("dim", [1, -1])
def test_any_dimension_can_be_split(dim: int):
    block = AdditiveCoupling(nn.Tanh(), nn.Tanh(), dim)
    assert check_inverse(block, torch.randn(3, 4, 6)).fused_agrees


def test_memory_format_is_kept():
    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    half = 2
    block = AdditiveCoupling(nn.Conv2d(half, half, 1), nn.Conv2d(half, half, 1))
    rebuilt, gradient = block.reversible_backward(block(x).detach(), torch.ones_like(x))
    assert rebuilt.is_contiguous(memory_format=torch.channels_last)
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("clamp", [0.0, -1.0, math.inf, math.nan])
def test_the_clamp_is_mandatory(clamp: float):
    with pytest.raises(ModelError, match=r"clamp is .*: expected a positive, finite bound"):
        AffineCoupling(nn.Linear(2, 4), clamp=clamp)


def test_the_clamp_bounds_the_scale():
    class Huge(nn.Module):
        def forward(self, half: torch.Tensor) -> torch.Tensor:
            return torch.cat([1e6 * half.sign(), torch.zeros_like(half)], 1)

    x = torch.randn(50, 4)
    scales = (AffineCoupling(Huge(), clamp=0.5)(x) / x)[:, 2:].log()
    assert torch.allclose(scales, 0.5 * x[:, :2].sign(), atol=1e-5)


def test_a_sequence_and_its_inverse():
    net = network(["additive", "affine", "convolution"]).eval()
    x = batch()
    assert torch.allclose(net.inverse(net(x)), x)
    with pytest.raises(InverseError, match=r"'1 \(ReLU\)' .*has no inverse"):
        InvertibleSequential(net[0], nn.ReLU())


def test_reversal():
    net = network(["additive", "convolution"]).eval()
    x = batch()
    assert torch.allclose(reverse(net)(net(x)), x)
    assert torch.allclose(net(reverse(net)(x)), x)
    assert reverse(reverse(net[0])) is net[0]
    backwards = reverse(net)
    learning = x.requires_grad_()
    assert_same_step(
        step(backwards, backwards, learning),
        step(backwards, lambda x: invertible_checkpoint(backwards, x), learning),
        1e-12,
    )
    with pytest.raises(InverseError, match="has no inverse"):
        reverse(nn.ReLU())


@pytest.mark.parametrize("kind", MAKERS)
def test_copies_and_state(kind: str):
    module = MAKERS[kind]().double().eval()
    x = batch()
    expected = module(x)
    names = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    assert set(module.state_dict()) == names
    other = MAKERS[kind]().double().eval()
    other.load_state_dict(module.state_dict())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), other):
        assert torch.equal(twin(x), expected)
        assert torch.allclose(twin.inverse(expected), x)


def test_a_network_in_bfloat16_keeps_dtypes():
    net = network(dtype=torch.bfloat16)
    x = torch.randn(4, CHANNELS, 5, dtype=torch.bfloat16)
    assert net(x).dtype == torch.bfloat16
    assert net.inverse(net(x)).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_branches():
    plain = InvertibleSequential(*(AdditiveCoupling(branch(), branch()) for _ in range(2)))
    compiled = InvertibleSequential(
        *(
            AdditiveCoupling(*(torch.compile(part, backend="aot_eager") for part in (block.f, block.g)))
            for block in plain
        )
    )
    x = batch(torch.float32).requires_grad_()
    expected, found = step(plain, plain, x), step(compiled, lambda x: invertible_checkpoint(compiled, x), x)
    assert torch.allclose(expected["output"], found["output"], atol=1e-6)
    assert torch.allclose(expected["gradient of the input"], found["gradient of the input"], atol=1e-5)
    assert sum("gradient" in name for name in found) == sum("gradient" in name for name in expected)
