"""Tensors of recorded code: the node of the graph that each is the value of, and the memory under it."""

from __future__ import annotations

import operator
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx

from lightning_rotor.capture.node_facts import OF, is_constant
from lightning_rotor.private.torch_names import identity_of
from lightning_rotor.private.values import bytes_of, plain_parts, storage_bytes_of

LASTING = ("placeholder", "get_attr")
"""Kinds of nodes whose values are there anyway."""


@dataclass(frozen=True, slots=True)
class OpMemory:
    """Memory of one operation.

    Attributes:
        made_bytes: Bytes of a new storage that it returns.
        saved_bytes: Bytes of storages that autograd saves, without parameters, buffers and the chain's inputs.
        storages: Bytes of the storages under what it returns, by the first node that has each.
        pieces: Those of which it returns only a part.
        saved: Those of the saved storages that are under values of the graph.
        of_parameters: It returns memory of a parameter.
    """

    made_bytes: int
    saved_bytes: int
    storages: Mapping[fx.Node, int]
    pieces: frozenset[fx.Node]
    saved: frozenset[fx.Node]
    of_parameters: bool


class ValueMemory:
    """Tensors and their nodes. It keeps no tensor alive: the forward decides how long they live.

    Attributes:
        saving: Bytes of the storages that autograd saves in the running operation, by storage.
        lasting: Storages of parameters and buffers.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[weakref.ref[torch.Tensor], fx.Node]] = {}
        # A tensor changes when another that shares its memory is changed in place: the first node of those that share.
        self._firsts: dict[fx.Node, fx.Node] = {}
        # Bytes of the tensor's memory, and of the tensor.
        self._bytes: dict[fx.Node, tuple[int, int]] = {}
        # Operations that changed it in place, by the first node that shares the memory.
        self._changes: defaultdict[fx.Node, set[fx.Node]] = defaultdict(set)
        self._saved: dict[fx.Node, tuple[int, frozenset[fx.Node]]] = {}
        self.saving: dict[int | None, int] = {}
        self.lasting: Set[int | None] = frozenset()

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        """The newest node that the tensor is the value of."""
        # A tensor may have the address of one that is gone, or have been rebuilt around what C++ still held of it.
        reference, node = self._nodes.get(id(tensor), (None, None))
        if reference is not None and reference() is tensor:
            return node
        return None

    def forget_tensors(self) -> None:
        """Let go of them: torch moves no parameter of a class of its own to which there is a weak reference."""
        self._nodes.clear()

    def memory_owner(self, node: fx.Node) -> fx.Node:
        """The first node that shares a node's memory, so that a view is known by what it was taken from."""
        return self._firsts.get(node, node)

    def put(
        self,
        tensor: torch.Tensor,
        node: fx.Node,
        made_from: Sequence[torch.Tensor] = (),
    ) -> None:
        """Make the tensor the value of this node; it may be a view of one that it was made from."""
        # A view of an argument shares its memory, and whatever changes the one changes the other.
        storage = storage_of(tensor)
        self._firsts[node] = node
        for other in made_from:
            if other is tensor or (storage is not None and storage_of(other) == storage):
                owner = self.node_of(other)
                if owner is not None and owner in self._firsts:
                    self._firsts[node] = self._firsts[owner]
                break
        memory_bytes = 0 if storage is None else storage_bytes_of(tensor)
        self._bytes[node] = memory_bytes, bytes_of(tensor)
        self._nodes[id(tensor)] = weakref.ref(tensor), node

    def mark_changed(self, tensor: torch.Tensor, by: fx.Node) -> None:
        """Note that an operation in place has changed the tensor."""
        node = self.node_of(tensor)
        if node is not None and node in self._firsts:
            self._changes[self._firsts[node]].add(by)

    def is_repeatable(self, nodes: Set[fx.Node]) -> bool:
        """True if these operations alone give what they gave: no other, and none on what was there, changed a value."""
        # ``x.add_(1)`` between two questions about x: asked again before the forward, both would see the same x.
        firsts = {self._firsts[node] for node in nodes if node in self._firsts}
        changed = [first for first in firsts if first in self._changes]
        return all(first.op not in LASTING and self._changes[first] <= nodes for first in changed)

    def note_saved(self, tensor: torch.Tensor) -> None:
        """Note a tensor that autograd saves, which is dropped."""
        self.saving[storage_of(tensor)] = storage_bytes_of(tensor)

    def settle_saved(self, node: fx.Node, tensors: Sequence[torch.Tensor]) -> None:
        """Count what autograd has saved (``saving``) for an operation that took and gave these tensors; empty it."""
        owners: dict[int | None, fx.Node] = {}
        for tensor in tensors:
            owner = self.node_of(tensor)
            if owner is not None:
                owners[storage_of(tensor)] = self._firsts[owner]
        # By storage, so that several tensors which show one memory count once.
        saved_bytes = 0
        saved_values = set()
        for storage, size in self.saving.items():
            first = owners.get(storage)
            # Parameters and inputs are held by others, whether autograd saves them or not.
            if storage in self.lasting or (first is not None and first.op in LASTING):
                continue
            saved_bytes += size
            if first is not None:
                saved_values.add(first)
        self._saved[node] = saved_bytes, frozenset(saved_values)
        self.saving.clear()

    def memory_of(self, node: fx.Node) -> OpMemory:
        """Memory of an operation."""
        first = self._firsts.get(node)
        memory_bytes, shown_bytes = self._bytes.get(node, (0, 0))
        saved_bytes, saved = self._saved.get(node, (0, frozenset()))
        made_bytes = 0
        storages: dict[fx.Node, int] = {}
        for value in self._tensors_of(node):
            size, _ = self._bytes[value]
            owner = self._firsts[value]
            if owner.op not in LASTING:
                storages[owner] = size
            if owner is value and value not in node.all_input_nodes:
                made_bytes += size
        # What is taken out of a tuple was made by the operation that returned the tuple.
        unpacks = node.target is operator.getitem and node.args[0] not in self._firsts
        return OpMemory(
            made_bytes=0 if unpacks else made_bytes,
            saved_bytes=saved_bytes,
            storages=storages,
            pieces=frozenset(storages if shown_bytes < memory_bytes else ()),
            saved=saved,
            of_parameters=first is not None and first.op == "get_attr" and _is_parameter(first),
        )

    def _tensors_of(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes of the tensors in a node's value, each once: those that it was made of, or that come out of it."""
        if node in self._firsts:
            yield node
            return
        inside = dict.fromkeys(used for used in node.all_input_nodes if used in self._firsts)
        for user in node.users:
            if user.target is operator.getitem:
                inside.update(dict.fromkeys(self._tensors_of(user)))
        yield from inside


def _is_parameter(node: fx.Node) -> bool:
    if is_constant(node):
        return False
    owner, name = node.meta[OF]
    return name in owner._parameters


def storage_of(tensor: torch.Tensor) -> int | None:
    """A number for the memory under a tensor; None if it has none."""
    # Both tensors are alive when this is compared, so the address is nobody else's.
    try:
        return identity_of(plain_parts(tensor)[0].untyped_storage())
    except (NotImplementedError, RuntimeError):
        # Sparse tensors, fake ones.
        return None
