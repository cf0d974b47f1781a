"""A second look at a graph: which of its operations are Python code that saves several tensors, and what they were called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from lightning_rotor.tracing.composites import is_attention, is_composite
from lightning_rotor.tracing.footprints import lasting_addresses, run_watched
from lightning_rotor.tracing.samples import Sample
from lightning_rotor.tracing.slices import GraphSlice
from lightning_rotor.tracing.tracer import Tracer


def has_composites(module: nn.Module, graph: fx.Graph) -> bool:
    """Whether an operation of a graph looks like one but is Python code that may do several things."""
    return any(_is_composite(module, node) for node in graph.nodes)


def samples_of(
    module: nn.Module, graph: fx.Graph, tracer: Tracer, tensors: Sequence[torch.Tensor]
) -> list[Sample | None]:
    """Run a graph, and see what its composite operations are called with.

    Args:
        module: What it was traced from; the run updates its buffers and generators.
        graph: Its operations.
        tracer: What traced it.
        tensors: Of the call.
    Returns:
        One for each composite operation in order, None for those that save one tensor at most: there is nothing to choose inside.
    """
    found: list[Sample | None] = []
    lasting = lasting_addresses(module, tracer, tensors)

    def watch(node: fx.Node, reads: list[fx.Node], given: Any, _: Any, saved: dict[int, int]) -> None:
        if not _is_composite(module, node):
            return
        if len(saved.keys() - lasting) <= 1 or _is_opaque(tracer, module, node):
            found.append(None)
            return
        called = [node.args, node.kwargs]
        arguments = GraphSlice(reads, [], called, root=module, owners=tracer.owners, constants=tracer.constants)
        found.append(Sample.of(arguments(given)))

    run_watched(module, graph, tracer, tensors, watch)
    return found


def _is_composite(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return is_attention(module.get_submodule(str(node.target)))
    return node.op == "call_function" and is_composite(node.target)


def _is_opaque(tracer: Tracer, module: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and tracer.calls.is_opaque(module.get_submodule(str(node.target)))
