"""Operations that torch computes below Python, seen one by one while a module is recorded.

Code in C++ and scripted functions bypass the mode that records. Here they are refused; and of an operation that is
recorded, this tells what its name does not: it drew random numbers, it read values, it changed a tensor in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_rotor.capture.operations import UntraceableError, words
from lightning_rotor.private.torch_names import TorchDispatchMode, packet_of, schema_of, written_arguments
from lightning_rotor.private.values import address_of, plain_parts, tensors_in
from lightning_rotor.stages.draws import draws

CHANGES = (
    "it changes a parameter, or another tensor that is no buffer and was there before, or made without any input, in "
    "place"
)
"""Why a forward cannot run again."""


@dataclass(slots=True)
class OperationSeen:
    """Facts about the operations that torch computed inside of one recorded operation.

    Attributes:
        in_module: The operation is a module as a whole.
        in_unit: That module holds FSDP units, which gather their parameters into memory that was there before.
        draws: Random numbers were drawn.
        accumulates: Sums were made in any order, so that other bits may come when it runs again.
        reads_values: Values of tensors decided over sizes, or were handed to the host.
    """

    in_module: bool
    in_unit: bool
    draws: bool = False
    accumulates: bool = False
    reads_values: bool = False


class DispatchCheck(TorchDispatchMode):
    """Sees every operation that torch computes while a module is recorded.

    Attributes:
        inside: Number of recorded operations, or modules that are one, that are running.
        is_over: The recording has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0
        self.is_over = False
        self._seen = OperationSeen(in_module=False, in_unit=False)
        # Modules that the forward has made, by id.
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        # Weak keys: the forward decides how long its memory lives, and no other memory can get an equal key.
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

    @contextmanager
    def watching(self, *, in_module: bool, in_unit: bool) -> Iterator[OperationSeen]:
        """Context of one operation; yields an account that is complete when the context ends."""
        # No operation begins in another: while one runs, its code is not recorded.
        self._seen = seen = OperationSeen(in_module, in_unit)
        yield seen

    def note_module(self, module: nn.Module) -> None:
        """Note that a module is being made."""
        self._modules[id(module)] = weakref.ref(module)

    def was_there(self, module: nn.Module) -> bool:
        """True if a module is older than the recording."""
        made = self._modules.get(id(module))
        return made is None or made() is not module

    def is_older(self, tensor: torch.Tensor) -> bool:
        """True if no operation of the recording has made a tensor's memory."""
        return not _memories([tensor]) & self._made

    def trust(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the recording change these tensors in place, as they were made for it."""
        self._made.update(_memories(tensors))

    def allow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let modules that are one operation change these; they are put back after the recording."""
        self._undoable.update(_memories(tensors))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at an operation, and run it."""
        kwargs = kwargs or {}
        # ``torch.tensor(3)`` makes a tensor of the host's numbers, which no function mode sees.
        from_host = func is torch.ops.aten.lift_fresh.default
        if not self.inside:
            if not from_host:
                raise UntraceableError(
                    f"it computes {func} in a way that no recording sees (C++ code, torch.jit.script)"
                )
            with self.aside():
                return func(*args, **kwargs)
        self._note(func, args, kwargs)
        result = func(*args, **kwargs)
        if from_host:
            self.trust([result])
        elif _makes_memory(func):
            # The schema of aten::_unsafe_view says that it makes memory, but it shows its input's.
            read = _memories(tensors_in((args, kwargs)))
            self._made.update(_memories(tensors_in(result)) - read)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what an operation is about to do; ``UntraceableError`` if it writes to what must not change."""
        seen = self._seen
        # With and without the underscore of an operation in place.
        name = packet_of(func).__name__.rstrip("_")
        seen.draws = seen.draws or draws(func, args, kwargs)
        seen.accumulates = seen.accumulates or name in _ACCUMULATING
        seen.reads_values = seen.reads_values or _reads_values(func, args)
        # A unit of FSDP gathers parameters into memory that was there before, a change that nobody could notice.
        if seen.in_unit:
            return
        allowed = self._made
        if seen.in_module:
            allowed = self._made | self._undoable
        for written in written_arguments(func, args, kwargs):
            if not _memories(tensors_in(written)) <= allowed:
                raise UntraceableError(CHANGES)


_ACCUMULATING = words(
    "bincount cumsum cumprod histc index_add index_put _index_put_impl _unsafe_index_put index_reduce kthvalue median",
    "put scatter_add scatter_reduce",
)
"""Operations that add up in any order, on some device, or choose among equals."""


def _memories(tensors: Iterable[torch.Tensor]) -> set[StorageWeakRef]:
    """Keys of the memory under tensors, unequal for any other memory, that keep none alive."""
    memories: set[StorageWeakRef] = set()
    for tensor in tensors:
        # A sparse tensor has no memory but that of its indices and values.
        parts = [tensor] if tensor.layout is torch.strided else plain_parts(tensor)
        memories.update(StorageWeakRef(part.untyped_storage()) for part in parts if _has_memory(part))
    return memories


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return bool(address_of(tensor))
    except (NotImplementedError, RuntimeError):
        # Layouts of libraries, such as oneDNN's.
        return False


@lru_cache(maxsize=4096)
def _makes_memory(func: Any) -> bool:
    """True if an operation returns nothing that it was given."""
    schema = schema_of(func)
    # A view says in its schema which of its arguments' memory it returns.
    has_views = any(value.alias_info is not None for value in schema.returns)
    return not schema.is_mutable and not has_views


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """True if values of tensors decide over sizes, or are handed to the host."""
    if func in _INDEXING:
        # By numbers, the result has as many entries as there are numbers. By a mask, as many as it has ones.
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    tags = func.tags
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor)
