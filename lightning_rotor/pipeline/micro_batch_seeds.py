"""Random numbers of micro-batches: the same on one device and on many, and again after a resumed run.

In one process, dropout draws from one generator in turn. The stages of a pipeline run at the same time on several
devices, each with a generator of its own. So each stage of the chain that may draw gets numbers from three integers::

    the step's seed  ──┐      made of ``seed_everything``'s seed and the step's number: a resumed run goes on alike
    micro-batch k    ──┼──►  seed of the generator while stage i works on micro-batch k
    chain stage i    ──┘      -1 for what runs outside of the chain

Micro-batch ``k`` begins with the generator seeded by the first two. A stage reads that seed off the generator itself,
so recomputation, which restores the generator, finds the same. Seeds draw nothing from the user's generators.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_rotor.chain import Chain
from lightning_rotor.stages.generators import seeded
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.wiring import Wiring

OUTSIDE = -1
"""The place of what runs outside of the chain."""

_64_BITS = (1 << 64) - 1


def mixed(seed: int, place: int) -> int:
    """Seed of 63 bits made of a seed and a number, by the finalizer of SplitMix64.

    Neighbouring numbers give seeds that have nothing in common. Sums would collide: of micro-batch 1 in stage 2 with
    micro-batch 2 in stage 1.
    """
    value = (seed + (place + 2) * 0x9E3779B97F4A7C15) & _64_BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _64_BITS
    # torch takes seeds as signed numbers.
    return (value ^ (value >> 31)) & (_64_BITS >> 1)


class _SeededStage(torch.nn.Module):
    """A stage that runs with random numbers of its own."""

    def __init__(self, way: Any, place: int) -> None:
        super().__init__()
        # Not a submodule: it is the user's, and stays where it is.
        self.__dict__["_way"] = way
        self._place = place

    def forward(self, value: Any) -> Any:
        with seeded(mixed(torch.initial_seed(), self._place), host=False):
            return self.__dict__["_way"](value)


def with_seeds(stages: Sequence[Stage], chain: Chain) -> tuple[Stage, ...]:
    """Stages of a chain; those that may draw random numbers get numbers of their own."""
    running = []
    for place, (stage, cost) in enumerate(zip(stages, chain, strict=True)):
        # A stage that draws nothing needs no seed, and setting one takes the host's time in every forward.
        running.append(_with_seed(stage, place) if cost.draws_random else stage)
    return tuple(running)


def _with_seed(stage: Stage, place: int) -> Stage:
    # The wrapper runs the user's modules with their own wiring; outside it is one function of the stage's values.
    seeded_stage = _SeededStage(replace(stage, variants=()), place)
    variants = [_SeededStage(variant, place) for variant in stage.variants]
    return replace(
        stage,
        modules=(seeded_stage,),
        wiring=Wiring.of([stage.wiring.wire], stage.writes),
        variants=tuple(variants),
    )
