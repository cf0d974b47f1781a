"""Gradients that share memory or wait for each other: of tied parameters, and of boundaries of several tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor import Checkpointable
from lightning_rotor.execution.executor import Executor
from lightning_rotor.planning import minimum_budget
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from lightning_rotor.stages.sequential import sequential_stages
from tests.models import Case, training_step

WIDTH = 32
LOSS_BYTES = 24  # a number that a multiplication holds among them


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = x.chunk(2, -1)
        return torch.tanh(first), second * 1


class Streams(nn.Module):
    """Two tensors that change places; one gets the other's gradient as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(WIDTH // 2, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH // 2))

    def forward(self, streams: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        first, second = streams
        return second * 1, first + self.f(second)


class Whole(nn.Module):
    """Leaves slices of one gradient."""

    def forward(self, streams: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.cat(streams, -1)


def measured(net: nn.Sequential) -> tuple[Case, Profile]:
    case = Case(net, torch.randn(64, WIDTH))
    return case, profile_chain(sequential_stages(net), case.batch, repeats=1)


def peaks(case: Case, profile: Profile, text: str, *, gradients_exist: bool) -> tuple[int, int]:
    """Of a step, and simulated."""
    schedule = Schedule.parse(text)
    state = {key: value.clone() for key, value in case.net.state_dict().items()}
    run = Executor(profile.stages, profile.chain, schedule, profile.states)
    peak = training_step(case, run, state, gradients_exist=gradients_exist).peak_bytes
    return peak, simulate(profile.chain, schedule, gradients_exist=gradients_exist).peak_bytes


def test_slices_of_one_gradient_keep_all_of_it_alive() -> None:
    torch.manual_seed(0)
    streams = [Streams() for _ in range(3)]
    case, profile = measured(nn.Sequential(nn.Linear(WIDTH, WIDTH), Halves(), *streams, Whole(), nn.Linear(WIDTH, 4)))
    boundary = 64 * WIDTH * 4
    assert [stage.keep.input_gradient_bytes for stage in profile.chain.stages[4:6]] == [boundary * 3 // 2, boundary]
    for text in ("0-6", "0 (1-3) 4-6", "0-1 (2-3) 4-6", "0-2 (3) 4-6", "(0-3) 4-6"):
        for gradients_exist in (False, True):
            peak, simulated = peaks(case, profile, text, gradients_exist=gradients_exist)
            assert 0.99 * simulated <= peak <= simulated + LOSS_BYTES, text
    peak, simulated = peaks(case, profile, "0 ((1 2) 3) 4-6", gradients_exist=False)
    assert 0.95 * simulated <= peak <= simulated + LOSS_BYTES


class _OtherOrder(torch.autograd.Function):
    """Leaves its gradient with the channels last, as convolutions that Inductor compiled do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous(memory_format=torch.channels_last)


class OtherOrder(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_OtherOrder.apply(x))


UNLIKE = nn.Sigmoid(), nn.SiLU(), nn.ELU(), nn.Softplus(), nn.Mish(), nn.GELU(), nn.Hardswish()


@pytest.mark.parametrize(
    "between",
    [(), (nn.Tanh(), nn.Sigmoid(), nn.Tanh()), UNLIKE],
    ids=["next to it", "behind others", "behind many others"],
)
def test_a_gradient_in_another_order_is_copied_by_who_wants_its_own(between: tuple[nn.Module, ...]) -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 8, 1), nn.MaxPool2d(2, 1), *between, OtherOrder(8, 8, 1), nn.Conv2d(8, 1, 1)
    case = Case(nn.Sequential(*layers), torch.randn(2, 4, 24, 24))
    profile, last = profile_chain(sequential_stages(case.net), case.batch, repeats=1), len(layers) - 1
    for text in (f"0-{last}", f"(0-{last - 1}) {last}", f"0 (1) 2-{last}", f"(0-1) (2) 3-{last}"):
        for gradients_exist in (False, True):
            peak, simulated = peaks(case, profile, text, gradients_exist=gradients_exist)
            assert 0 <= peak - simulated <= LOSS_BYTES, text


def test_the_gradient_of_a_tied_parameter_waits_for_its_first_use() -> None:
    torch.manual_seed(0)
    tied = nn.Linear(WIDTH, WIDTH)
    layers = nn.Linear(WIDTH, WIDTH), tied, nn.Tanh(), nn.Linear(WIDTH, WIDTH), tied, nn.GELU(), tied, nn.Tanh()
    case, profile = measured(nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)))
    size = sum(parameter.nbytes for parameter in tied.parameters())
    assert [stage.waiting_gradient_bytes for stage in profile.chain] == [0, 0, *[size] * 5, 0, 0]
    least = minimum_budget(profile.chain, gradients_exist=True)
    for text in ("0-8", "0 (1-4) 5-8", "(0-1) (2-5) 6-8", "(0-5) 6-8", str(least.schedule)):
        for gradients_exist in (False, True):
            peak, simulated = peaks(case, profile, text, gradients_exist=gradients_exist)
            assert 0 <= peak - simulated <= LOSS_BYTES, text
    assert least.peak_bytes == simulate(profile.chain, least.schedule, gradients_exist=True).peak_bytes


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_sum_of_gradients_is_a_new_tensor_and_they_are_counted_once(kind: str) -> None:
    torch.manual_seed(0)
    make = {"linear": lambda: nn.Linear(WIDTH, WIDTH), "convolution": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1)}[
        kind
    ]
    first, second = make(), make()
    net = nn.Sequential(*(layer for _ in range(3) for layer in (first, nn.Tanh(), second, nn.GELU())), make())
    case = Case(net, torch.randn(2, WIDTH) if kind == "linear" else torch.randn(1, WIDTH, 2, 2))
    profile = profile_chain(sequential_stages(net), case.batch, repeats=1)
    size = sum(parameter.nbytes for parameter in first.parameters())
    new = [stage.keep.parameter_gradient_bytes for stage in profile.chain]
    assert new == [*[0] * 8, size, 0, size, 0, size]
    biases = first.bias.nbytes + second.bias.nbytes  # whose sums are there before those of the weights
    # The gradient of a linear layer's weight is a view, so that autograd does not add the next one in place.
    less = 0 if kind == "linear" else second.weight.nbytes
    for text in ("0-12", "(0-3) 4-12", "0 (1-6) (7-9) 10-12"):
        peak, simulated = peaks(case, profile, text, gradients_exist=False)
        assert -less <= peak - simulated <= LOSS_BYTES, text
        peak, simulated = peaks(case, profile, text, gradients_exist=True)
        assert -less - biases <= peak - simulated <= LOSS_BYTES, text


def test_costs_of_new_gradients_bound_those_of_gradients_that_are_added_to_others() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.GELU())
    case, exact = measured(net)
    profile = profile_chain(sequential_stages(net), case.batch, repeats=1, accumulating=False)
    for text in ("0-4", "(0-3) 4", "0 (1-2) 3-4"):
        peak, simulated = peaks(case, profile, text, gradients_exist=True)
        assert peak <= simulated + LOSS_BYTES, text
        assert peaks(case, profile, text, gradients_exist=False) == peaks(case, exact, text, gradients_exist=False)
    assert any(stage.keep.accumulating for stage in exact.chain)
    assert not any(stage.keep.accumulating for stage in profile.chain)
    # A limit for activations and new gradients never counts on earlier ones, and the first batch comes sooner.
    chain = Checkpointable(net, case.batch, show_progress=False).chain
    assert chain is not None
    assert not any(stage.keep.accumulating for stage in chain)
