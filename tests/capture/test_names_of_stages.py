"""Stages are named after the user's modules."""

from __future__ import annotations

import torch
from torch import fx

from lightning_rotor.capture.names_of_stages import StageNames
from lightning_rotor.capture.node_facts import SIZE, name_of


def body_of(*operations: tuple[str, object, str]) -> list[fx.Node]:
    """Nodes in a row, each with its kind, its target and the module that it runs in."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    nodes = []
    for kind, target, module in operations:
        node = graph.create_node(kind, target, (node,))  # type: ignore[arg-type]
        node.meta["module"] = module
        nodes.append(node)
    return nodes


BODY = (
    ("call_module", "block.norm", "block.norm"),
    ("call_function", torch.relu, "block"),
    ("call_method", "view", "block"),
    ("call_module", "head", "head"),
    ("call_function", torch.sum, ""),
)


def test_a_stage_that_is_a_whole_module_has_its_name() -> None:
    nodes = body_of(*BODY)
    names = StageNames(nodes)
    assert names.of(nodes[:3]) == "block"
    assert names.of(nodes[3:4]) == "head"
    assert names.of(nodes[4:]) == "sum"


def test_other_stages_have_the_names_of_their_first_and_last_operations() -> None:
    nodes = body_of(*BODY)
    names = StageNames(nodes)
    assert names.of(nodes[1:4]) == "block.relu … head"
    assert names.of(nodes[:2]) == "block.norm … block.relu"


def test_views_name_a_stage_only_if_there_is_nothing_else() -> None:
    nodes = body_of(*BODY)
    names = StageNames(nodes)
    assert names.of(nodes[1:3]) == "block.relu"
    assert names.of(nodes[2:3]) == "block.view"
    assert names.of(nodes[2:3]) == "block.view (2)"


def test_sizes_name_no_stage() -> None:
    nodes = body_of(*BODY)
    nodes[4].meta[SIZE] = 3
    assert StageNames(nodes).of(nodes[3:]) == "head"
    assert name_of(nodes[1]) == "relu"
