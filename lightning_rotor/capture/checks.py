"""What torch computes below Python: sees the operations that a recording would miss, and stops those that would change the user's tensors.

A ``TorchFunctionMode`` sees what Python calls. Code in C++, scripted functions and the like reach torch without it. All of them come by here,
so an operation that arrives while no recorded one runs is one that the recording does not have.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_rotor.capture.modules import UntraceableError
from lightning_rotor.private.torch_names import TorchDispatchMode, schema_of
from lightning_rotor.private.values import address_of, tensors_in

# ----------------------------------------------------------------------------------------------------
# What is alive at one moment: tensors and modules.


class LiveObjects:
    """The tensors and modules that are there now. It keeps them alive, so that no other object gets the address of one."""

    def __init__(self) -> None:
        self._found = {id(thing): thing for thing in _alive(torch.Tensor, nn.Module)}
        self._memory = {memory_of(thing) for thing in self._found.values() if torch.Tensor in type(thing).__mro__}

    def has(self, thing: object) -> bool:
        """Whether a tensor or a module is among them."""
        return self._found.get(id(thing)) is thing

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether one of them lies where the tensor does."""
        address = memory_of(tensor)
        return address != 0 and address in self._memory


def memory_of(value: Any) -> int:
    """Where a tensor's bytes are; 0 if there are none."""
    try:
        return address_of(value)
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return 0


def _alive(*bases: type) -> list[Any]:
    """All objects of some classes and their subclasses.

    ``isinstance`` would ask each object for its class, at which a lazy import loads its module.
    """
    everything = gc.get_objects()
    wanted = _with_subclasses(bases)
    return list(compress(everything, map(wanted.__contains__, map(type, everything))))


def _with_subclasses(bases: Iterable[type]) -> set[type]:
    found: set[type] = set()
    pending = list(bases)
    while pending:
        kind = pending.pop()
        if kind not in found:
            found.add(kind)
            pending.extend(type.__subclasses__(kind))
    return found


# ----------------------------------------------------------------------------------------------------


class DispatchCheck(TorchDispatchMode):
    """Sees every operation that torch computes.

    Args:
        looks: Note what is there before the recording, which takes long where much is. Few recordings ask for it.

    Attributes:
        inside: How many recorded operations, or modules that are one, are running.
        random: Some operation has drawn random numbers since this was last set to False.
        reads_values: Some operation has read values that decide over sizes since this was last set to False.
        in_module: A module that is one operation runs.
        must_look: Somebody has asked what was there before, and nobody has looked, so that the recording is of no use.
    """

    def __init__(self, *, looks: bool) -> None:
        super().__init__()
        self.inside = 0
        self.random = False
        self.reads_values = False
        self.in_module = False
        self.is_over = self.must_look = False
        self._there = LiveObjects() if looks else None
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._memory: set[StorageWeakRef] = set()
        self._undoable: set[StorageWeakRef] = set()
        self._from_host: dict[int, weakref.ref[torch.Tensor]] = {}

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

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was there before, or was made of nothing but numbers of the host's."""
        made = self._from_host.get(id(tensor))
        return (made is not None and made() is tensor) or self._before().has(tensor)

    def was_there(self, module: nn.Module) -> bool:
        """Whether a module is older than the recording."""
        made = self._modules.get(id(module))
        return (made is None or made() is not module) and self._before().has(module)

    def note_module(self, module: nn.Module) -> None:
        """A module is being made."""
        self._modules[id(module)] = weakref.ref(module)

    def trust(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors were made for the recording, which may change them in place."""
        self._memory.update(_memories(tensors))

    def allow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Modules that are one operation may change these, which are put back after the recording."""
        self._undoable.update(_memories(tensors))

    def _before(self) -> LiveObjects:
        """What was there before the recording.

        Raises:
            UntraceableError: Nobody has looked.
        """
        if self._there is None:
            self.must_look = True
            raise UntraceableError("it asks what was there before")
        return self._there

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at an operation, and run it."""
        kwargs = kwargs or {}
        if not self.inside:
            return self._unrecorded(func, args, kwargs)
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        self.reads_values = self.reads_values or _reads_values(func, args)
        if schema_of(func).is_mutable:
            self._protect(func, args, kwargs)
        result = func(*args, **kwargs)
        if _makes_memory(func):
            read = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}  # aten::_unsafe_view says it makes some
            self.trust(tensor for tensor in tensors_in(result) if memory_of(tensor) not in read)
        return result

    def _unrecorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:
            raise UntraceableError(f"it computes {func} in a way that no recording sees (C++ code, torch.jit.script)")
        with self.aside():
            made = func(*args, **kwargs)
        self._from_host[id(made)] = weakref.ref(made)
        return made

    def _protect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for index, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                if any(self._was_there(tensor) for tensor in tensors_in(value)):
                    raise UntraceableError(
                        "it changes a parameter, or another tensor that is no buffer and was there before, in place"
                    )

    def _was_there(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory that is older than the recording, and that nobody puts back."""
        if self.in_module and _memories([tensor]) <= self._undoable:
            return False
        return (
            memory_of(tensor) != 0 and not _memories([tensor]) <= self._memory and self._before().has_memory_of(tensor)
        )


@lru_cache(maxsize=4096)
def _makes_memory(func: Any) -> bool:
    """Whether an operation returns nothing that it was given."""
    return not schema_of(func).is_mutable and all(value.alias_info is None for value in schema_of(func).returns)


def _memories(tensors: Iterable[torch.Tensor]) -> set[StorageWeakRef]:
    """The memory under tensors, as something that no other memory is equal to while it exists, and that keeps none alive."""
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if memory_of(tensor)}


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether values of tensors decide over sizes, or are handed to the host."""
    if func in _INDEXING:  # by numbers: as many as there are
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor)
