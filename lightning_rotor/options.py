"""How one stage runs. The profiler and the executor both call this, so that what was measured is what runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lightning_rotor.errors import InverseError
from lightning_rotor.inversion import Way
from lightning_rotor.sequential import Stage
from lightning_rotor.state import SegmentState


def run_stage(stage: Stage, value: Any, option: int = 0) -> Any:
    """Run a stage under one of its options: plainly under the first one, ``keep``, and else its variant.

    Autocast caches every weight that it casts until its context ends. That would pin a second copy of all weights during the
    forward, and let a recomputation save other tensors than the first pass did, so the cache lives for one stage only. A weight that
    is used twice within a stage is still cast once, as without this package.

    Raises:
        InverseError: A coupling of the stage cannot split its input.
    """
    try:
        return stage.variants[option - 1](value) if option else stage(value)
    except InverseError as error:  # modules know their type, not where they are
        raise error.located(stage.name) from error
    finally:
        forget_casts()


def way_of(stage: Stage, *, draws_random: bool, state: SegmentState) -> Way:
    """How a stage with an inverse runs if it is inverted.

    Args:
        stage: The stage.
        draws_random: Whether it reads random number generators.
        state: What recomputation must leave alone.
    """
    assert stage.invertible is not None
    return Way(
        stage.name,
        stage.invertible,
        partial(run_stage, stage),
        partial(_run_inverse, stage),
        draws_random=draws_random,
        state=state,
    )


def _run_inverse(stage: Stage, output: Any) -> Any:
    assert stage.inverse is not None
    try:
        return stage.inverse(output)
    finally:
        # What was cast without gradients must not serve the forward that follows.
        forget_casts()


def forget_casts() -> None:
    """Empty autocast's cache if it is in use."""
    if autocast_enabled() and torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


def autocast_enabled() -> bool:
    """Whether any autocast context is active."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
