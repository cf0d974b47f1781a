"""Storages that items hold are elsewhere between their forward and their backward (:class:`.schedule.Move`).

One call, and who holds what::

    forward of a moved item     autograd saves a tensor ─► _Saved, in the graph ─► _Away, one for each storage
    behind it                   each storage is copied out
    point of release            the copy is waited for, and the storage dropped
    point of fetching           memory is taken, and the copy back begins
    backward of the item        autograd asks ─► the copy is waited for ─► a view of the storage

* The graph alone owns what moves, so that all goes with it. The call knows it weakly.
* A storage is known by the object, never by its address: addresses are used again.
* Points of the backward are reached when autograd comes to what an item has made. One is never passed over: those of
  items that a backward leaves out are made up for by the next, each once.
* Hooks switch off autograd's check that what it saved was not changed in place. So that is checked here, with tensors
  of no bytes that share the counter of changes.
* Never moved are parameters and buffers, the input of the chain, and what is no plain dense tensor on the chain's
  device. Where somebody else's hooks save tensors, they do, and nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.autograd.graph import increment_version, saved_tensors_hooks

from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import tree_leaves
from lightning_rotor.schedule import Schedule


class Copy(Protocol):
    """The copy of one storage in another memory, which is freed when this is dropped."""

    def wait_out(self) -> None:
        """Return when the storage may be overwritten."""

    def begin_back(self) -> None:
        """Take memory for the way back."""

    def wait_back(self) -> torch.UntypedStorage:
        """The storage, when it may be read."""


class OtherMemory(Protocol):
    """Memory that storages can be copied to."""

    def copy_out(self, storage: torch.UntypedStorage) -> Copy:
        """Begin a copy; whoever began it may drop the storage when that has been waited for."""


class _Away:
    """One storage that items have saved: here, elsewhere, or both.

    Attributes:
        storage: None while it is elsewhere.
        known: The storage, as long as anybody has it.
        copy: None before it is copied out.
        is_coming: The copy back has begun.
        holders: Items that have saved it and not given it back.
    """

    __slots__ = ("__weakref__", "copy", "holders", "is_coming", "known", "storage", "version")

    def __init__(self, storage: torch.UntypedStorage, version: int) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.known = ref(storage)
        self.version = version
        self.copy: Copy | None = None
        self.is_coming = False
        self.holders: set[int] = set()

    def send(self, memory: OtherMemory) -> None:
        """Begin the copy out, if there is none."""
        if self.copy is None and self.storage is not None:
            self.copy = memory.copy_out(self.storage)

    def release(self, item: int) -> None:
        """An item gives the storage back; it goes with the last one."""
        self.holders.discard(item)
        if not self.holders and self.storage is not None and self.copy is not None:
            self.copy.wait_out()
            self.storage = None

    def fetch(self) -> None:
        """Begin the copy back, unless the storage is still somewhere."""
        if self.storage is not None or self.is_coming:
            return
        self.storage = self.known()
        if self.storage is None:
            assert self.copy is not None
            self.copy.begin_back()
            self.is_coming = True

    def here(self) -> torch.UntypedStorage:
        """The storage, fetched now if it was not."""
        self.fetch()
        if self.storage is None:
            assert self.copy is not None
            self.storage, self.is_coming = self.copy.wait_back(), False
            self.known = ref(self.storage)
        return self.storage


class _Saved(NamedTuple):
    """The stand-in for a saved tensor in the graph: a view of a storage.

    Attributes:
        changes: A tensor of no bytes that counts the changes of the saved one.
        version: The count when it was saved.
    """

    away: _Away
    dtype: torch.dtype
    offset: int | torch.SymInt
    shape: torch.Size
    strides: Sequence[int | torch.SymInt]
    changes: torch.Tensor
    version: int


_Item: TypeAlias = Callable[[Any], Any]


class MovingCall:
    """One call of an executor whose schedule moves something.

    Args:
        schedule: With moves.
        memory: That they lead to.
        staying: Storages that never move: of parameters, of buffers, and of the call's input.
        device: Of what moves.
    """

    def __init__(
        self,
        schedule: Schedule,
        memory: OtherMemory,
        staying: Iterable[torch.UntypedStorage],
        device: torch.device,
    ) -> None:
        self._count = len(schedule.items)
        self._memory = memory
        self._device = device
        self._releases: dict[int, list[int]] = {}
        self._fetches: dict[int, list[int]] = {}
        for move in schedule.moves:
            self._releases.setdefault(move.release, []).append(move.item)
            # The last item is first: its backward comes first, and the link carries one copy after the other.
            self._fetches.setdefault(move.fetch, []).insert(0, move.item)
        # By item that moves, what it has saved.
        self._saved: dict[int, list[ReferenceType[_Away]]] = {}
        for move in schedule.moves:
            self._saved[move.item] = []
        # By the identity of a storage; that of a dead one may be another's by now.
        self._known: dict[int, ReferenceType[_Away]] = {}
        # Weakly: nobody must hold the input for longer than the chain does.
        self._staying = {id(storage): ref(storage) for storage in staying}
        self._next_point = 0

    def run(self, item: int, run: _Item, value: Any) -> Any:
        """Output of an item, whose forward begins now."""
        self._reach(item)
        makers = {id(tensor.grad_fn) for tensor in _tensors(value)}
        if item in self._saved:
            with saved_tensors_hooks(partial(self._pack, item), unpack_moved):
                output = run(value)
            del value
            for away in self._of(item):
                away.send(self._memory)
        else:
            output = run(value)
        for tensor in _tensors(output):
            # What is handed through belongs to another item.
            if tensor.grad_fn is not None and id(tensor.grad_fn) not in makers:
                # So the graph keeps the call, too.
                private.before_node(tensor.grad_fn, partial(self._backward_begins, item))
        return output

    def end_forward(self) -> None:
        """Give back what goes before the backward begins: the gradient of the loss comes first."""
        self._give_back(self._count)

    def _backward_begins(self, item: int, _: Any) -> None:
        self._reach(2 * self._count - 1 - item)

    def _of(self, item: int) -> list[_Away]:
        """Storages that an item has saved, and the graph still holds."""
        aways = [known() for known in self._saved[item]]
        return [away for away in aways if away is not None]

    def _reach(self, point: int) -> None:
        """All points up to one, each once."""
        while self._next_point <= point:
            now = self._next_point
            self._next_point += 1
            # What is given back at this point went when the forward ended (``end_forward``).
            if now != self._count:
                self._give_back(now)
            for item in self._fetches.get(now, ()):
                for away in self._of(item):
                    away.fetch()
                    away.holders.add(item)

    def _give_back(self, point: int) -> None:
        for item in self._releases.get(point, ()):
            for away in self._of(item):
                away.release(item)

    def _pack(self, item: int, tensor: torch.Tensor) -> Any:
        # A subclass may have a scale or parts besides its storage.
        if type(tensor) not in _PLAIN:
            return tensor
        if tensor.layout != torch.strided or tensor.device != self._device:
            return tensor
        storage = tensor.untyped_storage()
        staying = self._staying.get(id(storage))
        if staying is not None and staying() is storage:
            return tensor
        # Views that are conjugated or negated when they are read have a flag besides, which would be lost.
        if not storage.nbytes() or tensor.is_conj() or tensor.is_neg():
            return tensor
        version = private.version_of(tensor)
        known = self._known.get(id(storage))
        away = None if known is None else known()
        # Changed in place since, the storage holds other numbers than what was saved before.
        if away is None or away.known() is not storage or away.version != version:
            away = _Away(storage, version)
            self._known[id(storage)] = ref(away)
        away.storage = storage
        if item not in away.holders:
            away.holders.add(item)
            self._saved[item].append(ref(away))
        # It shares the tensor's counter of changes, and none of its memory.
        changes = tensor.detach()
        changes.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return _Saved(
            away,
            tensor.dtype,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            changes,
            version,
        )


_PLAIN = (torch.Tensor, nn.Parameter)


def unpack_moved(saved: Any) -> torch.Tensor:
    """A saved tensor of a moved item, for autograd."""
    if isinstance(saved, torch.Tensor):
        return saved
    away, dtype, offset, shape, strides, changes, version = saved
    now = private.version_of(changes)
    if now != version:
        # In autograd's own words, and no earlier: what no backward reads may be overwritten.
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{dtype} {list(shape)}] is at version {now}; expected version {version} instead"
        )
    tensor = torch.empty(0, dtype=dtype, device=away.here().device)
    # With a counter of its own: segments in a moved one compare how often their inputs were changed.
    view = tensor.set_(away.here(), offset, shape, strides).data
    for _ in range(version):
        increment_version(view)
    return view


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
