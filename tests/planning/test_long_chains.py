"""A thousand layers run, and segments nested as deeply as a chain is long."""

from __future__ import annotations

import copy
import pickle
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_rotor import Chain, Leaf, Schedule, Segment, profile_chain, sequential_stages, simulate
from lightning_rotor.execution.executor import Executor
from tests.grids import few
from tests.imported_python import ImportedPython
from tests.strategies import random_chain

STAGES = 1000


@cache
def chain() -> Chain:
    return random_chain(random.Random(1), STAGES, "cnn", grain=4099)


def nested(stages: int, depth: int) -> Schedule:
    """``((((0) 1) 2) 3) 4 5``: so many segments inside one another."""
    item = Segment((Leaf(0),))
    for stage in range(1, depth):
        item = Segment((item, Leaf(stage)))
    return Schedule((item, *(Leaf(stage) for stage in range(depth, stages))))


def test_schedules_as_deep_as_the_chain_are_long_are_values() -> None:
    deep = nested(STAGES, STAGES - 1)
    assert deep.depth == deep.segments == STAGES - 1
    assert deep == nested(STAGES, STAGES - 1)
    assert hash(deep) == hash(nested(STAGES, STAGES - 1))
    assert deep != nested(STAGES, STAGES - 2)
    assert Schedule.parse(str(deep)) == deep
    assert eval(repr(deep)) == deep
    assert pickle.loads(pickle.dumps(deep)) == deep == copy.deepcopy(deep)
    assert pickle.loads(pickle.dumps(deep.items[0])) == deep.items[0]
    assert deep.recomputed == tuple(range(STAGES - 1))


def test_deep_schedules_are_simulated_in_a_process_that_has_done_nothing_else(imported_python: ImportedPython) -> None:
    script = (
        f"import sys; sys.path[:0] = {[str(each) for each in (Path(__file__).parent, Path(__file__).parents[2])]}\n"
        "import random\n"
        "from benchmarks.random_chains import random_chain\n"
        "from test_long_chains import nested, simulate\n"
        'print(simulate(random_chain(random.Random(1), 400, "cnn"), nested(400, 399)).peak_bytes)'
    )
    assert (
        int(imported_python.run(script))
        == simulate(random_chain(random.Random(1), 400, "cnn"), nested(400, 399)).peak_bytes
    )


@pytest.mark.parametrize("depth", few([4, 40], 40))
def test_a_thousand_layers_run_under_a_schedule_with_the_same_bits(depth: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(2, 2) if number % 2 else nn.Tanh() for number in range(STAGES)))
    sample = torch.randn(3, 2)
    profile = profile_chain(sequential_stages(net), sample, repeats=1)
    assert len(profile.chain) == STAGES
    executor = Executor(profile.stages, profile.chain, nested(STAGES, depth), profile.states)
    assert torch.equal(executor(sample), net(sample))
    gradients = []
    for forward in (net, executor):
        net.zero_grad()
        forward(sample).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in net.parameters()])
    assert all(map(torch.equal, *gradients))
