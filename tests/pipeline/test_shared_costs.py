"""What weights that several stages share cost each device, without torch."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lightning_rotor.chain import Chain
from lightning_rotor.pipeline.partition import PipelineDevice, partition
from lightning_rotor.pipeline.partition.problem import Problem, SharedTensors
from lightning_rotor.pipeline.partition.run_costs import Costs
from lightning_rotor.pipeline.partition.sub_chains import sub_chain
from tests.strategies import random_chain

LENGTH, GRADIENT, STATE, MESSAGE = 6, 1000, 3000, 40
SHARED = SharedTensors(stages=(1, 4), state_bytes=STATE, gradient_bytes=GRADIENT, message_bytes=MESSAGE)


def chain() -> Chain:
    """Stages 1 and 4 share a weight, whose gradient appears in stage 4 and waits for that of stage 1."""
    made = random_chain(random.Random(2), LENGTH, "cnn")
    stages = list(made.stages)
    options = [
        replace(option, parameter_gradient_bytes=option.parameter_gradient_bytes + GRADIENT)
        for option in stages[4].options
    ]
    stages[4] = replace(stages[4], options=tuple(options))
    for number in (2, 3, 4):
        stages[number] = replace(stages[number], waiting_gradient_bytes=GRADIENT)
    return replace(made, stages=tuple(stages))


def costs(shared: tuple[SharedTensors, ...]) -> Costs:
    state_bytes = (0, STATE, 0, 0, STATE, 0)
    return Costs(Problem(chain(), (PipelineDevice(),) * 2, 4, state_bytes=state_bytes, shared=shared))


@pytest.mark.parametrize(
    ("first", "last", "state", "gradient"),
    [
        (0, 0, 0, 0),
        (0, 3, STATE + MESSAGE, GRADIENT),
        (2, 3, 0, 0),
        (4, 5, STATE + MESSAGE, GRADIENT),
        (1, 4, STATE, GRADIENT),
        (0, 5, STATE, GRADIENT),
    ],
)
def test_a_device_holds_one_copy_and_one_gradient(first: int, last: int, state: int, gradient: int) -> None:
    own = costs((SHARED,))
    assert own.state_bytes(first, last) == state
    others = sum(stage.keep.parameter_gradient_bytes for stage in chain().stages[first : last + 1])
    if first <= 4 <= last:
        others -= GRADIENT
    assert own.gradient_bytes(first, last) == others + gradient
    # As an array, in which the search asks for all runs with one end.
    firsts = np.arange(last + 1)
    assert own.fixed_bytes(firsts, last)[first] == own.fixed_bytes(first, last)


def test_without_shared_weights_nothing_changes() -> None:
    plain = costs(())
    assert plain.state_bytes(0, 5) == 2 * STATE
    assert sub_chain(chain(), 1, 3) == sub_chain(chain(), 1, 3, shared=())


def test_a_gradient_appears_and_waits_where_its_device_has_the_stages() -> None:
    def facts(first: int, last: int) -> tuple[list[int], list[int]]:
        part = sub_chain(chain(), first, last, shared=(SHARED,))
        own = [stage.keep.parameter_gradient_bytes for stage in part]
        before = [stage.keep.parameter_gradient_bytes for stage in chain().stages[first : last + 1]]
        appears = [new - old for new, old in zip(own, before, strict=True)]
        return appears, [stage.waiting_gradient_bytes for stage in part]

    # Without the last of the stages, the gradient is the first one's own; nothing waits for another device's.
    assert facts(0, 3) == ([0, GRADIENT, 0, 0], [0, 0, 0, 0])
    assert facts(2, 5) == ([0, 0, 0, 0], [0, 0, 0, 0])
    assert facts(1, 4) == ([0, 0, 0, 0], [0, GRADIENT, GRADIENT, GRADIENT])


def test_cuts_that_keep_a_weight_together_need_less_in_all() -> None:
    devices = [PipelineDevice(10**9)] * 2
    state_bytes = (0, STATE, 0, 0, STATE, 0)
    found = []
    for balance in ([1, 5], [3, 3]):
        cut = partition(chain(), devices, micro_batches=4, balance=balance, state_bytes=state_bytes, shared=(SHARED,))
        found.append(sum(choice.load.static_bytes for choice in cut.choices))
        received = 4 * 2 * sum(costs((SHARED,))._boundary_bytes[[balance[0]]])
        found[-1] -= int(received)
    assert found == [STATE, 2 * (STATE + MESSAGE)]
