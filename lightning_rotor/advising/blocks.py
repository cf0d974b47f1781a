"""The blocks of a model, each of which ``fully_shard`` makes a unit: layers of a transformer, bottlenecks of a ResNet.

FSDP2 says nothing of where units should be. People take the members of the container that most of the model is in, and
the rest of the model is one more unit; so do we.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from lightning_rotor.profiling.scan import merged
from lightning_rotor.stages.sequential import Stage

_CONTAINERS = (nn.ModuleList, nn.Sequential)
# A container with less of the parameters does not hold the blocks of a model.
_LEAST_SHARE = 0.5


class Blocks(NamedTuple):
    """Modules that are units, and how a user writes them: ``"model.layers"``."""

    containers: tuple[str, ...]
    modules: tuple[nn.Module, ...]


def blocks_of(model: nn.Module) -> Blocks | None:
    """The blocks of a model; None if at most half of its parameters are in containers of several modules."""
    total_bytes = _size_of([model])
    containers: list[str] = []
    members: list[nn.Module] = []
    for name, module in model.named_modules():
        # Outer ones come first, and what is in a unit is a part of it.
        if any(name.startswith(f"{outer}.") for outer in containers if outer):
            continue
        # The members of a model that is a container itself are looked at by their own.
        if not name and _holds_containers(module):
            continue
        if not isinstance(module, _CONTAINERS) or not _calls_no_members(module):
            continue
        # Activations and dropout have nothing that could be spread.
        with_parameters = [child for child in module.children() if _size_of([child])]
        if len(with_parameters) > 1:
            containers.append(name)
            members += with_parameters
    if not total_bytes or _size_of(members) < _LEAST_SHARE * total_bytes:
        return None
    return Blocks(tuple(containers), tuple(members))


def _holds_containers(module: nn.Module) -> bool:
    for below in module.modules():
        if below is not module and isinstance(below, _CONTAINERS):
            return True
    return False


def _calls_no_members(module: nn.Module) -> bool:
    """True if a container's members may be units."""
    # ``fully_shard`` works where a module is called, and nobody calls a ModuleList.
    return all(not isinstance(child, nn.ModuleList) for child in module.children())


def _size_of(modules: Sequence[nn.Module]) -> int:
    # Once each: tied parameters belong to several modules.
    parameters = {}
    for module in modules:
        for parameter in module.parameters():
            parameters[id(parameter)] = parameter.nbytes
    return sum(parameters.values())


def unit_of_each(stages: Sequence[Stage], blocks: Blocks) -> list[int | None]:
    """By stage, the number of the block that it is a part of, or None.

    A stage belongs to a block if it uses its parameters, or stands between stages that do.
    """
    unit_of_parameter = {}
    for number, module in enumerate(blocks.modules):
        unit_of_parameter.update(dict.fromkeys(map(id, module.parameters()), number))
    units: list[int | None] = [None] * len(stages)
    places: dict[int, list[int]] = {}
    for place, stage in enumerate(stages):
        used = set()
        for parameter in stage.parameters():
            unit = unit_of_parameter.get(id(parameter))
            if unit is not None:
                used.add(unit)
        # A stage that runs across two blocks is a part of neither.
        if len(used) == 1:
            places.setdefault(used.pop(), []).append(place)
    for number, at in places.items():
        # Stages without parameters, such as an addition, are in the block that they stand in.
        for place in range(at[0], at[-1] + 1):
            if units[place] is None:
                units[place] = number
    return units


def by_unit(blocks: Blocks) -> Callable[[Sequence[Stage]], Sequence[Stage]]:
    """Puts the stages of each block together, as planning does with modules that are units."""

    def together(stages: Sequence[Stage]) -> Sequence[Stage]:
        return merged(stages, _groups(unit_of_each(stages, blocks)))

    return together


def _groups(units: Sequence[int | None]) -> list[range]:
    """Runs of neighbours of one block; others alone."""
    groups: list[range] = []
    for place, unit in enumerate(units):
        if groups and unit is not None and units[place - 1] == unit:
            groups[-1] = range(groups[-1].start, place + 1)
        else:
            groups.append(range(place, place + 1))
    return groups
