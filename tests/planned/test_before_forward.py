"""What a forward may change, noted before it and put back if it runs out of memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.execution.segment_state import state_of
from lightning_rotor.planned.out_of_memory import BeforeForward, CopiedBuffers, is_shortage, shortage_message
from lightning_rotor.stages.sequential import Stage


class Counting(nn.Module):
    """Code of a user's, with a small buffer and perhaps a large one."""

    def __init__(self, large: int = 0) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("bank", torch.zeros(large) if large else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def profile_of(net: nn.Module, *, draws_random: bool = False) -> Any:
    stage = Stage("net", (net,))
    return SimpleNamespace(state=state_of(stage, (), {}), draws_random=draws_random)


def before(net: nn.Module, *tensors: torch.Tensor, buffers: CopiedBuffers | None = None, **options: Any) -> Any:
    return BeforeForward(profile_of(net, **options), tensors or (torch.ones(2),), buffers or CopiedBuffers())


def test_statistics_small_buffers_and_attributes_are_what_they_were() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), Counting())
    noted = before(net)
    net(torch.randn(8, 3))
    net[1].average += 5
    net[1].calls += 1
    assert net[0].num_batches_tracked == 1
    assert noted.restore()
    assert net[0].num_batches_tracked == 0
    assert torch.equal(net[0].running_mean, torch.zeros(3))
    assert torch.equal(net[1].average, torch.zeros(3))
    assert net[1].calls == 0


@pytest.mark.parametrize("draws_random", [False, True])
def test_generators_are_set_back_if_the_forward_draws(draws_random: bool) -> None:
    net = Counting()
    noted = before(net, draws_random=draws_random)
    first = torch.rand(3)
    assert noted.restore()
    assert torch.equal(torch.rand(3), first) == draws_random


def test_an_input_that_has_changed_is_not_put_back() -> None:
    net, x = Counting(), torch.ones(3)
    noted = before(net, x)
    net.average += 1
    x.add_(1)
    assert not noted.restore()
    assert torch.equal(net.average, torch.ones(3))  # left as it is


def test_a_large_buffer_is_not_copied_and_must_not_change() -> None:
    net = Counting(large=2**16)
    noted = before(net)
    assert noted.restore()
    net.bank.add_(1)
    assert not noted.restore()


def test_copies_are_kept_for_the_next_forward_of_the_same_buffers() -> None:
    net, buffers = nn.BatchNorm1d(3), CopiedBuffers()
    first = before(net, buffers=buffers)
    first.forget()
    kept = [copy for _, copy in buffers._kept]
    second = before(net, buffers=buffers)
    assert [copy for _, copy in second._copies.pairs] == kept
    assert buffers._kept == []  # taken while it is in use
    second.forget()
    net.running_mean = torch.zeros(5)  # another buffer now
    third = before(net, buffers=buffers)
    net.running_mean += 1
    assert third.restore()
    assert torch.equal(net.running_mean, torch.zeros(5))


def test_a_lack_of_memory_is_told_from_other_errors() -> None:
    assert is_shortage(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as failure:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_shortage(failure.value)
    assert not is_shortage(RuntimeError("shapes cannot be multiplied"))
    assert not is_shortage(ValueError("DefaultCPUAllocator: no"))


def test_a_message_has_the_users_limit_and_torchs_words() -> None:
    message = shortage_message(RuntimeError("boom"), "No plan takes less", limit_bytes=2048, predicted_bytes=1024)
    assert message.startswith("out of memory inside mem_limit 2.00 KiB: the plan was to peak at 1.00 KiB")
    assert message.endswith("torch said: boom")
