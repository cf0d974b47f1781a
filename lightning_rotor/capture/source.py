"""Python source for operations of a graph.

No word of the user's gets into it. Variables are ``v0``, ``v1``; modules, functions, tensors, names of attributes and
all other objects are bound to ``c0``, ``c1``; only numbers, None, True and False are spelled. So nothing can be
injected, and equal operations on other modules have the same source and share its code.
"""

from __future__ import annotations

from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Size, fx, nn

from lightning_rotor.capture.recorded_checks import spell_whole

_SPELLED = (bool, int, type(None))
"""Types of arguments that stand in the source."""


class Source:
    """Writes operations as Python; what has no literal is a constant with a name."""

    def __init__(self) -> None:
        self.bound: dict[str, Any] = {}
        self._names: dict[fx.Node, str] = {}

    def name(self, node: fx.Node) -> str:
        """The variable that holds a node's value."""
        # By order of appearance, so that equal operations have equal names in every recording.
        return self._names.setdefault(node, f"v{len(self._names)}")

    def call(self, node: fx.Node, called: str) -> str:
        """The call of an operation by the name of its function; of a tensor's method by its own."""
        args = node.args
        if node.op == "call_method":
            called = f"getattr({self.argument(args[0])}, {self.constant(node.target)})"
            args = args[1:]
        words = [*map(self.argument, args)]
        if node.kwargs:
            words.append(f"**{self.argument(node.kwargs)}")
        return f"{called}({', '.join(words)})"

    def argument(self, value: Any) -> str:
        """Expression of an argument. Containers are made anew at each call, as they would be by the user's code."""
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, tuple) and not isinstance(value, Size):
            entries = "".join(f"{self.argument(entry)}, " for entry in value)
            return f"({entries})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.argument, value))}]"
        if isinstance(value, dict):
            pairs = [f"{self.argument(key)}: {self.argument(entry)}" for key, entry in value.items()]
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, slice):
            return f"slice({self.argument(value.start)}, {self.argument(value.stop)}, {self.argument(value.step)})"
        return repr(value) if type(value) in _SPELLED else self.constant(value)

    def constant(self, value: Any) -> str:
        """Name of a constant that holds a value when the source runs."""
        # One name for each use, so that the source is the same whether two uses are of one value or of two.
        name = f"c{len(self.bound)}"
        self.bound[name] = value
        return name


# Bounded, for recordings for other lengths have other numbers in them.
@lru_cache(maxsize=4096)
def code_of_source(source: str) -> CodeType:
    """Compiled source, the same for equal ones."""
    return compile(source, "<stage of lightning_rotor>", "exec")


def look_of(value: Any) -> Any:
    """A hashable that is equal for values with which operations do the same; modules and tensors are not compared."""
    match value:
        case nn.Module():
            return "module"
        case torch.Tensor():
            return tuple(value.shape)
        case FunctionType():
            # A function that is made anew by each forward has the same code.
            return "function", id(value.__code__)
        case MethodType():
            return "method", id(value.__func__), id(value.__self__)
        case np.ndarray() | np.generic():
            return str(value.dtype), value.shape, value.tobytes()
    if callable(value) and not isinstance(value, type):
        # The object itself where it has a hash, so that its own equality counts: two equal partials do the same.
        return "callable", id(value) if type(value).__hash__ is None else value
    return spell_whole(value)
