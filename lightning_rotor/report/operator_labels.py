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
_QUIET = (
    "size dim numel getattr getitem assert view reshape transpose permute unsqueeze squeeze expand expand_as "
    "contiguous view_as reshape_as t movedim swapaxes unflatten chunk split unbind detach to type_as is_floating_point "
    "tree_unflatten eq ne lt le gt ge floordiv mod"
)
_PLAIN = {"iadd": "add", "isub": "sub", "imul": "mul", "truediv": "div"}


def operator_labels(stage: Stage) -> tuple[str, ...]:
    """Operators of a stage in order, for people; one that comes several times in a row is named once."""
    labels = [label for module in stage.modules for label in _labels(module)]
    loud = [label for label in labels if label not in _QUIET.split()] or labels
    counted = ((label, len(list(group))) for label, group in groupby(loud))
    return tuple(label if count == 1 else f"{label} (×{count})" for label, count in counted)


def _labels(operator: Any) -> Iterator[str]:
    """Labels of a module with the shape of its weight (``Linear 10×288``), a function, or a tensor's method by name."""
    match operator:
        case GraphSlice():
            for inner in operator.operators:
                yield from _labels(inner)
        case nn.Sequential():
            for member in operator:
                yield from _labels(member)
        case nn.Module():
            weight = getattr(operator, "weight", None)
            sizes = "×".join(map(str, weight.shape)) if isinstance(weight, torch.Tensor) else ""
            yield f"{type(operator).__name__} {sizes}".strip()
        case _:
            name = operator if isinstance(operator, str) else getattr(operator, "__name__", str(operator))
            yield _PLAIN.get(name.strip("_"), name.strip("_"))
