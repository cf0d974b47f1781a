"""One layer that computes in a way of its own leaves the rest of a module to be planned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from lightning_rotor import Checkpointable, ModelError
from tests.grids import few
from tests.training import assert_same_bits

WIDTH, BATCH, STEPS = 32, 48, 3
Forward = Callable[["Odd", torch.Tensor], torch.Tensor]


class Odd(nn.Module):
    """Layers, and a forward that does something unusual with them."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.row = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU())
        self.normalization = nn.BatchNorm1d(WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self._forward = forward

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._forward(self, input)


class Net(nn.Module):
    """Blocks before the unusual layer and behind it."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.before = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        self.odd = Odd(forward)
        self.behind = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.behind(self.odd(self.before(input)))


def scaled_weight(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    return functional_call(odd.layer, {"weight": odd.layer.weight * 0.5}, (input,))


def generated_weight(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    return functional_call(odd.layer, {"weight": odd.other.weight.tanh() + odd.layer.weight}, (input,))


def weights_of_another(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    return functional_call(odd.layer, dict(odd.other.named_parameters()), (input,)) + odd.layer(input)


def weight_inside_of_a_row(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    return functional_call(odd.row, {"0.weight": odd.row[0].weight * 2}, (input,))


def weight_beside_statistics(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    return functional_call(odd.normalization, {"weight": odd.normalization.weight * 2}, (input,))


def recurrent_weights(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    weights = {name: weight * 0.9 for name, weight in odd.recurrent.named_parameters()}
    return functional_call(odd.recurrent, weights, (input[None],))[0][0]


def parameter_in_the_table(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    """As hypernetworks did before functional_call."""
    weight = odd.layer._parameters["weight"]
    try:
        odd.layer._parameters["weight"] = odd.other(weight)
        return odd.layer(input)
    finally:
        odd.layer._parameters["weight"] = weight


def force(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    """As in models of molecules: minus the gradient of an energy."""
    with torch.enable_grad():
        positions = input if input.requires_grad else input.detach().requires_grad_()
        energy = odd.layer(positions).tanh().square().sum()
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
    return -gradient


def force_twice(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    gradient = force(odd, input)
    (second,) = torch.autograd.grad(gradient.square().sum(), odd.layer.weight, create_graph=True)
    return gradient + input @ second


def forward_mode(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(lambda value: odd.layer(value).tanh(), (input,), (torch.ones_like(input),))[1]


def double_backward(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    ones = torch.ones_like(input)
    return torch.autograd.functional.jvp(lambda value: odd.layer(value).tanh(), input, ones, create_graph=True)[1]


def one_sample_at_a_time(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    weights = dict(odd.layer.named_parameters())
    return vmap(lambda row: functional_call(odd.layer, weights, (row,)))(input)


def sparse_adjacency(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    neighbours = torch.eye(len(input)).roll(1, 0).to_sparse()
    return odd.other(torch.sparse.mm(neighbours, odd.layer(input)))


def compressed_adjacency(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    neighbours = torch.eye(len(input)).roll(1, 0).to_sparse_csr()
    return odd.other(neighbours @ odd.layer(input))


def jagged(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.nested_tensor_from_jagged(input, torch.tensor([0, 3, len(input)]))
    return odd.layer(rows).values()


def nested(odd: Odd, input: torch.Tensor) -> torch.Tensor:
    return torch.cat(odd.layer(torch.nested.as_nested_tensor([input[:9], input[9:]])).unbind())


PLANNED: dict[str, Forward] = {
    forward.__name__: forward
    for forward in (
        scaled_weight, generated_weight, weights_of_another, weight_inside_of_a_row, weight_beside_statistics,
        recurrent_weights, parameter_in_the_table, force, force_twice, forward_mode, double_backward,
        one_sample_at_a_time, sparse_adjacency, compressed_adjacency, jagged, nested,
    )
}  # fmt: skip
ALIKE = {"generated_weight", "recurrent_weights", "double_backward", "one_sample_at_a_time", "compressed_adjacency"}


def trained(forward: Forward, limit: int | None) -> tuple[dict[str, torch.Tensor], Checkpointable | None]:
    """State behind a few steps, and the gradient of the last input."""
    torch.manual_seed(0)
    net = Net(forward)
    inputs = [torch.randn(BATCH, WIDTH, requires_grad=True) for _ in range(STEPS)]
    planned = None if limit is None else Checkpointable(net, inputs[0], limit)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for input in inputs:
        (net if planned is None else planned)(input).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict() | {"input": inputs[-1].grad}, planned


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:stage 'odd' gives other bits when it runs again.*jagged:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", few(PLANNED, *(set(PLANNED) - ALIKE)))
def test_the_rest_is_planned(name: str) -> None:
    torch.manual_seed(0)
    planned = Checkpointable(Net(PLANNED[name]), torch.randn(BATCH, WIDTH, requires_grad=True))
    assert len(planned.chain.stages) > 12
    budgets = [point.peak_bytes for point in planned.frontier()]
    least, most = min(budgets), max(budgets)
    state, _ = trained(PLANNED[name], None)
    for limit in (least, (least + most) // 2, most):
        others, planned = trained(PLANNED[name], limit)
        assert_same_bits(state, others)
        assert planned is not None
        assert ("(" in str(planned.plan.schedule)) == (limit < most)
        assert planned.plan.peak_bytes <= limit


def test_gradients_that_refuse_hooks_are_named() -> None:
    def forward(odd: Odd, input: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda value: odd.layer(value).square().sum())(input)

    with pytest.raises(ModelError, match=r"expected torch.autograd.grad\(..., create_graph=True\)"):
        Checkpointable(Net(forward), torch.randn(BATCH, WIDTH))
