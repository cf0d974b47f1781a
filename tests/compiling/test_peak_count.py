"""The peak of a pair of graphs, counted from its nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from lightning_rotor.compiling.kernel_workspaces import Workspaces
from lightning_rotor.compiling.peak_count import CountedPeak, count_peak

ATEN = torch.ops.aten
KIB = 1024


def node_of(node: fx.Node, size_bytes: int) -> fx.Node:
    node.meta["val"] = torch.empty(size_bytes // 4, device="meta")
    return node


class Pair:
    """A forward of products in a row, and its backward: each saves its input, unless it is left out."""

    def __init__(self, sizes: tuple[int, ...], *, target: Any = ATEN.cumsum.default) -> None:
        self.forward, self.backward = fx.Graph(), fx.Graph()
        value = node_of(self.forward.placeholder("primals_1"), sizes[0])
        made = []
        for size_bytes in sizes[1:]:
            value = node_of(self.forward.call_function(target, (value,)), size_bytes)
            made.append(value)
        output, *others = reversed(made)
        self.forward.output((output, *others))
        held = {}
        for each in others:
            held[each.name] = node_of(self.backward.placeholder(each.name), each.meta["val"].nbytes)
        gradient = node_of(self.backward.placeholder("tangents_1"), sizes[-1])
        for each in others:
            size_bytes = each.meta["val"].nbytes
            gradient = node_of(self.backward.call_function(ATEN.mul.Tensor, (gradient, held[each.name])), size_bytes)
        self.backward.output((gradient,))

    def peak(self, *, fused: bool = False) -> CountedPeak:
        forward, backward = (fx.GraphModule({}, graph) for graph in (self.forward, self.backward))
        return count_peak(forward, backward, outputs=1, fused=fused, workspaces=Workspaces(fused=fused))


def test_what_is_saved_is_held_until_the_backward_has_read_it() -> None:
    peak = Pair((KIB, 2 * KIB, 3 * KIB, 4 * KIB)).peak()
    # The input is the caller's. All that the forward makes is its output or saved.
    assert peak.forward_bytes == 9 * KIB
    assert peak.held_bytes == 9 * KIB
    # The gradient of the output comes, then that of 3 KiB is made beside all of it.
    assert peak.backward_bytes == (9 + 4 + 3) * KIB
    assert peak.peak_bytes == peak.backward_bytes


def test_a_result_that_nobody_saves_dies_with_its_last_reader() -> None:
    pair = Pair((KIB, 2 * KIB, 3 * KIB, 4 * KIB))
    first, second, last = (node for node in pair.forward.nodes if node.op == "call_function")
    output = next(iter(reversed(pair.forward.nodes)))
    output.args = ((last,),)
    pair.backward = fx.Graph()
    pair.backward.output((node_of(pair.backward.placeholder("tangents_1"), 4 * KIB),))
    peak = pair.peak()
    # The first one is gone when the last one is made.
    assert peak.forward_bytes == (3 + 4) * KIB
    assert peak.held_bytes == 4 * KIB
    assert peak.backward_bytes == 8 * KIB
    assert first.name != second.name


@pytest.mark.parametrize("fused", [False, True])
def test_pointwise_results_take_nothing_where_a_compiler_makes_them_as_they_are_read(fused: bool) -> None:
    pair = Pair((KIB, 8 * KIB, 8 * KIB, 4 * KIB), target=ATEN.tanh.default)
    last = [node for node in pair.forward.nodes if node.op == "call_function"][-1]
    next(iter(reversed(pair.forward.nodes))).args = ((last,),)
    pair.backward = fx.Graph()
    pair.backward.output((node_of(pair.backward.placeholder("tangents_1"), 4 * KIB),))
    assert pair.peak(fused=fused).forward_bytes == (4 if fused else 16) * KIB


@pytest.mark.parametrize("fused", [False, True])
def test_a_compiler_writes_a_pointwise_result_over_what_it_reads_last(fused: bool) -> None:
    pair = Pair((KIB, 8 * KIB, 8 * KIB, 4 * KIB))
    _, second, last = (node for node in pair.forward.nodes if node.op == "call_function")
    second.target = ATEN.tanh.default
    next(iter(reversed(pair.forward.nodes))).args = ((last,),)
    pair.backward = fx.Graph()
    pair.backward.output((node_of(pair.backward.placeholder("tangents_1"), 4 * KIB),))
    # A kernel of its own reads the second one, which is therefore not made where it is read.
    assert pair.peak(fused=fused).forward_bytes == ((8 + 4) if fused else 16) * KIB


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_compiler_saves_copies_of_what_convolutions_read(fused: bool, channels_last: bool) -> None:
    shape, layout = (2, 4, 8, 8), torch.channels_last if channels_last else torch.contiguous_format
    forward, backward = fx.Graph(), fx.Graph()
    image = forward.placeholder("primals_1")
    image.meta["val"] = torch.empty(shape).contiguous(memory_format=layout)
    weight = forward.placeholder("primals_2")
    weight.meta["val"] = torch.empty(4, 4, 3, 3).contiguous(memory_format=layout)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    result = forward.call_function(ATEN.convolution.default, (image, weight, None, *settings))
    result.meta["val"] = torch.empty(shape)
    forward.output((result, image, weight))
    for node in (image, weight):
        backward.placeholder(node.name).meta["val"] = node.meta["val"]
    gradient = node_of(backward.placeholder("tangents_1"), KIB)
    backward.output((gradient,))
    modules = (fx.GraphModule({}, graph) for graph in (forward, backward))
    peak = count_peak(*modules, outputs=1, fused=fused, workspaces=Workspaces(fused=fused))
    copied_bytes = image.meta["val"].nbytes + weight.meta["val"].nbytes
    assert peak.held_bytes == result.meta["val"].nbytes + (copied_bytes if fused and not channels_last else 0)
