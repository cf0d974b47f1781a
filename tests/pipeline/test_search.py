"""The search for cuts against all cuts, where they are few."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from lightning_rotor.pipeline.partition.problem import PipelineDevice, Problem
from lightning_rotor.pipeline.partition.run_costs import Costs
from lightning_rotor.pipeline.partition.search import Search
from tests.strategies import random_chain


def seconds_of(problem: Problem, search: Search, cuts: tuple[int, ...]) -> float:
    choices = search.only(cuts)
    assert choices is not None
    return problem.simulator.step_seconds([choice.load for choice in choices])


@pytest.mark.parametrize("seed", range(3))
def test_no_cuts_are_faster_than_those_that_are_found(seed: int) -> None:
    chain = random_chain(random.Random(seed), 7, "cnn")
    devices = (PipelineDevice(speed=1.0), PipelineDevice(speed=2.0), PipelineDevice(speed=1.0))
    problem = Problem(chain, devices, 4)
    search = Search(Costs(problem))
    choices, bound = search.run()
    assert choices is not None
    found = problem.simulator.step_seconds([choice.load for choice in choices])
    every = [seconds_of(problem, search, (0, *rest)) for rest in combinations(range(1, 7), 2)]
    assert found == pytest.approx(min(every))
    assert bound <= found * (1 + 1e-9)


def test_cuts_that_do_not_fit_have_no_choices() -> None:
    chain = random_chain(random.Random(0), 6, "cnn")
    search = Search(Costs(Problem(chain, (PipelineDevice(1), PipelineDevice(1)), 2)))
    assert search.only((0, 3)) is None
    choices, _ = search.run()
    assert choices is None
