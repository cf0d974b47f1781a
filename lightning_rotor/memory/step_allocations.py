"""Bytes that operators allocate in a step of an optimizer on ``meta``, and nobody has freed yet.

A step's variables hold there what the real ones would, so the life of each storage is the real one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from lightning_rotor.memory.held import block_bytes, is_on
from lightning_rotor.memory.optimizer_copies import ASSUMED_NUMBER
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import plain_parts, tensors_in
from lightning_rotor.profiling.assumed_values import AssumedValues

_Storage: TypeAlias = tuple[StorageWeakRef, int]
"""A storage, and its bytes."""


class StepAllocations(AssumedValues):
    """Follows storages while this mode is active.

    Attributes:
        older_bytes: Of parameters, gradients and state before the step.
        peak_bytes: The most bytes of new storages at once, less those of older ones that were freed meanwhile.

    Args:
        optimizer: A copy on ``meta`` whose state exists.
        device: The real one of all tensors that are on ``meta``.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        super().__init__(ASSUMED_NUMBER)
        parameters: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        state = tensors_in(list(optimizer.state.values()))
        self._device = device
        # A step may replace these by new ones, as some optimizers do with their state: then old and new are not both
        # there. Weak references, so that following them keeps none alive.
        self._older = dict(self._storages([*parameters, *gradients, *state]))
        self.older_bytes = _level(self._older)
        self._newer: dict[int, _Storage] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # torch raises another error for meta than for fake tensors.
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self.answer(func, args, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._newer = _alive(self._newer)
        for identity, storage in self._storages(tensors_in(result)):
            older = self._older.get(identity)
            # The identity of a storage that is gone may be used again.
            if older is None or older[0].expired():
                self._newer.setdefault(identity, storage)
        new_bytes = _level(self._newer)
        # Looking for older storages that are gone takes time, and there are many. It can only lower the level.
        if new_bytes > self.peak_bytes:
            freed_bytes = self.older_bytes - _level(_alive(self._older))
            self.peak_bytes = max(self.peak_bytes, new_bytes - freed_bytes)
        return result

    def _storages(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, _Storage]]:
        """Storages under tensors on the device, by identity, with their bytes."""
        for tensor in tensors:
            # Step counters lie on the host, and count where that is asked for.
            if not (tensor.is_meta or is_on(tensor.device, self._device)):
                continue
            for part in plain_parts(tensor):
                storage = part.untyped_storage()
                size_bytes = block_bytes(storage.nbytes(), self._device)
                yield private.identity_of(storage), (StorageWeakRef(storage), size_bytes)


def _alive(storages: dict[int, _Storage]) -> dict[int, _Storage]:
    alive = {}
    for identity, (reference, size_bytes) in storages.items():
        if not reference.expired():
            alive[identity] = reference, size_bytes
    return alive


def _level(storages: dict[int, _Storage]) -> int:
    return sum(size_bytes for _, size_bytes in storages.values())
