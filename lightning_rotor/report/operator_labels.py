"""Labels of stages: which modules and functions they run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch import nn

from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.stages.sequential import Stage

# They compute nothing. Shown only if a stage does nothing else.
_QUIET_NAMES = (
    "size dim numel getattr getitem assert view reshape transpose permute unsqueeze squeeze expand expand_as "
    "contiguous view_as reshape_as t movedim swapaxes unflatten chunk split unbind detach to type_as is_floating_point "
    "tree_unflatten eq ne lt le gt ge floordiv mod"
)
_QUIET = frozenset(_QUIET_NAMES.split())
# Names of Python's operators that are not the words for them.
_PLAIN = {"iadd": "add", "isub": "sub", "imul": "mul", "truediv": "div"}


def operator_labels(stage: Stage) -> tuple[str, ...]:
    """Operators of a stage in order, for people; one that comes several times in a row is named once."""
    labels: list[str] = []
    for module in stage.modules:
        labels += _labels(module)
    loud = [label for label in labels if label not in _QUIET]
    counted = []
    # A stage that only looks at shapes is shown as what it does: an empty box would say that nothing runs.
    for label, group in groupby(loud or labels):
        count = len(list(group))
        counted.append(label if count == 1 else f"{label} (×{count})")
    return tuple(counted)


def _labels(operator: Any) -> Iterator[str]:
    """Labels of a module with the shape of its weight (``Linear 10×288``), a function, or a tensor's method by name."""
    match operator:
        case GraphSlice():
            # What was recorded, since the slice itself is nothing that the user wrote.
            for inner in operator.operators:
                yield from _labels(inner)
        case nn.Sequential():
            for member in operator:
                yield from _labels(member)
        case nn.Module():
            yield _module_label(operator)
        case str():
            yield _function_label(operator)
        case _:
            # Objects that can be called need have no name.
            yield _function_label(getattr(operator, "__name__", str(operator)))


def _module_label(module: nn.Module) -> str:
    name = type(module).__name__
    # Any module may have an attribute of that name, such as a number.
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.dim():
        return name
    sizes = "×".join(map(str, weight.shape))
    return f"{name} {sizes}"


def _function_label(name: str) -> str:
    """The name without the underscores of methods in place and of Python's operators."""
    bare = name.strip("_")
    return _PLAIN.get(bare, bare)
