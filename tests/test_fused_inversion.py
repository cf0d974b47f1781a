"""Inverted stages whose module has a ``reversible_backward``, beside those that have an inverse alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_rotor.errors import ExecutionError, InverseError
from lightning_rotor.execution.executor import Executor
from lightning_rotor.invertible import AdditiveCoupling, AffineCoupling
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from lightning_rotor.stages.sequential import sequential_stages
from tests.grids import few
from tests.invertible import Unfused, assert_same_step
from tests.models import Case, training_step

LOSS_BYTES = 16
NUMBER_BYTES = 16  # the affine coupling's clamp, which its graph holds unless its backward is fused
WIDTH = 32


def branch(half: int = WIDTH // 2, made: int = WIDTH // 2) -> nn.Module:
    return nn.Sequential(
        nn.Linear(half, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, made)
    )


def network(kind: str = "invert, fused") -> nn.Sequential:
    wrap: Any = Unfused if kind == "invert" else lambda block: block
    torch.manual_seed(0)
    frozen, *others = (AdditiveCoupling(branch(), branch()) for _ in range(3))
    frozen.f.requires_grad_(False)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        wrap(others[0]),
        wrap(AffineCoupling(branch(made=WIDTH))),
        nn.SiLU(),
        wrap(frozen),
        wrap(others[1]),
    )


def profile_of(net: nn.Sequential, sample: torch.Tensor) -> Profile:
    return profile_chain(sequential_stages(net), sample, repeats=1)


def executor(profile: Profile, text: str = "0-1 2-3:1 4 5-6:1") -> Executor:
    return Executor(profile.stages, profile.chain, Schedule.parse(text), profile.states)


class Profiles(dict[tuple[torch.dtype, str], tuple[Case, Profile]]):
    """Made when they are asked for."""

    def __missing__(self, key: tuple[torch.dtype, str]) -> tuple[Case, Profile]:
        dtype, kind = key
        net, batch = network(kind).to(dtype), torch.randn(128, WIDTH, dtype=dtype)
        self[key] = Case(net, batch), profile_of(net, batch)
        return self[key]


@pytest.fixture(scope="module")
def profiles() -> Profiles:
    return Profiles()


@pytest.mark.parametrize("dtype", few([torch.float32, torch.float64], torch.float64), ids=str)
@pytest.mark.parametrize("kind", ["invert", "invert, fused"])
@pytest.mark.parametrize(
    "text", ["0-1 2-3:1 4 5-6:1", "0 (1 2-3:1 4) 5-6:1", "((0-1 2:1) 3:1 4) 5 6:1", "0 ((1 2:1) 3-4) 5-6:1"]
)
def test_a_step_is_that_of_plain_autograd_and_its_peak_as_simulated(
    profiles: Profiles, dtype: torch.dtype, kind: str, text: str
) -> None:
    case, profile = profiles[dtype, kind]
    assert [option.name for option in profile.chain.stages[2].options] == ["keep", kind]
    state = {key: value.clone() for key, value in case.net.state_dict().items()}
    for gradients_exist in (False, True):
        plain = training_step(case, case.net, state, gradients_exist=gradients_exist)
        planned = training_step(case, executor(profile, text), state, gradients_exist=gradients_exist)
        assert_same_step(plain.tensors, planned.tensors, 1e-12 if dtype == torch.float64 else 1e-5)
        schedule = Schedule.parse(text)
        simulated = simulate(profile.chain, schedule, gradients_exist=gradients_exist).peak_bytes
        assert -NUMBER_BYTES <= planned.peak_bytes - simulated <= LOSS_BYTES


def test_it_takes_less_memory_and_one_evaluation_less(profiles: Profiles) -> None:
    counts, peaks = {}, {}
    for kind in ("invert", "invert, fused"):
        case, profile = profiles[torch.float64, kind]
        linear = (case.net[3].module if kind == "invert" else case.net[3]).net[0]
        calls: list[str] = []
        # No hook: what it counts in a recomputation is undone.
        linear.forward = lambda x, calls=calls, linear=linear: calls.append("net") or nn.Linear.forward(linear, x)
        executor(profile)(case.batch).sum().backward()
        del linear.forward
        counts[kind], peaks[kind] = len(calls), profile.chain.stages[2].options[1].backward_peak_bytes
    assert counts == {"invert": 3, "invert, fused": 2}
    assert peaks["invert, fused"] < peaks["invert"]


def test_parameters_accumulate_and_their_hooks_fire_as_in_plain_training() -> None:
    net, batch = network().double(), torch.randn(128, WIDTH, dtype=torch.float64)
    net[6].f = net[2].g  # tied
    case, profile = Case(net, batch), profile_of(net, batch)
    fired: dict[str, Any] = {}
    for name, run in {"plain": case.net, "fused": executor(profile)}.items():
        case.net.zero_grad()
        counts = fired[name] = Counter[str]()
        learning = [(key, parameter) for key, parameter in case.net.named_parameters() if parameter.requires_grad]
        hooks = [
            register(lambda *_, key=f"{key} {number}", counts=counts: counts.update([key]))
            for key, parameter in learning
            for number, register in enumerate((parameter.register_hook, parameter.register_post_accumulate_grad_hook))
        ]
        for _ in range(2):
            torch.manual_seed(1)
            run(case.batch).square().sum().backward()
        for hook in hooks:
            hook.remove()
        fired[f"{name} gradients"] = [parameter.grad.clone() for _, parameter in learning]
    assert fired["fused"] == fired["plain"]
    assert set(fired["fused"].values()) == {2}  # once a step, tied or not
    torch.testing.assert_close(fired["plain gradients"], fired["fused gradients"], rtol=1e-10, atol=1e-9)


def test_distributed_data_parallel_reduces_each_gradient_once(tmp_path: Path, profiles: Profiles) -> None:
    """Its reducer refuses a gradient that is ready twice, and waits for one that never is."""
    case, profile = profiles[torch.float64, "invert, fused"]

    class Planned(nn.Module):
        def __init__(self, *, fused: bool) -> None:
            super().__init__()
            self.net = case.net
            self.run = executor(profile) if fused else case.net.forward

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run(x)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        gradients = []
        for fused in (False, True):
            case.net.zero_grad()
            model = DistributedDataParallel(Planned(fused=fused))
            for _ in range(2):
                torch.manual_seed(1)
                model(case.batch).square().sum().backward()
            gradients.append([each.grad.clone() for each in case.net.parameters() if each.requires_grad])
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("text", ["0-1 2-3:1 4 5-6:1", "0 (1 2-3:1 4) 5-6:1"])
def test_graphs_that_are_kept_and_gradients_of_some(profiles: Profiles, text: str) -> None:
    case, profile = profiles[torch.float64, "invert, fused"]

    def gradients(forward: nn.Module | Executor) -> list[torch.Tensor]:
        case.net.zero_grad()
        torch.manual_seed(1)
        loss = forward(case.batch).square().sum()
        some = torch.autograd.grad(loss, [case.net[3].net[0].weight], retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises((ExecutionError, RuntimeError), match="retain_graph=True"):
            loss.backward()
        return [*some, *(each.grad for each in case.net.parameters() if each.grad is not None)]

    plain = [gradient.clone() for gradient in gradients(case.net)]
    torch.testing.assert_close(plain, gradients(executor(profile, text)), rtol=1e-10, atol=1e-9)


def test_gradients_of_gradients_are_refused_by_name(profiles: Profiles) -> None:
    case, profile = profiles[torch.float64, "invert, fused"]
    batch = case.batch.clone().requires_grad_()
    with pytest.raises(ExecutionError, match=r"gradients of the gradients of '\d' are wanted"):
        torch.autograd.grad(executor(profile)(batch).square().sum(), batch, create_graph=True)


def test_bfloat16_autocast(profiles: Profiles) -> None:
    case, _ = profiles[torch.float32, "invert, fused"]
    results = []
    with torch.autocast("cpu", torch.bfloat16):
        profile = profile_of(case.net, case.batch)
        for forward in (case.net, executor(profile)):
            torch.manual_seed(2)
            learning = [parameter for parameter in case.net.parameters() if parameter.requires_grad]
            results.append(torch.autograd.grad(forward(case.batch).float().square().sum(), learning))
    scale = max(float(gradient.abs().max()) for gradient in results[0])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(expected, found, rtol=0.02, atol=0.02 * scale)


def test_an_inverse_that_drifts_later_is_an_error_with_the_stages_name() -> None:
    errors: SimpleQueue[float] = SimpleQueue()  # which no recomputation puts back

    class Shifted(AdditiveCoupling):
        """Its inverse can be made wrong."""

        def reversible_backward(
            self, output: torch.Tensor, gradient: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            error = 0.0 if errors.empty() else errors.get()
            return super().reversible_backward(output + error, gradient)

    net = nn.Sequential(nn.Linear(4, 4), Shifted(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Tanh())
    profile = profile_of(net, torch.randn(8, 4))
    run = Executor(profile.stages, profile.chain, Schedule.parse("0 1:1 2"), profile.states)
    loss = run(torch.randn(8, 4)).sum()
    errors.put(0.5)
    with pytest.raises(InverseError, match="the input of '1' as rebuilt by its inverse is off by"):
        loss.backward()
    loss = run(torch.randn(8, 4)).sum()
    with torch.no_grad():
        net[1].f.weight += 1.0  # an optimizer's step between forward and backward
    with pytest.raises(ExecutionError, match="the parameter 'weight' of Linear has changed since the forward read it"):
        loss.backward()


class WronglyFused(AdditiveCoupling):
    def reversible_backward(self, output: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rebuilt, for_input = super().reversible_backward(output, gradient)
        return rebuilt, for_input * 1.5


def test_a_fused_backward_that_is_none_is_withheld_and_the_chain_says_why() -> None:
    net = nn.Sequential(nn.Linear(4, 4), WronglyFused(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Tanh())
    stage = profile_of(net, torch.randn(8, 4)).chain.stages[1]
    assert [option.name for option in stage.options] == ["keep", "invert"]
    assert "its fused backward is not used: it differs from autograd's" in stage.not_inverted


def test_hooks_of_a_modules_backward_fire_so_it_is_not_fused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), AdditiveCoupling(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Tanh())
    fired = Counter[str]()
    net[1].register_full_backward_hook(lambda *_: fired.update(["backward"]))
    profile = profile_of(net, torch.randn(8, 4))
    assert [option.name for option in profile.chain.stages[1].options] == ["keep", "invert"]
    fired.clear()
    run = Executor(profile.stages, profile.chain, Schedule.parse("0 1:1 2"), profile.states)
    run(torch.randn(8, 4)).sum().backward()
    assert fired["backward"] == 1
