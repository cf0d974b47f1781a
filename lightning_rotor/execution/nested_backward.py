"""A backward inside of a backward: it touches no ``grad`` and fires no hook of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_rotor.errors import ExecutionError
from lightning_rotor.private import torch_names as private

Tensors: TypeAlias = Sequence[torch.Tensor]
Roots: TypeAlias = list[tuple[GradientEdge, torch.Tensor]]
"""Where a backward begins: outputs of a forward, of which only the graph is kept, and their gradients."""


def learning(tensor: torch.Tensor, *, wanted: bool = True) -> torch.Tensor:
    """A leaf with the tensor's memory, which receives a gradient if it can have one and that is wanted."""
    can_learn = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(wanted and can_learn)


def roots_of(outputs: Tensors, gradients: Tensors) -> Roots:
    """The roots of a backward from some outputs."""
    roots: Roots = []
    for output, gradient in zip(outputs, gradients, strict=True):
        # An edge in the place of the tensor: the backward needs the node, and not the output's memory.
        if output.requires_grad:
            roots.append((get_gradient_edge(output), gradient))
    return roots


def gradients_for(inputs: Tensors, roots: Roots, *, name: str) -> list[torch.Tensor | None]:
    """The gradients for some leaves, None without any; ExecutionError if another tensor would go without its own."""
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    if not (roots and leaves):
        return [None] * len(inputs)
    edges, gradients = zip(*roots, strict=True)
    # torch.autograd.grad is silent about leaves that it was not asked for.
    _require_no_others(leaves, [edge.node for edge in edges], name=name)
    # And where a leaf has no part in the outputs, None is its gradient, as in plain training.
    received = torch.autograd.grad(edges, leaves, gradients, allow_unused=True)
    of_leaf = dict(zip(map(id, leaves), received, strict=True))
    return [of_leaf.get(id(tensor)) for tensor in inputs]


def _require_no_others(leaves: Tensors, nodes: Iterable[Node], *, name: str) -> None:
    """Raise ``ExecutionError`` if a backward from some nodes reaches a leaf that is none of these."""
    known = set(map(id, leaves))
    for node in graph_behind(nodes):
        other = private.leaf_of_node(node)
        if other is not None and id(other) not in known:
            raise ExecutionError(
                f"{name!r} uses a tensor of shape {tuple(other.shape)} that requires a gradient and is neither its "
                "input nor one of its parameters: expected no other, for its gradient would be lost. Give it as "
                "an input (in a tuple), or register it"
            )


def graph_behind(nodes: Iterable[Node]) -> Iterator[Node]:
    """Some nodes of autograd's graph, and all that a backward from there goes on to, each once."""
    # A loop and no recursion: the graph of an unrolled recurrent network is deeper than Python's stack.
    pending = [*dict.fromkeys(nodes)]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            # None stands for an input that wants no gradient.
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
