"""From a module to a chain: an ``nn.Sequential`` of layers is cut between them, anything else along its graph.

An ``nn.Sequential`` of blocks is cut along its graph as well, so that a plan can choose inside the blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn

from lightning_rotor.capture.compiled_call import CompiledCut
from lightning_rotor.capture.graph_cut import GraphCut, cut_graph
from lightning_rotor.errors import ModelError, SampleError
from lightning_rotor.private.sharding import Unit, units_below
from lightning_rotor.private.torch_names import is_compiler_wrapper, module_inside, noticed_checkpoints
from lightning_rotor.private.values import require_tensors, tensors_in
from lightning_rotor.stages.sequential import Stage, sequential_members, sequential_stages
from lightning_rotor.stages.submodules import submodule_of

NO_CHECKPOINTS = (
    "It calls torch.utils.checkpoint by itself: expected no other recomputation than the plan's, which is "
    "faster within the same memory. Switch it off: model.gradient_checkpointing_disable() for Hugging Face's models, "
    "model.set_grad_checkpointing(False) for timm's, or call the layers directly"
)
"""Why a model that recomputes by itself cannot be planned, and the remedy."""
_NO_POINT = "there is no point between its operations where little is alive"
WAYS = {"sequential": "as an nn.Sequential", "graph": "as a graph", "compiled": "as it was compiled"}
"""The ways to a chain, as messages spell them."""


class SequentialCut:
    """The members of an ``nn.Sequential`` as stages, nested ones flattened. ``ModelError`` if it is none or empty."""

    way: ClassVar[str] = "sequential"
    inputs: ClassVar[tuple[str, ...]] = ()
    anew: ClassVar[str] = ""

    def __init__(self, module: nn.Module) -> None:
        self.reasons: Mapping[str, str] = {}
        self.module = module
        self.stages = sequential_stages(module)
        self._members = sequential_members(module)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The one input, unless a layer was replaced, or a container got hooks that the flat chain would never fire."""
        if len(args) != 1 or kwargs:
            # Raises Python's own error for a call that the forward does not take.
            inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs)
        (value,) = (*args, *kwargs.values())
        if not tensors_in(value) or sequential_members(self.module) != self._members:
            return None
        return value


Cut: TypeAlias = SequentialCut | GraphCut | CompiledCut
"""Stages of a module for a certain kind of call."""


def sequentialize(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    known: Sequence[Cut] = (),
    afresh: bool = False,
) -> SequentialCut | GraphCut:
    """Turn a module into a chain of stages. The module stays as it is.

    Args:
        module: Any module with a forward.
        args: Positional arguments of a call as in training. An ``nn.Sequential`` takes one, which may be a tuple.
        kwargs: Keyword arguments of that call.
        known: Earlier cuts of the module; one is returned if it holds for this call.
        afresh: Run the module as often as if there were none, as processes without them do that wait for it.
    Returns:
        The stages, what they take as input for a given call, and in ``way`` how they were found.
    Raises:
        ModelError: No way works; says why for each.
        SampleError: The call holds no tensor.
    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> sequentialize(net, (torch.ones(1, 2),)).way
        'sequential'
    """
    check_module(module)
    if not isinstance(args, (tuple, list)):
        raise SampleError(f"args is a {type(args).__name__}: expected a tuple of positional arguments, such as (x,)")
    require_tensors((args, kwargs))
    reasons: dict[str, str] = {}
    row: SequentialCut | None = None
    try:
        row = SequentialCut(module)
        blocks = [stage.name for stage in row.stages if _has_layers(stage)]
        # Nothing is gained by a recording where every stage is one layer, and its guards cost at every call.
        if not blocks:
            return row
        reasons["sequential"] = f"there are several layers in {blocks[0]!r}, between which a graph can be cut"
    except ModelError as error:
        if isinstance(module, nn.Sequential):
            reasons["sequential"] = str(error)
    # Torch's checkpoint sets hooks on saved tensors, which a recording would lose: it fails there, and names the cause.
    with noticed_checkpoints() as noticed:
        try:
            graphs = [earlier for earlier in known if isinstance(earlier, GraphCut)]
            cut = cut_graph(module, args, kwargs, known=graphs, afresh=afresh)
            stages_without_graph = 1 if row is None else max(1, len(row.stages))
            # Otherwise the row of blocks is as good, and holds for every call without guards.
            if len(cut.stages) > stages_without_graph:
                cut.reasons = reasons
                return cut
            stuck = ", ".join(map(repr, cut.opaque))
            why = f"most of it is in {stuck}, which cannot be recorded" if stuck else _NO_POINT
            reasons["graph"] = f"{why}, so it is {len(cut.stages)} stages. Name a submodule that is a chain of layers"
        except ModelError as error:
            reasons["graph"] = f"{error}. {NO_CHECKPOINTS}" if noticed else str(error)
    if row is not None:
        row.reasons = {"graph": reasons["graph"]}
        return row
    if len(reasons) == 1:
        raise ModelError(f"{type(module).__name__} cannot be planned: {reasons['graph']}")
    sentences = []
    for way, reason in reasons.items():
        words = WAYS[way]
        sentences.append(f"{words[0].upper()}{words[1:]}: {reason}")
    raise ModelError(f"{type(module).__name__} cannot be planned. {'. '.join(sentences)}")


def _has_layers(stage: Stage) -> bool:
    """True if a stage is more than one layer. Attention holds its projection, but runs as one function."""
    for module in stage.modules:
        if module._modules and not isinstance(module, nn.MultiheadAttention):
            return True
    return False


def check_module(module: nn.Module) -> None:
    """Raise ``ModelError`` if a module can be no chain, whatever its input: a single layer, or wrapped as a whole."""
    name = type(module).__name__
    if not isinstance(module, nn.Module):
        raise ModelError(f"module is a {name}: expected an nn.Module, such as an nn.Sequential of layers")
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"{name} was scripted or traced (torch.jit), which leaves no Python code to cut: expected the module as it "
            "was before, or one around it that has other layers, too"
        )
    if "_planned" in module.__dict__:
        raise ModelError(
            f"this {name} plans its module by itself: expected one of both, RotorCallback on the module without the "
            "Checkpointable around it, or a Checkpointable without RotorCallback"
        )
    wrapped = units_below(module, "FullyShardedDataParallel")
    if wrapped:
        raise ModelError(
            f"{name} holds modules that FullyShardedDataParallel wraps (the first is {wrapped[0]!r}), which gathers "
            "parameters in a way that cannot be measured or planned: expected units of fully_shard (FSDP2, "
            f"ModelParallelStrategy), or a module inside of one wrapper, such as {wrapped[0]!r}"
        )
    shared = []
    for unit in units_below(module):
        if Unit(submodule_of(module, unit)).shares_hooks:
            shared.append(unit)
    if shared:
        raise ModelError(
            f"{name} holds {shared[0]!r}, which fully_shard was given in a list, so that it gathers its parameters "
            "together with other modules, and cannot be recomputed alone: expected fully_shard for each of these "
            "modules, or a module to plan without them"
        )
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        sequential_stages(module)
    if is_compiler_wrapper(module):
        raise ModelError(
            f"{type(module_inside(module)).__name__} was compiled as a whole, which leaves nothing to cut: "
            "expected its blocks to be compiled instead (for block in net.blocks: block.compile()), "
            "Checkpointable(torch.compile(net)), which chooses among compiled code for the whole, or the module "
            "inside, ._orig_mod, which runs uncompiled under a plan"
        )
    if type(module).forward is nn.Module.forward and "forward" in vars(module):
        raise ModelError(
            f"{name} has a forward that was set on this object alone (self.forward = ...): expected it in the class, "
            "def forward(self, ...), since a plan takes its place on the object"
        )
    if type(module).forward is nn.Module.forward:
        raise ModelError(
            f"{name} has no forward, so it is no chain of layers: expected an nn.Sequential, or a module "
            "that calls its layers"
        )
    if type(module).__module__.startswith("torch.nn.modules.") and not module._modules:
        raise ModelError(
            f"{name} is a single layer, so there is nothing to cut: expected an nn.Sequential, or a module "
            "with several layers"
        )
