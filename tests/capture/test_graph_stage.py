"""Operations of a graph as Python functions."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import fx, nn

from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.capture.node_facts import OF


def slice_of(graph: fx.Graph, output: Any) -> GraphSlice:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    return GraphSlice(inputs, nodes, output)


def test_arguments_of_every_kind_arrive_as_they_were_written() -> None:
    nan, seen, graph = float("nan"), [], fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")

    def note(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    args = (
        x,
        (1,),
        [y, -2],
        {"k": x, 3: None},
        slice(None, y, 2),
        ...,
        nan,
        True,
        "a'\n",
        torch.float16,
        (),
    )
    graph.call_function(note, args, {"from": y, "not a name": ()})
    run = slice_of(graph, (y, [x]))
    given = object(), 7
    for _ in range(2):
        assert run(given) == (7, [given[0]])
    received = (
        given[0],
        (1,),
        [7, -2],
        {"k": given[0], 3: None},
        slice(None, 7, 2),
        ...,
        nan,
        True,
        "a'\n",
        torch.float16,
        (),
    )
    assert seen == [(received, {"from": 7, "not a name": ()})] * 2
    # Callees may change the lists and dicts that they are given.
    assert seen[0][0][2] is not seen[1][0][2]
    assert seen[0][0][3] is not seen[1][0][3]


def test_values_live_as_long_as_in_the_users_code() -> None:
    alive: list[bool] = []

    def look(*values: torch.Tensor) -> torch.Tensor:
        alive.append(made() is not None)
        return values[0] * 1

    def make(value: torch.Tensor) -> torch.Tensor:
        nonlocal made
        result = value + 1
        made = weakref.ref(result)
        return result

    made: Any = lambda: None  # noqa: E731
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(make, (x,))
    z = graph.call_function(look, (y,))
    w = graph.call_function(look, (z,))
    assert slice_of(graph, w)(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert alive == [True, False]


def test_what_is_read_is_looked_up_at_each_call_and_equal_operations_share_their_code() -> None:
    layers = nn.Linear(2, 2), nn.Linear(2, 2)

    def run_of(layer: nn.Linear) -> GraphSlice:
        graph = fx.Graph()
        x, weight = graph.placeholder("x"), graph.get_attr("weight")
        y = graph.call_module("0", (x,))
        z = graph.call_method("add", (y, weight), {"alpha": 2})
        weight.meta[OF], y.meta[OF] = (layer, "weight"), layer
        return GraphSlice([x], [y, z], z)

    first, second = map(run_of, layers)
    assert first.operations == second.operations
    for _ in range(2):
        for run, layer in zip((first, second), layers, strict=True):
            assert torch.equal(run(torch.eye(2)), layer(torch.eye(2)) + 2 * layer.weight)
            layer.weight = nn.Parameter(torch.randn(2, 2))
    assert first._function.__code__ is second._function.__code__
