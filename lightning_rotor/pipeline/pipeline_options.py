"""Settings of a pipeline, checked when they are made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.partition import RecomputeMode
from lightning_rotor.pipeline.partition.problem import check_recompute
from lightning_rotor.pipeline.pipeline_schedule import PipelineScheduleName, check_numbers


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Settings of a pipeline.

    Attributes:
        micro_batches: Parts into which a batch is split.
        schedule: See ``pipeline_schedule``.
        recompute: See ``partition.Problem``.
        balance: ``"auto"``, or how many stages of the chain each pipeline stage gets.
        stages_per_device: More than one for ``"interleaved"`` only.
        deferred_batch_norm: Running statistics are updated once for each batch.
    """

    micro_batches: int = 8
    schedule: PipelineScheduleName = "1f1b"
    recompute: RecomputeMode = "rotor"
    balance: Literal["auto"] | Sequence[int] = "auto"
    stages_per_device: int = 1
    deferred_batch_norm: bool = False

    def __post_init__(self) -> None:
        # For one device and one stage: how many there are is not known before the processes are.
        check_numbers(self.schedule, 1, self.micro_batches, 1)
        check_recompute(self.recompute)
        # Numbers are checked against the chain's stages, once there is a chain.
        if isinstance(self.balance, str) and self.balance != "auto":
            raise PipelineError(f'balance is {self.balance!r}: expected "auto" or numbers such as [3, 4, 2]')
