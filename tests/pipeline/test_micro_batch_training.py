"""A loss whose backward has run already: gradients wait until Lightning asks for them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from lightning_rotor.errors import PipelineError
from lightning_rotor.invertible.layers import accumulate
from lightning_rotor.strategies.micro_batch_training import _deferred, _taken


def test_gradients_wait_for_the_backward() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 3.0)
    taken = _taken([weight])
    assert weight.grad is None
    loss = _deferred(torch.tensor(5.0), 0.5, partial(accumulate, [weight], taken))
    assert weight.grad is None
    (loss * 0.5).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


def test_a_loss_that_is_scaled_behind_is_refused() -> None:
    loss = _deferred(torch.tensor(5.0), 0.5, lambda: None)
    with pytest.raises(PipelineError, match=r"the loss was scaled by 2 behind training_step, .* with 0\.5"):
        (loss * 2).backward()
