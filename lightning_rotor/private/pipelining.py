"""Releases of ``torch.distributed.pipelining``."""

from functools import cache


@cache
def sent_outputs_linger() -> bool:
    """True if torch's schedules hold on to sent outputs: up to torch 2.14. From 2.15 on they tell the stage."""
    from torch.distributed.pipelining import PipelineStage

    return not hasattr(PipelineStage, "release_fwd_send_outputs")
