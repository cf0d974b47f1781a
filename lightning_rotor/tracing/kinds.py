"""Which values of a symbolic trace are tensors. The trace has none, but code may ask."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from lightning_rotor.private.torch_names import schema_of
from lightning_rotor.sequential import has_own_call
from lightning_rotor.snapshot import is_users
from lightning_rotor.tracing.modules import UntraceableError, is_torchs_module
from lightning_rotor.tracing.replaced import replaced

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
