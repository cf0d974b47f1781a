"""Which node of a recorded graph a tensor is the value of, and which tensors share memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from lightning_rotor.private import torch_names as private
from lightning_rotor.private.torch_names import identity_of


class _Family:
    """Values that share memory: one changes when another is changed in place."""

    __slots__ = ("changed",)

    def __init__(self) -> None:
        self.changed = False


class Values:
    """Tensors and their nodes. It keeps no tensor alive: the forward decides how long they live, as it would without a recording."""

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[weakref.ref[torch.Tensor], fx.Node]] = {}
        self._families: dict[fx.Node, _Family] = {}

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        """The newest node that the tensor is the value of."""
        # A tensor may have the address of one that is gone, or have been rebuilt around what C++ still held of it.
        reference, node = self._nodes.get(id(tensor), (None, None))
        return node if reference is not None and reference() is tensor else None

    def put(self, tensor: torch.Tensor, node: fx.Node, made_from: Sequence[torch.Tensor] = ()) -> None:
        """From now on the tensor is the value of this node; it may be a view of one that it was made from."""
        relative = self._relative(tensor, made_from)
        self._families[node] = self._families[relative] if relative in self._families else _Family()
        self._nodes[id(tensor)] = weakref.ref(tensor), node

    def _relative(self, tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> fx.Node | None:
        storage = _storage(tensor)
        for other in others:
            if other is tensor or (storage is not None and _storage(other) == storage):
                return self.node_of(other)
        return None

    def mark_changed(self, tensor: torch.Tensor) -> None:
        """An operation in place has changed the tensor."""
        node = self.node_of(tensor)
        if node in self._families:
            self._families[node].changed = True

    def has_changed(self, node: fx.Node) -> bool:
        """Whether the node's value is no longer what the node computed."""
        return node in self._families and self._families[node].changed


def version_of(tensor: torch.Tensor) -> int:
    """Counts changes in place."""
    return -1 if tensor.is_inference() else private.version_of(tensor)


def _storage(tensor: torch.Tensor) -> int | None:
    # Both tensors are alive when this is compared, so the address is nobody else's.
    try:
        return identity_of(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors, fake ones
        return None
