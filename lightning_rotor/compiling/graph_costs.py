"""Bytes and seconds of a joint graph's nodes, from their metadata alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_rotor.private.operators import OpOverload
from lightning_rotor.private.partitioning import takes_part
from lightning_rotor.private.torch_names import packet_of

# FLOPs, and bytes that a device moves, in a second. Their ratio alone decides between schedules, and is alike on most.
_FLOPS = 2.0e10
_BYTES = 5.0e9
_VIEWS = frozenset(("_unsafe_view", "reshape", "_reshape_alias"))


def node_bytes(node: fx.Node) -> int:
    """Bytes of the tensor that a node returns. Of several tensors, the nodes that take them count each."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return _bytes(value)
    return 0


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        numel: Any = value.numel()
        # A symbol, where sizes are. Such graphs are refused.
        if not isinstance(numel, int):
            return 0
        return numel * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes, value))
    return 0


def is_view(node: fx.Node) -> bool:
    """True if a node shows memory of its first argument."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    # These copy where strides do not let them, and a compiler mostly need not.
    return target.is_view or packet_of(target).__name__ in _VIEWS


def owner(node: fx.Node) -> fx.Node:
    """The node whose memory one shows."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_pointwise(node: fx.Node) -> bool:
    """True if a compiler makes a node's entries where they are read."""
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def node_seconds(node: fx.Node) -> float:
    """Seconds of a node, by a cost model: what it computes, and what it reads and writes."""
    if node.op != "call_function" or is_view(node):
        return 0.0
    if takes_part(node):
        return 0.0
    moved_bytes = _bytes(node.meta.get("val"))
    # What is made where it is read has its inputs at hand.
    if not is_pointwise(node):
        moved_bytes += sum(map(node_bytes, node.all_input_nodes))
    return _flops(node) / _FLOPS + moved_bytes / _BYTES


def computes_much(node: fx.Node) -> bool:
    """True for convolutions, matrix products and attention, which compilers leave to libraries."""
    return _formula(node) is not None


def _formula(node: fx.Node) -> Any:
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(packet_of(node.target)) if isinstance(node.target, OpOverload) else None


def _flops(node: fx.Node) -> int:
    formula = _formula(node)
    if formula is None:
        return 0

    def value(argument: Any) -> Any:
        return argument.meta.get("val") if isinstance(argument, fx.Node) else argument

    args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), value)
    try:
        return int(formula(*args, **kwargs, out_val=node.meta.get("val")))
    except Exception:  # of a formula, for sizes or arguments that it does not expect
        return 0
