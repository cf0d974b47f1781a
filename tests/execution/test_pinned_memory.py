"""Moves to pinned memory of the host: the bits of plain training, the predicted peak, and nothing left behind."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.random_chains import random_moves, random_schedule
from lightning_rotor import Checkpointable, Offload, OffloadError
from lightning_rotor.execution.executor import Executor
from lightning_rotor.execution.pinned_memory import PinnedMemory
from lightning_rotor.link import Link
from lightning_rotor.profiling import profile_chain
from lightning_rotor.profiling.cuda_recording import await_autograd
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from lightning_rotor.stages.sequential import sequential_stages

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
LINK = Link(1e9, 1e9)
SCALARS = 2 * 512
"""The loss and its gradient."""


def dense(seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(bool(seed % 2)), nn.Dropout(0.2), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(64, 3)).to(GPU), torch.randn(301, 64, device=GPU)


def convolutional(seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    layers: list[nn.Module] = []
    for block in range(3):
        layers += [nn.Conv2d(8 if block else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(bool(seed % 2))]
    return nn.Sequential(*layers, nn.Dropout2d(0.2)).to(GPU), torch.randn(4, 3, 12, 12, device=GPU)


def step(net: nn.Module, run: Callable[[torch.Tensor], Any], batch: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Gradients and buffers of one step from fixed ones, and its peak."""
    net.zero_grad()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
    torch.manual_seed(1)
    await_autograd(GPU)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(batch).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    seen = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    return [*seen, *(buffer.clone() for buffer in net.buffers())], peak


@pytest.mark.parametrize("make", [dense, convolutional])
@pytest.mark.parametrize("seed", range(3))
def test_any_moves_give_the_bits_of_plain_autograd_and_the_simulated_peak(
    make: Callable[[int], tuple[nn.Sequential, torch.Tensor]], seed: int
) -> None:
    torch.manual_seed(seed)
    net, batch = make(seed)
    profile = profile_chain(sequential_stages(net), batch, repeats=1)
    rng = random.Random(seed)
    plain, _ = step(net, net, batch)
    memory = PinnedMemory(GPU)
    for _ in range(4):
        schedule = random_moves(rng, profile.chain, random_schedule(rng, profile.chain))
        simulation = simulate(profile.chain, schedule, link=LINK)
        memory.reserve(simulation.host_bytes)
        reserved_bytes = memory.reserved_bytes
        stays = Schedule(schedule.items)
        _, unmoved_bytes = step(net, Executor(profile.stages, profile.chain, stays, profile.states), batch)
        run = Executor(profile.stages, profile.chain, schedule, profile.states, memory=memory)
        seen, peak_bytes = step(net, run, batch)
        assert all(map(torch.equal, plain, seen)), schedule
        uncounted = max(unmoved_bytes - simulate(profile.chain, stays, link=LINK).peak_bytes, 0)
        assert peak_bytes <= simulation.peak_bytes + uncounted + SCALARS, schedule
        # What the plan says is in the other memory has room in what was reserved for it.
        assert memory.reserved_bytes == reserved_bytes
    gc.collect()
    assert memory.used_bytes == 0


def small(memory: PinnedMemory, text: str = "0 1> 2> 3") -> tuple[nn.Sequential, torch.Tensor, Executor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Sigmoid()).to(GPU)
    batch = torch.randn(16, 32, device=GPU)
    profile = profile_chain(sequential_stages(net), batch, repeats=1)
    return net, batch, Executor(profile.stages, profile.chain, Schedule.parse(text), profile.states, memory=memory)


def test_nothing_is_left_by_steps_graphs_without_backward_and_exceptions() -> None:
    memory = PinnedMemory(GPU)
    net, batch, run = small(memory, "0 1> (2)> 3")
    run(batch).sum().backward()
    gc.collect()
    allocated_bytes, reserved_bytes = torch.cuda.memory_allocated(), memory.reserved_bytes

    def fail(*_: Any) -> None:
        raise ValueError("a stage fails")

    for number in range(20):
        if number % 4 == 1:
            run(batch)
        elif number % 4 == 2:
            handle = net[2].register_forward_pre_hook(fail)
            with pytest.raises(ValueError, match="a stage fails"):
                run(batch)
            handle.remove()
        elif number % 4 == 3:
            output = run(batch)
            output.register_hook(fail)
            with pytest.raises(ValueError, match="a stage fails"):
                output.sum().backward()
            del output
        else:
            run(batch).sum().backward()
        gc.collect()
        # After an error, too, autograd's thread may hold what the hook was given.
        await_autograd(GPU)
        assert memory.used_bytes == 0
    assert memory.reserved_bytes == reserved_bytes
    assert torch.cuda.memory_allocated() <= allocated_bytes


def test_two_calls_may_be_in_flight_and_a_graph_be_kept() -> None:
    memory = PinnedMemory(GPU)
    net, batch, run = small(memory)
    other = torch.randn(16, 32, device=GPU)
    wanted = torch.autograd.grad(net(batch).sum() + net(other).square().sum(), [*net.parameters()])
    loss = run(batch).sum() + run(other).square().sum()
    once = torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)
    again = torch.autograd.grad(loss, [*net.parameters()])
    assert all(map(torch.equal, wanted, once))
    assert all(map(torch.equal, wanted, again))


def test_memory_is_registered_to_the_page_and_given_back() -> None:
    memory = PinnedMemory(GPU)
    memory.reserve(9 * 2**20)
    assert memory.reserved_bytes == 9 * 2**20
    memory.reserve(2**20)
    assert memory.reserved_bytes == 9 * 2**20
    memory.reserve(10 * 2**20)
    assert memory.reserved_bytes == 10 * 2**20
    assert memory._slabs[0].memory.is_pinned()


def test_a_limit_of_the_host_is_kept() -> None:
    memory = PinnedMemory(GPU, limit_bytes=4096)
    _, batch, run = small(memory)  # moves 16 x 32 numbers twice
    first = run(batch)
    second = run(batch)
    with pytest.raises(OffloadError, match=r"what moves to the host takes .* more than the limit of 4.00 KiB"):
        run(batch)
    (first.sum() + second.sum()).backward()
    run(batch).sum().backward()


def test_host_memory_that_the_driver_refuses_is_told_from_the_memory_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refuses:
        def cudaHostRegister(self, *_: int) -> int:  # noqa: N802
            return 2  # cudaErrorMemoryAllocation

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", Refuses)
        with pytest.raises(
            OffloadError, match=r"the host does not give 1.00 MiB of pinned memory .*RAM, and no memory"
        ):
            PinnedMemory(GPU).reserve(2**20)


def test_no_copy_to_the_host_becomes_part_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    _, batch, run = small(PinnedMemory(GPU))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(OffloadError, match=r"a CUDA graph is being captured of a module whose plan moves .*plain"):
            run(batch)
    run(batch).sum().backward()


def test_a_planned_module_moves_inside_its_limit_to_the_same_bits() -> None:
    torch.manual_seed(0)
    layers = [module for _ in range(5) for module in (nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1))]
    net, batch = nn.Sequential(*layers, nn.Linear(128, 8)).to(GPU), torch.randn(2048, 128, device=GPU)
    plain, plain_bytes = step(net, net, batch)
    offload = Offload("host", bandwidth=1e12)
    planned = Checkpointable(net, batch, int(0.6 * plain_bytes), offload=offload)
    assert planned.plan is not None
    assert planned.plan.moved
    for _ in range(3):
        seen, peak_bytes = step(net, planned, batch)
        assert all(map(torch.equal, plain, seen))
        assert peak_bytes <= planned.plan.peak_bytes + SCALARS


def test_a_file_is_no_other_memory_for_a_gpu(tmp_path: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(GPU)
    with pytest.raises(OffloadError, match=r"moves from the CPU to a file, .*: expected offload=\"host\""):
        Checkpointable(net, torch.randn(4, 8, device=GPU), "1GiB", offload=f"disk:{tmp_path}")
