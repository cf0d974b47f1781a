"""Nestings of tuples, lists, dicts, dataclasses, attrs classes and registered containers.

``torch.utils._pytree`` is private in name alone: torch's own messages send users there to register containers, and
``torch.utils`` has no public module of the kind. The same in 2.11 to 2.15.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import ref

import torch
from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    SequenceKey,
    TreeSpec,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)

__all__ = [
    "TreeSpec",
    "attribute_of",
    "flatten",
    "keystr",
    "leaves_by_path",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
    "watch_containers",
]


def attribute_of(owner: Any, name: str, default: Any = None) -> Any:
    """An attribute that an object or its class has by itself. A ``__getattr__`` of the user's may raise anything."""
    try:
        return object.__getattribute__(owner, name)
    # A property of the user's may raise anything, too.
    except Exception:
        return default


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """``tree_flatten`` that also looks into dataclasses and attrs objects: it registers their classes."""
    leaves, spec = tree_flatten(value)
    records = [kind for kind in set(map(type, leaves)) if _is_record(kind)]
    if not records:
        return leaves, spec
    for kind in records:
        register_pytree_node(kind, _taken_apart, _put_together, flatten_with_keys_fn=_named)
    return flatten(value)


def _is_record(kind: type) -> bool:
    """True for a class of dataclasses or attrs objects. A module that is one has parameters, and is no container."""
    has_fields = is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")
    return has_fields and not issubclass(kind, torch.nn.Module)


_MISSING = object()


def _taken_apart(record: Any) -> tuple[list[Any], Any]:
    """The values of an object's fields, and of what else was set; and what makes such an object of them again."""
    declared = fields(record) if is_dataclass(record) else type(record).__attrs_attrs__
    # Each once, the fields first, since a field mostly stands in the object's dict as well.
    names = dict.fromkeys((*(field.name for field in declared), *attribute_of(record, "__dict__", ())))
    values = {}
    for name in names:
        value = attribute_of(record, name, _MISSING)
        if value is not _MISSING:
            values[name] = value
    return list(values.values()), (type(record), tuple(values))


def _named(record: Any) -> tuple[list[tuple[Any, Any]], Any]:
    values, (kind, names) = _taken_apart(record)
    named = [(GetAttrKey(name), value) for name, value in zip(names, values, strict=True)]
    return named, (kind, names)


def _put_together(values: Iterable[Any], context: Any) -> Any:
    """An object with these attributes. Its class is not asked: ``__post_init__`` might make other ones."""
    kind, names = context
    record = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(record, name, value)
    return record


def leaves_by_path(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each leaf and the way to it. Parts of containers that were registered without names for them are numbered."""
    entries, _ = tree_flatten_with_path(value, is_leaf=_is_nameless)
    for way, leaf in entries:
        if not _is_nameless(leaf):
            yield (*path, *way), leaf
            continue
        parts, _ = SUPPORTED_NODES[type(leaf)].flatten_fn(leaf)
        for number, part in enumerate(parts):
            yield from leaves_by_path(part, (*path, *way, SequenceKey(number)))


def _is_nameless(value: Any) -> bool:
    """True of a container of whose parts torch's pytree knows no names."""
    node = SUPPORTED_NODES.get(type(value))
    return node is not None and node.flatten_with_keys_fn is None


def watch_containers(value: Any) -> Callable[[], bool]:
    """A function that says whether containers in a value hold anything else than now. It keeps no tensor alive."""
    leaves, spec = tree_flatten(value)
    before = [ref(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    del leaves

    def changed() -> bool:
        leaves_now, spec_now = tree_flatten(value)
        if spec_now != spec:
            return True
        for was, leaf in zip(before, leaves_now, strict=True):
            if type(was) is ref:
                was = was()
            if was is not leaf:
                return True
        return False

    return changed
