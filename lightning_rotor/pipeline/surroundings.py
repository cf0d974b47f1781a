"""Random numbers of a pipeline, which do not depend on the number of devices.

In one process, dropout draws from one generator, stage after stage and micro-batch after micro-batch. The stages of a pipeline run at the same
time on several devices, each with a generator of its own. So each stage of the chain that may draw is given its own numbers, from nothing but
three integers::

    the step's seed  ──┐
    micro-batch k    ──┼──►  seed of the generator while stage i works on micro-batch k
    chain stage i    ──┘

The step's seed is made of the seed that torch was given (``seed_everything``) and the number of the step, so nothing is drawn that a run in one
process would not draw, and a run that is resumed goes on as it would have. Micro-batch ``k`` begins with the generator seeded by the first two.
A stage reads that seed off the generator itself, so that recomputation, which restores the generator, finds the same. What the model runs
outside of the chain has place ``-1``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from lightning_rotor.chain import Chain
from lightning_rotor.stages.sequential import Stage, Wiring
from lightning_rotor.stages.state import Settings

OUTSIDE = -1
"""The place of what runs outside of the chain."""
_MASK = (1 << 63) - 1


def mixed(seed: int, place: int) -> int:
    """A seed made of a seed and a number (the finalizer of SplitMix64, so that neighbours have nothing in common)."""
    value = (seed + (place + 2) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) & _MASK


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's generators under a seed, and as they were behind it."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None
    torch.default_generator.manual_seed(seed)
    if cuda:
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)


class _SeededStage(torch.nn.Module):
    """A way to run a stage, with random numbers of its own."""

    def __init__(self, way: Any, place: int) -> None:
        super().__init__()
        # Not a submodule: it is the user's, and stays where it is.
        self.__dict__["_way"] = way
        self._place = place

    def forward(self, value: Any) -> Any:
        with seeded(mixed(torch.initial_seed(), self._place)):
            return self.__dict__["_way"](value)


def with_seeds(stages: Sequence[Stage], chain: Chain) -> tuple[Stage, ...]:
    """Stages of a chain, those that may draw random numbers each with numbers of its own."""
    return tuple(
        replace(
            stage,
            modules=(_SeededStage(replace(stage, variants=()), place),),
            wiring=Wiring.of([stage.wiring.wire], stage.writes),
            variants=tuple(_SeededStage(variant, place) for variant in stage.variants),
        )
        if cost.draws_random
        else stage
        for place, (stage, cost) in enumerate(zip(stages, chain, strict=True))
    )


# ----------------------------------------------------------------------------------------------------
# What stands around a call and decides over its numbers, carried from the thread of user code to where the pipeline
# runs.


_KINDS = ("cpu", "cuda")


class Surroundings:
    """Settings of torch, and autocast, which is a thread's own, at the moment when it is made.

    Attributes:
        dtypes: What of them may decide over dtypes; can be a key.
    """

    __slots__ = ("_autocast", "_settings", "dtypes")

    def __init__(self) -> None:
        self._settings = Settings()
        self._autocast = tuple(map(_autocast, _KINDS))
        self.dtypes = torch.get_default_dtype(), self._autocast

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which they stand again."""
        with ExitStack() as stack:
            stack.enter_context(self._settings.restored())
            for kind, wanted in zip(_KINDS, self._autocast, strict=True):
                if wanted != _autocast(kind):
                    enabled, dtype, caches = wanted
                    stack.enter_context(torch.autocast(kind, dtype, enabled, caches))
            yield


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
