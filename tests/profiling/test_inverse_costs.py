"""Which stages with an inverse may be inverted in their chain, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.execution.inversion import Way
from lightning_rotor.invertible.layers import AdditiveCoupling
from lightning_rotor.profiling.inverse_costs import with_inverse
from lightning_rotor.profiling.stage_ends import StageEnds
from lightning_rotor.profiling.stage_profiler import StageMeasurement, StageProfiler
from lightning_rotor.profiling.stage_seconds import measure
from tests.profiling.stage_runs import SIZE, profiler_of


def coupling() -> AdditiveCoupling:
    return AdditiveCoupling(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)))


def inverted(profiler: StageProfiler) -> StageProfiler:
    return replace(profiler, way=Way(profiler.stage, fused=False, draws_random=False, known_state=profiler.state))


def measured(profiler: StageProfiler, **changes: Any) -> StageMeasurement:
    measurement = measure(profiler)
    measurement = replace(measurement, cost=replace(measurement.cost, **changes))
    return with_inverse(inverted(profiler), measurement)


def test_an_inverted_stage_saves_its_output_alone() -> None:
    cost = measured(profiler_of(coupling())).cost
    keep, invert = cost.options
    assert (invert.name, invert.inverts, invert.fused, cost.not_inverted) == ("invert", True, False, "")
    assert (invert.saved_input_bytes, invert.saved_output_bytes) == (0, SIZE)
    assert invert.saved_bytes < 64  # no activation
    assert keep.saved_bytes + keep.saved_input_bytes > 0
    assert invert.forward_seconds == invert.replay_seconds == keep.forward_seconds
    assert invert.backward_seconds >= keep.backward_seconds
    # The rebuilt input stays where the stage before has saved it.
    assert invert.backward_held_peak_bytes >= invert.backward_peak_bytes
    assert cost.discard_peak_bytes == max(option.discard_peak_bytes or 0 for option in cost.options)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ends": StageEnds((0,), (0,), (None,), (True,), SIZE, (0,))}, "its input is the caller's"),
        ({"ends": StageEnds((0,), (None,), (0,), (False,), 0, (SIZE,))}, "its output is read by more than the next"),
        ({"recomputable": False}, "it gives other bits when it runs again"),
    ],
    ids=["input", "output", "bits"],
)
def test_a_stage_whose_place_forbids_it_is_not_inverted(changes: dict[str, Any], reason: str) -> None:
    cost = measured(profiler_of(coupling(), **changes)).cost
    assert len(cost.options) == 1
    assert cost.not_inverted.startswith(reason)


def test_an_input_that_is_a_slice_or_does_not_learn_is_not_rebuilt() -> None:
    sliced = torch.randn(64, 128, requires_grad=True)[:, :64]
    profiler = profiler_of(coupling(), sliced)
    cost = measured(profiler).cost
    assert cost.not_inverted == "its input is a part of something larger"
    cost = measured(profiler_of(coupling(), torch.randn(64, 64))).cost
    assert cost.not_inverted == "nothing before it learns"


def test_pinned_memory_is_in_the_way() -> None:
    cost = measured(profiler_of(coupling()), pinned_bytes=4096).cost
    assert cost.not_inverted == "it stores 4096 bytes on its graph, which nobody can drop"
