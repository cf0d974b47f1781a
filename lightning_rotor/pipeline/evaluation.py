"""A module as pipeline stages in evaluation, where its code may go another way than in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_rotor.cutting import SequentialCut, sequentialize
from lightning_rotor.errors import ModelError
from lightning_rotor.pipeline.ownership import Ownership
from lightning_rotor.pipeline.parts import PartPlan
from lightning_rotor.pipeline_schedule import PipelineError
from lightning_rotor.planning.partition import Partition
from lightning_rotor.private.pytree import tree_flatten, tree_unflatten
from lightning_rotor.profiling import Profile
from lightning_rotor.sequential import Stage
from lightning_rotor.tracing import GraphCut


def evaluation_cut(
    module: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    training: SequentialCut | GraphCut,
    profile: Profile,
    made: Partition,
    ownership: Ownership,
) -> tuple[SequentialCut | GraphCut, list[PartPlan] | None]:
    """The module as stages in evaluation, where its code may go another way, and which of them belong to which part; None: as in training."""
    if isinstance(training, SequentialCut):
        return training, None
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    # What layers before it make requires no gradients then.
    leaves, spec = tree_flatten(call)
    args, kwargs = tree_unflatten([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
    try:
        with torch.no_grad():
            cut = sequentialize(module, args, kwargs)
    except ModelError as error:
        raise PipelineError(f"{type(module).__name__} can be cut in training, but not in evaluation: {error}") from None
    finally:
        for each, mode in modes:
            each.training = mode
    return cut, _shared_out(cut.stages, profile, made, ownership)


def _shared_out(stages: Sequence[Stage], profile: Profile, made: Partition, ownership: Ownership) -> list[PartPlan]:
    """Stages where their weights are; those without weights where they are in training, or else as soon as their input is there."""
    owned = [_owners(stage, ownership) for stage in stages]
    by_name = {
        stage.name: number
        for number, choice in enumerate(made.choices)
        for stage in profile.stages[choice.first : choice.last + 1]
    }
    at, numbers = 0, []
    for place, (stage, owners) in enumerate(zip(stages, owned, strict=True)):
        if len(owners) > 1 or (owners and min(owners) < at):
            raise PipelineError(
                f"in evaluation the model runs {stage.name!r} together with what other pipeline stages hold: expected code that does the same in "
                "training and in evaluation but for its layers (nn.Dropout, not a branch on self.training), or another balance=[...]"
            )
        if not owners:
            behind = min((number for later in owned[place:] for number in later), default=len(made.choices) - 1)
            owners = {min(by_name.get(stage.name, at), behind)}
        at = max([at, *owners])
        numbers.append(at)
    missing = sorted(set(range(len(made.choices))) - set(numbers))
    if missing:
        raise PipelineError(
            f"in evaluation nothing is left for pipeline stages {missing}: expected a balance in which every stage has weights, such as "
            "one with fewer, larger stages"
        )
    firsts = [numbers.index(number) for number in range(len(made.choices))]
    return [
        PartPlan(first, (firsts[number + 1] if number + 1 < len(firsts) else len(stages)) - 1, None)
        for number, first in enumerate(firsts)
    ]


def _owners(stage: Stage, ownership: Ownership) -> set[int]:
    """Pipeline stages that hold its weights."""
    buffers = [b for _, module in stage.submodules() for b in module._buffers.values() if b is not None]
    return {owner for tensor in (*stage.parameters(), *buffers) if (owner := ownership.stage_of(tensor)) is not None}
