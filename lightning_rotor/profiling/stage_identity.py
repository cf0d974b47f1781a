"""A key that tells stages apart which may cost different amounts.

Stages with equal keys are measured once: a network of 24 equal blocks is measured like one of two or three. So the key
has all that can change a cost and is known without a run. It may differ between stages that cost the same, which only
takes time. It must not be equal for stages that cost different amounts.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_rotor.capture.compiled import CompiledModules
from lightning_rotor.capture.copies import Copies
from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.private.torch_names import HOOKS, STRUCTURE, is_compiled
from lightning_rotor.stages.sequential import Stage


def stage_identity(
    stage: Stage,
    compiled: CompiledModules,
    *,
    with_numbers: bool = True,
) -> tuple[Any, ...]:
    """A key that is equal for stages that cost the same, by all that can be told without running them.

    ``with_numbers=False`` leaves out whole numbers in attributes, since layers often know their own number.
    """
    identity: list[Any] = _wires(stage)
    for module in stage.modules:
        # A slice of a graph is known by its operations. The modules that it calls follow below.
        if isinstance(module, GraphSlice):
            identity.append(module.identity)
    # One for all modules: what two of them share is shared in the key as well.
    copies = Copies()
    for name, module in stage.submodules():
        if not isinstance(module, GraphSlice):
            identity.append((name, *_module_identity(module, compiled, copies, with_numbers=with_numbers)))
    return tuple(identity)


def _wires(stage: Stage) -> list[Any]:
    """Values that the modules of a stage take and make, in the order of their first use in the stage."""
    # Not by their numbers in the whole chain, which differ between equal stages.
    numbers_by_wire = []
    for wire in (*stage.wiring.steps, stage.wiring.wire):
        numbers_by_wire += [wire.reads, wire.writes]
    places: dict[int, int] = {}
    for numbers in numbers_by_wire:
        for number in numbers:
            places.setdefault(number, len(places))
    return [tuple(places[number] for number in numbers) for numbers in numbers_by_wire]


def _module_identity(
    module: nn.Module,
    compiled: CompiledModules,
    copies: Copies,
    *,
    with_numbers: bool,
) -> tuple[Any, ...]:
    """Class, compiler, attributes, hooks and tensors of a module."""
    compiler, compilers_attributes = compiled.identity(module) if is_compiled(module) else (None, ())
    attributes = set()
    for key, value in module.__dict__.items():
        if key in STRUCTURE or key in compilers_attributes:
            continue
        if with_numbers or type(value) is not int:
            # Copies compare by what is in them, where users' objects would compare as they like.
            attributes.add((key, copies.of(value)))
    # By identity: what a hook costs nobody can tell.
    hooks = tuple(tuple(map(id, getattr(module, key).values())) for key in HOOKS)
    tensors = []
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            # Not their values, which change no cost.
            tensors.append((key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
    return type(module), compiler, frozenset(attributes), hooks, tuple(tensors)
