"""Least costs of stages against what any schedule takes of them."""

from __future__ import annotations

import random

import pytest

from lightning_rotor.planning.least_costs import least_stages
from lightning_rotor.schedule import Leaf, Schedule
from lightning_rotor.simulator import simulate
from tests.strategies import random_chain


@pytest.mark.parametrize("kind", ["cnn", "transformer", "odd", "options"])
def test_least_seconds_are_at_most_those_of_keeping_everything(kind: str) -> None:
    chain = random_chain(random.Random(4), 6, kind)
    stages = least_stages(chain, 10**9)
    least = sum(stage.first_seconds + stage.kept_seconds for stage in stages)
    kept = simulate(chain, Schedule(tuple(map(Leaf, range(len(chain))))))
    assert least <= kept.seconds * (1 + 1e-9)
    assert least > 0


def test_inputs_are_the_outputs_before_and_the_callers_is_not_counted() -> None:
    chain = random_chain(random.Random(4), 6, "cnn")
    stages = least_stages(chain, 1000)
    assert [stage.input_bytes for stage in stages] == [0, *(cost.output_bytes for cost in chain.stages[:-1])]
    assert stages[-1].ways[0].output_bytes == 0


def test_gradients_that_exist_leave_the_room_that_new_ones_take() -> None:
    chain = random_chain(random.Random(4), 6, "cnn")
    fresh = least_stages(chain, 10**6)
    exist = least_stages(chain, 10**6, gradients_exist=True)
    behind = sum(cost.keep.parameter_gradient_bytes for cost in chain.stages[1:])
    assert exist[0].room_bytes - fresh[0].room_bytes == behind
    assert exist[-1].room_bytes == fresh[-1].room_bytes


def test_what_lingers_takes_room_in_forwards_alone() -> None:
    chain = random_chain(random.Random(4), 6, "cnn")
    plain = least_stages(chain, 10**6)
    lingering = least_stages(chain, 10**6, lingering_bytes=123)
    assert [a.forward_room_bytes - b.forward_room_bytes for a, b in zip(plain, lingering, strict=True)] == [123] * 6
    assert [stage.room_bytes for stage in plain] == [stage.room_bytes for stage in lingering]
