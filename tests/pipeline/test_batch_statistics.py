"""Deferred batch normalization: running statistics are those of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_rotor.pipeline.batch_statistics import BatchStatistics


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("sizes", [(4, 4), (5, 3, 1), (6,)])
def test_statistics_of_micro_batches_of_any_size_are_those_of_the_batch(
    sizes: tuple[int, ...], momentum: float | None
) -> None:
    torch.manual_seed(0)
    whole, parts = nn.BatchNorm2d(3, momentum=momentum), nn.BatchNorm2d(3, momentum=momentum)
    statistics = BatchStatistics([parts, nn.Linear(2, 2), parts])
    for _ in range(2):
        batch = torch.randn(sum(sizes), 3, 2, 2) * 3 + 1
        whole(batch)
        for place, rows in enumerate(batch.split(list(sizes))):
            with statistics.micro_batch(last=place == len(sizes) - 1):
                parts(rows)
        torch.testing.assert_close(parts.running_mean, whole.running_mean)
        torch.testing.assert_close(parts.running_var, whole.running_var)
        assert parts.num_batches_tracked == whole.num_batches_tracked
    assert parts.momentum == momentum
    assert not parts._forward_pre_hooks


def test_layers_in_evaluation_or_without_statistics_are_left_alone() -> None:
    evaluated, plain = nn.BatchNorm1d(2).eval(), nn.BatchNorm1d(2, track_running_stats=False)
    statistics = BatchStatistics([evaluated, plain])
    with statistics.micro_batch(last=True):
        evaluated(torch.ones(3, 2))
        plain(torch.randn(3, 2))
    assert torch.equal(evaluated.running_mean, torch.zeros(2))
    assert plain.momentum == 0.1


def test_a_forward_that_fails_puts_the_momentum_back() -> None:
    layer = nn.BatchNorm1d(2)
    with pytest.raises(RuntimeError, match="running_mean"), BatchStatistics([layer]).micro_batch(last=True):
        layer(torch.ones(4, 5))
    assert layer.momentum == 0.1
    assert not layer._forward_pre_hooks
