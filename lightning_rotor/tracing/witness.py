"""What torch computes below Python: sees the operations that a recording would miss, and stops those that would change the user's tensors.

A ``TorchFunctionMode`` sees what Python calls. Code in C++, scripted functions and the like reach torch without it. All of them come by here,
so an operation that arrives while no recorded one runs is one that the recording does not have.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_rotor.tensors import address_of
from lightning_rotor.tracing.modules import UntraceableError


class Witness(TorchDispatchMode):
    """Sees every operation that torch computes.

    Attributes:
        inside: How many recorded operations, or modules that are one, are running.
        random: Some operation has drawn random numbers since this was last set to False.
        reads_values: Some operation has read values that decide over sizes since this was last set to False.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0
        self.random = False
        self.reads_values = False
        found = _live(torch.Tensor, nn.Module)
        self._known = {id(thing): thing for thing in found if torch.Tensor in type(thing).__mro__}
        self._modules = {id(thing): thing for thing in found if nn.Module in type(thing).__mro__}
        self._protected = {address for tensor in self._known.values() if (address := _address(tensor))}
        self._from_host: dict[int, weakref.ref[torch.Tensor]] = {}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of an operation that is recorded."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was there before, or was made of nothing but numbers of the host's."""
        made = self._from_host.get(id(tensor))
        return self._known.get(id(tensor)) is tensor or (made is not None and made() is tensor)

    def was_there(self, module: nn.Module) -> bool:
        """Whether a module is older than the recording."""
        return self._modules.get(id(module)) is module

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at an operation, and run it."""
        kwargs = kwargs or {}
        if not self.inside:
            return self._unrecorded(func, args, kwargs)
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        self.reads_values = self.reads_values or _reads_values(func, args)
        if func._schema.is_mutable:
            self._protect(func, args, kwargs)
        return func(*args, **kwargs)

    def _unrecorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:
            raise UntraceableError(f"it computes {func} in a way that no recording sees (C++ code, torch.jit.script)")
        with self.aside():
            made = func(*args, **kwargs)
        self._from_host[id(made)] = weakref.ref(made)
        return made

    def _protect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                if any(_address(leaf) in self._protected for leaf in tree_leaves(value)):
                    raise UntraceableError(
                        "it changes a parameter, or another tensor that is no buffer and was there before, in place"
                    )


def _live(*bases: type) -> list[Any]:
    """All objects of some classes and their subclasses.

    There are a million objects, of few types. ``isinstance`` would ask each for its class, at which a lazy import loads its module.
    """
    everything = gc.get_objects()
    kinds = list(map(type, everything))
    wanted = {kind for kind in set(kinds) if not set(bases).isdisjoint(kind.__mro__)}
    return list(compress(everything, map(wanted.__contains__, kinds)))


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether values of tensors decide over sizes, or are handed to the host."""
    if func in _INDEXING:  # by numbers: as many as there are
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor)


def _address(value: Any) -> int:
    """Where a tensor's bytes are; 0 if there are none."""
    if not isinstance(value, torch.Tensor):
        return 0
    try:
        return address_of(value)
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return 0
