"""Bytes and seconds of a joint graph's nodes, from their metadata alone, and of its stages as a chain."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.private.operators import OpOverload
from lightning_rotor.private.partitioning import takes_part
from lightning_rotor.private.torch_names import packet_of

if TYPE_CHECKING:
    from lightning_rotor.compiling.joint_graph import Stages
    from lightning_rotor.compiling.stage_options import StageOption

# FLOPs and bytes that a device moves in a second. Their ratio alone decides between schedules, and it is alike on most.
_FLOPS = 2.0e10
_BYTES = 5.0e9
_VIEWS = frozenset(("_unsafe_view", "reshape", "_reshape_alias"))


def node_bytes(node: fx.Node) -> int:
    """Bytes of the tensor that a node returns. Of several tensors, the nodes that take them count each."""
    value = node.meta.get("val")
    return _bytes(value) if isinstance(value, torch.Tensor) else 0


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        numel: Any = value.numel()  # a symbol, where sizes are
        return numel * value.element_size() if isinstance(numel, int) else 0
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes, value))
    return 0


def is_view(node: fx.Node) -> bool:
    """True if a node shows memory of its first argument."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
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
    if not is_pointwise(node):
        moved_bytes += sum(map(node_bytes, node.all_input_nodes))
    return _flops(node) / _FLOPS + moved_bytes / _BYTES


def _flops(node: fx.Node) -> int:
    from torch.utils.flop_counter import flop_registry

    target = node.target
    formula = flop_registry.get(packet_of(target)) if isinstance(target, OpOverload) else None
    if formula is None:
        return 0

    def value(argument: Any) -> Any:
        return argument.meta.get("val") if isinstance(argument, fx.Node) else argument

    args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), value)
    try:
        return int(formula(*args, **kwargs, out_val=node.meta.get("val")))
    except Exception:  # of a formula, for sizes or arguments that it does not expect
        return 0


def chain_of(stages: Stages, options: list[list[StageOption]]) -> Chain:
    """The stages with their options, as the planner reads them."""
    backward = _backward_costs(stages)
    costs = []
    last = len(stages) - 1
    for number in range(len(stages)):
        boundary = stages.boundaries[number]
        output = stages.output(number)
        input_bytes = 0 if boundary is None else node_bytes(boundary)
        output_bytes = 0 if output is None else node_bytes(output)
        if number == last:
            own = {owner(node) for node in stages.parts.outputs if stages.of.get(owner(node)) == number}
            output_bytes = sum(map(node_bytes, own))
        nodes = stages.nodes[number]
        forward_seconds = sum(map(node_seconds, nodes))
        largest_bytes = max(map(node_bytes, nodes), default=0)
        seconds, peak_bytes, gradient_bytes = backward[number]
        each = []
        for option in options[number]:
            saved_bytes = sum(map(node_bytes, {owner(node) for node in option.saved} - {boundary, output}))
            again_bytes = sum(node_bytes(node) for node in option.again if not is_view(node) and not is_pointwise(node))
            again_seconds = sum(map(node_seconds, option.again))
            highest_bytes = max(peak_bytes, output_bytes + input_bytes) + gradient_bytes + again_bytes
            each.append(
                Option(
                    name=option.name,
                    saved_bytes=saved_bytes,
                    saved_input_bytes=input_bytes if option.needs_input else 0,
                    saved_output_bytes=output_bytes if option.needs_output and number != last else 0,
                    saved_tensors=max(1, len(option.saved)),
                    forward_peak_bytes=saved_bytes + output_bytes + largest_bytes,
                    replay_peak_bytes=saved_bytes + largest_bytes,
                    unpack_peak_bytes=output_bytes,
                    unpack_bytes=output_bytes,
                    backward_peak_bytes=highest_bytes,
                    backward_segment_peak_bytes=highest_bytes,
                    backward_held_peak_bytes=highest_bytes,
                    input_gradient_bytes=input_bytes,
                    parameter_gradient_bytes=gradient_bytes,
                    forward_seconds=forward_seconds,
                    replay_seconds=forward_seconds * 0.999,
                    backward_seconds=seconds + again_seconds,
                    discard_peak_bytes=output_bytes + largest_bytes,
                )
            )
        costs.append(
            StageCost(
                name=str(nodes[-1]),
                output_bytes=output_bytes,
                discard_peak_bytes=output_bytes + largest_bytes,
                discard_seconds=forward_seconds,
                pinned_bytes=sum(node_bytes(node) for node in stages.always_saved if stages.of.get(node) == number),
                options=tuple(each),
            )
        )
    return Chain(tuple(costs))


def _backward_costs(stages: Stages) -> list[tuple[float, int, int]]:
    """Seconds, peak without what was saved, and bytes of parameters' gradients of each stage's backward."""
    nodes = [node for node in stages.joint.graph.nodes if node.op == "call_function" and not stages.is_forward(node)]
    gradients = set(stages.parts.gradients)
    last_use: dict[fx.Node, int] = {}
    for place, node in enumerate(nodes):
        for each in node.all_input_nodes:
            last_use[owner(each)] = place
    seconds = [0.0] * len(stages)
    peaks = [0] * len(stages)
    gradient_bytes = [0] * len(stages)
    alive: dict[fx.Node, int] = {}
    current = len(stages) - 1
    for place, node in enumerate(nodes):
        read = [stages.of[each] for each in node.all_input_nodes if each in stages.of]
        # Backwards come in the order of stages, last ones first. A node belongs to the latest that was begun.
        current = min([current, *read[:1], *([reduce(max, read)] if read else [])])
        seconds[current] += node_seconds(node)
        if node in gradients:
            gradient_bytes[current] += node_bytes(node)
        elif not is_view(node) and not (is_pointwise(node) and len(node.users) == 1):
            alive[node] = node_bytes(node)
        peaks[current] = max(peaks[current], sum(alive.values()))
        for each in [each for each in alive if last_use.get(each, place) <= place]:
            del alive[each]
    return list(zip(seconds, peaks, gradient_bytes, strict=True))
