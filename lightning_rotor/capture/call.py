"""One call of a module: which of its arguments are tensors, and which a recording takes for granted."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_rotor.capture.module_calls import Slot
from lightning_rotor.capture.operations import CONSTANTS
from lightning_rotor.errors import ModelError
from lightning_rotor.private.values import TreeSpec, flatten, keystr, leaves_by_path, tree_unflatten

_SIMPLE = frozenset((torch.Tensor, nn.Parameter, bool, int, float, str, type(None)))
"""Types of arguments that are leaves. A call with these alone needs no flattening, whatever pytree is told to know."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of a call as they were given, flattened. Leaves that are no tensors are baked into a recording.

    Attributes:
        key: Equal for calls that one recording could serve: the structure, and leaves without tensors.
        inputs: The tensors, and behind them the values of ``attributes``.
        leaves: The arguments, with None in the place of each tensor.
        attributes: Attributes of modules that may be others at each call: tensors and numbers.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    key: Any
    leaves: tuple[Any, ...]
    attributes: tuple[Slot, ...]
    # None if no argument is a container.
    _spec: TreeSpec | None
    _keywords: tuple[str, ...]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        attributes: tuple[Slot, ...] = (),
    ) -> Call:
        """Flatten arguments; ``ModelError`` if one may hide tensors. This runs at every training call."""
        flat = [*args, *kwargs.values()]
        spec = None
        structure = ""
        if not _SIMPLE.issuperset(map(type, flat)):
            # There is a container, or an object of a class that may be registered as one.
            flat, spec = flatten((tuple(args), dict(kwargs)))
            structure = str(spec)
        # Lists in the place of generators: this runs at every call, and they take less time. By type() all over this
        # file: isinstance asks an object for its class, where a dead proxy raises.
        tensors = [leaf for leaf in flat if issubclass(type(leaf), torch.Tensor)]
        # None for an attribute that is gone, which the watch of modules tells.
        others = [owner.__dict__.get(name) for owner, name in attributes]
        key = (len(args), *kwargs), structure, tuple(map(_spelled, flat))
        leaves = tuple([None if issubclass(type(leaf), torch.Tensor) else leaf for leaf in flat])
        call = cls(module, (*tensors, *others), key, leaves, attributes, spec, tuple(kwargs))
        # Without a container, every leaf is of a type that is known to hide nothing.
        if spec is not None:
            call._require_constants()
        return call

    def _require_constants(self) -> None:
        """Raise ``ModelError`` if a leaf is of a type that may hide tensors."""
        for number, leaf in enumerate(self.leaves):
            if not issubclass(type(leaf), CONSTANTS):
                raise ModelError(
                    f"the forward of {type(self.module).__name__} takes {type(leaf).__name__} as "
                    f"{self._paths()[number]}: expected tensors and plain values, or tuples, lists, "
                    "dicts, dataclasses and plain objects of them (register others with torch.utils._pytree)"
                )

    def _paths(self) -> list[str]:
        """The argument that each leaf is in, and the place in it; ``TypeError`` if the forward takes no such call."""
        # The same nesting with numbers in it, so that a path leads to the number of its leaf.
        args, kwargs = self._unflatten(list(range(len(self.leaves))))
        signature = inspect.signature(type(self.module).forward)
        arguments = dict(signature.bind(self.module, *args, **kwargs).arguments)
        # Not self, which no caller gives.
        del arguments[next(iter(arguments))]
        numbered = leaves_by_path(arguments)
        paths = {}
        for path, number in numbered:
            argument = getattr(path[0], "key", None)
            paths[number] = f"{argument!r}{keystr(path[1:])}"
        return [paths[number] for number in range(len(self.leaves))]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs in messages; ``TypeError`` if the forward takes no such call."""
        kinds = self.key[-1]
        names = []
        for path, kind in zip(self._paths(), kinds, strict=True):
            if kind is torch.Tensor:
                names.append(f"input {path}")
        paths = {module: path for path, module in self.module.named_modules()}
        for owner, name in self.attributes:
            path = f"{paths[owner]}.{name}" if paths[owner] else name
            names.append(f"attribute {path!r}")
        return tuple(names)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the inputs."""
        return [value for value in self.inputs if isinstance(value, torch.Tensor)]

    @property
    def signature(self) -> Any:
        """Shapes, and what else code can tell of tensors without values, besides dimensions, types and devices."""
        return tuple([(tuple(tensor.shape), (layout_of(tensor), tensor.requires_grad)) for tensor in self.tensors])

    def with_tensors(self, replacements: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, as they were given, with other values in the place of the tensors."""
        pending = iter(replacements)
        leaves = []
        for kind, leaf in zip(self.key[-1], self.leaves, strict=True):
            leaves.append(next(pending) if kind is torch.Tensor else leaf)
        return self._unflatten(leaves)

    def _unflatten(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._spec is not None:
            args, kwargs = tree_unflatten(leaves, self._spec)
            return args, kwargs
        positional = len(leaves) - len(self._keywords)
        return tuple(leaves[:positional]), dict(zip(self._keywords, leaves[positional:], strict=True))


def firsts_of(values: Sequence[Any]) -> tuple[int, ...]:
    """For each value, the number of the first one that is the same object."""
    addresses = [id(value) for value in values]
    return tuple(map(addresses.index, addresses))


def _spelled(leaf: Any) -> Any:
    """A leaf in a key: equal and hashable for leaves that code cannot tell apart."""
    kind = type(leaf)
    if issubclass(kind, torch.Tensor):
        return torch.Tensor
    if issubclass(kind, float):
        # NaN is unequal to itself, and 0.0 equal to -0.0.
        return kind, float.__repr__(leaf)
    if kind is slice:
        # A slice has no hash before Python 3.12.
        return kind, repr(leaf)
    for base in (str, int, bytes):
        # A class of the user's may compare as it likes. Members of an enum are there once each.
        if issubclass(kind, base) and kind is not base and not issubclass(kind, enum.Enum):
            return kind, base.__repr__(leaf)
    return kind, leaf


def layout_of(tensor: torch.Tensor) -> Any:
    """A value that is equal for tensors of other sizes with the same memory layout."""
    # Sparse and nested tensors have no strides to compare.
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.layout
    # Strides of contiguous tensors follow from the sizes, which are compared elsewhere.
    return True if tensor.is_contiguous() else tensor.stride()
