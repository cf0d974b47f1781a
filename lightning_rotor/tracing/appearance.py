"""What values look like at one moment, comparable, and what puts them back."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_rotor.tracing.values import version_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that never change."""

_FILLED = (list, dict, set, deque, OrderedDict, defaultdict)
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


def rewinding(value: Any, depth: int = 4) -> Callable[[], None] | None:
    """What sets a random generator back to its present state, or puts the present entries back into a list, a dict and what is in them.

    None for anything else.
    """
    if type(value) in _FILLED and len(value) <= LONG and depth:
        return _refilling(value, depth)
    state = generator_state(value)
    if state is None:
        return None
    if isinstance(value, random.Random):
        return partial(value.setstate, state)
    if isinstance(value, torch.Generator):
        state_of_torchs = value.get_state()
        return lambda: (value.set_state(state_of_torchs), None)[1]
    if hasattr(value, "bit_generator"):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return partial(value.set_state, value.get_state())


def _refilling(value: Any, depth: int) -> Callable[[], None]:
    entries: Any = copy(value)
    inside = [rewinding(entry, depth - 1) for entry in (value.values() if isinstance(value, dict) else value)]

    def refill() -> None:
        for rewind in inside:
            if rewind is not None:
                rewind()
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(entries)

    return refill


def generator_state(value: Any) -> Any:
    """The state of a random generator, comparable; None for anything else."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        # Its numbers are equal only if their text is: a NumPy array in a state has no truth value.
        return repr(value.bit_generator.state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        name, keys, *rest = value.get_state()
        return name, keys.tobytes(), *rest
    return None
