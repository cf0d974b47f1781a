"""The executor against plain autograd, and the simulator against the allocator."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from lightning_rotor.errors import ExecutionError, ScheduleError
from lightning_rotor.execution.executor import Executor
from lightning_rotor.execution.passes import is_checkpointing, is_recomputing
from lightning_rotor.execution.segment import recomputed
from lightning_rotor.execution.stopwatch import Stopwatch
from lightning_rotor.profiling import Meter, Profile, profile_chain
from lightning_rotor.profiling.segment_seconds import segment_seconds, unwatched_seconds
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from lightning_rotor.stages.sequential import sequential_stages
from tests.grids import examples, few
from tests.models import Case, assert_same_bits, cases, schedules, training_step

# The product and the sum of the loss hold one number each.
LOSS_BYTES = 16


def executor(profile: Profile, schedule: Schedule | str) -> Executor:
    if isinstance(schedule, str):
        schedule = Schedule.parse(schedule)
    return Executor(profile.stages, profile.chain, schedule, profile.states)


def profile_of(net: nn.Sequential, sample: object) -> Profile:
    return profile_chain(sequential_stages(net), sample, repeats=1)


@pytest.mark.filterwarnings("ignore:all .* layers were merged into one stage")  # of a small model that was drawn
@settings(max_examples=examples(8, 60), suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_schedule_gives_the_bits_of_plain_autograd_and_the_simulated_peak(data: st.DataObject) -> None:
    case = data.draw(cases())
    profile = profile_of(case.net, case.batch)
    state = {key: value.clone() for key, value in case.net.state_dict().items()}
    gradients_exist = data.draw(st.booleans())
    plain = training_step(case, case.net, state, gradients_exist=gradients_exist)
    for _ in range(3):
        schedule = data.draw(schedules(len(profile.chain)))
        planned = training_step(case, executor(profile, schedule), state, gradients_exist=gradients_exist)
        assert_same_bits(plain.tensors, planned.tensors)
        simulated = simulate(profile.chain, schedule, gradients_exist=gradients_exist).peak_bytes
        # Never more than simulated. Less by at most 1 %: during recomputation, an operator frees its saved tensors before the
        # gradient of a broadcast bias is summed, and plain autograd frees them after.
        assert planned.peak_bytes <= simulated + LOSS_BYTES
        assert planned.peak_bytes >= 0.99 * simulated


def test_keep_all_peak_is_exact(dense_case: Case) -> None:
    profile = profile_of(dense_case.net, dense_case.batch)
    state = {key: value.clone() for key, value in dense_case.net.state_dict().items()}
    plain = training_step(dense_case, dense_case.net, state)
    kept = training_step(dense_case, executor(profile, Schedule.keep_all(len(profile.chain))), state)
    simulated = simulate(profile.chain, Schedule.keep_all(len(profile.chain))).peak_bytes
    assert plain.peak_bytes == kept.peak_bytes
    assert 0 <= kept.peak_bytes - simulated <= LOSS_BYTES


class Lookup(nn.Module):
    """A learned bias that is looked up by place, as in attention within windows (Swin). Autograd saves the index, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        # So large that the peak is in the backward, where its gradient appears.
        self.table, self.linear = nn.Parameter(torch.randn(512, 32)), nn.Linear(32, 32)
        self.register_buffer("index", torch.arange(256) * 2)
        self.register_buffer("unsaved", torch.ones(32))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = self.table[self.index]
        return torch.tanh(self.linear(input) + bias + self.unsaved)


@pytest.mark.parametrize(
    "schedule",
    few(
        ["0-3", "0 (1-2) 3", "(0-2) 3", "((0-1) 2) 3", "(0 (1) 2) 3", "(0) (1) (2) 3"],
        "0-3",
        "0 (1-2) 3",
        "(0 (1) 2) 3",
    ),
)
def test_buffers_that_autograd_saves_are_copies_in_a_recomputation(schedule: str) -> None:
    case = Case(nn.Sequential(*(Lookup() for _ in range(4))), torch.randn(256, 32))
    profile = profile_of(case.net, case.batch)
    assert [stage.keep.saved_state_bytes for stage in profile.chain] == [256 * 8] * 4
    state = {key: value.clone() for key, value in case.net.state_dict().items()}
    peak = training_step(case, executor(profile, schedule), state).peak_bytes
    assert 0 <= peak - simulate(profile.chain, Schedule.parse(schedule)).peak_bytes <= LOSS_BYTES


@pytest.mark.parametrize(
    "schedule",
    few(["0-5", "(0-1) 2-5", "0 (1-3) 4-5", "((0-1) 2-4) 5", "(0) (1) (2) (3) (4) 5"], "0-5", "((0-1) 2-4) 5"),
)
def test_gradients_that_are_added_to_existing_ones_do_not_pile_up_within_a_stage(schedule: str) -> None:
    layers = (
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(6)
    )
    case = Case(nn.Sequential(*map(Whole, layers)), torch.randn(16, 64))
    profile = profile_of(case.net, case.batch)
    state = {key: value.clone() for key, value in case.net.state_dict().items()}
    run, parsed = executor(profile, schedule), Schedule.parse(schedule)
    for gradients_exist in (False, True):
        peak = training_step(case, run, state, gradients_exist=gradients_exist).peak_bytes
        simulated = simulate(profile.chain, parsed, gradients_exist=gradients_exist).peak_bytes
        assert 0 <= peak - simulated <= LOSS_BYTES


class Whole(nn.Module):
    """Layers that are one stage."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.layers(input)


@pytest.fixture
def dense_case() -> Case:
    net = nn.Sequential(
        nn.Linear(32, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 8),
    )
    return Case(net, torch.randn(128, 32))


@pytest.mark.parametrize("schedule", ["0-6", "(0-2) 3-6", "(0-4) 5-6", "((0-1) 2-3) 4-6", "0 (1 (2-3) 4) 5-6"])
@pytest.mark.parametrize("dtype", few([torch.float32, torch.float64], torch.float32))
def test_two_backwards_through_one_graph(dense_case: Case, schedule: str, dtype: torch.dtype) -> None:
    net, batch = dense_case.net.to(dtype), dense_case.batch.to(dtype)
    run = executor(profile_of(net, batch), schedule)

    def gradients(forward: object) -> list[torch.Tensor]:
        torch.manual_seed(1)
        loss = forward(batch).sum()  # type: ignore[operator]
        loss.backward(retain_graph=True)
        loss.backward()
        found = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        net.zero_grad()
        return found

    assert all(map(torch.equal, gradients(net), gradients(run)))


def test_double_backward_interleaved_forwards_and_partial_inputs(dense_case: Case) -> None:
    net = nn.Sequential(*(layer for layer in dense_case.net if not isinstance(layer, nn.Dropout)))
    run = executor(profile_of(net, dense_case.batch), "(0-1) 2 (3-4) 5")
    one, two = dense_case.batch.clone().requires_grad_(), torch.randn(128, 32)

    def results(forward: object) -> list[torch.Tensor]:
        first, second = forward(one), forward(two)  # type: ignore[operator]
        (gradient,) = torch.autograd.grad(first.square().sum(), one, create_graph=True)
        penalty = torch.autograd.grad(gradient.square().sum(), list(net[0].parameters()))
        partial = torch.autograd.grad(second.sum(), [net[3].weight])
        return [gradient.detach(), *penalty, *partial]

    assert all(map(torch.equal, results(net), results(run)))


def test_bfloat16_autocast(dense_case: Case) -> None:
    net, batch = dense_case.net, dense_case.batch
    with torch.autocast("cpu", torch.bfloat16):
        run = executor(profile_of(net, batch), "(0-3) 4 (5) 6")

    def gradients(forward: object) -> list[torch.Tensor]:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(batch).float().square().mean()  # type: ignore[operator]
        loss.backward()
        found = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        net.zero_grad()
        return found

    assert all(map(torch.equal, gradients(net), gradients(run)))


def test_frozen_stages_get_no_gradient(dense_case: Case) -> None:
    net, batch = dense_case.net, dense_case.batch
    for parameter in (*net[0].parameters(), *net[4].parameters()):
        parameter.requires_grad_(False)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    profile = profile_of(net, batch)
    assert profile.chain.stages[0].keep.parameter_gradient_bytes == 0
    for schedule in ("(0-1) 2 (3-5) 6", "(0) 1 (2-4) 5-6"):
        run = executor(profile, schedule)
        planned = training_step(dense_case, run, state)
        assert_same_bits(training_step(dense_case, net, state).tensors, planned.tensors)


class Averaging(nn.Module):
    """Its output depends on a buffer that it updates, sometimes in place and sometimes not at all."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if int(self.calls) % 2:
            mean = 0.9 * self.mean + input.detach().mean(0)
            if self.in_place:
                self.mean.copy_(mean)
            else:
                self.mean = mean
        return torch.tanh(self.linear(input - self.mean))


class Fickle(nn.Module):
    """Draws from Python's and NumPy's generators, and counts its calls in a plain attribute that its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if random.random() < 0.5:
            return torch.tanh(self.linear(input)) / self.calls
        return torch.sigmoid(self.linear(input)) * float(np.random.rand())  # noqa: NPY002


def shared_normalization() -> nn.Sequential:
    norm = nn.BatchNorm1d(16)
    return nn.Sequential(nn.Linear(16, 16), norm, nn.Tanh(), nn.Linear(16, 16), norm, nn.Tanh(), nn.Linear(16, 16))


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(*(Averaging(in_place=True) for _ in range(4))),
        nn.Sequential(*(Averaging(in_place=False) for _ in range(4))),
        nn.Sequential(*(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)) for _ in range(4))),
        nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)) for _ in range(4))),
        nn.Sequential(*(Fickle() for _ in range(4))),
        shared_normalization(),
    ],
    ids=[
        "in place",
        "replaced",
        "spectral_norm",
        "weight_norm",
        "attributes and host generators",
        "one BatchNorm twice",
    ],
)
def test_state_that_the_forward_updates_is_updated_once(net: nn.Sequential) -> None:
    profile = profile_of(net, torch.randn(32, 16))
    last = len(profile.chain) - 1
    schedules = ["(0-1) 2", f"((0) 1) 2-{last}", f"0-{last}"]
    schedules = [text if Schedule.parse(text).items[-1].last == last else f"(0-1) 2-{last}" for text in schedules]
    twin = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (net, twin)]
    for step in range(6):
        batch = torch.randn(32, 16)
        run = executor(profile, schedules[step % 3])
        after: list[object] = []
        for forward, model, optimizer in ((run, net, optimizers[0]), (twin, twin, optimizers[1])):
            random.seed(step)
            np.random.seed(step)  # noqa: NPY002
            optimizer.zero_grad()
            loss = forward(batch).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            numbers = np.random.get_state()[1].tolist()  # noqa: NPY002
            after.append((random.getstate(), numbers, [getattr(layer, "calls", 0) for layer in model]))
        assert after[0] == after[1]
        assert_same_bits(net.state_dict(), twin.state_dict())


def test_a_large_buffer_that_changes_unexpectedly_in_a_segment_is_refused() -> None:
    class Switchable(nn.Linear):
        on = False

        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("history", torch.zeros(100, 1000))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if self.on:
                self.history += 1
            return super().forward(input)

    net = nn.Sequential(Switchable(), nn.Tanh(), nn.Linear(8, 8))
    run = executor(profile_of(net, torch.randn(4, 8)), "(0-1) 2")
    run(torch.randn(4, 8)).sum().backward()
    net[0].on = True
    with pytest.raises(ExecutionError, match=r"'history' of Switchable changed .* Measure again"):
        run(torch.randn(4, 8))
    assert not is_checkpointing()


class Pair(nn.Module):
    """Hands a tuple on, as torchgpipe's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(
        self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        left, rest = pair
        return self.left(left).tanh(), {"right": self.right(rest["right"]) + left}


class Join(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> torch.Tensor:
        return pair[0] * pair[1]["right"]


@pytest.mark.parametrize("schedule", ["(0-2) 3", "0 (1-2) 3", "((0) 1-2) 3"])
def test_nested_values_between_stages(schedule: str) -> None:
    net = nn.Sequential(Pair(), Pair(), Pair(), Join())
    value = (torch.randn(32, 16, requires_grad=True), {"right": torch.randn(32, 16)})
    profile = profile_of(net, value)
    run = executor(profile, schedule)
    plain, planned = net(value), run(value)
    assert torch.equal(plain, planned)
    inputs = [value[0], *net.parameters()]
    expected, received = (
        torch.autograd.grad(plain.sum(), inputs, allow_unused=True),
        torch.autograd.grad(planned.sum(), inputs, allow_unused=True),
    )
    assert all(
        left is right is None or torch.equal(left, right) for left, right in zip(expected, received, strict=True)
    )


def test_flags_tell_user_code_which_pass_it_is() -> None:
    seen: SimpleQueue[tuple[bool, bool]] = SimpleQueue()  # a list would be put back after a recomputation

    def all_seen() -> list[tuple[bool, bool]]:
        return [seen.get() for _ in range(seen.qsize())]

    class Witness(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.put((is_checkpointing(), is_recomputing()))
            return super().forward(input)

    net = nn.Sequential(Witness(4, 4), nn.Tanh(), nn.Linear(4, 4))
    profile = profile_of(net, torch.randn(2, 4))
    assert all(recomputing for _, recomputing in all_seen())  # while measuring
    executor(profile, "(0-1) 2")(torch.randn(2, 4)).sum().backward()
    executor(profile, "0-2")(torch.randn(2, 4)).sum().backward()
    assert all_seen() == [(True, False), (False, True), (False, False)]
    assert not is_checkpointing()
    assert not is_recomputing()


class Ticks:
    """A clock that goes on when somebody looks at it."""

    repeats_itself = False
    time = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


@pytest.mark.parametrize(
    ("schedule", "again", "step"), [("0-2", 0.0, 2.0), ("(0-1) 2", 1.0, 4.0), ("((0) 1) 2", 2.0, 6.0)]
)
def test_calls_are_timed_from_the_second_on(schedule: str, again: float, step: float) -> None:
    profile = profile_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4))
    watch = Stopwatch(Ticks())
    run = Executor(profile.stages, profile.chain, Schedule.parse(schedule), profile.states, stopwatch=watch)
    seen = []
    for _ in range(8):
        run(torch.randn(2, 4)).sum().backward()
        seen.append((watch.again_seconds, watch.step_seconds))
    # Each look at this clock takes a tick: two of a call, and two of each recomputation in its backward.
    assert seen == [(None, None), *[(again, step)] * 7]


def test_a_backward_is_timed_until_the_inputs_have_their_gradients() -> None:
    clock = Ticks()

    def slowly(*_: Any) -> None:
        clock.time += 1e3

    profile = profile_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))
    watch = Stopwatch(clock)
    run = Executor(profile.stages, profile.chain, Schedule.parse("0-1"), profile.states, stopwatch=watch)
    for _ in range(3):
        value = torch.randn(2, 4, requires_grad=True) * 2
        assert value.grad_fn is not None
        value.grad_fn.register_hook(slowly)  # behind the gradient of what comes before the module
        output = run(value)
        output.register_hook(slowly)  # before that of its output
        output.sum().backward()
    assert watch.step_seconds == 2.0


def test_segments_are_timed_around_what_runs_in_them_and_a_stopwatch_misses_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Ticks()

    def slowly(*args: Any, **options: Any) -> Any:
        clock.time += 5.0
        return recomputed(*args, **options)

    monkeypatch.setattr("lightning_rotor.profiling.segment_seconds.recomputed", slowly)
    # Each look at this clock takes a tick, also around the operations, which take the same in a segment.
    assert segment_seconds(torch.device("cpu"), cast("Meter", clock)) == 5.0
    chain = profile_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)).chain
    chain = replace(chain, segment_seconds=5.0)
    assert [unwatched_seconds(chain, Schedule.parse(text)) for text in ("0-2", "(0-1) 2", "((0) 1) 2")] == [
        0.0,
        1.0,
        2.0,
    ]


def test_an_exception_during_recomputation_leaves_a_clean_next_step(dense_case: Case) -> None:
    class Fuse(nn.Module):
        blown = False

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if self.blown and is_recomputing():
                raise KeyError("boom")
            return input * 2

    fuse = Fuse()
    case = Case(
        nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), fuse, nn.Tanh(), nn.Linear(32, 4)), dense_case.batch
    )
    state = {key: value.clone() for key, value in case.net.state_dict().items()}
    run = executor(profile_of(case.net, case.batch), "(0-3) 4")
    buffers = dict(case.net.named_buffers())
    fuse.blown = True
    with pytest.raises(KeyError, match="boom"):
        run(case.batch).sum().backward()
    fuse.blown = False
    assert not is_recomputing()
    assert all(buffer is buffers[name] for name, buffer in case.net.named_buffers())
    assert_same_bits(training_step(case, case.net, state).tensors, training_step(case, run, state).tensors)


def test_a_segment_that_changes_its_input_in_place_is_refused() -> None:
    with pytest.raises(ExecutionError, match="'relu' changes its input in place"):
        recomputed(torch.nn.functional.relu_, torch.randn(3, requires_grad=True).clone(), name="'relu'")


def test_a_schedule_for_another_chain_is_refused(dense_case: Case) -> None:
    profile = profile_of(dense_case.net, dense_case.batch)
    with pytest.raises(ScheduleError, match="covers 2 stages, but the chain has 7"):
        executor(profile, "(0) 1")
