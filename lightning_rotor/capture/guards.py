"""What a recording knows about the values of its call's tensors: if code asked whether a mask is all ones, the answer must be the same again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.capture.modules import PLAIN
from lightning_rotor.capture.symbols import CONSTANT
from lightning_rotor.errors import ExecutionError
from lightning_rotor.private.values import same_bits, tree_flatten
from lightning_rotor.stages.sequential import packed


def spell_value(value: Any) -> Any:
    """Something that compares equal for values that Python code cannot tell apart; NaN equals itself."""
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(map(spell_value, value))
    return type(value).__name__, repr(value)


class Guards:
    """Values that a forward read out of tensors, and how to compute them for another call without running it.

    Args:
        inputs: Placeholders of the graph.
        questions: Nodes whose values Python saw, in order.
        answers: What it saw.
        root: The module.
        owners: Where parameters and buffers are.
        constants: Tensors that the forward made out of nothing.
    """

    def __init__(
        self,
        inputs: Sequence[fx.Node],
        questions: Sequence[fx.Node],
        answers: Sequence[Any],
        *,
        root: nn.Module,
        owners: Mapping[str, tuple[nn.Module, str]],
        constants: Sequence[torch.Tensor],
    ) -> None:
        needed = ancestors(questions)
        self.nodes = [node for node in inputs[0].graph.nodes if node in needed] if inputs else []
        self._asked = GraphSlice(
            inputs,
            [node for node in self.nodes if node.op not in ("placeholder", "get_attr")],
            list(questions),
            root=root,
            owners=owners,
            constants=constants,
        )
        self._answers = [spell_value(list(answers))]

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a call with these tensors would see the same values."""
        try:
            with torch.no_grad():
                found = self._asked(packed(tensors))
        except (RuntimeError, IndexError, ValueError):  # the forward itself will say it better
            return False
        return spell_value(found) in self._answers

    def ask_the_same(self, other: Guards) -> bool:
        """Whether two guards ask the same questions, whatever the answers."""
        return self._asked.operations == other._asked.operations and self._asked.reads == other._asked.reads

    def also_accept(self, other: Guards) -> None:
        """Hold for the other's answers as well, which have turned out to make no difference."""
        self._answers += [answer for answer in other._answers if answer not in self._answers]


def ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes and everything that they are computed from."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


# -------------------------------------------------------------------- at every call


def require_as_recorded(output: Any, appearance: Any) -> None:
    """Check that code which a recording runs as it is returns what the code after it was recorded for.

    Raises:
        ExecutionError: Another shape, type or number.
    """
    received = appearance_of(output)
    if received != appearance:
        raise ExecutionError(
            f"a submodule returned {received[1]} where its recording has {appearance[1]}: expected shapes and plain values that depend on the "
            "shapes of the inputs alone. Plan the submodules instead, by name"
        )


def appearance_of(output: Any) -> Any:
    """Shapes, types and plain values in what a module returned."""
    leaves, spec = tree_flatten(output)
    return str(spec), tuple(
        ("tensor", tuple(leaf.shape), str(leaf.dtype), str(leaf.device))
        if isinstance(leaf, torch.Tensor)
        else spell_value(leaf)
        if isinstance(leaf, PLAIN)
        else type(leaf).__name__
        for leaf in leaves
    )


# ----------------------------------------------------------------------------------------------------
# Whether two recordings of one call agree.


def first_difference(
    left: fx.Graph, right: fx.Graph, constants: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
) -> tuple[str, ...]:
    """Paths of the modules at the first operation that two recordings of one call do not share; none if they agree.

    Args:
        left: One recording.
        right: The other.
        constants: The tensors that each made out of nothing.
    """
    places: dict[fx.Node, int] = {}
    for place, pair in enumerate(zip_longest(left.nodes, right.nodes)):
        if (
            None in pair
            or _spell(pair[0], places) != _spell(pair[1], places)
            or not _same_constants(pair[0], constants)
        ):
            return tuple(str(node.meta["module"]) for node in pair if node is not None)
        places.update(dict.fromkeys(pair, place))
    return ()


def _same_constants(node: fx.Node, constants: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]) -> bool:
    if node.op != "get_attr" or not str(node.target).startswith(CONSTANT):
        return True
    index = int(str(node.target)[len(CONSTANT) :])
    return same_bits(constants[0][index], constants[1][index])


def _spell(node: fx.Node, places: dict[fx.Node, int]) -> Any:
    def spell(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "%", places[value]
        if isinstance(value, (tuple, list)):
            return tuple(map(spell, value))
        if isinstance(value, dict):
            return tuple((key, spell(entry)) for key, entry in value.items())
        if isinstance(value, slice):
            return spell((value.start, value.stop, value.step))
        if isinstance(value, FunctionType):
            return id(value.__code__)
        if isinstance(value, MethodType):
            return spell(value.__func__), id(value.__self__)
        if isinstance(value, (np.ndarray, np.generic)):
            return str(value.dtype), value.shape, value.tobytes()
        if isinstance(value, (int, float, complex, str, bytes)):
            return spell_value(value)
        return value if callable(value) else repr(value)

    return node.op, node.meta["module"], spell(node.target), spell(node.args), spell(node.kwargs)
