"""A profiler of one stage without a chain around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_rotor.execution.segment_state import state_of
from lightning_rotor.profiling.meters import CpuMeter
from lightning_rotor.profiling.ranks import ALONE
from lightning_rotor.profiling.stage_ends import StageEnds
from lightning_rotor.profiling.stage_input import Boundary
from lightning_rotor.profiling.stage_profiler import StageProfiler
from lightning_rotor.stages.sequential import Stage

SIZE = 64 * 64 * 4


def profiler_of(layer: nn.Module, x: torch.Tensor | None = None, **changes: Any) -> StageProfiler:
    """Of a layer that takes and makes one tensor of ``SIZE`` bytes."""
    value = torch.randn(64, 64, requires_grad=True) if x is None else x
    stage = Stage("layer", (layer,))
    profiler = StageProfiler(
        stage,
        StageEnds((), (None,), (None,), (False,), SIZE, ()),
        state_of(stage, (), {}),
        last=False,
        recomputable=True,
        generators=None,
        meter=CpuMeter(),
        repeats=1,
        interlude=lambda: None,
        ranks=ALONE,
        accumulating=True,
        boundary=Boundary.of(value),
    )
    return replace(profiler, **changes)
