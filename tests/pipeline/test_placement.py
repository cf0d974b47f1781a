"""Bytes by place: what is outside of a module, what training keeps of tensors, and whose they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_rotor.errors import PipelineError
from lightning_rotor.memory.held import storage_bytes
from lightning_rotor.pipeline.partition.problem import SharedTensors
from lightning_rotor.pipeline.placement import (
    Placement,
    bytes_around,
    kept_bytes,
    outside,
    shared_tensors,
    tensors_of,
)
from lightning_rotor.pipeline.processes import PipelineProcesses
from lightning_rotor.stages.sequential import Stage


class Alone(PipelineProcesses):
    """Two processes of a pipeline, of which this is the first; nothing is sent."""

    rank = 0  # type: ignore[assignment]
    size = 2  # type: ignore[assignment]


def stages_of(*modules: nn.Module) -> list[list[Stage]]:
    return [[Stage(str(number), (module,))] for number, module in enumerate(modules)]


def test_tensors_are_parameters_and_buffers_once() -> None:
    norm = nn.BatchNorm1d(4)
    tensors = tensors_of(Stage("norm", (norm,)))
    assert set(map(id, tensors)) == {id(tensor) for tensor in (*norm.parameters(), *norm.buffers())}


def test_bytes_around_are_those_outside_with_their_gradients_and_the_batch() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    assert outside(model, model[0]) == [model[1].weight]
    assert kept_bytes([model[1].weight], 2.0) == 3 * 400
    assert kept_bytes([model[1].weight.detach()], 2.0) == 400
    assert bytes_around(model, model[0], torch.zeros(5), 2.0) == 3 * 400 + 400 + 20


def test_others_weights_take_no_memory_until_they_come_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    placement = Placement(model, model, stages_of(*model), Alone(torch.device("cpu")))
    own, others = model[0].weight, model[1].weight
    assert (placement.stages_of(own), placement.stages_of(others)) == ((0,), (1,))
    placement.give_up()
    assert model[0].weight is own
    assert model[1].weight.is_meta
    assert (model[1].weight.shape, others.numel()) == ((2, 2), 0)
    placement.restore(values=False)
    assert model[1].weight is others
    assert others.isnan().all()


def tied() -> nn.Sequential:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return nn.Sequential(first, second)


def test_a_parameter_of_two_stages_is_in_both() -> None:
    model = tied()
    placement = Placement(model, model, stages_of(*model), Alone(torch.device("cpu")))
    assert placement.stages_of(model[0].weight) == (0, 1)
    assert placement.stages_of(model[1].bias) == (1,)
    placement.give_up()
    assert model[1].weight is model[0].weight
    assert not model[1].weight.is_meta
    assert model[1].bias.is_meta


def test_tensors_of_several_stages_are_listed_with_what_they_take() -> None:
    model = tied()
    stages = [stage for stages in stages_of(*model) for stage in stages]
    (shared,) = shared_tensors(stages, lambda tensors: 3 * storage_bytes(tensors), block_bytes=512)
    assert shared == SharedTensors(stages=(0, 1), state_bytes=48, gradient_bytes=512, message_bytes=512)
    model.requires_grad_(False)
    (frozen,) = shared_tensors(stages, storage_bytes, block_bytes=1)
    assert frozen == SharedTensors(stages=(0, 1), state_bytes=16, gradient_bytes=0, message_bytes=0)


def test_a_parameter_inside_and_outside_of_the_pipeline_is_refused() -> None:
    model = tied()
    first = model[0]
    with pytest.raises(PipelineError, match=r"pipeline stage 0 shares the parameter '1\.weight' with what is outside"):
        Placement(model, first, stages_of(first), Alone(torch.device("cpu")))


def test_modules_inside_that_no_stage_calls_may_hold_a_stages_parameter() -> None:
    """As T5 has one embedding that it only ties others to."""
    model = tied()
    placement = Placement(model, model, stages_of(nn.Identity(), model[1]), Alone(torch.device("cpu")))
    placement.give_up()
    assert model[0].weight is model[1].weight
    assert model[0].weight.is_meta
