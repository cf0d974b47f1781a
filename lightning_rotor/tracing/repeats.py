"""Whether two recordings of one call agree.

If they do not, the code looks at something that no guard can know: a clock, a counter outside of modules, a random generator of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import fx

from lightning_rotor.tensors import same_bits
from lightning_rotor.tracing.guards import spell_value
from lightning_rotor.tracing.tracer import CONSTANT


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
