"""What values look like at one moment, comparable."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

from lightning_rotor.generators import generator_state
from lightning_rotor.tracing.values import version_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that never change."""

LONG = 1000
"""Entries of a list or dict that are looked at; of a longer one, it counts which object it is and how long."""


class Same:
    """Compares by identity, and keeps the object alive so that no other one gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def frozen(value: Any, depth: int = 4, *, objects: bool = True) -> Any:
    """Something that compares equal as long as the value stays what it is.

    Args:
        value: Anything.
        depth: How far to follow lists and dicts in lists and dicts.
        objects: Whether the plain attributes of other objects count, too.
    """
    kind = type(value)
    if kind in PLAIN:
        return kind, repr(value) if kind is float else value
    if isinstance(value, torch.Tensor):
        return Same(value), version_of(value)
    if isinstance(value, (list, tuple, dict, set, deque)):
        if len(value) > LONG or depth == 0:
            return Same(value), len(value)
        if isinstance(value, dict):
            # Not the methods of a class of the user's, which may make its entries anew whenever they are asked for.
            entries = dict.items(value)
            return kind, tuple((frozen(key, 0), frozen(entry, depth - 1, objects=objects)) for key, entry in entries)
        return kind, tuple(frozen(entry, depth - 1, objects=objects) for entry in value)
    state = generator_state(value)
    if state is not None:
        return Same(value), state
    if objects and depth and not isinstance(value, (nn.Module, type)) and hasattr(value, "__dict__"):
        # A configuration object, most likely; what it refers to is followed no further.
        return Same(value), tuple((key, entry) for key, entry in vars(value).items() if type(entry) in PLAIN)
    return Same(value)
