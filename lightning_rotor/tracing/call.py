"""One call of a module: which of its arguments are tensors, and which a trace takes for granted."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from lightning_rotor.errors import ModelError
from lightning_rotor.private.pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    enum.Enum,
    slice,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.Size,
    FunctionType,
    BuiltinFunctionType,
    type,
)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of a call, flattened. A trace speaks of the tensors; every other leaf is baked into it.

    Attributes:
        tensors: In the order of the signature.
        key: Equal for calls that the same trace could serve: the structure and all leaves that are no tensor.
        leaves: Everything, with None where a tensor was.
        spec: How leaves make the bound arguments.
    """

    tensors: tuple[torch.Tensor, ...]
    key: Any
    leaves: tuple[Any, ...]
    spec: TreeSpec
    _signature: inspect.Signature

    @classmethod
    def of(cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Bind arguments to the module's forward, defaults included.

        Raises:
            ModelError: An argument may hold tensors where nobody can see them.
            TypeError: The arguments do not fit the forward.
        """
        signature = inspect.signature(type(module).forward)
        bound = signature.bind(module, *args, **kwargs)
        bound.apply_defaults()
        arguments = list(bound.arguments.items())[1:]
        flat, spec = tree_flatten(dict(arguments))
        for leaf in flat:
            if not isinstance(leaf, (torch.Tensor, *PLAIN)):
                names = [name for name, value in arguments if any(entry is leaf for entry in tree_flatten(value)[0])]
                raise ModelError(
                    f"the forward of {type(module).__name__} takes {type(leaf).__name__} as {' or '.join(map(repr, names))}: expected tensors "
                    "and plain values, or tuples, lists and dicts of them (register other containers with torch.utils._pytree)"
                )
        tensors = tuple(leaf for leaf in flat if isinstance(leaf, torch.Tensor))
        constants = tuple(
            "tensor"
            if isinstance(leaf, torch.Tensor)
            else (type(leaf), repr(leaf) if isinstance(leaf, (slice, float)) else leaf)
            for leaf in flat
        )
        leaves = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat)
        return cls(tensors, (str(spec), constants), leaves, spec, signature)

    @property
    def firsts(self) -> tuple[int, ...]:
        """For each tensor, the number of the first one that is the same object: code may ask whether two arguments are one."""
        return firsts_of(self.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """How messages call the tensors: by the argument, and the place in it."""
        paths, _ = tree_flatten_with_path(tree_unflatten(range(len(self.leaves)), self.spec))
        named = [f"input {getattr(path[0], 'key', None)!r}{keystr(path[1:])}" for path, _ in paths]
        return tuple(name for name, kind in zip(named, self.key[1], strict=True) if kind == "tensor")

    @property
    def signature(self) -> Any:
        """What code can tell about the tensors without looking at their values, besides which are the same object."""
        return tuple(
            (tensor.shape, _strides(tensor), tensor.dtype, tensor.device, tensor.requires_grad)
            for tensor in self.tensors
        )

    def with_tensors(self, replacements: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with something else in the place of each tensor."""
        pending = iter(replacements)
        leaves = [
            next(pending) if kind == "tensor" else leaf for kind, leaf in zip(self.key[1], self.leaves, strict=True)
        ]
        bound = self._signature.bind_partial()
        bound.arguments.update({next(iter(self._signature.parameters)): None}, **tree_unflatten(leaves, self.spec))
        return bound.args[1:], bound.kwargs


def firsts_of(values: Sequence[Any]) -> tuple[int, ...]:
    """For each value, the number of the first one that is the same object."""
    addresses = [id(value) for value in values]
    return tuple(map(addresses.index, addresses))


def _strides(tensor: torch.Tensor) -> Any:
    return tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else None
