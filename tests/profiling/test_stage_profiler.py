"""Bytes of single stages, against those of the same layers run by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_rotor.errors import ModelError
from lightning_rotor.stages.generators import GeneratorStates
from tests.profiling.stage_runs import SIZE, profiler_of


class Shift(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Gate(nn.Module):
    """Its backward reads the input first, and takes most when it needs the input no more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1).repeat(8, 1, 1).sigmoid().sum(0) * x


@pytest.mark.parametrize(
    ("layer", "saved_input", "saved_output", "saved"),
    [
        (lambda: nn.Linear(64, 64), SIZE, 0, 0),
        (nn.Tanh, 0, SIZE, 0),
        (nn.GELU, SIZE, 0, 0),
        (lambda: nn.Sequential(nn.Tanh(), nn.GELU()), 0, 0, SIZE),
        (Shift, 0, 0, 0),
    ],
    ids=["Linear", "Tanh", "GELU", "Tanh, GELU", "Shift"],
)
def test_what_autograd_saves(layer: Callable[[], nn.Module], saved_input: int, saved_output: int, saved: int) -> None:
    option, _ = profiler_of(layer()).recorded_run(hold_input=False, hold_output=False)
    assert (option.saved_input_bytes, option.saved_output_bytes, option.saved_bytes) == (
        saved_input,
        saved_output,
        saved,
    )


def test_who_holds_the_input_keeps_it_alive_in_the_backward() -> None:
    option = profiler_of(Gate()).measure().cost.keep
    assert option.saved_input_bytes == SIZE
    assert option.backward_held_peak_bytes == option.backward_peak_bytes + SIZE


def test_the_last_stage_is_measured_with_its_output_held() -> None:
    plain = profiler_of(nn.Tanh()).measure().cost.keep
    last = profiler_of(nn.Tanh(), last=True).measure().cost.keep
    assert (plain.saved_output_bytes, last.saved_output_bytes) == (SIZE, SIZE)
    assert last.backward_peak_bytes >= plain.backward_peak_bytes


def test_a_stage_that_must_be_kept_is_not_run_as_a_segment() -> None:
    runs = []

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(torch.is_grad_enabled())
            return super().forward(x)

    cost = profiler_of(Counting(64, 64), recomputable=False).measure().cost
    kept = len(runs)
    assert not cost.recomputable
    runs.clear()
    assert profiler_of(Counting(64, 64)).measure().cost.recomputable
    assert len(runs) > kept


def test_backwards_that_add_to_gradients_are_measured_on_demand() -> None:
    layer = nn.Linear(64, 64)
    assert profiler_of(layer).measure().cost.keep.accumulating is not None
    assert profiler_of(layer, accumulating=False).measure().cost.keep.accumulating is None
    # Nothing is added where nothing learns.
    assert profiler_of(nn.Tanh()).measure().cost.keep.accumulating is None


def test_every_run_starts_from_the_same_random_numbers() -> None:
    masks = []

    class Noting(nn.Dropout):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            masks.append((output == 0).tolist())
            return output

    profiler = profiler_of(Noting(), generators=GeneratorStates(torch.device("cpu")))
    profiler.measure()
    assert len(masks) > 2
    assert all(mask == masks[0] for mask in masks)


def test_a_stage_that_overwrites_what_it_saved_is_refused() -> None:
    class Spoilt(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(x).mul_(2)

    with pytest.raises(ModelError, match=r"stage 'layer' changes a tensor in place .* changed by Mul"):
        profiler_of(Spoilt()).measure()
