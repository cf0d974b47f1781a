"""A second look at a graph: which of its operations are Python code that saves several tensors, and what they were called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from lightning_rotor.tensors import address_of
from lightning_rotor.tracing.boundaries import run_and_watch
from lightning_rotor.tracing.composites import is_attention, is_composite
from lightning_rotor.tracing.samples import Sample
from lightning_rotor.tracing.slices import GraphSlice
from lightning_rotor.tracing.tracer import Tracer
from lightning_rotor.wiring import packed


def has_composites(module: nn.Module, graph: fx.Graph) -> bool:
    """Whether an operation of a graph looks like one but is Python code that may do several things."""
    return any(_is_composite(module, node) for node in graph.nodes)


def samples_of(
    module: nn.Module, graph: fx.Graph, tracer: Tracer, tensors: Sequence[torch.Tensor]
) -> list[Sample | None]:
    """Run a graph, and see what its composite operations are called with.

    What is saved is let go at once, so this takes no more memory than a forward without gradients.

    Args:
        module: What it was traced from; the run updates its buffers and generators.
        graph: Its operations.
        tracer: What traced it.
        tensors: Of the call.
    Returns:
        One for each composite operation in order, None for those that save one tensor at most: there is nothing to choose inside.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    body = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    last_use = {used: index for index, node in enumerate(body) for used in node.all_input_nodes}
    values: dict[fx.Node, Any] = dict(zip(inputs, tensors, strict=True))
    lasting = {address_of(tensor) for tensor in (*module.parameters(), *module.buffers(), *tracer.constants, *tensors)}
    found: list[Sample | None] = []
    for index, node in enumerate(body):
        reads = [used for used in node.all_input_nodes if used.op != "get_attr"]
        step = GraphSlice(reads, [node], node, root=module, owners=tracer.owners, constants=tracer.constants)
        given = packed([values[used] for used in reads])
        if _is_composite(module, node):
            arguments = GraphSlice(
                reads, [], [node.args, node.kwargs], root=module, owners=tracer.owners, constants=tracer.constants
            )
            sample = Sample.of(arguments(given))
            values[node], saved = run_and_watch(step, given)
            found.append(sample if len(saved.keys() - lasting) > 1 and not _is_opaque(tracer, module, node) else None)
        else:
            values[node] = step(given)
        del given
        for used in (*reads, node):
            if last_use.get(used, -1) <= index:
                values.pop(used, None)
    return found


def _is_composite(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return is_attention(module.get_submodule(str(node.target)))
    return node.op == "call_function" and is_composite(node.target)


def _is_opaque(tracer: Tracer, module: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and tracer.calls.is_opaque(module.get_submodule(str(node.target)))
