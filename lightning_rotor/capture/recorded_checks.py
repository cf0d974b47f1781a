"""Checks that become operations of a graph: code that runs as it is must return what it did, asserts must hold."""

from __future__ import annotations

from typing import Any

import torch

from lightning_rotor.capture.operations import CONSTANTS
from lightning_rotor.errors import ExecutionError
from lightning_rotor.private.values import flatten, is_fake

_SPELLED_BY = (int, float, complex, str, bytes)
"""Types of Python's whose own ``__repr__`` is asked, which a subclass may have replaced."""


def spell_value(value: Any) -> Any:
    """A value that compares equal for values that Python code cannot tell apart; NaN equals itself."""
    # Entry by entry, as the text of a tuple would spell its entries by their own __repr__.
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(map(spell_value, value))
    return spell_whole(value)


def spell_whole(value: Any) -> tuple[str, str]:
    """Type and text of a value, without looking into tuples and lists."""
    # With the type, for 1 equals True and 1.0. As text, for NaN is unequal to itself, and 0.0 equal to -0.0.
    kind = type(value)
    return kind.__name__, _base_of(kind).__repr__(value)


def _base_of(kind: type) -> Any:
    for base in _SPELLED_BY:
        if issubclass(kind, base):
            return base
    return kind


def require_as_recorded(output: Any, appearance: Any, sizes: bool) -> None:
    """Raise ``ExecutionError`` if code that runs as it is returns another shape, type or number than recorded."""
    # The code behind it was recorded for what it returned then, and runs no branch for anything else.
    received = appearance_of(output, sizes=sizes)
    if received != appearance:
        raise ExecutionError(
            f"a submodule returned {received[1]} where its recording has {appearance[1]}: expected shapes and plain "
            "values that depend on the shapes of the inputs alone. Plan the submodules instead, by name"
        )


def require_check(condition: torch.Tensor, answer: bool, place: str) -> None:
    """Raise ``ExecutionError`` if the forward itself would raise an error, as an ``assert`` does. Fake tensors pass."""
    # Where costs are estimated, there are no values that could pass or fail.
    if not is_fake(condition) and bool(condition) is not answer:
        raise ExecutionError(
            f"the check at {place} has failed: expected values that pass it. Call the module without a plan to see its "
            "own error; where the code around it goes on after that error, switch the check off or plan submodules"
        )


def appearance_of(output: Any, *, sizes: bool) -> Any:
    """Shapes, or dimensions alone, types and plain values in what a module returned."""
    leaves, spec = flatten(output)
    return str(spec), tuple(_appearance_of_leaf(leaf, sizes=sizes) for leaf in leaves)


def _appearance_of_leaf(leaf: Any, *, sizes: bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        extent = tuple(leaf.shape) if sizes else leaf.dim()
        return "tensor", extent, str(leaf.dtype), str(leaf.device)
    if isinstance(leaf, CONSTANTS):
        return spell_value(leaf)
    return type(leaf).__name__
