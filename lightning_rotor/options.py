"""How one stage runs. The profiler and the executor both call this, so that what was measured is what runs."""

from __future__ import annotations

from typing import Any

import torch

from lightning_rotor.sequential import Stage

_AUTOCAST_DEVICES = ("cuda", "cpu")


def run_stage(stage: Stage, value: Any, option: int = 0) -> Any:
    """Run a stage under one of its options: plainly under the first one, ``keep``, and else its variant.

    Autocast caches every weight that it casts until its context ends. That would pin a second copy of all weights during the
    forward, and let a recomputation save other tensors than the first pass did, so the cache lives for one stage only. A weight that
    is used twice within a stage is still cast once, as without this package.
    """
    try:
        return stage.variants[option - 1](value) if option else stage(value)
    finally:
        if torch.is_autocast_cache_enabled() and autocast_enabled():
            torch.clear_autocast_cache()


def autocast_enabled() -> bool:
    """Whether any autocast context is active."""
    return any(torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES)
