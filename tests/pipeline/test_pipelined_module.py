"""A module that runs as a pipeline of one process: gradients, evaluation, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.pipeline import Pipeline
from lightning_rotor.pipeline.pipelined_module import PipelinedModule


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_one_process_trains_and_evaluates_as_the_module_does() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plain = copy.deepcopy(net)
    x = torch.randn(5, 3)
    pipeline = Pipeline(net, x, micro_batches=2)
    loss = pipeline.step(lambda part: net(part).square().mean(), x)
    expected = plain(x).square().mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item())
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    with torch.no_grad():
        torch.testing.assert_close(net(x), plain(x))
    with pytest.raises(PipelineError, match="was called with gradients outside of the function given to Pipeline"):
        net(x)
    with pytest.raises(PipelineError, match=r"Pipeline\.step returned str without a loss"):
        pipeline.step(lambda part: "no loss" if net(part) is not None else None, x)
    pipeline.close()
    assert net(x).requires_grad


def test_a_copy_is_inactive() -> None:
    rebuild, arguments = PipelinedModule.__reduce__(object.__new__(PipelinedModule))
    assert rebuild(*arguments).active is False
