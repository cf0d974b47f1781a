"""What a process holds beside a chain, and the budget that it leaves."""

from __future__ import annotations

import torch
from torch import nn

from lightning_rotor.memory.resident_memory import ResidentMemory, allocated_bytes, named_bytes

CPU = torch.device("cpu")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2, bias=False))


def test_what_is_there_is_counted_and_what_will_be_is_predicted() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9, foreach=False)
    memory = ResidentMemory.of(net, net[:2], [optimizer], [torch.ones(4, 8)], CPU)
    weights = 4 * (64 + 16 + 16)
    assert memory.parameter_bytes == weights
    assert memory.buffer_bytes == 4 * 16 + 8
    assert memory.optimizer_bytes == weights
    assert memory.chain_gradient_bytes == 4 * (64 + 16)
    assert memory.outside_gradient_bytes == 4 * 16
    assert memory.batch_bytes == 128
    assert memory.staying_bytes == 3 * weights + memory.buffer_bytes + 128


def test_an_optimizer_that_cannot_be_predicted_makes_the_temporary_bytes_unknown() -> None:
    class Strange(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            raise RuntimeError("not without values")

    net = model()
    known = torch.optim.Adam(net[0].parameters(), foreach=False)
    assert ResidentMemory.of(net, net, [known], [], CPU).temporary_bytes
    strange = Strange(net[2].parameters(), lr=0.1)
    assert ResidentMemory.of(net, net, [known, strange], [], CPU).temporary_bytes is None
    assert ResidentMemory.of(net, net, [], [], CPU).temporary_bytes == 0


def test_gradients_that_linger_leave_their_room_to_the_chain() -> None:
    memory = ResidentMemory(parameter_bytes=100, chain_gradient_bytes=40, outside_gradient_bytes=10)
    budget = memory.budget(1000)
    assert (budget.available_bytes, budget.lingering_bytes, budget.gradients_exist) == (890, 40, False)
    staying = ResidentMemory(
        parameter_bytes=100, chain_gradient_bytes=40, outside_gradient_bytes=10, gradients_linger=False
    ).budget(1000)
    assert (staying.available_bytes, staying.lingering_bytes, staying.gradients_exist) == (850, 0, True)


def test_a_budget_says_what_the_rest_is_for() -> None:
    memory = ResidentMemory(parameter_bytes=100, buffer_bytes=1, batch_bytes=20)
    budget = memory.budget(1000, correction_bytes=9)
    assert budget.reserved_for == "parameters (101 B), the batch (20 B), the rest of the step (9 B)"
    assert budget.reserved_bytes == 130
    assert budget.limit_bytes == 1000


def test_on_the_cpu_what_can_be_named_is_counted() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    before = named_bytes(net, [optimizer], [], CPU)
    net(torch.ones(4, 8)).sum().backward()
    weights = 4 * (64 + 16 + 16)
    assert named_bytes(net, [optimizer], [torch.ones(3)], CPU) == before + weights + 12
    optimizer.step()
    # Two moments, and a step counter for each of four parameters.
    assert allocated_bytes(net, [optimizer], [], CPU) == before + 3 * weights + 4 * 4
