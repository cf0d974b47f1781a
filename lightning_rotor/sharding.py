"""Modules whose parameters are spread over processes and come together for a moment around each forward and backward."""

from __future__ import annotations

import sys

from torch import nn


def sharded_units(module: nn.Module) -> list[str]:
    """Names of the FSDP units below a module: what ``fully_shard`` was called on, or FSDP's wrappers.

    The module itself does not count: what happens around its forward is no part of it.
    """
    # Without either of them having been imported there are none, and importing takes a second.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(
        kind for name in ("FSDPModule", "FullyShardedDataParallel") if (kind := getattr(fsdp, name, None)) is not None
    )
    return [name for name, each in module.named_modules() if name and kinds and isinstance(each, kinds)]
