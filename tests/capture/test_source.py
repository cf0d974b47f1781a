"""Written source holds no word of the user's, and says whether operations are the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from lightning_rotor.capture.differences import first_difference
from lightning_rotor.capture.node_facts import OF
from lightning_rotor.capture.recorded_checks import appearance_of, spell_value
from lightning_rotor.capture.source import Source, code_of_source, look_of


def test_names_and_strings_are_bound_and_numbers_spelled() -> None:
    graph, source = fx.Graph(), Source()
    x = graph.placeholder("import os")
    node = graph.call_method("__class__; evil()", (x, "'); evil('", 3, None), {"key; evil()": True})
    assert source.name(x) == "v0"
    text = source.call(node, "")
    assert text == "getattr(v0, c0)(c1, 3, None, **{c2: True})"
    assert source.bound == {"c0": "__class__; evil()", "c1": "'); evil('", "c2": "key; evil()"}


def test_a_number_of_a_class_of_the_users_is_bound() -> None:
    class Odd(int):
        def __repr__(self) -> str:
            return "evil()"

    source = Source()
    assert source.argument((Odd(3), 3)) == "(c0, 3, )"


def test_equal_source_is_compiled_once() -> None:
    assert code_of_source("value = 1\n") is code_of_source("value = 1\n")


def test_looks_are_equal_where_operations_do_the_same() -> None:
    def make() -> Any:
        return lambda value: value

    assert look_of(nn.ReLU()) == look_of(nn.Linear(2, 2)) == "module"
    assert look_of(make()) == look_of(make())
    assert look_of([1].append) != look_of([1].append)
    assert look_of(torch.zeros(2)) == look_of(torch.ones(2)) != look_of(torch.zeros(3))
    assert look_of(1) != look_of(True)
    assert look_of(float("nan")) == look_of(float("nan"))
    assert spell_value([1, (2.0,)]) == spell_value([1, (2.0,)]) != spell_value([1, (2,)])


def graph_of(number: int, constant: float = 1.0) -> fx.Graph:
    graph = fx.Graph()
    x, c = graph.placeholder("x"), graph.get_attr("constant")
    y = graph.call_function(torch.add, (x, number))
    z = graph.call_function(torch.mul, (y, c))
    for node in (x, c, y, z):
        node.meta["module"] = ""
    c.meta[OF] = torch.tensor(constant)
    return graph


def test_the_first_operation_that_differs_is_told() -> None:
    assert first_difference(graph_of(1), graph_of(1)) == ()
    left, right = graph_of(1), graph_of(2)
    assert [node.target for node in first_difference(left, right)] == [torch.add] * 2
    (node,) = first_difference(graph_of(1), graph_of(1, constant=2.0))
    assert node.op == "get_attr"
    longer = graph_of(1)
    more = longer.call_function(torch.relu, (list(longer.nodes)[-1],))
    assert first_difference(graph_of(1), longer) == (more,)


def test_an_output_looks_like_its_shapes_types_and_numbers() -> None:
    output = {"a": torch.zeros(2, 3), "b": (1, "x")}
    assert appearance_of(output, sizes=True)[1] == (
        ("tensor", (2, 3), "torch.float32", "cpu"),
        ("int", "1"),
        ("str", "'x'"),
    )
    assert appearance_of(output, sizes=False)[1][0] == ("tensor", 2, "torch.float32", "cpu")
