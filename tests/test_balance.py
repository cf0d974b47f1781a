"""Balances of chains and modules by one number per stage, against every way to cut."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
from torch import nn

from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.errors import PipelineError, SampleError
from lightning_rotor.pipeline.balances import balance_by_size, balance_by_time
from lightning_rotor.pipeline.partition import partition
from lightning_rotor.pipeline.partition.solve import check_balance, counted_in_stages
from lightning_rotor.profiling import profile_chain
from lightning_rotor.stages.sequential import sequential_stages
from tests.strategies import random_chain


def largest(values, balance):
    ends = list(itertools.accumulate(balance))
    return max(sum(values[end - count : end]) for end, count in zip(ends, balance, strict=True))


def all_balances(n, parts):
    for middle in itertools.combinations(range(1, n), parts - 1):
        yield [right - left for left, right in itertools.pairwise((0, *middle, n))]


@pytest.mark.parametrize("seed", range(10))
def test_no_other_balance_has_a_smaller_largest_part(seed):
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(1, 9), "heterogeneous")
    seconds = [stage.keep.forward_seconds + stage.keep.backward_seconds for stage in chain]
    sizes = [stage.keep.saved_bytes + stage.output_bytes + 4 * stage.keep.parameter_gradient_bytes for stage in chain]
    for parts in range(1, len(chain) + 1):
        by_time = balance_by_time(chain, partitions=parts)
        by_size = balance_by_size(chain, partitions=parts, param_scale=4)
        for values, found in ((seconds, by_time), (sizes, by_size)):
            assert check_balance(found, chain.names, parts) == tuple(found)
            assert largest(values, found) == pytest.approx(
                min(largest(values, each) for each in all_balances(len(chain), parts))
            )


@pytest.mark.parametrize(
    ("balance", "expected"),
    [([1, 1, 1, 1], [2, 2, 1, 2]), ([2, 2], [4, 3]), ([4, 3], [4, 3]), ([3, 3], [3, 3]), ([1, 1.0], [1, 1.0])],
)
def test_children_can_be_counted_instead_of_stages(balance, expected):
    names = ["0.0", "0.1", "1.0", "1.1", "2.0 … 2.1", "3.0", "3.1"]
    assert counted_in_stages(balance, names, ["0", "1", "2", "3"], len(balance)) == expected


def test_children_that_run_as_one_stage_cannot_be_cut_apart():
    names = ["0", "1 … 2", "3"]
    assert counted_in_stages([1, 3], names, ["0", "1", "2", "3"], 2) == [1, 2]
    with pytest.raises(PipelineError, match=r"cuts between the children '1' and '2', which run as one .* '1 … 2'"):
        counted_in_stages([2, 2], names, ["0", "1", "2", "3"], 2)


@pytest.mark.parametrize(
    ("balance", "parts", "example"),
    [([1, 1, 2], 2, r"such as balance=\[2, 2\]\. "), ([4], 3, "balance="), ([4], 5, r"children\. ")],
)
def test_a_balance_for_another_number_of_devices_is_shown_as_it_was_written(balance, parts, example):
    names = [f"{number}.{part}" for number in range(4) for part in range(2)]
    expected = rf"balance={re.escape(str(balance))} is for {len(balance)} pipeline stages, and there are {parts}: .*{example}.*are 0, 1, 2, 3"
    with pytest.raises(PipelineError, match=expected):
        counted_in_stages(balance, names, ["0", "1", "2", "3"], parts)


def test_a_module_is_measured_first():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(3)] + [nn.Linear(8, 4096), nn.Linear(4096, 8)]
    module = nn.Sequential(*layers)
    found = balance_by_size(module, torch.randn(4, 8), partitions=2)
    assert found == [4, 1] or found == [3, 2]
    assert sum(balance_by_time(module, torch.randn(4, 8), partitions=3)) == 5


def test_what_comes_out_can_be_used_for_a_partition():
    chain = random_chain(random.Random(0), 9, "cnn")
    found = balance_by_time(chain, partitions=3)
    assert partition(chain, 3, micro_batches=4, balance=found).balance == tuple(found)


@pytest.mark.parametrize("partitions", [0, 10, -1, 2.0, True])
def test_a_number_of_partitions_that_cannot_be_is_refused(partitions):
    with pytest.raises(
        PipelineError, match="the chain has 9 stages: expected an integer from 1 to 9, such as partitions=9"
    ):
        balance_by_time(random_chain(random.Random(0), 9, "cnn"), partitions=partitions)


def test_bad_arguments_are_refused():
    chain = random_chain(random.Random(0), 3, "cnn")
    with pytest.raises(PipelineError, match="param_scale is -1: expected a number that is not negative"):
        balance_by_size(chain, partitions=2, param_scale=-1)
    with pytest.raises(SampleError, match="the sample is missing"):
        balance_by_time(nn.Sequential(nn.ReLU(), nn.ReLU()), partitions=2)


@pytest.mark.parametrize("sample", [{}, [], 3, "text", (3,)])
def test_a_sample_without_a_tensor_is_refused(sample):
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    for module in (net, Scaled()):
        with pytest.raises(SampleError, match="holds no tensor"):
            balance_by_time(module, sample, partitions=2)
    with pytest.raises(SampleError, match="holds no tensor"):
        profile_chain(sequential_stages(net), sample)
    with pytest.raises(SampleError, match="holds no tensor"):
        sequentialize(Scaled(), (sample,))


class Scaled(nn.Module):
    """Needs no tensor."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))

    def forward(self, scale):
        return self.layers(torch.ones(3, 2) * scale)
