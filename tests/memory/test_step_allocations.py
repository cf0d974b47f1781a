"""The most that operators allocate at once beside an optimizer's state, on meta."""

from __future__ import annotations

import torch
from torch import nn

from lightning_rotor.memory.step_allocations import StepAllocations

CPU = torch.device("cpu")


def optimizer() -> torch.optim.SGD:
    weight = nn.Parameter(torch.empty(1000, device="meta"))
    weight.grad = torch.empty_like(weight)
    return torch.optim.SGD([weight])


def test_new_storages_count_while_they_live() -> None:
    held = optimizer()
    allocations = StepAllocations(held, CPU)
    with allocations:
        first = torch.empty(1000, device="meta")
        second = first + 1
        del first
        second.mul_(2)
        third = second.sqrt()
    assert third.is_meta
    assert allocations.peak_bytes == 8000


def test_older_storages_and_views_do_not_count() -> None:
    made = optimizer()
    (weight,) = made.param_groups[0]["params"]
    allocations = StepAllocations(made, CPU)
    with allocations, torch.no_grad():
        weight.view(10, 100).mul_(2)
        weight.add_(weight.grad)
    assert allocations.peak_bytes == 0


def test_state_that_is_freed_makes_room() -> None:
    made = optimizer()
    (weight,) = made.param_groups[0]["params"]
    allocations = StepAllocations(made, CPU)
    with allocations, torch.no_grad():
        weight.grad = None
        kept = torch.empty(1500, device="meta")
    assert kept.is_meta
    assert allocations.peak_bytes == 2000


def test_numbers_that_a_step_reads_are_assumed() -> None:
    held = optimizer()
    with StepAllocations(held, CPU):
        assert torch.empty((), device="meta").item() == 0.5


def test_sizes_are_those_of_the_real_device() -> None:
    held = optimizer()
    allocations = StepAllocations(held, torch.device("cuda"))
    with allocations:
        block = torch.empty(1, device="meta")
    assert block.is_meta
    assert allocations.peak_bytes == 512
