"""The backward of one stage by itself: the gradients that it is given, those that it leaves, and what stays as it was."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

from lightning_rotor.profiling.gradient_layouts import Layout
from lightning_rotor.profiling.meters import CpuMeter
from lightning_rotor.profiling.stage_backward import StageBackward
from lightning_rotor.profiling.stage_ends import StageEnds
from lightning_rotor.stages.sequential import Stage

PLAIN = StageEnds((), (None,), (None,), (False,), 0, ())


def backward_of(
    layer: nn.Module, value: Any, *, ends: StageEnds = PLAIN, **changes: Any
) -> tuple[StageBackward, torch.Tensor]:
    output = layer(value)
    settings: dict[str, Any] = {"layouts": (), "elsewhere": {}, "shared": {}, "gradients_exist": False, **changes}
    return StageBackward(Stage("layer", (layer,)), ends, value, output, meter=CpuMeter(), **settings), output


def test_it_leaves_gradients_of_input_and_parameters_and_no_grad() -> None:
    layer, x = nn.Linear(8, 4), torch.ones(2, 8, requires_grad=True)
    backward, _ = backward_of(layer, x)
    gradients = backward.gradients()
    assert (gradients.link_bytes, gradients.parameters) == (64, (128, 16))
    assert gradients.layouts[~0].is_plain
    assert backward.seconds > 0
    assert x.grad is None
    assert layer.weight.grad is None


def test_it_holds_neither_input_nor_output() -> None:
    layer, x = nn.Dropout(0.5), torch.ones(2, 8, requires_grad=True) * 1
    backward, output = backward_of(layer, x)
    seen = weakref.ref(x), weakref.ref(output)
    del x, output
    gc.collect()
    assert [each() for each in seen] == [None, None]
    assert backward.gradients().link_bytes == 64


def test_a_stage_in_which_nothing_learns_has_no_backward() -> None:
    backward, _ = backward_of(nn.Tanh(), torch.ones(2, 8))
    assert backward.gradients().layouts == {}
    assert backward.seconds == 0.0


def test_gradients_that_are_added_to_others_are_freed_at_once() -> None:
    layer = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))

    def peak_bytes(*, gradients_exist: bool) -> int:
        x = torch.ones(1, 256, requires_grad=True)
        backward, _ = backward_of(layer, x, gradients_exist=gradients_exist)
        with CpuMeter().recording() as recording:
            backward.gradients()
        return recording.peak_bytes

    weight_bytes = layer[0].weight.nbytes
    assert 2 * weight_bytes <= peak_bytes(gradients_exist=False) < 3 * weight_bytes
    assert weight_bytes <= peak_bytes(gradients_exist=True) < 2 * weight_bytes
    assert not layer[0].weight._backward_hooks


def test_it_is_given_gradients_in_the_layouts_of_later_stages() -> None:
    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            strides.append((gradients[0].stride(), gradients[0].untyped_storage().nbytes()))
            return gradients[0]

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Looking.apply(x)

    strides: list[Any] = []
    sliced = Layout(torch.Size([2, 8]), (16, 1), 0, 128, torch.float32, torch.device("cpu"))
    for layouts in ((), ((~0, sliced),)):
        backward, _ = backward_of(Layer(), torch.ones(2, 8, requires_grad=True), layouts=layouts)
        gradients = backward.gradients()
        # It hands the layout on.
        assert gradients.layouts[~0].is_plain == (not layouts)
    assert strides == [((8, 1), 64), ((16, 1), 128)]


def test_gradients_of_skips_count_by_place() -> None:
    class Adding(nn.Module):
        def forward(self, values: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return values[0] * 2 + values[1]

    ends = StageEnds((5,), (None, 0), (None,), (False, True), 64, (0,))
    values = torch.ones(2, 8, requires_grad=True), torch.ones(2, 8, requires_grad=True)
    backward, _ = backward_of(Adding(), values, ends=ends)
    gradients = backward.gradients()
    # The skip's later reader has left a gradient, to which autograd adds this stage's.
    assert gradients.given_bytes == 64
    assert gradients.link_bytes == 64
    assert gradients.skip_bytes == {0: 64}
