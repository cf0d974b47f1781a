"""From a module to a chain: an ``nn.Sequential`` of layers is cut between them, anything else along its graph.

An ``nn.Sequential`` of blocks is cut along its graph as well, so that a plan can choose inside the blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from lightning_rotor.capture.cuts import GraphCut, cut_graph
from lightning_rotor.errors import ModelError
from lightning_rotor.private.torch_names import is_compiler_wrapper, module_inside, noticed_checkpoints
from lightning_rotor.private.values import require_tensors
from lightning_rotor.stages.sequential import Stage, sequential_members, sequential_stages
from lightning_rotor.stages.sharding import Unit, units_below, wrapped_by_fsdp1

NO_CHECKPOINTS = (
    "It calls torch.utils.checkpoint by itself: expected no other recomputation than the plan's, which is faster within "
    "the same memory. Switch it off: model.gradient_checkpointing_disable() for Hugging Face's models, "
    "model.set_grad_checkpointing(False) for timm's, or call the layers directly"
)
"""Why not, and the remedy."""
_NO_POINT = "there is no point between its operations where little is alive"
WAYS = {"sequential": "as an nn.Sequential", "graph": "as a graph"}
"""How messages spell the ways to a chain."""


class SequentialCut:
    """The members of an ``nn.Sequential`` as stages, nested ones flattened.

    Attributes:
        way: How messages call this way to a chain.
        inputs: How messages call the values that the chain takes, by number.
        reasons: For each other way that was tried, why it was not taken.
        stages: One for each member.

    Raises:
        ModelError: It is none, or an empty one.
    """

    way: ClassVar[str] = "sequential"
    inputs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, module: nn.Module) -> None:
        self.reasons: Mapping[str, str] = {}
        self.module = module
        self.stages = sequential_stages(module)
        self._members = sequential_members(module)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The one input, unless a layer was replaced, or a container got hooks that the flat chain would never fire."""
        if len(args) != 1 or kwargs:
            inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs)
        (value,) = (*args, *kwargs.values())
        return value if sequential_members(self.module) == self._members else None


def sequentialize(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    known: Sequence[SequentialCut | GraphCut] = (),
) -> SequentialCut | GraphCut:
    """Turn a module into a chain of stages.

    Args:
        module: Nothing about it changes.
        args: Positional arguments of a call as in training. An ``nn.Sequential`` takes one, which may be a tuple.
        kwargs: Keyword arguments of that call.
        known: Earlier cuts of the module, of which one is returned if it turns out to hold for this call.
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
    require_tensors((args, kwargs))
    reasons: dict[str, str] = {}
    row: SequentialCut | None = None
    try:
        row = SequentialCut(module)
        blocks = [stage.name for stage in row.stages if _has_layers(stage)]
        if not blocks:
            return row
        reasons["sequential"] = f"there are several layers in {blocks[0]!r}, between which a graph can be cut"
    except ModelError as error:
        reasons["sequential"] = str(error)
    with noticed_checkpoints() as noticed:
        try:
            cut = cut_graph(module, args, kwargs, known=[each for each in known if isinstance(each, GraphCut)])
            if len(cut.stages) > max(1, 0 if row is None else len(row.stages)):
                cut.reasons = reasons
                return cut
            stuck = ", ".join(map(repr, cut.opaque))
            why = f"most of it is in {stuck}, which cannot be recorded" if stuck else _NO_POINT
            reasons["graph"] = f"{why}, so it is {len(cut.stages)} stages. Name a submodule that is a chain of layers"
        except ModelError as error:
            reasons["graph"] = f"{error}{f'. {NO_CHECKPOINTS}' * bool(noticed)}"
    if row is not None:
        row.reasons = {"graph": reasons["graph"]}
        return row
    tried = ". ".join(f"{WAYS[way][0].upper()}{WAYS[way][1:]}: {reason}" for way, reason in reasons.items())
    raise ModelError(f"{type(module).__name__} cannot be planned. {tried}")


def _has_layers(stage: Stage) -> bool:
    """True if a stage is more than one layer. Attention holds its projection, but runs as one function."""
    return any(module._modules and not isinstance(module, nn.MultiheadAttention) for module in stage.modules)


def check_module(module: nn.Module) -> None:
    """Find out without any input that a module can be no chain.

    Raises:
        ModelError: It is a single layer of torch, a container without a forward, an empty ``nn.Sequential``, what
            ``torch.compile`` returns, or holds modules that FSDP has wrapped, or taken together.
    """
    name = type(module).__name__
    wrapped = wrapped_by_fsdp1(module)
    if wrapped:
        raise ModelError(
            f"{name} holds modules that FullyShardedDataParallel wraps (the first is {wrapped[0]!r}), which gathers "
            "parameters in a way that cannot be measured or planned: expected units of fully_shard (FSDP2, "
            f"ModelParallelStrategy), or a module inside of one wrapper, such as {wrapped[0]!r}"
        )
    shared = [unit for unit in units_below(module) if Unit(module.get_submodule(unit)).shares_hooks]
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
            f"{type(module_inside(module)).__name__} was compiled as a whole, which leaves nothing to cut: expected its "
            "blocks to be compiled instead (for block in net.blocks: block.compile()), "
            "Checkpointable(torch.compile(net)), which chooses among compiled code for the whole, or the module inside, "
            "._orig_mod, which runs uncompiled under a plan"
        )
    if type(module).forward is nn.Module.forward:
        raise ModelError(
            f"{name} has no forward, so it is no chain of layers: expected an nn.Sequential, or a module that calls its "
            "layers"
        )
    if type(module).__module__.startswith("torch.nn.modules.") and not module._modules:
        raise ModelError(
            f"{name} is a single layer, so there is nothing to cut: expected an nn.Sequential, or a module with several "
            "layers"
        )
