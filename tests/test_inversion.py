"""Inverted stages as they run: gradients against plain autograd, the simulator against the allocator, and what is refused."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import lightning.pytorch as L
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_rotor import Checkpointable, RotorCallback, sequentialize
from lightning_rotor.chain import StageCost
from lightning_rotor.errors import ExecutionError, InverseError, ScheduleError
from lightning_rotor.execution.executor import Executor
from lightning_rotor.invertible import AdditiveCoupling, InvertibleSequential
from lightning_rotor.invertible.layers import accumulate
from lightning_rotor.planning import minimum_budget
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import first_inverted, simulate
from lightning_rotor.stages.sequential import sequential_stages
from tests.grids import examples, few
from tests.invertible import CHANNELS, Unfused, assert_same_step, exact_coupling, of_few_bits
from tests.invertible import step as invertible_step
from tests.models import Case, training_step
from tests.strategies import random_schedule

LOSS_BYTES = 16
WIDTH = 32


def branch(dropout: float = 0.0, *, norm: bool = False) -> nn.Module:
    half = WIDTH // 2
    layers: list[nn.Module] = [nn.Linear(half, WIDTH), nn.GELU(), nn.Linear(WIDTH, half)]
    layers += [nn.BatchNorm1d(half)] if norm else []
    return nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []))


def coupling(dropout: float = 0.0, *, norm: bool = False) -> AdditiveCoupling:
    return AdditiveCoupling(branch(dropout, norm=norm), branch(dropout, norm=norm))


def can_be_inverted(stage: StageCost) -> bool:
    return any(option.inverts for option in stage.options)


class Block(nn.Module):
    """One stage that saves its output, and outputs inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.tanh(self.linear(x).relu()))


class Wrong(AdditiveCoupling):
    """Its inverse can be made wrong."""

    error = 0.0

    def inverse(self, output: torch.Tensor) -> torch.Tensor:
        return super().inverse(output) + self.error


@st.composite
def mixed_cases(draw: st.DrawFn) -> Case:
    """Invertible and ordinary stages in any order."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    kinds: dict[str, Callable[[], nn.Module]] = {
        "coupling": coupling,
        "dropping coupling": lambda: coupling(0.3),
        "normalizing coupling": lambda: coupling(norm=True),
        "unfused coupling": lambda: Unfused(coupling(0.3, norm=True)),
        "Linear": lambda: nn.Linear(WIDTH, WIDTH),
        "ReLU": nn.ReLU,
        "Tanh": nn.Tanh,
        "Sigmoid": nn.Sigmoid,
        "Softmax": lambda: nn.Softmax(-1),
        "Dropout": lambda: nn.Dropout(0.2),
        "LayerNorm": lambda: nn.LayerNorm(WIDTH),
        "Block": Block,
    }
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    if dtype == torch.float32:
        # A coupling behind it that normalizes blows up the rounding errors of their small values.
        del kinds["Softmax"], kinds["Block"]
    weights = [*kinds, "coupling", "coupling", "dropping coupling"]
    layers = [
        nn.Linear(WIDTH, WIDTH),
        *(kinds[draw(st.sampled_from(weights))]() for _ in range(draw(st.integers(1, 6)))),
    ]
    return Case(nn.Sequential(*layers).to(dtype), torch.randn(64, WIDTH, dtype=dtype))


def executor(profile: Profile, schedule: Schedule | str) -> Executor:
    schedule = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    return Executor(profile.stages, profile.chain, schedule, profile.states)


def profile_of(net: nn.Sequential, sample: torch.Tensor) -> Profile:
    return profile_chain(sequential_stages(net), sample, repeats=1)


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Gradients up to rounding; output, buffers and generators bit for bit."""
    assert_same_step(left, right, 1e-12 if left["output"].dtype == torch.float64 else 1e-5)


def normalizing_case() -> Case:
    """Biases before a normalization: their gradients are zero, so whatever is computed of them are rounding errors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Case(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), *(coupling(norm=True) for _ in range(4))), torch.randn(64, WIDTH)
        )


@settings(max_examples=examples(4, 12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(normalizing_case(), 3, False)
@given(mixed_cases(), st.integers(0, 2**32 - 1), st.booleans())
def test_plans_and_any_schedule_give_the_gradients_of_plain_autograd_and_the_simulated_peak(
    case: Case, seed: int, gradients_exist: bool
) -> None:
    profile = profile_of(case.net, case.batch)
    for stage in profile.chain.stages[1:]:
        invertible = stage.name.isdigit() and isinstance(case.net[int(stage.name)], AdditiveCoupling | Unfused)
        assert can_be_inverted(stage) == invertible, stage.not_inverted
    state = {key: value.clone() for key, value in case.net.state_dict().items()}
    # Were they equal, nothing that only shifts what is normalized would have a gradient.
    weights = torch.linspace(-1, 1, case.batch.numel(), dtype=case.batch.dtype).view_as(case.batch)
    step = partial(training_step, case, state=state, gradients_exist=gradients_exist, weights=weights)
    plain = step(case.net)
    tightest = minimum_budget(profile.chain, gradients_exist=gradients_exist).schedule
    rng = random.Random(seed)  # not hypothesis' own: which options there are, and so what is drawn, may depend on times
    for schedule in (tightest, *(random_schedule(rng, profile.chain) for _ in range(2))):
        if first_inverted(profile.chain, schedule) is not None:
            assert schedule is not tightest
            continue
        planned = step(executor(profile, schedule))
        assert_close(plain.tensors, planned.tensors)
        simulated = simulate(profile.chain, schedule, gradients_exist=gradients_exist).peak_bytes
        assert planned.peak_bytes <= simulated + LOSS_BYTES, schedule
        assert planned.peak_bytes >= 0.99 * simulated, schedule


@pytest.fixture
def case() -> Case:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), coupling(0.2), coupling(norm=True), nn.SiLU(), coupling())
    return Case(net.double(), torch.randn(256, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize(
    "schedule",
    few(
        ["0-1 2-3:1 4 5:1", "0 (1 2-3:1 4) 5:1", "((0-1 2:1) 3:1 4) 5", "0 ((1 2:1) 3-4) 5:1"],
        "0 (1 2-3:1 4) 5:1",
        "((0-1 2:1) 3:1 4) 5",
    ),
)
def test_peak_is_exact(case: Case, schedule: str) -> None:
    profile = profile_of(case.net, case.batch)
    state = {key: value.clone() for key, value in case.net.state_dict().items()}
    peak = training_step(case, executor(profile, schedule), state).peak_bytes
    assert 0 <= peak - simulate(profile.chain, Schedule.parse(schedule)).peak_bytes <= LOSS_BYTES


@pytest.mark.parametrize("schedule", few(["0-1 2-3:1 4 5:1", "0 (1 2-3:1 4) 5:1"], "0 (1 2-3:1 4) 5:1"))
def test_two_backwards_through_one_graph_and_gradients_of_some_parameters(case: Case, schedule: str) -> None:
    net, run = case.net, executor(profile_of(case.net, case.batch), schedule)

    def gradients(forward: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        loss = forward(case.batch).square().sum()
        some = torch.autograd.grad(loss, [net[3].f[0].weight], retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        found = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        net.zero_grad()
        return [*some, *found]

    for expected, found in zip(gradients(net), gradients(run), strict=True):
        torch.testing.assert_close(expected, found, rtol=1e-10, atol=1e-10)


def test_input_with_another_use_is_right_and_bfloat16_autocast_too(case: Case) -> None:
    class Twice(nn.Module):
        """Its input is used a second time, around the chain."""

        def __init__(self, inside: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inside(x)

    net, batch = case.net.float(), case.batch.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        profile = profile_of(net, batch)
        assert [can_be_inverted(stage) for stage in profile.chain] == [False, False, True, True, False, True]
        results = []
        for inside in (net, executor(profile, "0-1 2-3:1 4 5:1")):
            torch.manual_seed(2)
            output = Twice(inside)(batch)
            results.append(torch.autograd.grad(output.float().square().sum(), [batch, *net.parameters()]))
    scale = max(
        gradient.abs().max().item() for gradient in results[0]
    )  # a bias before a normalization has but rounding errors
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(expected, found, rtol=0.02, atol=0.02 * scale)


class Scale(nn.Module):
    """Exact, and in float32 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


# ---------------------------------------------------------------------------------------------------- refused, by name


def test_a_stage_after_one_that_saves_its_output_is_not_inverted() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), coupling(), nn.Tanh(), coupling()).double()
    batch = torch.randn(64, WIDTH, dtype=torch.float64)
    profile = profile_of(net, batch)
    assert [stage.keep.needs_exact_output for stage in profile.chain] == [False, True, False, True, False]
    with pytest.raises(ScheduleError, match="a kept stage that needs every bit of its output"):
        executor(profile, "0-1 2:1 3-4")
    state = {key: value.clone() for key, value in net.state_dict().items()}
    plain = training_step(Case(net, batch), net, state)
    planned = training_step(Case(net, batch), executor(profile, "0 (1) 2:1 (3) 4:1"), state)
    assert_close(plain.tensors, planned.tensors)


def test_a_stage_whose_inverse_is_wrong_keeps_its_input_and_the_chain_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = Wrong(branch(), branch())
    wrong.error = 0.5
    with caplog.at_level(logging.INFO, "lightning_rotor"):
        chain = profile_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), wrong), torch.randn(8, WIDTH)).chain
    assert [len(stage.options) for stage in chain] == [1, 1]
    assert "the inverse of '1' is off by 0.5" in chain.stages[1].not_inverted
    assert "'1' is not inverted: the inverse of '1' is off by 0.5" in caplog.text
    assert "Not inverted" in str(minimum_budget(chain))


def test_the_callers_input_is_not_dropped_and_the_chain_says_so() -> None:
    chain = profile_of(nn.Sequential(coupling(), coupling()), torch.randn(8, WIDTH)).chain
    assert [can_be_inverted(stage) for stage in chain] == [False, True]
    assert chain.stages[0].not_inverted == "the chain's input belongs to the caller"


class Shortcut(nn.Module):
    """A coupling whose input is read once more, around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), coupling(), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + self.block(x))


def test_a_stage_whose_input_is_read_elsewhere_or_that_nothing_learns_before_keeps_it_and_the_chain_says_why() -> None:
    net, batch = Shortcut(), torch.randn(16, WIDTH)
    planned = Checkpointable(net)
    stage = next(each for each in planned.measure(batch) if each.name == "block")
    assert not can_be_inverted(stage)
    assert "is read elsewhere, too" in stage.not_inverted
    state = {key: value.clone() for key, value in net.state_dict().items()}
    tight = Checkpointable(net, batch, minimum_budget(planned.measure(batch)).peak_bytes)
    plain, found = (training_step(Case(net, batch), run, state) for run in (net, tight))  # type: ignore[arg-type]
    assert_close(plain.tensors, found.tensors)
    frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), coupling(), nn.Tanh())
    assert profile_of(frozen, batch).chain.stages[1].not_inverted == "nothing before it learns"


def test_an_inverse_that_drifts_later_is_an_error_with_the_stages_name() -> None:
    wrong = coupling()
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), wrong, nn.Tanh())
    profile = profile_of(net, torch.randn(8, WIDTH))
    loss = executor(profile, "0 1:1 2")(torch.randn(8, WIDTH)).sum()
    wrong.f[2].bias.data += 0.5  # torch does not count what is written like this
    with pytest.raises(InverseError, match=r"the input of '1' as rebuilt by its inverse is off by 0\.5"):
        loss.backward()
    executor(profile, "0 1:1 2")(torch.randn(8, WIDTH)).sum().backward()


@pytest.mark.parametrize(
    "wrap", [pytest.param(Unfused, marks=pytest.mark.wide), lambda block: block], ids=["invert", "invert, fused"]
)
def test_a_second_backward_is_refused_with_the_stages_name_and_the_remedy(case: Case, wrap: Any) -> None:
    net = nn.Sequential(*(wrap(each) if isinstance(each, AdditiveCoupling) else each for each in case.net))
    profile = profile_of(net, case.batch)
    for schedule in ("0-1 2-3:1 4 5:1", "0 (1 2-3:1 4) 5:1"):
        loss = executor(profile, schedule)(case.batch).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(ExecutionError, match=r"a second time through '5'.*retain_graph=True"):
            loss.backward()
    # A kept stage that comes before it in the backward is autograd's own, and so is the error.
    loss = executor(profile, "0-1 2-3:1 4-5")(case.batch).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("wrap", [Unfused, lambda block: block], ids=["invert", "invert, fused"])
def test_autocast_is_that_of_the_forward_and_requires_grad_is_truthful(wrap: Any) -> None:
    """Where the input is rebuilt to the bit, so are the casts of a plain step, and the gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(Scale(), wrap(exact_coupling()), wrap(exact_coupling()))
    batch = of_few_bits((64, CHANNELS), steps=4)
    autocast = torch.autocast("cpu", torch.bfloat16)
    with autocast:
        run = executor(profile_of(net, batch), "0 1-2:1")
    assert_same_step(invertible_step(net, autocast(net), batch), invertible_step(net, autocast(run), batch), 1e-5)
    with torch.no_grad():
        assert not run(batch).requires_grad
    net.requires_grad_(False)
    assert not run(batch).requires_grad
    assert run(batch.clone().requires_grad_()).requires_grad


# ---------------------------------------------------------------------------------------------------- from a model to a plan


class Flow(nn.Module):
    """Traced, not an nn.Sequential: couplings between ordinary layers, one of them followed by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = InvertibleSequential(*(coupling() for _ in range(10)))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(torch.tanh(self.first(x))).flatten(1))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Flow, marks=pytest.mark.wide),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Flow().blocks, nn.Tanh()),
    ],
)
@pytest.mark.wide
def test_invertible_modules_stay_whole_and_a_tight_limit_inverts_them(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net, batch = make(), torch.randn(256, WIDTH)
    stages = sequentialize(net, (batch,)).stages
    assert sum(stage.invertible is not None for stage in stages) == 10
    probe = Checkpointable(net)
    chain = probe.measure(batch)
    assert sum(map(can_be_inverted, chain)) == 10, [stage.not_inverted for stage in chain]
    least = minimum_budget(chain).peak_bytes
    plans = [Checkpointable(net, batch, int(ratio * least)) for ratio in (1.0, 1.02, 1.05)]
    planned = next(each for each in plans if each.plan is not None and each.plan.inverted)
    assert planned.plan is not None
    case, state = Case(net, batch), {key: value.clone() for key, value in net.state_dict().items()}  # type: ignore[arg-type]
    plain, step = training_step(case, net, state), training_step(case, planned, state)
    assert_close(plain.tensors, step.tensors)
    assert 0.98 * planned.plan.peak_bytes <= step.peak_bytes <= planned.plan.peak_bytes + LOSS_BYTES


def test_callback_trains_with_inverted_stages_as_without_it(tmp_path: Path) -> None:
    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), *(coupling(0.1, norm=True) for _ in range(5)), nn.Linear(WIDTH, 4)
            )

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    def trained(*callbacks: L.Callback) -> dict[str, torch.Tensor]:
        L.seed_everything(1, verbose=False)
        model = Model().double()
        generator = torch.Generator().manual_seed(2)
        data = TensorDataset(
            torch.randn(768, WIDTH, generator=generator, dtype=torch.float64),
            torch.randint(4, (768,), generator=generator),
        )
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, DataLoader(data, 256))
        return model.state_dict()

    with pytest.raises(Exception, match="Raise mem_limit") as refused:
        trained(RotorCallback(mem_limit="10KiB", show_table=False))
    callback = RotorCallback(mem_limit=refused.value.minimum_bytes, show_table=False)
    plain, planned = trained(), trained(callback)
    assert callback.plan is not None
    assert callback.plan.inverted
    for name, expected in plain.items():
        torch.testing.assert_close(planned[name], expected, rtol=1e-9, atol=1e-9)


class Shift(nn.Module):
    """A user's own block, whose inverse is right or wrong."""

    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.right = right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(torch.ones_like(x))))

    def inverse(self, output: torch.Tensor) -> torch.Tensor:
        shift = self.second(torch.tanh(self.first(torch.ones_like(output))))
        return output - shift if self.right else output + shift


@pytest.mark.parametrize("right", [True, False])
def test_a_module_whose_inverse_is_wrong_is_cut_inside_like_any_other(
    right: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Shift(right=right) for _ in range(3)), nn.Tanh())
    batch = torch.randn(8, WIDTH)
    before, generator = {name: tensor.clone() for name, tensor in net.state_dict().items()}, torch.get_rng_state()
    with caplog.at_level(logging.INFO, "lightning_rotor"):
        cut = sequentialize(net, (batch,))
    assert any(stage.name == "2" for stage in cut.stages) == right
    assert (len(cut.stages) > 8) != right
    assert (
        "'2' is not inverted, and cut inside like any other module: the inverse of '2' is off by" in caplog.text
    ) != right
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(module._forward_pre_hooks for module in net.modules())
    planned = Checkpointable(net, batch, "10MiB")
    planned(batch).sum().backward()
    assert sum(map(can_be_inverted, planned.plan.chain)) == 3 * right  # type: ignore[union-attr]


class Streams(nn.Module):
    """A coupling of two tensors in a tuple, and a mask that nobody differentiates."""

    def __init__(self) -> None:
        super().__init__()
        self.f = branch()

    def forward(self, streams: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        first, second, count = streams
        return second * 1, first + self.f(second), count + 1

    def inverse(self, streams: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        second, first, count = streams
        return first - self.f(second), second * 1, count - 1

    def reversible_backward(
        self, streams: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        (second, first, count), (for_second, for_first, _) = streams, gradients
        leaf, parameters = second.detach().requires_grad_(), list(self.f.parameters())
        with torch.enable_grad():
            made = self.f(leaf)
        more, *found = torch.autograd.grad(made, [leaf, *parameters], for_first)
        accumulate(parameters, found)
        return (first - made.detach(), second * 1, count - 1), (
            for_first * 1,
            for_second + more,
            torch.zeros_like(count),
        )


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = x.chunk(2, -1)
        return nn.functional.gelu(first), second * 1, torch.zeros(2, dtype=torch.long)


class Whole(nn.Module):
    def forward(self, streams: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.cat(streams[:2], -1)


@pytest.mark.parametrize("wrap", [Unfused, lambda block: block], ids=["invert", "invert, fused"])
@pytest.mark.parametrize("schedule", few(["0-1 2-4:1 5-6", "0 (1 2-3:1) 4:1 5-6"], "0 (1 2-3:1) 4:1 5-6"))
def test_boundaries_of_several_tensors_are_dropped_and_rebuilt_too(schedule: str, wrap: Any) -> None:
    torch.manual_seed(0)
    streams = [wrap(Streams()) for _ in range(3)]
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Halves(), *streams, Whole(), nn.Linear(WIDTH, 4))
    batch = torch.randn(256, WIDTH, dtype=torch.float64)  # more than the states of generators
    case = Case(net.double(), batch)
    profile = profile_of(net, batch)
    names = [[option.name for option in stage.options[1:]] for stage in profile.chain]
    kind = "invert" if wrap is Unfused else "invert, fused"
    assert names == [[], [], *[[kind]] * 3, [], []], [stage.not_inverted for stage in profile.chain]
    state = {key: value.clone() for key, value in net.state_dict().items()}
    plain, planned = (training_step(case, run, state) for run in (net, executor(profile, schedule)))
    assert_close(plain.tensors, planned.tensors)
    assert 0 <= planned.peak_bytes - simulate(profile.chain, Schedule.parse(schedule)).peak_bytes <= LOSS_BYTES
