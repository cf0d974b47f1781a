"""Calls of torch's checkpoint are noticed, of this thread alone, and torch is as it was afterwards."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils import checkpoint as module
from torch.utils.checkpoint import checkpoint

from lightning_rotor.private.users_checkpoints import noticed_checkpoints


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_call_is_noticed_with_its_kind(reentrant: bool) -> None:
    before = module.CheckpointFunction, module._CheckpointFrame
    x = torch.ones(2, requires_grad=True)
    with noticed_checkpoints() as seen:
        assert seen == set()
        checkpoint(torch.tanh, x, use_reentrant=reentrant).sum().backward()
        assert seen == {reentrant}
    assert x.grad is not None
    assert before == (module.CheckpointFunction, module._CheckpointFrame)


def test_a_call_of_another_thread_is_not_noticed() -> None:
    x = torch.ones(2, requires_grad=True)
    with noticed_checkpoints() as seen:
        thread = threading.Thread(target=lambda: checkpoint(torch.tanh, x, use_reentrant=False))
        thread.start()
        thread.join()
        assert seen == set()
