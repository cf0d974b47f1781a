"""Functions that are others in one thread for a while, though all threads find them at the same place.

A forward that is traced is shown by what runs instead of ``nn.Module.__call__``, ``isinstance`` and the like. Threads that load data or serve
another model meanwhile get the originals::

    nn.Module.__call__ ─► dispatch ─┬─► the replacement, in the thread that traces
                                    └─► the original, in any other
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ClassMethodDescriptorType, FrameType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from lightning_rotor.capture.modules import UntraceableError, hides_code, is_torchs_module
from lightning_rotor.private.torch_names import FakeTensor, FakeTensorMode, schema_of
from lightning_rotor.private.values import tree_leaves
from lightning_rotor.stages.sequential import has_own_call
from lightning_rotor.stages.snapshot import is_users

_CLASS_METHODS = (classmethod, ClassMethodDescriptorType)
_lock = threading.Lock()


class _Shared:
    """A function that some threads have replaced."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.users = 0
        self._mine = threading.local()

    @property
    def current(self) -> Any:
        """What this thread finds."""
        return getattr(self._mine, "function", self.original)

    @current.setter
    def current(self, function: Any) -> None:
        self._mine.function = function

    def dispatch(self) -> Any:
        """What stands in the function's place."""

        def function(*args: Any, **kwargs: Any) -> Any:
            return self.current(*args, **kwargs)

        def class_method(cls: type, *args: Any, **kwargs: Any) -> Any:
            return self.current.__get__(None, cls)(*args, **kwargs)

        return classmethod(class_method) if type(self.original) in _CLASS_METHODS else function


_replaced: dict[tuple[int, str], _Shared] = {}


@contextmanager
def replaced(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which this thread finds another function in a module or class.

    Args:
        owner: The module or class.
        name: Of the function or class method there.
        replacement: Makes the other one, of the same kind, from what this thread finds now.
    """
    key = id(owner), name
    with _lock:
        if key not in _replaced:
            _replaced[key] = _Shared(vars(owner)[name])
            setattr(owner, name, _replaced[key].dispatch())
        shared = _replaced[key]
        shared.users += 1
    before = shared.current
    shared.current = replacement(before)
    try:
        yield
    finally:
        shared.current = before
        with _lock:
            shared.users -= 1
            if not shared.users:
                setattr(owner, name, _replaced.pop(key).original)


# ----------------------------------------------------------------------------------------------------
# Which values of a symbolic trace are tensors. The trace has none, but code may ask.


IS_TENSOR = "is_tensor"
"""Where nodes keep the answer."""

_SOME_TENSOR = torch.empty(0)
_METADATA = ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "itemsize", "nbytes")


def is_tensor(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool | None:
    """Whether a node's value is a tensor, or None if nobody knows before it is computed.

    Args:
        node: An input, a parameter, or what torch computes of such. What it reads has the answer in its ``meta``.
        modules: By path; torch's own layers return a tensor, with a few exceptions.
    """
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op == "call_module":
        return _returns_tensor(modules[str(node.target)]) or None
    read = [argument.meta.get(IS_TENSOR) for argument in node.args if isinstance(argument, fx.Node)]
    if node.target is getattr:
        return _of_attribute(str(node.args[1])) if read == [True] else None
    if getattr(node.target, "__module__", None) == "_operator":
        return _of_operator(read)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_method" and read[:1] != [True]:
        return None
    if node.op == "call_function" and not _is_torchs(node.target):
        return None
    return _of_operation(name)


@contextmanager
def truthful_isinstance(named: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context in which the user's code hears the truth of ``isinstance`` about symbols, where it is known before anything is computed.

    A symbol cannot say by its ``__class__`` that it is a tensor: torch's C++ code, which asks as well, would take its bytes for a tensor's.

    Args:
        named: Parameters and buffers by the names of their nodes; they may be of other classes than ``torch.Tensor``.
    """

    def answering(ask: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        def answer(value: Any, kinds: Any, /) -> bool:
            # Two frames up: between is what tells the threads apart.
            if ask(value, kinds) or not issubclass(type(value), fx.Proxy) or not _is_asked_by_user(sys._getframe(2)):
                return ask(value, kinds)
            known = value.node.meta.get(IS_TENSOR)
            if known:
                return ask(named.get(str(value.node.target), _SOME_TENSOR), kinds)
            if known is False and kinds is torch.Tensor:
                return False
            raise UntraceableError("it asks what type a value has that it has computed (isinstance)")

        return answer

    with replaced(builtins, "isinstance", answering):
        yield


def _is_asked_by_user(frame: FrameType) -> bool:
    return frame.f_code is torch.is_tensor.__code__ or is_users(frame.f_code.co_filename)


def _of_attribute(name: str) -> bool | None:
    return False if name in _METADATA else True if name in ("T", "mT", "H", "mH", "real", "imag", "data") else None


def _of_operator(read: list[bool | None]) -> bool | None:
    """Of arithmetic, and of taking a part: a size of sizes, a tensor if one is among the operands."""
    if True in read:
        return True
    return None if None in read else False


@cache
def _of_operation(name: str) -> bool | None:
    """What all of torch's operations with a name return."""
    packet: Any = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    schemas = [schema_of(getattr(packet, overload)) for overload in packet.overloads() if "out" not in overload]
    kinds = [[str(result.type) for result in schema.returns] for schema in schemas]
    if all(kind == ["Tensor"] for kind in kinds):
        return True
    return False if all(kind in (["int"], ["bool"], ["SymInt"], ["float"]) for kind in kinds) else None


def _is_torchs(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    return module in ("torch", "torch._C._nn", "torch.functional", "torch.nn.functional") or (
        getattr(torch, getattr(function, "__name__", ""), None) is function
    )


def _returns_tensor(module: nn.Module) -> bool:
    return (
        is_torchs_module(module)
        and not module._modules
        and not has_own_call(module)
        and not isinstance(module, nn.RNNBase)
        and not getattr(module, "return_indices", False)
    )


# ----------------------------------------------------------------------------------------------------
# What values look like in the call that is traced, for code inside of a composite operation that asks for sizes.


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The arguments of one call of a composite operation, with fake tensors.

    Attributes:
        leaves: In the order of the tree.
        mode: Makes the fake tensors.
    """

    leaves: tuple[Any, ...]
    mode: FakeTensorMode

    @classmethod
    def of(cls, arguments: Any) -> Sample:
        """The sample that real arguments, or fake ones, make."""
        leaves = tree_leaves(arguments)
        modes = [leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)]
        mode = modes[0] if modes else FakeTensorMode()
        return cls(tuple(_fake(leaf, mode) for leaf in leaves), mode)


class Samples:
    """The composite operations that a trace meets, in order, each with a sample of its arguments or None if it is to stay one operation."""

    def __init__(self, samples: Sequence[Sample | None]) -> None:
        self._samples = list(samples)
        self._place = -1
        self.failed: int | None = None
        """Which of them could not be traced through."""

    def next_is_given(self) -> bool:
        """Go on to the next one, and say whether there is a sample of it."""
        self._place += 1
        return self._place < len(self._samples) and self._samples[self._place] is not None

    @contextmanager
    def taken(self) -> Iterator[Sample]:
        """Context in which the code of the present one is traced."""
        sample = self._samples[self._place]
        assert sample is not None
        try:
            yield sample
        except Exception:
            self.failed = self._place
            raise


class Known:
    """Samples of the values inside of one composite operation.

    Args:
        sample: Of its arguments.
        arguments: What the trace calls it with: proxies where there are values.
        tensor: The parameter, buffer or constant that a ``get_attr`` node of this name reads.
    """

    def __init__(self, sample: Sample, arguments: Any, tensor: Callable[[str], torch.Tensor]) -> None:
        self._mode = sample.mode
        self._tensor = tensor
        self._values: dict[fx.Node, Any] = {}
        self._sizes: set[fx.Node] = set()  # what sizes decide over
        for symbol, value in zip(tree_leaves(arguments), sample.leaves, strict=True):
            if isinstance(symbol, fx.Proxy):
                self._values[symbol.node] = value

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._values

    def __getitem__(self, node: fx.Node) -> Any:
        return self._values[node]

    def is_of_sizes(self, node: fx.Node) -> bool:
        """Whether a number depends on sizes, and not only on types and the number of dimensions."""
        return node in self._sizes

    def add(self, node: fx.Node) -> None:
        """Compute the sample of a new node, if there is one of everything that it reads."""
        if node.op == "get_attr":
            self._values[node] = _fake(self._tensor(str(node.target)), self._mode)
        elif node.op in ("call_function", "call_method") and all(used in self for used in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
            with self._mode:
                if node.op == "call_method":
                    self._values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    self._values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            if not isinstance(self._values[node], torch.Tensor) and _tells_sizes(node, self._sizes):
                self._sizes.add(node)

    def erase_unused(self, graph: fx.Graph, output: Any) -> None:
        """Take out sizes and types that were looked at and are not needed any more, nor given back."""
        needed = {leaf.node for leaf in tree_leaves(output) if isinstance(leaf, fx.Proxy)}
        for node in reversed(list(graph.nodes)):
            if not node.users and node not in needed and isinstance(self._values.get(node), _PLAIN):
                graph.erase_node(node)


_PLAIN = (bool, int, float, torch.Size, torch.dtype, torch.device, torch.layout)
_SIZES = ("shape", "size", "numel", "nelement", "stride", "is_contiguous")


def _tells_sizes(node: fx.Node, sizes: set[fx.Node]) -> bool:
    name = node.args[1] if node.target is getattr else node.target
    return name in _SIZES or any(used in sizes for used in node.all_input_nodes) or name is len


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    return mode.from_tensor(value.detach(), static_shapes=True).requires_grad_(value.requires_grad)


# ----------------------------------------------------------------------------------------------------
# Operations that look like one though they are Python code that does several, between which a plan could choose.


FUNCTIONS: frozenset[Any] = frozenset(
    {
        F.gumbel_softmax,
        F.local_response_norm,
        F.multi_head_attention_forward,
        F.normalize,
        F.softsign,
        F.tanhshrink,
    }
)
"""Functions of torch, written in Python, that save more than one tensor for the backward. The others are one operation in the end."""

_GATES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def is_attention(module: nn.Module) -> bool:
    """Whether a module is torch's attention, and its code is what runs.

    In evaluation a kernel in C++ may run instead, if nothing asks for gradients.
    """
    return (
        type(module) is nn.MultiheadAttention
        and module.training
        and not any(hides_code(part) for part in module.modules())
    )


def is_composite(function: Any) -> bool:
    """Whether a function is Python code that may do several things: one of torch's, or one that is not torch's."""
    return isinstance(function, FunctionType) and (
        function in FUNCTIONS or str(function.__module__).partition(".")[0] != "torch"
    )


def body_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a function does once nobody else wants to handle the call.

    Functions of torch begin with the question whether an argument, or a mode, would handle them as a whole. In this copy the answer is no; the
    operations inside ask for themselves.
    """
    if function not in FUNCTIONS:
        return function
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, **dict.fromkeys(_GATES, _nobody)}
    body = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _nobody(*_: Any) -> bool:
    return False
