"""Schedules that move what stages hold: the bits of plain autograd, the simulated peak, and nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from benchmarks.random_chains import random_moves, random_schedule
from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.errors import OffloadError, RotorWarning, ScheduleError
from lightning_rotor.execution import moving
from lightning_rotor.execution.executor import Executor
from lightning_rotor.execution.file_memory import FileMemory
from lightning_rotor.execution.places import Places
from lightning_rotor.link import Link
from lightning_rotor.private.torch_names import threads
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import movable, simulate
from lightning_rotor.stages.sequential import sequential_stages
from tests.grids import few
from tests.models import Case, assert_same_bits, training_step

LOSS_BYTES = 16
LINK = Link(1e9, 1e9)


def profile_of(net: nn.Module, batch: torch.Tensor) -> tuple[Profile, Any]:
    cut = sequentialize(net, (batch,))
    return profile_chain(cut.stages, cut.bind((batch,), {}), repeats=1), cut


def executor_of(profile: Profile, schedule: Schedule | str, memory: moving.OtherMemory | None) -> Executor:
    parsed = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    return Executor(profile.stages, profile.chain, parsed, profile.states, memory=memory)


class LateCopy:
    """A copy that is made when somebody waits for it, from an address: what was given up before is overwritten by then."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._address, self._size = storage.data_ptr(), storage.nbytes()
        self._content: bytes | None = None
        self._target: torch.UntypedStorage | None = None

    def wait_out(self) -> None:
        if self._content is None:
            self._content = ctypes.string_at(self._address, self._size)

    def begin_back(self) -> None:
        self._target = torch.full((self._size,), 255, dtype=torch.uint8).untyped_storage()

    def wait_back(self) -> torch.UntypedStorage:
        self.wait_out()
        assert self._content is not None
        assert self._target is not None
        ctypes.memmove(self._target.data_ptr(), self._content, self._size)
        storage, self._target = self._target, None
        return storage


class LateMemory:
    """The latest legal order of all copies, so that a missing wait gives wrong bits."""

    def copy_out(self, storage: torch.UntypedStorage) -> LateCopy:
        return LateCopy(storage)


class Residual(nn.Module):
    """Two skips a block, views, and a tensor that is saved with its dimensions swapped."""

    def __init__(self, width: int = 24, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList((nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for norm, wide, narrow in self.blocks:  # type: ignore[misc]
            inner = torch.tanh(wide(norm(value)))
            value = value + narrow(inner.t().contiguous().t()) * torch.sigmoid(value)
        return self.head(value)  # type: ignore[no-any-return]


def states_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in net.state_dict().items()}


@pytest.fixture
def memory(tmp_path: Path) -> FileMemory:
    return FileMemory(tmp_path)


def dense(seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [
            nn.Linear(32, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(bool(seed % 2)),
            nn.Dropout(0.2),
            nn.Linear(32, 32),
            nn.Tanh(),
        ]
    return nn.Sequential(*layers), torch.randn(64, 32)


def convolutional(seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    layers: list[nn.Module] = []
    for block in range(3):
        layers += [nn.Conv2d(8 if block else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(bool(seed % 2))]
    return nn.Sequential(*layers, nn.Dropout2d(0.2), nn.MaxPool2d(2, 1, 1)), torch.randn(4, 3, 12, 12)


@pytest.mark.parametrize("make", [dense, convolutional])
@pytest.mark.parametrize("seed", few(range(6), 0, 1))
def test_any_moves_give_the_bits_of_plain_autograd_and_the_simulated_peak(
    memory: FileMemory, make: Callable[[int], tuple[nn.Sequential, torch.Tensor]], seed: int
) -> None:
    torch.manual_seed(seed)
    net, batch = make(seed)
    case = Case(net, batch.requires_grad_(seed > 2))
    profile = profile_chain(sequential_stages(net), case.batch, repeats=1)
    state = states_of(net)
    rng = random.Random(seed)
    for gradients_exist in (False, True):
        plain = training_step(case, net, state, gradients_exist=gradients_exist)
        step = partial(training_step, case, state=state, gradients_exist=gradients_exist)
        for _ in range(3):
            schedule = random_moves(rng, profile.chain, random_schedule(rng, profile.chain))
            stays = Schedule(schedule.items)
            planned, unmoved = step(executor_of(profile, schedule, memory)), step(executor_of(profile, stays, None))
            assert_same_bits(plain.tensors, planned.tensors)
            if gradients_exist:
                continue
            simulated, simulated_unmoved = (
                simulate(profile.chain, each, link=LINK).peak_bytes for each in (schedule, stays)
            )
            # States of generators in nested segments count only approximately, with moves and without.
            uncounted = max(unmoved.peak_bytes - simulated_unmoved, 0)
            assert 0.99 * simulated <= planned.peak_bytes <= simulated + uncounted + LOSS_BYTES
    gc.collect()
    memory.drain()
    assert memory.used_bytes == 0


@pytest.mark.parametrize("seed", few(range(6), 0, 1))
def test_a_module_with_skips_moves_to_the_same_bits_and_the_simulated_peak(memory: FileMemory, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    case = Case(Residual(), torch.randn(64, 24))  # type: ignore[arg-type]
    profile, cut = profile_of(case.net, case.batch)
    state = states_of(case.net)
    plain = training_step(case, case.net, state)
    schedule = random_moves(rng, profile.chain, random_schedule(rng, profile.chain, segment_probability=0.3))
    run = executor_of(profile, schedule, memory)
    planned = training_step(case, lambda batch: run(cut.bind((batch,), {})), state)
    assert_same_bits(plain.tensors, planned.tensors)
    simulated = simulate(profile.chain, schedule, link=LINK).peak_bytes
    assert 0.98 * simulated <= planned.peak_bytes <= simulated + LOSS_BYTES


def test_a_plan_goes_below_what_recomputation_can(memory: FileMemory) -> None:
    layers = [nn.Linear(64, 64), nn.Tanh()] * 4
    case = Case(nn.Sequential(*layers, nn.Linear(64, 64)), torch.randn(512, 64))
    profile, _ = profile_of(case.net, case.batch)
    schedule = Schedule.keep_all(len(profile.chain))
    whole = movable(profile.chain, schedule.items)
    text = " ".join(f"{number}>" if number in whole else str(number) for number in range(len(profile.chain)))
    state = states_of(case.net)
    kept = training_step(case, executor_of(profile, schedule, None), state)
    moved = training_step(case, executor_of(profile, text, memory), state)
    assert_same_bits(kept.tensors, moved.tensors)
    assert moved.peak_bytes < 0.7 * kept.peak_bytes


# ---------------------------------------------------------------------------------------------------- mutants of order


def late_bits(text: str = "0> 1>3<2 2> 3> (4-5)> 6> 7 8") -> Callable[[], None]:
    """A check that a step under the latest legal copies gives the bits of plain training."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(24, 24), nn.Tanh(), nn.Dropout(0.1)]
    case = Case(nn.Sequential(*layers), torch.randn(48, 24))
    profile, _ = profile_of(case.net, case.batch)
    state = states_of(case.net)
    plain = training_step(case, case.net, state)

    def check() -> None:
        for _ in range(3):
            planned = training_step(case, executor_of(profile, text, LateMemory()), state)
            assert_same_bits(plain.tensors, planned.tensors)

    return check


def test_the_latest_legal_copies_give_the_same_bits() -> None:
    late_bits()()


def _released_without_waiting(away: Any, item: int) -> None:
    away.holders.discard(item)
    if not away.holders and away.copy is not None:
        away.storage = None


def _used_without_waiting(away: Any) -> torch.UntypedStorage:
    away.fetch()
    if away.storage is None:
        away.storage = away.copy._target or away.copy.wait_back()
    return away.storage  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "mutant"), [("release", _released_without_waiting), ("here", _used_without_waiting)])
def test_a_missing_wait_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[..., Any]) -> None:
    check = late_bits()
    monkeypatch.setattr(moving._Away, name, mutant)
    with pytest.raises(AssertionError, match="these differ"):
        check()


# ---------------------------------------------------------------------------------------------------- what goes wrong


def small(memory: FileMemory, text: str = "0 1> 2> 3") -> tuple[nn.Sequential, torch.Tensor, Executor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Sigmoid())
    batch = torch.randn(8, 16)
    profile, _ = profile_of(net, batch)
    return net, batch, executor_of(profile, text, memory)


def test_a_graph_without_a_backward_leaves_nothing(memory: FileMemory) -> None:
    _, batch, run = small(memory)
    output = run(batch)
    memory.drain()
    assert memory.used_bytes > 0
    del output
    gc.collect()
    memory.drain()
    assert memory.used_bytes == 0


def test_two_calls_may_be_in_flight(memory: FileMemory) -> None:
    net, batch, run = small(memory)
    other = torch.randn(8, 16)
    (net(batch).sum() + net(other).square().sum()).backward()
    wanted = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    first, second = run(batch), run(other)
    (first.sum() + second.square().sum()).backward()
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(wanted, net.parameters(), strict=True))  # type: ignore[arg-type]


def test_a_graph_that_is_kept_gives_the_same_gradients_twice(memory: FileMemory) -> None:
    net, batch, run = small(memory)
    loss = run(batch).sum()
    once = torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)
    again = torch.autograd.grad(loss, [*net.parameters()])
    assert all(map(torch.equal, once, again))


@pytest.mark.parametrize("text", ["0 1> 2> 3", "0 1> (2)> 3"])
def test_a_backward_that_leaves_out_the_last_stages_brings_back_what_it_needs(memory: FileMemory, text: str) -> None:
    net, batch, run = small(memory, text)
    seen: list[torch.Tensor] = []
    net[1].register_forward_hook(lambda module, args, output: seen.append(output))
    run(batch)
    gradient = torch.autograd.grad(seen[0].sum(), net[0].weight)
    assert torch.equal(gradient[0], torch.autograd.grad(net[:2](batch).sum(), net[0].weight)[0])


def test_an_exception_in_the_forward_leaves_nothing(memory: FileMemory) -> None:
    net, batch, run = small(memory)

    def fail(*_: Any) -> None:
        raise ValueError("a stage fails")

    handle = net[2].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="a stage fails"):
        run(batch)
    handle.remove()
    gc.collect()
    memory.drain()
    assert memory.used_bytes == 0
    run(batch).sum().backward()


def test_a_change_in_place_is_the_error_that_it_is_in_plain_training(memory: FileMemory) -> None:
    net, batch, run = small(memory, "0 1> 2 3")
    seen: list[torch.Tensor] = []
    net[1].register_forward_hook(lambda module, args, output: seen.append(output))
    output = run(batch)
    with torch.no_grad():
        seen[0].add_(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        output.sum().backward()


def test_hooks_of_others_save_in_the_place_of_moves(memory: FileMemory) -> None:
    net, batch, run = small(memory)
    wanted = torch.autograd.grad(net(batch).sum(), [*net.parameters()])
    with save_on_cpu(), pytest.warns(RotorWarning, match="moves nothing in this call, and the step may take more"):
        output = run(batch)
    memory.drain()
    assert memory.used_bytes == 0
    assert all(map(torch.equal, wanted, torch.autograd.grad(output.sum(), [*net.parameters()])))


def test_without_gradients_nothing_moves(memory: FileMemory) -> None:
    _, batch, run = small(memory)
    with torch.no_grad():
        run(batch)
    assert memory.used_bytes == 0


def test_nothing_leaks_over_many_steps(memory: FileMemory) -> None:
    net, batch, run = small(memory, "0 1> (2)> 3")
    levels = set()
    for _ in range(50):
        run(batch).sum().backward()
        memory.drain()
        levels.add(memory.used_bytes)
    assert levels == {0}
    call = weakref.ref(net)
    assert call() is net


def test_a_schedule_with_moves_needs_another_memory() -> None:
    with pytest.raises(ScheduleError, match="there is no other memory to move it to"):
        small(None)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- the file


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"no file can be made in .*missing.* \(No such file or directory\)"):
        FileMemory(tmp_path / "missing")


def test_a_limit_of_the_disk_is_kept(tmp_path: Path) -> None:
    memory = FileMemory(tmp_path, limit_bytes=500)
    _, batch, run = small(memory)  # moves 8 x 16 numbers
    with pytest.raises(OffloadError, match="what moves to disk takes 512 B, more than its limit of 500 B"):
        run(batch)


def test_a_full_disk_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    memory = FileMemory(tmp_path)
    _, batch, run = small(memory)
    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", full)
        with pytest.raises(OffloadError, match=r"could not be written to the disk at .* \(No space left on device\)"):
            run(batch)
    gc.collect()
    run(batch).sum().backward()


def test_threads_that_copy_do_not_count_as_drawing_random_numbers(tmp_path: Path) -> None:
    before = threads()
    memory = FileMemory(tmp_path)
    _, batch, run = small(memory)
    run(batch).sum().backward()
    assert threads() == before


def test_places_are_used_again() -> None:
    places = Places()
    first, second, third = (places.take(size) for size in (10, 20, 30))
    assert (first, second, third) == (0, 10, 30)
    places.give_back(second, 20)
    assert places.take(15) == 10
    assert places.take(5) == 25
    assert places.take(1) == 60
    for begin, size in ((0, 10), (30, 30), (10, 15), (60, 1), (25, 5)):
        places.give_back(begin, size)
    assert places.used_bytes == 0
    assert places.take(100) == 0
