"""Bytes and seconds of nodes, from what is known of them without running anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from lightning_rotor.compiling.graph_costs import is_pointwise, is_view, node_bytes, node_seconds, owner

ATEN = torch.ops.aten


class Graph:
    """A graph of operations on tensors without values."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def given(self, *shape: int) -> fx.Node:
        node = self.graph.placeholder("x")
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in args]
        node.meta["val"] = target(*values)
        return node


@pytest.fixture
def graph() -> Graph:
    return Graph()


def test_bytes_are_those_of_the_tensor_and_of_several_none(graph: Graph) -> None:
    x = graph.given(8, 4)
    assert node_bytes(x) == 8 * 4 * 4
    assert node_bytes(graph.call(ATEN.split.Tensor, x, 2)) == 0
    x.meta["val"] = None
    assert node_bytes(x) == 0


def test_a_view_belongs_to_the_tensor_that_it_shows(graph: Graph) -> None:
    x = graph.given(8, 4)
    turned = graph.call(ATEN.t.default, x)
    flat = graph.call(ATEN.view.default, graph.call(ATEN.mm.default, x, turned), [64])
    assert is_view(turned)
    assert is_view(flat)
    assert not is_view(x)
    assert owner(turned) is x
    assert owner(flat).target is ATEN.mm.default
    assert node_seconds(turned) == 0.0


def test_what_is_made_where_it_is_read_reads_nothing(graph: Graph) -> None:
    x = graph.given(64, 64)
    tanh, transposed = graph.call(ATEN.tanh.default, x), graph.call(ATEN.sum.dim_IntList, x, [0])
    assert is_pointwise(tanh)
    assert not is_pointwise(transposed)
    # It writes as much as it would read, and the sum reads all of it and writes a row.
    assert node_seconds(tanh) == pytest.approx(64 * 64 * 4 / 5e9)
    assert node_seconds(transposed) == pytest.approx((64 * 64 + 64) * 4 / 5e9)


def test_products_take_their_flops(graph: Graph) -> None:
    small = graph.call(ATEN.mm.default, graph.given(8, 8), graph.given(8, 8))
    large = graph.call(ATEN.mm.default, graph.given(80, 80), graph.given(80, 80))
    flops, moved_bytes = 2 * 80**3, 3 * 80**2 * 4
    assert node_seconds(large) == pytest.approx(flops / 2e10 + moved_bytes / 5e9)
    assert node_seconds(large) > 100 * node_seconds(small)
    assert node_seconds(graph.given(8, 8)) == 0.0
