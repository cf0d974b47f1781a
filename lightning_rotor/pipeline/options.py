"""How to pipeline, as users say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightning_rotor.pipeline_schedule import PipelineScheduleName
from lightning_rotor.planning.partition import RecomputeMode

Balance: TypeAlias = Literal["auto"] | Sequence[int]


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How to pipeline.

    Attributes:
        micro_batches: Into how many parts a batch is split.
        schedule: In which order devices work.
        recompute: See :class:`lightning_rotor.planning.partition.Problem`.
        balance: ``"auto"``, or how many stages of the chain each pipeline stage gets.
        stages_per_device: More than one for ``"interleaved"``.
        deferred_batch_norm: Running statistics of BatchNorm are updated once for each batch, as if it had not been split.
    """

    micro_batches: int = 8
    schedule: PipelineScheduleName = "1f1b"
    recompute: RecomputeMode = "rotor"
    balance: Balance = "auto"
    stages_per_device: int = 1
    deferred_batch_norm: bool = False
