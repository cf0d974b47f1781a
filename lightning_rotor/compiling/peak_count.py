"""The peak of a finished pair of graphs, counted from its nodes before anything is compiled.

Inputs of the forward are held by the caller and count nothing, but for copies that a compiler makes of them. What the
forward returns, and what it saves, is held until the backward has read it; gradients of outputs count while they are
read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_rotor.compiling.graph_costs import is_pointwise, is_view, node_bytes, owner
from lightning_rotor.compiling.kernel_workspaces import Workspaces
from lightning_rotor.private.partitioning import is_tangent


@dataclass(frozen=True)
class CountedPeak:
    """Peaks of a pair of graphs in bytes.

    Attributes:
        forward_bytes: Peak of the forward.
        held_bytes: Bytes that the forward leaves: outputs, and what it has saved.
        backward_bytes: Peak of the backward, with what the forward has left.
    """

    forward_bytes: int
    held_bytes: int
    backward_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The higher one."""
        return max(self.forward_bytes, self.backward_bytes)


def count_peak(
    forward: fx.GraphModule, backward: fx.GraphModule, *, outputs: int, fused: bool, workspaces: Workspaces
) -> CountedPeak:
    """Peak of a pair of graphs.

    Args:
        forward: Returns outputs, then what it saves.
        backward: Takes what was saved, then gradients of outputs.
        outputs: Number of the forward's outputs.
        fused: The compiler makes pointwise results where they are read, as Inductor does.
        workspaces: Of the kernels.
    """
    returned = _returned(forward)
    inputs = set(forward.graph.find_nodes(op="placeholder"))
    copied: set[fx.Node] = set()
    if fused:
        saved_inputs = inputs.intersection(returned[outputs:]).difference(returned[:outputs])
        copied.update(filter(_is_laid_out_anew, saved_inputs))
    held_by_caller = inputs - copied
    kept = {owner(node) for node in returned} - held_by_caller
    copies = {node: node_bytes(node) for node in copied}
    forward_peak, held_bytes = _walk(forward, held=copies, kept=kept, fused=fused, workspaces=workspaces)
    # The two graphs have no node in common. A placeholder of the backward has the name of what the forward saves.
    saved_names = {node.name: owner(node) for node in returned[outputs:]}
    output_owners = set(map(owner, returned[:outputs])) - inputs
    held: dict[fx.Node, int] = {}
    # What may go with its last reader in the backward is counted in there, and the rest around it.
    passing = set()
    for node in backward.graph.find_nodes(op="placeholder"):
        saved = saved_names.get(node.name)
        if is_tangent(node):
            held[node] = node_bytes(node)
        elif saved is not None and saved not in held_by_caller and saved not in output_owners:
            # An output that is saved, too, stays with the caller.
            held[node] = node_bytes(saved)
            passing.add(saved)
    around_bytes = held_bytes - sum(map(node_bytes, passing))
    results = {owner(node) for node in _returned(backward)}
    backward_peak, _ = _walk(backward, held=held, kept=results, fused=fused, workspaces=workspaces)
    return CountedPeak(forward_peak, held_bytes, around_bytes + backward_peak)


def _returned(module: fx.GraphModule) -> list[fx.Node]:
    output = next(iter(reversed(module.graph.nodes)))
    return [node for node in output.args[0] if isinstance(node, fx.Node)]


def _is_laid_out_anew(saved: fx.Node) -> bool:
    """True if Inductor saves a copy of an input, as convolutions read it, and not the input.

    On CPUs it lets images and weights lie with their channels last. What it saves of those that lead to a convolution
    lies so, too: inputs are copied when the forward begins, and the copies held until the backward has read them.
    """
    value = saved.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.device.type != "cpu":
        return False
    if value.is_contiguous(memory_format=torch.channels_last) or not torch.backends.mkldnn.is_available():
        return False
    seen: set[fx.Node] = set()
    waiting = list(saved.users)
    while waiting:
        node = waiting.pop()
        if node.target is torch.ops.aten.convolution.default:
            return True
        if node not in seen and node.target is not torch.ops.aten.bmm.default:
            seen.add(node)
            waiting += node.users
    return False


def _walk(
    module: fx.GraphModule, *, held: dict[fx.Node, int], kept: set[fx.Node], fused: bool, workspaces: Workspaces
) -> tuple[int, int]:
    """Peak of a graph, and what it leaves, if it begins with some placeholders that die with their last reader."""
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    inlined = {node for node in nodes if fused and node not in kept and _is_inlined(node)}
    last: dict[fx.Node, int] = {}
    for place, node in enumerate(nodes):
        # What nobody reads dies at once. Memory that is shown by views is read through them.
        last.setdefault(owner(node), place)
        for each in _read(node, inlined):
            last[owner(each)] = place
    dying: dict[int, list[fx.Node]] = {}
    for node, place in last.items():
        dying.setdefault(place, []).append(node)
    alive = dict(held)
    level = peak = sum(alive.values())
    for place, node in enumerate(nodes):
        if not is_view(node) and node not in inlined and node.op == "call_function":
            overwritten = None
            if fused:
                overwritten = _overwritten_by(node, set(dying.get(place, ())) - kept - held.keys())
            if overwritten is not None:
                level -= alive.pop(overwritten, 0)
            alive[node] = node_bytes(node)
            level += alive[node]
        # A workspace is there only while its kernel runs.
        peak = max(peak, level + workspaces.of(node))
        # Behind the node: it reads them while its own result is there.
        for each in dying.get(place, ()):
            if each not in kept:
                level -= alive.pop(each, 0)
    return peak, level


def _read(node: fx.Node, inlined: set[fx.Node]) -> list[fx.Node]:
    """Nodes whose memory is read when a node runs: through those that are made where they are read."""
    # It does not run: whoever reads it does.
    if node in inlined:
        return []
    read = []
    waiting = list(node.all_input_nodes)
    while waiting:
        each = waiting.pop()
        if owner(each) in inlined:
            waiting += owner(each).all_input_nodes
        else:
            read.append(each)
    return read


def _overwritten_by(node: fx.Node, dying: set[fx.Node]) -> fx.Node | None:
    """The node whose memory a compiler lets a pointwise one write to, entry by entry: it reads it last; else None."""
    if not is_pointwise(node):
        return None
    for source in node.all_input_nodes:
        # Inputs of the graph are somebody else's.
        if source in dying and source.op == "call_function" and _layout(source) == _layout(node):
            return source
    return None


def _layout(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else None


def _is_inlined(node: fx.Node) -> bool:
    """True if a compiler makes a node's entries in the one place where they are read."""
    # With several readers it would be computed several times, and compilers write it out instead.
    if not is_pointwise(node) or len(node.users) != 1:
        return False
    (user,) = node.users
    while is_view(user) and len(user.users) == 1:
        (user,) = user.users
    # Products and reductions are kernels of their own, which read memory.
    return is_pointwise(user)
