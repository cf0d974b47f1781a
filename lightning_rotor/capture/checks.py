"""What torch computes below Python: operations that a recording would miss, and writes to memory that is the user's.

A ``TorchFunctionMode`` sees what Python calls. Code in C++, scripted functions and the like reach torch without it. All come by here, so an
operation that arrives while no recorded one runs is one that the recording does not have.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_rotor.capture.modules import UntraceableError
from lightning_rotor.private.torch_names import TorchDispatchMode, schema_of
from lightning_rotor.private.values import address_of, tensors_in

CHANGES = "it changes a parameter, or another tensor that is no buffer and was there before, or made without any input, in place"
"""Why a forward cannot run again."""


class DispatchCheck(TorchDispatchMode):
    """Sees every operation that torch computes.

    Attributes:
        inside: How many recorded operations, or modules that are one, are running.
        random: Some operation has drawn random numbers since this was last set to False.
        reads_values: Some operation has read values that decide over sizes since this was last set to False.
        in_module: A module that is one operation runs.
        is_over: The recording has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0
        self.random = self.reads_values = self.in_module = self.is_over = False
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._made: set[StorageWeakRef] = set()
        self._undoable: set[StorageWeakRef] = set()

    @property
    def listens(self) -> bool:
        """True while the recorded code runs, and no operation of it."""
        return not self.inside and not self.is_over

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of an operation that is recorded."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def note_module(self, module: nn.Module) -> None:
        """A module is being made."""
        self._modules[id(module)] = weakref.ref(module)

    def was_there(self, module: nn.Module) -> bool:
        """True if a module is older than the recording."""
        made = self._modules.get(id(module))
        return made is None or made() is not module

    def is_older(self, tensor: torch.Tensor) -> bool:
        """True if no operation of the recording has made a tensor's memory."""
        return not _memories([tensor]) & self._made

    def trust(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors were made for the recording, which may change them in place."""
        self._made.update(_memories(tensors))

    def allow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Modules that are one operation may change these, which are put back after the recording."""
        self._undoable.update(_memories(tensors))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at an operation, and run it."""
        kwargs = kwargs or {}
        from_host = func is torch.ops.aten.lift_fresh.default
        if not self.inside:
            if not from_host:
                raise UntraceableError(
                    f"it computes {func} in a way that no recording sees (C++ code, torch.jit.script)"
                )
            with self.aside():
                return func(*args, **kwargs)
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        self.reads_values = self.reads_values or _reads_values(func, args)
        if schema_of(func).is_mutable:
            self._protect(func, args, kwargs)
        result = func(*args, **kwargs)
        if from_host:
            self.trust([result])
        elif _makes_memory(func):
            read = _memories(tensors_in((args, kwargs)))  # aten::_unsafe_view says it makes some
            self._made.update(_memories(tensors_in(result)) - read)
        return result

    def _protect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        allowed = self._made | self._undoable if self.in_module else self._made
        for index, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                if not _memories(tensors_in(value)) <= allowed:
                    raise UntraceableError(CHANGES)


def _memories(tensors: Iterable[torch.Tensor]) -> set[StorageWeakRef]:
    """The memory under tensors, as something that no other memory is equal to while it exists, and that keeps none alive."""
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if _has_memory(tensor)}


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return bool(address_of(tensor))
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return False


@lru_cache(maxsize=4096)
def _makes_memory(func: Any) -> bool:
    """True if an operation returns nothing that it was given."""
    return not schema_of(func).is_mutable and all(value.alias_info is None for value in schema_of(func).returns)


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """True if values of tensors decide over sizes, or are handed to the host."""
    if func in _INDEXING:  # by numbers: as many as there are
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor)
