"""Costs of pipeline stages on their devices: what the judge of pipelines and the planner of partitions count with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class MicroBatchLoad:
    """Costs of one micro-batch in one pipeline stage.

    Attributes:
        forward_seconds: Of its forward.
        backward_seconds: Of its backward, recomputation included.
        recompute_seconds: The part of these that is recomputation.
        held_bytes: Between forward and backward.
        forward_peak_bytes: Most in the forward, beyond what was there before it.
        backward_peak_bytes: Most in the backward, beyond the other micro-batches and gradients of parameters.
        first_backward_peak_bytes: Most in the first backward of a step, in which gradients of parameters appear.
    """

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float = 0.0
    held_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    first_backward_peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PipelineStageLoad:
    """Costs of one pipeline stage on its device.

    Attributes:
        micro_batch: Of a usual micro-batch.
        last: Of the last micro-batch, if it is another.
        static_bytes: Always there.
        gradient_bytes: Of parameters.
        send_forward_seconds: Travel time of the output to the stage behind.
        send_backward_seconds: Travel time of the input's gradient to the stage before.
        output_bytes: Part of ``held_bytes`` that is sent, or the output of the whole.
        input_gradient_bytes: Of a micro-batch.
    """

    micro_batch: MicroBatchLoad
    last: MicroBatchLoad | None = None
    static_bytes: int = 0
    gradient_bytes: int = 0
    send_forward_seconds: float = 0.0
    send_backward_seconds: float = 0.0
    output_bytes: int = 0
    input_gradient_bytes: int = 0

    @property
    def both(self) -> tuple[MicroBatchLoad, MicroBatchLoad]:
        """Loads of usual micro-batches, and of the last one."""
        return self.micro_batch, self.last or self.micro_batch


Loads: TypeAlias = Sequence[PipelineStageLoad] | Mapping[int, PipelineStageLoad]
"""By pipeline stage."""


def seconds_of(load: PipelineStageLoad) -> tuple[float, ...]:
    """Seconds of the forward of a usual micro-batch, of the last one, and of its message; then of the backward."""
    # Six numbers in a row, so that a simulator of many cuts reads loads into one array.
    usual, last = load.both
    forward = usual.forward_seconds, last.forward_seconds, load.send_forward_seconds
    backward = usual.backward_seconds, last.backward_seconds, load.send_backward_seconds
    return *forward, *backward
