"""The stages of a joint graph as a chain that the planner reads."""

from __future__ import annotations

from lightning_rotor.chain import Chain
from lightning_rotor.compiling.graph_chain import chain_of
from lightning_rotor.compiling.joint_graph import Stages
from lightning_rotor.compiling.stage_options import options_of
from lightning_rotor.planning import minimum_budget
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from tests.compiling.joint_graphs import ROWS, WIDTH, looked_at, perceptron

ACTIVATION_BYTES = ROWS * WIDTH * 4
WEIGHT_BYTES = WIDTH * WIDTH * 4


def chain(stages: Stages) -> Chain:
    return chain_of(stages, options_of(stages))


def test_boundaries_and_gradients_have_the_bytes_of_their_tensors() -> None:
    found = looked_at(perceptron(), chain)
    first, activation, *_, last = found.stages
    assert [stage.output_bytes for stage in found] == [ACTIVATION_BYTES] * 6
    assert first.keep.input_gradient_bytes == 0  # the input of the graph wants none
    assert activation.keep.input_gradient_bytes == ACTIVATION_BYTES
    assert [stage.keep.saved_input_bytes for stage in found] == [0] + [ACTIVATION_BYTES] * 5
    assert last.keep.saved_output_bytes == 0  # it is the caller's
    # Of weights and biases, whichever stage's backward they are counted in.
    gradient_bytes = sum(stage.keep.parameter_gradient_bytes for stage in found)
    assert gradient_bytes == 3 * (WEIGHT_BYTES + WIDTH * 4)


def test_products_take_more_seconds_than_what_is_made_where_it_is_read() -> None:
    _, activation, linear, *_ = looked_at(perceptron(), chain).stages
    assert linear.keep.forward_seconds > activation.keep.forward_seconds > 0
    assert linear.keep.backward_seconds > linear.keep.forward_seconds  # a product each for weight and input


def test_it_can_be_planned_for_less_than_it_takes() -> None:
    found = looked_at(perceptron(8), chain)
    plain = simulate(found, Schedule.keep_all(len(found)))
    least = minimum_budget(found)
    assert least.recomputed
    assert least.peak_bytes < plain.peak_bytes
