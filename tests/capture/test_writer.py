"""The graph of a recording: arguments, sizes, results and numbers become nodes, and what it cannot hold is refused."""

from __future__ import annotations

import math
import operator
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx, nn

from lightning_rotor.capture.dispatch_check import DispatchCheck
from lightning_rotor.capture.module_calls import ModuleCalls
from lightning_rotor.capture.node_facts import LINE, OF, SIZE, VALUED
from lightning_rotor.capture.operations import UntraceableError
from lightning_rotor.capture.recorded_checks import require_as_recorded
from lightning_rotor.capture.traced_numbers import Number, Size, plain
from lightning_rotor.capture.writer import GraphWriter, erase


class Pair(NamedTuple):
    """Two values."""

    left: Any
    right: Any


def begun(*inputs: Any, root: nn.Module | None = None) -> tuple[GraphWriter, list[Any], list[fx.Node]]:
    """A writer for a call with these inputs, the values that its code sees, and their nodes."""
    root = nn.Linear(2, 2) if root is None else root
    writer = GraphWriter(ModuleCalls(root), DispatchCheck())
    values = list(inputs)
    nodes = writer.begin(root, values)
    writer.check.trust([value for value in values if isinstance(value, torch.Tensor)])
    return writer, values, nodes


def targets(writer: GraphWriter) -> list[Any]:
    """The targets of all nodes but the inputs."""
    return [node.target for node in writer.graph.nodes if node.op != "placeholder"]


X = torch.zeros(4, 2)


def test_arguments_have_nodes_in_the_place_of_tensors() -> None:
    writer, _, (x,) = begun(X)
    encoded = writer.encode(((X, 1), {"key": [X, slice(None, 2)]}))
    assert encoded == ((x, 1), {"key": [x, slice(None, 2)]})
    named = writer.encode(Pair(X, 3))
    assert (named.target, named.args) == (Pair, (x, 3))


def test_parameters_and_constants_are_read_where_they_are() -> None:
    root = nn.Linear(2, 2)
    writer, _, _ = begun(X, root=root)
    weight = writer.encode(root.weight)
    assert (weight.op, weight.meta[OF]) == ("get_attr", (root, "weight"))
    assert writer.encode(root.weight) is weight
    constant = torch.ones(2)
    node = writer.encode(constant)
    assert node.meta[OF] is constant
    assert writer.constants == [constant]
    with pytest.raises(UntraceableError, match="parameters that it keeps elsewhere"):
        writer.encode(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize(
    ("value", "message"),
    [(nn.ReLU(), "hands the module ReLU to a function"), (object(), "hands object to an operation")],
    ids=["module", "object"],
)
def test_an_argument_that_may_hide_tensors_is_refused(value: Any, message: str) -> None:
    writer, _, _ = begun(X)
    with pytest.raises(UntraceableError, match=message):
        writer.encode([value])


def test_a_tensor_that_nobody_saw_being_made_is_refused() -> None:
    writer, _, _ = begun(X)
    made = torch.zeros(3)
    writer.check.trust([made])
    with pytest.raises(UntraceableError, match="made where no recording sees it"):
        writer.encode(made)


def test_sizes_are_nodes_and_arithmetic_with_them_too() -> None:
    writer, _, (x,) = begun(X)
    rows, columns = writer.sizes_of(X, X.shape, None)
    assert type(rows) is Size
    assert plain((rows, columns)) == (4, 2)
    area = rows * columns + 1
    assert (plain(area), area.node.target, area.node.meta[SIZE]) == (9, operator.add, 9)
    assert plain(writer.sizes_of(X, 2, -1)) == 2
    assert writer.sizes_of(X, 8, None).node.target == "numel"
    assert writer.asked == []
    assert x in rows.node.args[0].args


def test_a_question_about_a_size_is_kept_with_its_answer() -> None:
    writer, _, _ = begun(X)
    rows, _ = writer.sizes_of(X, X.shape, None)
    assert rows > 3
    ((node, answer),) = writer.asked
    assert (node.target, node.args, answer) == (operator.gt, (rows.node, 3), True)
    assert math.sqrt(rows) == 2.0  # the plain number is asked for, and only then
    assert [answer for _, answer in writer.asked] == [True, True]


def test_a_number_of_a_module_passes_for_what_it_is_and_is_followed() -> None:
    writer, (x, rate), _ = begun(X, 0.5)
    assert isinstance(rate, float)
    assert type(rate) is Number
    assert plain([rate, {"a": (rate,)}]) == [0.5, {"a": (0.5,)}]
    double = rate * 2
    assert plain(double) == 1.0
    assert VALUED in double.node.meta
    assert math.sin(rate) == math.sin(0.5)
    assert [answer for _, answer in writer.valued] == [True]  # it is that very number
    assert x is X


def test_inside_of_an_operation_nothing_is_recorded() -> None:
    writer, _, _ = begun(X)
    rows, _ = writer.sizes_of(X, X.shape, None)
    count = len(targets(writer))
    with writer.check.aside():
        assert rows > 3
        assert type(rows + 1) is int
    assert len(targets(writer)) == count
    assert writer.asked == []


def test_tensors_in_a_result_get_nodes_of_their_own() -> None:
    writer, _, (x,) = begun(X)
    first, second = torch.ones(2), torch.ones(3)
    node = writer.node("call_function", torch.split, (x,), {})
    result = writer.unpack({"a": first, "b": [second, 3]}, node, [X])
    assert result["a"] is first
    assert writer.encode(first).args == (node, "a")
    assert writer.encode(second).args == (writer.encode(second).args[0], 0)
    assert writer.node_of(first).op == "call_function"


def test_code_that_is_not_torchs_returns_objects_of_its_own() -> None:
    writer, _, (x,) = begun(X)
    node = writer.node("call_function", torch.relu, (x,), {})
    same = writer.unpack(X, node, [X], fresh_objects=True)
    assert same is not X
    assert same.data_ptr() == X.data_ptr()


def test_the_check_of_an_output_stands_behind_its_module() -> None:
    root = nn.Sequential(nn.ReLU(), nn.ReLU())
    writer, _, (x,) = begun(X, root=root)
    leaf = writer.node("call_module", "0", (x,), {})
    later = writer.node("call_function", torch.relu, (leaf,), {})
    writer.check_output(leaf, "appearance", sizes=True)
    assert [node.target for node in writer.graph.nodes][1:] == ["0", require_as_recorded, torch.relu]
    (check,) = [node for node in leaf.users if node is not later]
    assert (check.args, check.meta[LINE]) == ((leaf, "appearance", True), leaf.meta[LINE])


def test_a_value_that_depends_on_random_numbers_cannot_be_asked_again() -> None:
    writer, _, (x,) = begun(X)
    noise = writer.node("call_function", torch.rand_like, (x,), {})
    writer.impure[noise] = "random numbers"
    sum_of_noise = writer.node("call_method", "sum", (noise,), {})
    with pytest.raises(UntraceableError, match="its course depends on a sum, which depends on random numbers"):
        writer.guard(sum_of_noise, 3.0, "a sum")
    sum_of_input = writer.node("call_method", "sum", (x,), {})
    writer.guard(sum_of_input, 0.0, "a sum")
    assert writer.valued == [(sum_of_input, 0.0)]


def test_a_tensor_that_was_changed_in_place_cannot_be_asked_again() -> None:
    writer, _, (x,) = begun(X)
    writer.note_change(X, writer.node("call_method", "zero_", (x,), {}))
    with pytest.raises(UntraceableError, match="which was changed in place before"):
        writer.guard(writer.node("call_method", "sum", (x,), {}), 0.0, "a sum")
    constant = torch.ones(1)
    with pytest.raises(UntraceableError, match="changes a parameter, or another tensor"):
        writer.note_change(constant, writer.node("call_method", "zero_", (writer.encode(constant),), {}))


def test_attributes_of_tensors_are_refused_unless_they_came_with_an_input() -> None:
    source = torch.zeros(2)
    source.note = "from the user"  # type: ignore[attr-defined]
    writer, _, _ = begun(source)
    writer.require_bare([source])
    made = torch.zeros(2)
    made.note = "from the forward"  # type: ignore[attr-defined]
    with pytest.raises(UntraceableError, match="sets Python attributes of tensors"):
        writer.require_bare([made])


def test_what_was_computed_for_questions_alone_is_erased() -> None:
    writer, _, (x,) = begun(X)
    kept = writer.node("call_method", "relu", (x,), {})
    question = writer.node("call_method", "sum", (x,), {})
    writer.sizes_of(X, X.shape, None)
    writer.node("output", "output", (kept,), {})
    erase(writer.graph, [question])
    assert targets(writer) == ["relu", "output"]


def test_bytes_that_autograd_saves_are_those_of_the_operation() -> None:
    root = nn.Linear(2, 2)
    writer, _, (x,) = begun(X, root=root)
    result = torch.ones(8)
    node = writer.node("call_function", torch.relu, (x,), {})
    writer.unpack(result, node, [X])
    for saved in (result, X, root.weight):
        writer.values.note_saved(saved)
    writer.values.settle_saved(node, [X, result])
    memory = writer.values.memory_of(node)
    assert (memory.made_bytes, memory.saved_bytes, memory.saved) == (32, 32, {node})
    view = writer.node("call_method", "view", (node,), {})
    part = result[:2]
    writer.unpack(part, view, [result])
    memory = writer.values.memory_of(view)
    assert (memory.made_bytes, memory.storages, memory.pieces) == (0, {node: 32}, {node})
    reference = weakref.ref(part)
    del part
    assert reference() is None
