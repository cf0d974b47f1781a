"""A stage made of a piece of a graph: a few operations on the user's own modules and parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Size, fx, nn

from lightning_rotor.capture.modules import PLAIN
from lightning_rotor.errors import ExecutionError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import tree_flatten

CONSTANT = "_lightning_rotor_constant_"
"""With a number behind it, the name under which a graph reads a tensor that the forward made out of nothing."""
SIZE = "size"
"""Where the node of a size keeps what it was in the recording."""
IN_PLACE = tuple(
    getattr(operator, f"i{name}")
    for name in [
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "matmul",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    ]
)
"""Python's operators that change a tensor."""


def spell_value(value: Any) -> Any:
    """A value that compares equal for values that Python code cannot tell apart; NaN equals itself."""
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(map(spell_value, value))
    return type(value).__name__, repr(value)


def require_as_recorded(output: Any, appearance: Any, sizes: bool) -> None:
    """Raise ``ExecutionError`` if code that runs as it is returns another shape, type or number than recorded."""
    received = appearance_of(output, sizes=sizes)
    if received != appearance:
        raise ExecutionError(
            f"a submodule returned {received[1]} where its recording has {appearance[1]}: expected shapes and plain "
            "values that depend on the shapes of the inputs alone. Plan the submodules instead, by name"
        )


def appearance_of(output: Any, *, sizes: bool) -> Any:
    """Shapes, or dimensions alone, types and plain values in what a module returned."""
    leaves, spec = tree_flatten(output)
    return str(spec), tuple(
        ("tensor", tuple(leaf.shape) if sizes else leaf.dim(), str(leaf.dtype), str(leaf.device))
        if isinstance(leaf, torch.Tensor)
        else spell_value(leaf)
        if isinstance(leaf, PLAIN)
        else type(leaf).__name__
        for leaf in leaves
    )


# ----------------------------------------------------------------------------------------------------
# Python functions for runs of operations, so that a step costs the host no more than the user's own code does.


@dataclass(frozen=True, slots=True)
class Ref:
    """A value that an operation reads, by its place in the run."""

    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """An operation: what to call, with which values, and which values nobody needs afterwards."""

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    frees: tuple[int, ...]


def encoded(value: Any, places: Mapping[fx.Node, int]) -> Any:
    """Arguments with references in the place of nodes, and fx's immutable containers as plain ones."""
    if isinstance(value, fx.Node):
        return Ref(places[value])
    if isinstance(value, tuple) and not isinstance(value, Size):
        return tuple(encoded(entry, places) for entry in value)
    if isinstance(value, list):
        return [encoded(entry, places) for entry in value]
    if isinstance(value, dict):
        return {key: encoded(entry, places) for key, entry in value.items()}
    if isinstance(value, slice):
        return slice(*(encoded(entry, places) for entry in (value.start, value.stop, value.step)))
    return value


def function_of(inputs: int, steps: Sequence[Step], output: Any) -> Callable[[Any], Any]:
    """A function that runs operations: inputs have the first places, each step makes the next one.

    It lets go of values as the user's code would. It binds by name what it calls and reads, so equal operations on
    other modules share their code.
    """
    writer = _Writer()
    lines = [f"{', '.join(_value(place) for place in range(inputs))} = value"] if inputs else []
    lines.append("del value")
    for place, step in enumerate(steps, inputs):
        lines.append(f"{_value(place)} = {writer.call(step)}")
        if step.frees:
            lines.append(f"del {', '.join(map(_value, step.frees))}")
    lines.append(f"return {writer.spell(output)}")
    namespace = dict(writer.bound)
    exec(_code("\n    ".join(["def run(value):", *lines])), namespace)
    run: Callable[[Any], Any] = namespace["run"]
    return run


@lru_cache(maxsize=4096)  # recordings for other lengths have other numbers in them
def _code(source: str) -> CodeType:
    return compile(source, "<stage of lightning_rotor>", "exec")


def _value(place: int) -> str:
    return f"v{place}"


class _Writer:
    """Spells operations as Python, and binds what cannot be spelled to names."""

    def __init__(self) -> None:
        self.bound: dict[str, Any] = {}

    def call(self, step: Step) -> str:
        if step.kind == "constant":
            return self._bind(step.target)
        if step.kind == "read":
            owner, name = step.target
            return f"getattr({self._bind(owner)}, {name!r})"
        args = step.args
        if step.kind == "call_method":
            called, args = f"getattr({self.spell(args[0])}, {step.target!r})", args[1:]
        else:
            called = self._bind(step.target)
        words = [*map(self.spell, args)]
        if step.kwargs:
            words.append(f"**{self.spell(step.kwargs)}")
        return f"{called}({', '.join(words)})"

    def spell(self, value: Any) -> str:
        """An argument: containers are made anew at each call, as they would be by the user's code."""
        kind = type(value)
        if kind is Ref:
            return _value(value.index)
        if kind is tuple:
            return f"({''.join(f'{self.spell(entry)}, ' for entry in value)})"
        if kind is list:
            return f"[{', '.join(map(self.spell, value))}]"
        if kind is dict:
            return f"{{{', '.join(f'{self.spell(key)}: {self.spell(entry)}' for key, entry in value.items())}}}"
        if kind is slice:
            return f"slice({self.spell(value.start)}, {self.spell(value.stop)}, {self.spell(value.step)})"
        if kind in (bool, int, str) or value is None:
            return repr(value)
        return self._bind(value)

    def _bind(self, value: Any) -> str:
        name = f"c{len(self.bound)}"
        self.bound[name] = value
        return name


# ----------------------------------------------------------------------------------------------------


class GraphSlice(nn.Module):
    """Runs consecutive operations of a graph; a single input or output is itself, several are a tuple.

    It reads the user's modules and parameters where they are at that moment, so it sees a replaced parameter. A value
    is let go after the last operation that reads it, as in the user's code.
    """

    def __init__(
        self,
        inputs: Sequence[fx.Node],
        nodes: Sequence[fx.Node],
        outputs: Any,
        *,
        root: nn.Module,
        owners: Mapping[str, tuple[nn.Module, str]],
        constants: Sequence[torch.Tensor],
    ) -> None:
        super().__init__()
        self._inputs = len(inputs)
        self._reads: list[tuple[nn.Module, str]] = []
        self._constants: list[torch.Tensor] = []
        self._targets: dict[int, nn.Module] = {}
        self._steps: list[Step] = []
        self._function: Callable[[Any], Any] | None = None  # made at the first call
        places = {node: index for index, node in enumerate(inputs)}
        last = {used: node for node in nodes for used in node.all_input_nodes}
        kept = dict.fromkeys(_nodes_in(outputs))
        for node in self._with_reads(nodes, kept):
            dying = [used for used in node.all_input_nodes if last[used] is node and used not in kept]
            if node not in last and node not in kept:
                dying.append(node)
            places[node] = len(places)
            kind, target = self._target(node, root, owners, constants)
            args, kwargs = encoded(node.args, places), encoded(node.kwargs, places)
            self._steps.append(Step(kind, target, args, kwargs, tuple(places[each] for each in dying)))
        self._output = encoded(outputs, places)
        self.known_functions = all(node.op == "call_module" or _is_known(node) for node in nodes)
        """True if all functions that it calls are torch's, draw nothing and give the same bits each time."""

    @staticmethod
    def _with_reads(nodes: Sequence[fx.Node], kept: Iterable[fx.Node]) -> dict[fx.Node, None]:
        """The operations, each after the parameters and attributes that it is the first to read."""
        found: dict[fx.Node, None] = {}
        for node in nodes:
            found.update((used, None) for used in node.all_input_nodes if used.op == "get_attr")
            found[node] = None
        found.update((node, None) for node in kept if node.op == "get_attr")
        return found

    def _target(
        self,
        node: fx.Node,
        root: nn.Module,
        owners: Mapping[str, tuple[nn.Module, str]],
        constants: Sequence[torch.Tensor],
    ) -> tuple[str, Any]:
        """Kind and target of a node's step."""
        name = str(node.target)
        if node.op == "get_attr" and name.startswith(CONSTANT):
            self._constants.append(constants[int(name[len(CONSTANT) :])])
            return "constant", self._constants[-1]
        if node.op == "get_attr":
            self._reads.append(owners[name])
            return "read", owners[name]
        if node.op != "call_module":
            return node.op, node.target
        module = root.get_submodule(name)
        if id(module) not in self._targets:
            self._targets[id(module)] = module
            self._modules[str(len(self._modules))] = module
        return node.op, module

    # Not nn.Module's: hooks for all modules are the business of the user's modules.
    def __call__(self, value: Any) -> Any:
        """Run the operations."""
        if self._function is None:
            self._function = function_of(self._inputs, self._steps, self._output)
        return self._function(value)

    @property
    def only_module(self) -> nn.Module | None:
        """The module that it calls, if it does nothing else."""
        match [step for step in self._steps if step.target is not require_as_recorded]:
            case [Step(kind="call_module", target=module, args=(Ref(0),), kwargs={}) as step] if (
                self._inputs == 1 and not step.kwargs and self._output == Ref(1)
            ):
                return module if isinstance(module, nn.Module) else None
            case _:
                return None

    def calling(self, replacements: Mapping[nn.Module, Callable[..., Any]]) -> GraphSlice:
        """The same operations, with other callables in the place of some modules."""
        other = copy(self)
        other._function = None
        other._steps = [
            replace(step, target=replacements.get(step.target, step.target)) if step.kind == "call_module" else step
            for step in self._steps
        ]
        return other

    # ---------------------------------------------------------------- what belongs to it

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Parameters of the modules that it calls, and those that it reads by itself."""
        for module in self._modules.values():
            if module is not None:
                yield from module.parameters()
        for tensor in self.direct_tensors():
            if isinstance(tensor, nn.Parameter):
                yield tensor

    def direct_tensors(self) -> Iterator[torch.Tensor]:
        """Parameters, buffers and tensors in attributes that it reads by itself."""
        for owner, name in self._reads:
            yield getattr(owner, name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The user's modules that it calls or reads buffers of, and itself if it calls functions of unknown effect."""
        memo = set() if memo is None else memo
        if not self.known_functions:
            yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                yield from module.named_modules(memo, f"{prefix}.{name}", remove_duplicate)
        for index, (owner, name) in enumerate(self._reads):
            if owner._buffers.get(name) is not None and owner not in memo:
                memo.add(owner)
                yield f"{prefix}.owner{index}", owner

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """Tensors that the forward made out of nothing, and that every call shares."""
        return tuple(self._constants)

    @property
    def operators(self) -> tuple[Any, ...]:
        """What it runs, in order: modules, functions, and tensors' methods by name."""
        return tuple(step.target for step in self._steps if step.kind not in ("read", "constant"))

    @property
    def called_modules(self) -> tuple[nn.Module, ...]:
        """The user's modules that it calls."""
        return tuple(self._targets.values())

    @property
    def reads(self) -> list[tuple[nn.Module, str]]:
        """The parameters, buffers and attributes that it reads by itself: who has them, and under which name."""
        return self._reads

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for slices that cost the same if the modules that they call do."""
        tensors = tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in self.direct_tensors())
        return self.operations, tuple(map(id, self._constants)), tensors

    @property
    def operations(self) -> tuple[Any, ...]:
        """Equal for slices that do the same with modules and tensors of their own, whatever those look like."""
        places = {id(module): place for place, module in enumerate(self._targets.values())}

        def spell(value: Any) -> Any:
            return spelled(value, attrgetter("index"))

        def target_of(step: Step) -> Any:
            match step.kind:
                case "call_module":
                    return places[id(step.target)]
                case "read":
                    return step.target[1]
                case "constant":
                    return tuple(step.target.shape)
            return step.target

        steps = ((s.kind, spell(target_of(s)), spell(s.args), spell(s.kwargs), s.frees) for s in self._steps)
        return self._inputs, tuple(steps), spell(self._output)


def _nodes_in(*values: Any) -> list[fx.Node]:
    found: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.node.map_arg(values, note)
    return found


def spelled(value: Any, place_of: Callable[[Any], int]) -> Any:
    """A hashable that is equal for equal arguments and targets; ``place_of`` stands for each :class:`Ref` or node."""
    match value:
        case Ref() | fx.Node():
            return "%", place_of(value)
        case tuple() | list():
            return type(value).__name__, tuple(spelled(entry, place_of) for entry in value)
        case dict():
            return "dict", tuple((key, spelled(entry, place_of)) for key, entry in value.items())
        case slice():
            return "slice", spelled((value.start, value.stop, value.step), place_of)
        case FunctionType():
            return "function", id(value.__code__)
        case MethodType():
            return "method", id(value.__func__), id(value.__self__)
        case np.ndarray() | np.generic():
            return str(value.dtype), value.shape, value.tobytes()
    if callable(value) and not isinstance(value, type):
        return "callable", id(value) if type(value).__hash__ is None else value
    return type(value).__name__, repr(value)


# -------------------------------------------------------------------- functions whose behaviour is known

_KNOWN_METHODS = frozenset(
    name
    for line in (
        "abs add addcmul addmm adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
        "adaptive_max_pool2d arange avg_pool2d baddbmm",
        "batch_norm bmm cat celu chunk clamp concat contiguous conv1d conv2d conv3d dim div elu exp expand "
        "flatten gelu getattr glu",
        "group_norm hardsigmoid hardswish hardtanh interpolate layer_norm leaky_relu linear log log_softmax "
        "masked_fill matmul max_pool2d",
        "mean mish mul narrow normalize pad permute pixel_shuffle pow relu relu6 relu_ repeat reshape roll "
        "rms_norm rsqrt selu sigmoid silu",
        "size softmax softplus split sqrt squeeze stack sub sum tanh to transpose unbind unflatten unsqueeze "
        "view where",
    )
    for name in line.split()
)
_DROPOUT_PLACE = 4  # among the arguments of torch's attention
_KNOWN_OPERATORS = "getitem setitem add sub mul truediv floordiv mod matmul neg eq ne lt le gt ge"  # and those in place
_KNOWN_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    [
        *(
            function
            for holder in (torch, F, private.LAYERS)
            for name in _KNOWN_METHODS
            if callable(function := getattr(holder, name, None))
        ),
        *(getattr(operator, name) for name in _KNOWN_OPERATORS.split()),
        *IN_PLACE,
        getattr,
        require_as_recorded,
        Size,
    ]
)


def _is_known(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _KNOWN_METHODS
    if node.target is F.scaled_dot_product_attention:
        dropout = node.args[_DROPOUT_PLACE] if len(node.args) > _DROPOUT_PLACE else node.kwargs.get("dropout_p", 0)
        return isinstance(dropout, (int, float)) and dropout == 0
    try:
        return node.target in _KNOWN_FUNCTIONS
    except TypeError:  # a callable without a hash
        return False
