"""A look at single stages: what they change, whether they draw, and whether they give the same bits again."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.errors import ModelError
from lightning_rotor.profiling.ranks import ALONE, Ranks
from lightning_rotor.profiling.stage_behaviour import Behaviour, Look, look_at, outputs_of
from lightning_rotor.profiling.stage_input import Boundary
from lightning_rotor.profiling.storages import Storage
from lightning_rotor.stages.sequential import Stage

CPU = torch.device("cpu")


def look(layer: nn.Module, value: Any = None, *, born: int = 0, ranks: Ranks = ALONE, is_first: bool = False) -> Look:
    boundary = Boundary.of(torch.randn(4, 8) if value is None else value)
    taken = [Storage(born, 128) for _ in boundary.leaves]
    stage = Stage("layer", (layer,))
    return look_at(stage, 1, boundary, taken, CPU, 1, is_first=is_first, ranks=ranks)


class Layer(nn.Module):
    """Does what it is told to."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))
        self.notes: list[int] = []

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def test_a_plain_layer_repeats_itself_and_changes_nothing() -> None:
    found = look(nn.Linear(8, 8))
    assert found.behaviour == Behaviour(False, True, False, False, (), ())
    assert not found.changed
    ((storage,),) = found.storages
    assert storage is not None
    assert (storage.born, storage.size_bytes) == (1, 128)


def test_layers_that_may_draw_are_known_without_drawing() -> None:
    assert look(nn.Dropout(0.0)).behaviour.draws_random
    assert look(nn.Dropout(0.5)).behaviour.drawn == ("torch's CPU generator",)
    assert set(look(Layer(lambda _, x: x * random.random())).behaviour.drawn) == {"Python's random"}
    assert not look(nn.Tanh()).behaviour.draws_random


def test_updated_buffers_and_written_parameters_are_noted_and_put_back() -> None:
    def count(layer: Any, x: torch.Tensor) -> torch.Tensor:
        layer.calls += 1
        layer.notes.append(1)
        with torch.no_grad():
            layer.weight.mul_(2)
        return x * layer.weight

    layer = Layer(count)
    found = look(layer)
    assert found.behaviour.updating == (layer,)
    assert found.behaviour.written == (layer.weight,)
    assert found.behaviour.leaves_traces
    # A parameter that the forward changes is not the same one for a recomputation.
    assert not found.behaviour.repeatable
    assert (float(layer.calls), layer.notes, float(layer.weight.detach()[0])) == (0.0, [], 1.0)


@pytest.mark.parametrize(
    ("function", "repeatable"),
    [
        (lambda _, x: x.tanh(), True),
        (lambda _, x: x * next(NUMBERS), False),
        (lambda _, x: nn.functional.rrelu(x, training=True), False),
    ],
    ids=["plain", "other bits", "late noise"],
)
def test_a_stage_that_gives_other_bits_is_not_repeatable(function: Any, repeatable: bool) -> None:
    assert look(Layer(function), torch.randn(4, 8, requires_grad=True)).behaviour.repeatable == repeatable


NUMBERS = iter(range(1, 1000))


def test_changes_in_place_are_followed_to_the_storage() -> None:
    found = look(nn.ReLU(inplace=True))
    assert len(found.changed) == 1
    assert found.behaviour.repeatable
    # What the caller of the chain holds is changed but once in training.
    assert not look(nn.ReLU(inplace=True), born=-1).behaviour.repeatable


def test_a_stage_that_does_not_repeat_itself_elsewhere_is_not_repeatable_here() -> None:
    class Together(Ranks):
        def any(self, is_so: bool) -> bool:
            return True

    assert not look(nn.Tanh(), ranks=Together()).behaviour.repeatable


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ModelError, match="stage 'layer' returns NoneType, which holds no tensor"):
        look(Layer(lambda _, x: None))
    with pytest.raises(ModelError, match=r"returns a tensor of layout torch\.sparse_coo"):
        look(Layer(lambda _, x: x.to_sparse()))
    changing = Layer(lambda _, values: values.pop())
    with pytest.raises(ModelError, match="stage 'layer' changes a container that the module is called with"):
        look(changing, [torch.randn(4, 8)], is_first=True)


def test_calls_of_checkpoint_are_noted_and_reentrant_ones_refused() -> None:
    def checkpointed(*, use_reentrant: bool) -> Layer:
        run = torch.utils.checkpoint.checkpoint
        return Layer(lambda layer, x: run(torch.tanh, x * layer.weight, use_reentrant=use_reentrant))

    assert look(checkpointed(use_reentrant=False)).behaviour.calls_checkpoint
    with pytest.raises(ModelError, match="stage 'layer' cannot be measured"):
        look(checkpointed(use_reentrant=True))


def test_behaviours_of_stages_in_a_row_add_up() -> None:
    plain = Behaviour(False, True, False, False, (), ())
    layer = nn.Linear(2, 2)
    other = Behaviour(True, False, True, True, (layer,), (layer.weight,), ("here",))
    assert Behaviour.of_all([plain, plain]) == plain
    assert Behaviour.of_all([plain, other]) == other


def test_a_run_for_outputs_leaves_everything_as_it_is() -> None:
    layer = nn.BatchNorm1d(8)
    (output,) = outputs_of(Stage("layer", (layer,)), Boundary.of(torch.randn(4, 8)))
    assert output.leaves[0].shape == (4, 8)
    assert output.leaves[0].grad_fn is None
    assert int(layer.num_batches_tracked) == 0
