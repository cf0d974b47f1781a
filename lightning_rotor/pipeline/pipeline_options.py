"""Settings of a pipeline, checked when they are made."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.partition import RecomputeMode
from lightning_rotor.pipeline.partition.problem import check_recompute
from lightning_rotor.pipeline.pipeline_schedule import PipelineScheduleName, check_numbers

# Arguments of torchgpipe's GPipe, of torch.distributed.pipelining and of DDP, and what stands for them here.
_ELSEWHERE = {
    "chunks": "micro_batches, the parts of a batch",
    "n_microbatches": "micro_batches, the parts of a batch",
    "devices": "one process for each device (Trainer(devices=4), or torchrun --nproc-per-node=4)",
    "num_stages": "as many stages as there are devices, or pipeline_stages of RotorPipelineStrategy",
    "checkpoint": 'recompute: "rotor", "always", "except_last" or "never"',
    "find_unused_parameters": "nothing in its place, since gradients are not averaged by DDP here",
    "static_graph": "nothing in its place, since gradients are not averaged by DDP here",
    "gradient_as_bucket_view": "nothing in its place, since gradients are not averaged by DDP here",
}


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """``PipelineError`` for an option that there is not: says what is meant, or which ones there are."""
    known = sorted(known)
    for name in given:
        if name in known:
            continue
        expected = f"one of {', '.join(known)}"
        close = get_close_matches(name, known, n=1)
        if close:
            expected = close[0]
        raise PipelineError(f"a pipeline has no option {name!r}: expected {_ELSEWHERE.get(name, expected)}")


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
