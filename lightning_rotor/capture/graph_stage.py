"""A stage made of a piece of a graph: a few operations on the user's own modules and parameters.

It is written as Python source and executed once, so that a step costs the host no more than the user's own code does::

    def run(value):
        v0, v1 = value
        del value
        v2 = c0(v0)                          c0: a module of the user's
        del v0
        with c1():                           c1: a region, ``torch.no_grad`` or ``torch.autocast``
            v3 = getattr(v2, c2)(v1, 4)      c2: "view"
            del v1, v2
        return v3

Why not ``torch.fx``'s own ``CodeGen``: it has no blocks (``with``), and names variables after the user's functions and
modules by their paths, so that each of many equal blocks is compiled by itself, as a class of its own. It calls modules
as attributes of a copy of the tree, where we read the user's modules as they are at that moment. A subclass would have
to replace all of that; what would be left of it is the loop below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import fx, nn

from lightning_rotor.capture.node_facts import OF, REGION, SIZE, UNSURE, Region, is_constant
from lightning_rotor.capture.recorded_checks import require_as_recorded
from lightning_rotor.capture.source import Source, code_of_source, look_of


class GraphSlice(nn.Module):
    """Runs consecutive operations of a graph; a single input or output is itself, several are a tuple.

    It reads the user's modules and parameters where they are at that moment, so it sees a replaced parameter. A value
    is let go after the last operation that reads it, as in the user's code. Modules, functions and constants are bound
    by name, so equal operations on other modules share their code.

    Attributes:
        known_functions: All functions that it calls are torch's, draw nothing and give the same bits each time.
        operators: What it runs, in order: modules, functions, and tensors' methods by name.
        reads: The parameters, buffers and attributes that it reads by itself: who has them, and under which name.
    """

    def __init__(
        self,
        inputs: Sequence[fx.Node],
        nodes: Sequence[fx.Node],
        outputs: Any,
    ) -> None:
        super().__init__()
        self.reads: list[tuple[nn.Module, str]] = []
        self._constants: list[torch.Tensor] = []
        self._calls: dict[str, nn.Module] = {}
        # Compiled at the first call: some slices are compared with others, and never run.
        self._function: Callable[[Any], Any] | None = None
        source = Source()
        lines = self._lines(source, inputs, nodes, outputs)
        self._source = "\n    ".join(["def run(value):", *lines])
        self._bound = source.bound
        operators = []
        for node in nodes:
            operators.append(node.meta[OF] if node.op == "call_module" else node.target)
        self.operators = tuple(operators)
        self.known_functions = not any(UNSURE in node.meta for node in nodes)
        self._is_call = self._is_one_call(inputs, nodes, outputs)

    def _lines(
        self,
        source: Source,
        inputs: Sequence[fx.Node],
        nodes: Sequence[fx.Node],
        outputs: Any,
    ) -> list[str]:
        """The lines of the function's body; notes what they read, call and hold, on which ``__init__`` relies."""
        lines = ["del value"]
        if inputs:
            lines.insert(0, f"{', '.join(map(source.name, inputs))} = value")
        # A dict in the place of a set that keeps its order.
        returned: dict[fx.Node, None] = {}
        fx.node.map_arg(outputs, returned.setdefault)
        last_use: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            last_use.update(dict.fromkeys((node, *node.all_input_nodes), node))
        region: Region | None = None
        indent = ""
        for node in _with_reads(nodes, returned):
            expression = self._expression(source, node)
            # Sizes and parameters are the same under all settings, so they begin and end no block.
            depends_on_settings = node.op != "get_attr" and SIZE not in node.meta
            if depends_on_settings and node.meta.get(REGION) != region:
                region = node.meta.get(REGION)
                indent = "    " if region else ""
                if region:
                    lines.append(f"with {source.constant(region)}():")
            lines.append(f"{indent}{source.name(node)} = {expression}")
            # The result of the last operation that uses it may be nobody's: it is let go at once.
            used_here = (*node.all_input_nodes, node)
            dying = []
            for used in used_here:
                if last_use.get(used) is node and used not in returned:
                    dying.append(used)
            if dying:
                lines.append(f"{indent}del {', '.join(map(source.name, dying))}")
        lines.append(f"return {source.argument(outputs)}")
        return lines

    def _expression(self, source: Source, node: fx.Node) -> str:
        """The expression that gives a node's value."""
        if is_constant(node):
            self._constants.append(node.meta[OF])
            return source.constant(node.meta[OF])
        if node.op == "get_attr":
            self.reads.append(node.meta[OF])
            owner, name = node.meta[OF]
            return f"getattr({source.constant(owner)}, {source.constant(name)})"
        return source.call(node, self._called(source, node))

    def _called(self, source: Source, node: fx.Node) -> str:
        """The name of the module or function that an operation calls; empty for a method."""
        if node.op == "call_method":
            return ""
        if node.op != "call_module":
            return source.constant(node.target)
        module = node.meta[OF]
        if module not in self._calls.values():
            # A child in name alone, for those who walk modules: it is called by what is bound.
            self._modules[str(len(self._modules))] = module
        name = source.constant(module)
        self._calls[name] = module
        return name

    def _is_one_call(
        self,
        inputs: Sequence[fx.Node],
        nodes: Sequence[fx.Node],
        outputs: Any,
    ) -> bool:
        """True if all that it does is to call a module on its input."""
        # A check of what the module returns does not change it.
        working = [node for node in nodes if node.target is not require_as_recorded]
        if not len(working) == len(self._calls) == len(inputs) == 1:
            return False
        (node,) = working
        takes_input = (node.args, node.kwargs) == ((inputs[0],), {})
        return takes_input and outputs == node and REGION not in node.meta

    # Not nn.Module's: hooks for all modules are the business of the user's modules.
    def __call__(self, value: Any) -> Any:
        """Run the operations."""
        if self._function is None:
            # The code is shared by equal slices, the namespace is this one's.
            namespace = dict(self._bound)
            exec(code_of_source(self._source), namespace)
            self._function = namespace["run"]
        return self._function(value)

    @property
    def only_module(self) -> nn.Module | None:
        """The module that it calls, if it does nothing else."""
        return self.called_modules[0] if self._is_call else None

    def calling(self, replacements: Mapping[nn.Module, Callable[..., Any]]) -> GraphSlice:
        """A slice with the same operations, and other callables in the place of some modules."""
        # A shallow copy shares all but the names, which are bound to other modules, and what was compiled with them.
        other = copy(self)
        other._function = None
        other._bound = dict(self._bound)
        for name, module in self._calls.items():
            other._bound[name] = replacements.get(module, module)
        return other

    @property
    def called_modules(self) -> tuple[nn.Module, ...]:
        """The user's modules that it calls."""
        return tuple(dict.fromkeys(self._calls.values()))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Parameters of the modules that it calls, and those that it reads by itself."""
        for module in self.called_modules:
            yield from module.parameters()
        for tensor in self._direct_tensors():
            if isinstance(tensor, nn.Parameter):
                yield tensor

    def _direct_tensors(self) -> Iterator[torch.Tensor]:
        return (getattr(owner, name) for owner, name in self.reads)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """The user's modules that it calls or reads buffers of, and itself if it calls functions of unknown effect."""
        memo = set() if memo is None else memo
        if not self.known_functions:
            # The profiler takes a module that is no layer of torch's for one that may do anything.
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
        tensors = []
        for tensor in self._direct_tensors():
            tensors.append((tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        return self.operations, tuple(map(id, self._constants)), tuple(tensors)

    @property
    def operations(self) -> tuple[Any, ...]:
        """Equal for slices that do the same with modules and tensors of their own, whatever those look like."""
        places = {module: place for place, module in enumerate(self.called_modules)}
        looks: list[Any] = []
        for name, value in self._bound.items():
            is_called = name in self._calls
            looks.append(places[self._calls[name]] if is_called else look_of(value))
        return self._source, tuple(looks)


def _with_reads(nodes: Sequence[fx.Node], returned: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """The operations, each after the parameters and attributes that it is the first to read."""
    inside = set(nodes)
    ordered: dict[fx.Node, None] = {}
    for node in nodes:
        ordered.update(dict.fromkeys((*node.all_input_nodes, node)))
    # A forward may return a parameter as it is.
    ordered.update(dict.fromkeys(returned))
    for node in [*ordered]:
        if node not in inside and node.op != "get_attr":
            del ordered[node]
    return ordered
