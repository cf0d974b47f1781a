"""Warnings about a chain that was measured: what a plan for it cannot do, and what is no longer as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from lightning_rotor.capture.sequentialize import NO_CHECKPOINTS
from lightning_rotor.chain import StageCost
from lightning_rotor.private.autocast import autocast_enabled
from lightning_rotor.profiling.stage_behaviour import Behaviour
from lightning_rotor.stages.sequential import Stage

WORTH_MENTIONING_BYTES = 1024
"""More than the 8 bytes for a Python number (``x * 2``) that stays with the graph."""

_log = logging.getLogger(__name__)


def stage_complaints(costs: Iterable[StageCost], behaviours: Sequence[Behaviour]) -> Iterator[str]:
    """Warnings about single stages."""
    checkpointing = []
    for cost, behaviour in zip(costs, behaviours, strict=True):
        if behaviour.calls_checkpoint:
            checkpointing.append(cost.name)
        if cost.not_inverted:
            _log.info("%r is not inverted: %s", cost.name, cost.not_inverted)
        if not cost.recomputable:
            yield (
                f"stage {cost.name!r} gives other bits when it runs again, so it is kept and never recomputed. "
                "Typical reasons are state outside of buffers, spectral_norm, parameters that the forward itself "
                "changes (an embedding's max_norm), RReLU, jagged tensors, scripted modules, operations in place "
                "on the chain's input. "
                "State in an iterator, a generator, a queue or a file cannot be put back: measuring has moved it on, "
                "so training is not what it was. Keep it in attributes, buffers or random generators"
            )
        # A stage that leaves tensors where user code can reach them does so because the user wants them.
        if cost.pinned_bytes >= WORTH_MENTIONING_BYTES and not behaviour.leaves_traces:
            yield (
                f"stage {cost.name!r} keeps {cost.pinned_bytes} bytes in its graph that no checkpoint can free "
                "(tensors stored on an autograd context rather than saved by save_for_backward); the plan counts them"
            )
    if checkpointing:
        yield f"{', '.join(map(repr, checkpointing))}: each is one stage. {NO_CHECKPOINTS}"


def structure_complaints(layers: int, merged_stages: Sequence[Stage]) -> Iterator[str]:
    """Warnings about all stages together, which were ``layers`` before some were merged."""
    # One layer is no reason to complain: there was nothing to cut from the start.
    if len(merged_stages) == 1 < layers:
        yield (
            f"all {layers} layers were merged into one stage, so there is nothing to plan: the last of them change in "
            "place, or show as views, what the first has made. Use operations that are not in place"
        )
    # Autocast's cache holds every cast weight until the forward is over (4.4 MB where 2.8 were enough), so the executor
    # switches it off.
    parameters = [parameter for stage in merged_stages for parameter in stage.parameters()]
    if len(parameters) > len(set(parameters)) and autocast_enabled():
        yield (
            "stages share parameters under autocast. Without this package a shared weight is cast once and its "
            "gradients are summed in the lower precision; here each stage casts it for itself and they are summed in "
            "full, so the results differ in the last bits"
        )
