"""A stage made of a piece of a graph: a few operations on the user's own modules and parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Size, fx, nn

from lightning_rotor.capture.operations import CONSTANTS
from lightning_rotor.errors import ExecutionError
from lightning_rotor.private.values import flatten, is_fake

OF = "of"
"""Where a node keeps the module that it calls; the module whose tensor it reads, and the tensor's name there; or a
constant, a tensor that the forward made out of nothing."""
LINE = "line"
"""Where a node keeps the file and the line of the user's code that did it."""
UNSURE = "unsure"
"""Where the node of a function says that it may draw random numbers, or give other bits when it runs again."""
SIZE = "size"
"""Where the node of a size keeps what it was in the recording."""
VALUED = "valued"
"""Where a number says that it depends on values: the longest row of packed sequences, and what is computed from it."""
REGION = "region"
"""Where a node says under which other settings than the call's it runs."""
IN_PLACE = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow),
    *(operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
)
"""Python's operators that change a tensor."""


def longest(lengths: torch.Tensor) -> int:
    """Length of the longest of some rows: how many time steps they have once they are packed."""
    return int(lengths.max())


def total(lengths: torch.Tensor) -> int:
    """Entries of some rows once they are packed."""
    return int(lengths.sum())


@dataclass(frozen=True, slots=True)
class Region:
    """Settings of operations inside of ``torch.no_grad`` or ``torch.autocast``; of autocast those that it changes."""

    gradients: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context of the operations. A first pass without gradients stays without."""
        with torch.set_grad_enabled(self.gradients and torch.is_grad_enabled()), ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            yield


def name_of(node: fx.Node) -> str:
    """The name of what an operation calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def is_constant(node: fx.Node) -> bool:
    """True if a node is a tensor that the forward made out of nothing."""
    return node.op == "get_attr" and isinstance(node.meta[OF], torch.Tensor)


def spell_value(value: Any) -> Any:
    """A value that compares equal for values that Python code cannot tell apart; NaN equals itself."""
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(map(spell_value, value))
    base: Any = next((each for each in (int, float, complex, str, bytes) if issubclass(type(value), each)), type(value))
    return type(value).__name__, base.__repr__(value)


def require_as_recorded(output: Any, appearance: Any, sizes: bool) -> None:
    """Raise ``ExecutionError`` if code that runs as it is returns another shape, type or number than recorded."""
    received = appearance_of(output, sizes=sizes)
    if received != appearance:
        raise ExecutionError(
            f"a submodule returned {received[1]} where its recording has {appearance[1]}: expected shapes and plain "
            "values that depend on the shapes of the inputs alone. Plan the submodules instead, by name"
        )


def require_check(condition: torch.Tensor, answer: bool, place: str) -> None:
    """Raise ``ExecutionError`` if the forward itself would raise an error, as an ``assert`` does. Fake tensors pass."""
    if not is_fake(condition) and bool(condition) is not answer:
        raise ExecutionError(
            f"the check at {place} has failed: expected values that pass it. Call the module without a plan to see its "
            "own error; where the code around it goes on after that error, switch the check off or plan submodules"
        )


def appearance_of(output: Any, *, sizes: bool) -> Any:
    """Shapes, or dimensions alone, types and plain values in what a module returned."""
    leaves, spec = flatten(output)
    return str(spec), tuple(
        ("tensor", tuple(leaf.shape) if sizes else leaf.dim(), str(leaf.dtype), str(leaf.device))
        if isinstance(leaf, torch.Tensor)
        else spell_value(leaf)
        if isinstance(leaf, CONSTANTS)
        else type(leaf).__name__
        for leaf in leaves
    )


# ----------------------------------------------------------------------------------------------------
# Python functions for runs of operations, so that a step costs the host no more than the user's own code does.


class Source:
    """Spells operations as Python, and binds what cannot be spelled to names."""

    def __init__(self) -> None:
        self.bound: dict[str, Any] = {}
        self._names: dict[fx.Node, str] = {}

    def name(self, node: fx.Node) -> str:
        """The variable that holds a node's value."""
        return self._names.setdefault(node, f"v{len(self._names)}")

    def call(self, node: fx.Node, called: str) -> str:
        """The call of an operation by the name of its function; of a tensor's method by its own."""
        args = node.args
        if node.op == "call_method":
            called, args = f"getattr({self.spell(args[0])}, {node.target!r})", args[1:]
        words = [*map(self.spell, args)]
        if node.kwargs:
            words.append(f"**{self.spell(node.kwargs)}")
        return f"{called}({', '.join(words)})"

    def spell(self, value: Any) -> str:
        """An argument: containers are made anew at each call, as they would be by the user's code."""
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, tuple) and not isinstance(value, Size):
            return f"({''.join(f'{self.spell(entry)}, ' for entry in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.spell, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.spell(key)}: {self.spell(entry)}' for key, entry in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self.spell(value.start)}, {self.spell(value.stop)}, {self.spell(value.step)})"
        return repr(value) if type(value) in (bool, int, str, type(None)) else self.bind(value)

    def bind(self, value: Any) -> str:
        """A name for a value."""
        name = f"c{len(self.bound)}"
        self.bound[name] = value
        return name


@lru_cache(maxsize=4096)  # recordings for other lengths have other numbers in them
def _code(source: str) -> CodeType:
    return compile(source, "<stage of lightning_rotor>", "exec")


class GraphSlice(nn.Module):
    """Runs consecutive operations of a graph; a single input or output is itself, several are a tuple.

    It reads the user's modules and parameters where they are at that moment, so it sees a replaced parameter. A value
    is let go after the last operation that reads it, as in the user's code. What it calls and reads is bound by name,
    so equal operations on other modules share their code.

    Attributes:
        known_functions: All functions that it calls are torch's, draw nothing and give the same bits each time.
        operators: What it runs, in order: modules, functions, and tensors' methods by name.
        reads: The parameters, buffers and attributes that it reads by itself: who has them, and under which name.
    """

    def __init__(self, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Any) -> None:
        super().__init__()
        self.reads: list[tuple[nn.Module, str]] = []
        self._constants: list[torch.Tensor] = []
        self._calls: dict[str, nn.Module] = {}
        self._function: Callable[[Any], Any] | None = None  # made at the first call
        source = Source()
        lines, region, indent = ["del value"], None, ""
        if inputs:
            lines.insert(0, f"{', '.join(map(source.name, inputs))} = value")
        last = {used: node for node in nodes for used in (node, *node.all_input_nodes)}
        kept: dict[fx.Node, None] = {}
        fx.node.map_arg(outputs, kept.setdefault)
        for node in _with_reads(nodes, kept):
            if is_constant(node):
                self._constants.append(node.meta[OF])
                called = source.bind(node.meta[OF])
            elif node.op == "get_attr":
                self.reads.append(node.meta[OF])
                owner, name = node.meta[OF]
                called = f"getattr({source.bind(owner)}, {name!r})"
            else:
                called = source.call(node, self._target(node, source))
            if node.op != "get_attr" and SIZE not in node.meta and node.meta.get(REGION) != region:
                region = node.meta.get(REGION)
                indent = "    " if region else ""
                lines += [f"with {source.bind(region)}():"] if region else []
            lines.append(f"{indent}{source.name(node)} = {called}")
            dying = [used for used in (*node.all_input_nodes, node) if last.get(used) is node and used not in kept]
            if dying:
                lines.append(f"{indent}del {', '.join(map(source.name, dying))}")
        lines.append(f"return {source.spell(outputs)}")
        self._source, self._bound = "\n    ".join(["def run(value):", *lines]), source.bound
        self.operators = tuple(node.meta[OF] if node.op == "call_module" else node.target for node in nodes)
        self.known_functions = not any(UNSURE in node.meta for node in nodes)
        working = [node for node in nodes if node.target is not require_as_recorded]
        self._is_call = len(working) == len(self._calls) == len(inputs) == 1 and (
            (working[0].args, working[0].kwargs, outputs) == ((inputs[0],), {}, working[0])
            and REGION not in working[0].meta
        )

    def _target(self, node: fx.Node, source: Source) -> str:
        """The name of what an operation calls."""
        if node.op == "call_method":
            return ""
        if node.op != "call_module":
            return source.bind(node.target)
        module = node.meta[OF]
        if module not in self._calls.values():
            self._modules[str(len(self._modules))] = module
        name = source.bind(module)
        self._calls[name] = module
        return name

    # Not nn.Module's: hooks for all modules are the business of the user's modules.
    def __call__(self, value: Any) -> Any:
        """Run the operations."""
        if self._function is None:
            namespace = dict(self._bound)
            exec(_code(self._source), namespace)
            self._function = namespace["run"]
        return self._function(value)

    @property
    def only_module(self) -> nn.Module | None:
        """The module that it calls, if it does nothing else."""
        return self.called_modules[0] if self._is_call else None

    def calling(self, replacements: Mapping[nn.Module, Callable[..., Any]]) -> GraphSlice:
        """The same operations, with other callables in the place of some modules."""
        other = copy(self)
        other._function = None
        other._bound = self._bound | {name: replacements.get(each, each) for name, each in self._calls.items()}
        return other

    # ---------------------------------------------------------------- what belongs to it

    @property
    def called_modules(self) -> tuple[nn.Module, ...]:
        """The user's modules that it calls."""
        return tuple(dict.fromkeys(self._calls.values()))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Parameters of the modules that it calls, and those that it reads by itself."""
        for module in self.called_modules:
            yield from module.parameters()
        yield from (tensor for tensor in self._direct_tensors() if isinstance(tensor, nn.Parameter))

    def _direct_tensors(self) -> Iterator[torch.Tensor]:
        return (getattr(owner, name) for owner, name in self.reads)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The user's modules that it calls or reads buffers of, and itself if it calls functions of unknown effect."""
        memo = set() if memo is None else memo
        if not self.known_functions:
            yield prefix, self
        for index, module in enumerate(self.called_modules):
            yield from module.named_modules(memo, f"{prefix}.{index}", remove_duplicate)
        for index, (owner, name) in enumerate(self.reads):
            if owner._buffers.get(name) is not None and owner not in memo:
                memo.add(owner)
                yield f"{prefix}.owner{index}", owner

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for slices that cost the same if the modules that they call do."""
        tensors = tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in self._direct_tensors())
        return self.operations, tuple(map(id, self._constants)), tensors

    @property
    def operations(self) -> tuple[Any, ...]:
        """Equal for slices that do the same with modules and tensors of their own, whatever those look like."""
        places = {module: place for place, module in enumerate(self.called_modules)}
        calls = self._calls
        return self._source, tuple(
            places[calls[name]] if name in calls else look_of(value) for name, value in self._bound.items()
        )


def _with_reads(nodes: Sequence[fx.Node], kept: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """The operations, each after the parameters and attributes that it is the first to read."""
    inside = set(nodes)
    ordered = (each for node in nodes for each in (*node.all_input_nodes, node))
    return dict.fromkeys(each for each in (*ordered, *kept) if each in inside or each.op == "get_attr")


def look_of(value: Any) -> Any:
    """A hashable that is equal for values with which operations do the same; modules and tensors are not compared."""
    match value:
        case nn.Module():
            return "module"
        case torch.Tensor():
            return tuple(value.shape)
        case FunctionType():
            return "function", id(value.__code__)
        case MethodType():
            return "method", id(value.__func__), id(value.__self__)
        case np.ndarray() | np.generic():
            return str(value.dtype), value.shape, value.tobytes()
    if callable(value) and not isinstance(value, type):
        return "callable", id(value) if type(value).__hash__ is None else value
    base: Any = next((each for each in (int, float, complex, str, bytes) if issubclass(type(value), each)), type(value))
    return type(value).__name__, base.__repr__(value)
