"""What differs between releases of :mod:`torch.distributed.pipelining` and no public function tells.

The pipeline itself uses no private name of it: its stage overrides what torch's schedules call (:class:`.MicroBatchStage`).
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def sent_outputs_linger() -> bool:
    """True if torch's schedules hold on to outputs whose sending is done: up to torch 2.14.

    From 2.15 on they tell the stage that a send is done, by a public method of this name, and drop what they hold. Nothing public says so.
    """
    if not torch.distributed.is_available():
        return True
    from torch.distributed.pipelining import PipelineStage

    return not hasattr(PipelineStage, "release_fwd_send_outputs")
