"""What each operation of a graph makes and saves, from one real run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.tensors import address_of, sizes_by_address, tensors_in
from lightning_rotor.tracing.recorder import Recorder
from lightning_rotor.tracing.slices import GraphSlice
from lightning_rotor.tracing.tracer import Tracer
from lightning_rotor.wiring import packed

Watch: TypeAlias = Callable[[fx.Node, list[fx.Node], Any, Any, dict[int, int]], None]
"""Takes an operation, the nodes that it reads, their values, what it returns, and the sizes of what it saves by address."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that one operation takes.

    Attributes:
        made_bytes: New storages in what it returns.
        saved_bytes: Storages that autograd saves for its backward, parameters and buffers not among them.
        storages: Sizes of the storages under what it returns, new or not, by a number for each.
        pieces: Numbers of storages of which what it returns shows a part only.
        saved: Numbers of the storages that autograd saves, as far as they are under values of the graph.
        of_parameters: Whether what it returns shows parameters.
    """

    made_bytes: int
    saved_bytes: int
    storages: Mapping[int, int]
    pieces: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    of_parameters: bool = False


def footprints_of(
    module: nn.Module, graph: fx.Graph, tracer: Tracer | Recorder, tensors: Sequence[torch.Tensor]
) -> dict[fx.Node, Footprint]:
    """Run a graph, one operation after the other, and see what each of them makes and saves.

    Args:
        module: What it was traced from; the run updates its buffers and generators.
        graph: Its operations.
        tracer: What traced it.
        tensors: Of the call.
    """
    parameters = {address_of(parameter) for parameter in module.parameters()} - {0}
    numbers = count()
    numbered: dict[fx.Node, dict[int, int]] = {}  # by address; only values that are alive are looked up
    found: dict[fx.Node, Footprint] = {}

    def watch(node: fx.Node, reads: list[fx.Node], _: Any, value: Any, saved: dict[int, int]) -> None:
        old = {address: number for used in reads for address, number in numbered.get(used, {}).items()}
        made = {
            address: size for address, size in sizes_by_address(tensors_in(value)).items() if address not in lasting
        }
        numbered[node] = {address: old[address] if address in old else next(numbers) for address in made}
        shown = _shown_bytes(value)
        found[node] = Footprint(
            made_bytes=sum(size for address, size in made.items() if address not in old),
            saved_bytes=sum(size for address, size in saved.items() if address not in lasting),
            storages={numbered[node][address]: size for address, size in made.items()},
            pieces=frozenset(numbered[node][address] for address, size in made.items() if shown[address] < size),
            saved=frozenset(number for address, number in (old | numbered[node]).items() if address in saved),
            of_parameters=not parameters.isdisjoint(shown),
        )

    lasting = lasting_addresses(module, tracer, tensors)
    run_watched(module, graph, tracer, tensors, watch)
    return found


def run_watched(
    module: nn.Module, graph: fx.Graph, tracer: Tracer | Recorder, tensors: Sequence[torch.Tensor], watch: Watch
) -> None:
    """Run a graph, one operation after the other, and show each to a function.

    What is saved is let go at once, so this takes no more memory than a forward without gradients.
    """
    inputs, body = parts_of(graph)
    last_use = {used: index for index, node in enumerate(body) for used in node.all_input_nodes}
    values: dict[fx.Node, Any] = dict(zip(inputs, tensors, strict=True))
    for index, node in enumerate(body):
        reads = [used for used in node.all_input_nodes if used.op != "get_attr"]
        step = GraphSlice(reads, [node], node, root=module, owners=tracer.owners, constants=tracer.constants)
        given = packed([values[used] for used in reads])
        values[node], saved = _run(step, given)
        watch(node, reads, given, values[node], saved)
        del given
        for used in (*reads, node):
            if last_use.get(used, -1) <= index:
                values.pop(used, None)


def parts_of(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The inputs of a graph and its operations."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return inputs, [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def lasting_addresses(module: nn.Module, tracer: Tracer | Recorder, tensors: Sequence[torch.Tensor]) -> set[int]:
    """Storages that somebody holds anyway."""
    return {address_of(tensor) for tensor in (*module.parameters(), *module.buffers(), *tracer.constants, *tensors)}


def _run(step: GraphSlice, value: Any) -> tuple[Any, dict[int, int]]:
    """What an operation returns, and the storages that it saves, which are dropped."""
    saved: dict[int, int] = {}
    with saved_tensors_hooks(lambda tensor: saved.update(sizes_by_address([tensor])), _never_unpacked):
        return step(value), saved


def _shown_bytes(value: Any) -> Counter[int]:
    """Bytes of the tensors in a value, by address."""
    shown: Counter[int] = Counter()
    for tensor in tensors_in(value):
        shown[address_of(tensor)] += tensor.nbytes
    return shown


def _never_unpacked(_: None) -> torch.Tensor:
    raise AssertionError("nobody differentiates this run")
