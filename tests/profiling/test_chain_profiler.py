"""Measuring: it changes nothing, needs little memory, and knows what kind of stage it sees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import ClassVar

import pytest
import torch
from torch import nn

from lightning_rotor.chain import StageCost
from lightning_rotor.errors import ModelError, ProfilingError, RotorWarning
from lightning_rotor.profiling import Profile, StepMeter, chain_profiler, profile_chain, segment_seconds
from lightning_rotor.profiling.memory_recording import Recording
from lightning_rotor.profiling.meters import CpuMeter
from lightning_rotor.stages.sequential import sequential_stages
from tests.models import CPU


def profile_of(net: nn.Sequential, sample: object) -> Profile:
    return profile_chain(sequential_stages(net), sample, repeats=1)


def test_measuring_changes_nothing() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8, momentum=None),
    )
    net[5].eval()
    net[0].weight.grad = torch.ones_like(net[0].weight)
    fired: list[str] = []
    net[4].weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    sample = torch.randn(2, 3, 12, 12)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    buffers, modes, copy = dict(net.named_buffers()), [module.training for module in net.modules()], sample.clone()
    versions = [buffer._version for buffer in buffers.values()]
    generator = torch.get_rng_state()

    profile_of(net, sample)

    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in net.named_buffers())
    assert versions == [buffer._version for buffer in buffers.values()]
    assert modes == [module.training for module in net.modules()]
    assert torch.equal(net[0].weight.grad, torch.ones_like(net[0].weight))
    assert all(parameter.grad is None for name, parameter in net.named_parameters() if name != "0.weight")
    assert torch.equal(sample, copy)
    assert sample.grad is None
    assert not fired


class _Blind:
    """Runs everything that a real meter would see, but leaves torch's one profiler to the test around it."""

    needs_warm_up = False
    repeats_itself = False
    block_bytes = 1

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        recording = Recording()
        yield recording
        recording.mark("")

    def now(self) -> float:
        return 0.0

    def seconds_between(self, start: float, end: float) -> float:
        return 0.0


def test_measuring_needs_no_more_than_the_largest_stage_and_three_boundaries() -> None:
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))))
    sample = torch.randn(512, 64)
    chain = profile_of(net, sample).chain

    def stage_bytes(stage: StageCost) -> int:
        option = stage.keep
        held = option.saved_bytes + stage.output_bytes
        backward = held + max(option.unpack_peak_bytes, option.backward_held_peak_bytes)
        return sample.nbytes + max(option.forward_peak_bytes, backward)  # with its input

    meter = StepMeter(CPU)
    meter.start()
    profile_chain(sequential_stages(net), sample, repeats=1, meter=_Blind())
    peak = meter.stop().peak_bytes
    generator_states_and_scalars = 8 * torch.get_rng_state().nbytes
    assert peak <= max(map(stage_bytes, chain)) + 3 * sample.nbytes + generator_states_and_scalars


class _Ticking(CpuMeter):
    """A clock that goes on when somebody looks at it, or waits."""

    time = waits = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time

    def wait(self) -> None:
        self.waits += 1
        self.time += 1e6


def test_the_rest_of_a_step_runs_between_what_is_timed_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = _Ticking()
    for module in (chain_profiler, segment_seconds):
        monkeypatch.setattr(module, "interlude", lambda *_: meter.wait)
    chain = profile_chain(
        sequential_stages(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), torch.ones(2, 4), meter=meter
    ).chain
    assert [(option.forward_seconds, option.backward_seconds) for stage in chain for option in stage.options] == [
        (1.0, 1.0)
    ] * 2
    assert meter.waits >= 2 * 3 * len(chain)  # at least three times each way
    assert chain.segment_seconds == 0.0  # what runs in one, and between, takes as long without it


def test_views_and_operations_in_place_are_merged_with_their_neighbours() -> None:
    net = nn.Sequential(
        nn.Flatten(),
        nn.Identity(),
        nn.Linear(16, 8),
        nn.ReLU(inplace=True),
        nn.Unflatten(1, (2, 4)),
        nn.Tanh(),
        nn.Identity(),
    )
    assert profile_of(net, torch.randn(4, 2, 8)).chain.names == ("0 … 4", "5 … 6")


def test_an_operation_in_place_on_the_batch_itself_is_kept() -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 8))
    sample = torch.randn(4, 8)
    copy = sample.clone()
    with pytest.warns(RotorWarning, match="'0 … 1' gives other bits"):
        profile = profile_of(net, sample)
    assert torch.equal(sample, copy)
    assert [stage.recomputable for stage in profile.chain] == [False, True]


class Moody(nn.Linear):
    """Keeps state where nobody can see it."""

    calls: ClassVar[Iterator[int]] = count(1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * next(self.calls)


def test_a_stage_that_does_not_repeat_itself_is_kept() -> None:
    net = nn.Sequential(nn.Linear(8, 8), Moody(8, 8), nn.Linear(8, 8))
    with pytest.warns(RotorWarning, match="'1' gives other bits when it runs again"):
        profile = profile_of(net, torch.randn(4, 8))
    assert [stage.recomputable for stage in profile.chain] == [True, False, True]


class Hoarder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, input: torch.Tensor) -> torch.Tensor:
        ctx.hoard = input * 2  # type: ignore[attr-defined]
        return input + 1

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * ctx.hoard  # type: ignore[attr-defined]


def test_memory_that_no_checkpoint_can_free_is_found() -> None:
    class Layer(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return Hoarder.apply(input)

    with pytest.warns(RotorWarning, match="keeps 4096 bytes in its graph"):
        profile = profile_of(nn.Sequential(nn.Linear(8, 8), Layer(), nn.Linear(8, 8)), torch.randn(128, 8))
    assert [stage.pinned_bytes for stage in profile.chain] == [0, 4096, 0]


def test_costs_of_known_layers() -> None:
    rows, size = 256, 256 * 32 * 4
    net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 32))
    linear, tanh, dropout, last = profile_of(net, torch.randn(rows, 32)).chain.stages
    assert (linear.keep.saved_bytes, linear.keep.saved_input_bytes, linear.keep.saved_output_bytes) == (0, size, 0)
    assert (tanh.keep.saved_bytes, tanh.keep.saved_input_bytes, tanh.keep.saved_output_bytes) == (0, 0, size)
    assert (dropout.keep.saved_input_bytes, dropout.keep.saved_output_bytes) == (0, 0)
    assert dropout.keep.saved_bytes > 0
    assert [stage.draws_random for stage in (linear, tanh, dropout, last)] == [False, False, True, False]
    assert linear.keep.parameter_gradient_bytes == (32 * 32 + 32) * 4
    assert linear.keep.input_gradient_bytes == 0  # the sample needs no gradient
    assert last.keep.input_gradient_bytes == size
    assert all(
        math.isfinite(stage.keep.forward_seconds) and stage.keep.backward_seconds > 0
        for stage in (linear, tanh, dropout)
    )


def test_equal_stages_are_measured_once() -> None:
    # Not a list, which would be put back behind each measurement.
    calls: dict[int, Iterator[int]] = {}

    class Counting(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            next(calls[id(self)])
            return super().forward(input)

    net = nn.Sequential(*(Counting(8, 8) for _ in range(4)))
    # A counter that comes while a stage is measured would be put back as well.
    for layer in net:
        calls[id(layer)] = count()
    profile = profile_of(net, torch.randn(2, 8, requires_grad=True))
    counts = [next(calls[id(layer)]) for layer in net]
    # The last stage's output is held by the caller, so it is measured for itself.
    assert counts[1] == counts[2] < counts[0]
    assert profile.chain.stages[1].keep == profile.chain.stages[0].keep
    assert profile.chain.names == ("0", "1", "2", "3")


def test_every_one_of_equal_layers_that_draw_is_known_to_draw() -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Sigmoid(), nn.Dropout(0.1))]
    chain = profile_of(nn.Sequential(*layers, nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)).chain
    assert [stage.draws_random for stage in chain] == [False, False, True] * 3 + [False]


def test_stages_that_look_equal_are_judged_each_for_itself() -> None:
    net = nn.Sequential(nn.Linear(8, 8), Moody(8, 8), nn.Linear(8, 8), Moody(8, 8), nn.Linear(8, 8))
    with pytest.warns(RotorWarning, match="gives other bits"):
        profile = profile_of(net, torch.randn(4, 8, requires_grad=True))
    assert [stage.recomputable for stage in profile.chain] == [True, False, True, False, True]


def test_slices_of_larger_tensors_hold_all_of_them() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 128)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.linear(input)[:, :32]

    chain = profile_of(nn.Sequential(Wide(), Wide(), nn.Linear(32, 4)), torch.randn(64, 32)[:32]).chain
    assert chain.input_bytes == 32 * 32 * 4
    assert chain.stages[0].output_bytes == 32 * 128 * 4
    assert chain.stages[1].keep.saved_input_bytes == 32 * 128 * 4


def test_parameters_that_stages_share_under_autocast() -> None:
    layer = nn.Linear(8, 8)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.warns(RotorWarning, match="stages share parameters under autocast"),
    ):
        profile_of(nn.Sequential(layer, nn.Tanh(), layer), torch.randn(4, 8))


class Spoilt(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(x)
        return x.mul_(2)


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


@pytest.mark.parametrize(
    ("layers", "stage"), [((Spoilt(),), "1"), ((nn.Sigmoid(), Double()), "1 … 2")], ids=["in a stage", "merged"]
)
def test_a_saved_tensor_that_is_changed_in_place_is_refused(layers: tuple[nn.Module, ...], stage: str) -> None:
    net, batch = nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 8)), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        net(batch).sum().backward()
    # A recomputation would not notice, and compute other gradients.
    told = (
        rf"stage '{stage}' changes a tensor in place .* \(shape \(4, 8\), changed by Mul\): plain training fails here"
    )
    with pytest.raises(ModelError, match=told):
        profile_chain(sequential_stages(net), batch, repeats=1)


def test_a_stage_without_tensor_is_refused() -> None:
    class Name(nn.Module):
        def forward(self, input: torch.Tensor) -> str:
            return "a tensor"

    with pytest.raises(ModelError, match="stage '1' returns str, which holds no tensor"):
        profile_of(nn.Sequential(nn.Linear(8, 8), Name()), torch.randn(2, 8))


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ProfilingError, match="'meta' cannot be measured"):
        profile_of(nn.Sequential(nn.Linear(8, 8, device="meta")), torch.randn(2, 8, device="meta"))


def test_measuring_under_a_profiler_is_refused() -> None:
    with torch.autograd.profiler.profile(), pytest.raises(ProfilingError, match=r"while torch\.profiler is recording"):
        profile_of(nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8))
