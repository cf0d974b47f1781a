"""Nestings of tuples, lists, dicts, dataclasses, attrs classes, plain objects and registered containers.

``torch.utils._pytree`` is private in name alone: torch's own messages send users there to register containers, and
``torch.utils`` has no public module of the kind. The same in 2.11 to 2.15.
"""

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch.utils import _pytree
from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    keystr,
    register_pytree_node,
    tree_flatten_with_path,
    tree_unflatten,
)

__all__ = [
    "TreeSpec",
    "attribute_of",
    "flatten",
    "is_plain_container",
    "is_users_named_tuple",
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


@lru_cache(maxsize=1024)
def _is_users_named_tuple(kind: Any) -> bool:
    """True for a class of named tuples that does more than the generated one: torch calls it, and loses attributes."""
    if not _pytree.is_namedtuple_class(kind):
        return False
    # Its own methods may change what it is made of, and an instance with a namespace holds more than entries.
    generated: Any = next(base for base in kind.__mro__ if "_fields" in vars(base))
    is_generated = kind.__new__ is generated.__new__ and kind.__iter__ is tuple.__iter__
    return not is_generated or bool(kind.__dictoffset__)


def is_users_named_tuple(value: Any) -> bool:
    """True for a named tuple that does more than the generated ones."""
    kind: Any = type(value)
    return kind is not tuple and issubclass(kind, tuple) and _is_users_named_tuple(kind)


class _NamedTuple:
    """Stands in a nesting for such a tuple, as torch takes each named tuple for a generated one."""

    __slots__ = ("record",)

    def __init__(self, record: Any) -> None:
        self.record = record

    def parts(self) -> tuple[list[Any], Any]:
        values, context = _taken_apart(self.record)
        return [*map(_shown, values)], context

    def named_parts(self) -> tuple[list[tuple[Any, Any]], Any]:
        named, context = _named(self.record)
        return [(way, _shown(value)) for way, value in named], context


def _shown(value: Any) -> Any:
    """A nesting with stand-ins for users' named tuples; the very one if it holds none."""
    leaves, spec = _pytree.tree_flatten(value, is_leaf=is_users_named_tuple)
    if not any(map(is_users_named_tuple, leaves)):
        return value
    return tree_unflatten([_NamedTuple(leaf) if is_users_named_tuple(leaf) else leaf for leaf in leaves], spec)


def tree_flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeSpec]:
    """The leaves of a nesting, and its structure. With ``is_leaf`` it goes no deeper than that says."""
    if is_leaf is not None:
        return _pytree.tree_flatten(value, is_leaf=is_leaf)
    leaves, spec = _pytree.tree_flatten(value, is_leaf=is_users_named_tuple)
    if any(map(is_users_named_tuple, leaves)):
        return _pytree.tree_flatten(_shown(value))
    return leaves, spec


def tree_leaves(value: Any) -> list[Any]:
    """The leaves of a nesting."""
    return tree_flatten(value)[0]


def tree_structure(value: Any) -> TreeSpec:
    """The structure of a nesting."""
    return tree_flatten(value)[1]


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """A nesting with the results of a function in the place of the leaves."""
    leaves, spec = tree_flatten(value)
    return tree_unflatten([*map(function, leaves)], spec)


def tree_map_only(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """``tree_map`` of the leaves of one class."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, value)


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """``tree_flatten`` that also looks into objects which are nothing but their values: it registers their classes.

    These are dataclasses and attrs objects; tuples, lists and dicts of a class of the user's; and other objects whose
    attributes are tensors and plain values, of which at least one is a tensor.
    """
    leaves, spec = tree_flatten(value)
    # Registering is for the whole process, so that one look at each class is enough.
    is_new = False
    for leaf in leaves:
        kind = type(leaf)
        if kind not in _SIMPLE and kind not in SUPPORTED_NODES and _can_be_taken_apart(leaf):
            register_pytree_node(kind, _taken_apart, _put_together, flatten_with_keys_fn=_named)
            is_new = True
    # Once more, since objects of further classes may be in those that are taken apart now.
    return flatten(value) if is_new else (leaves, spec)


_SIMPLE = frozenset((torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None)))
"""Types of most leaves, which are no containers."""
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum, slice),
    *(torch.dtype, torch.device, torch.memory_format, torch.Size),
)
_MISSING = object()
_LIBRARIES = frozenset(("torch", "numpy", "lightning", "pytorch_lightning", "torchmetrics", "transformers"))
"""Packages whose objects may hold more than their attributes show, or are filled by layers, as caches are."""


@lru_cache(maxsize=1024)
def _base_of(kind: Any) -> Any:
    """The class of Python's whose values objects of a class have besides attributes; None if there may be others."""
    if is_dataclass(kind) or hasattr(kind, "__attrs_attrs__"):
        return None if issubclass(kind, torch.nn.Module) else object
    library = kind.__module__.partition(".")[0]
    if library in _LIBRARIES or kind.__module__ == "builtins":
        return None
    # A defaultdict has a factory besides its entries, an exception its arguments, and members of an enum are unique.
    if issubclass(kind, (defaultdict, BaseException, enum.Enum)):
        return None
    # What is in slots is in no namespace.
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return None
    bases: tuple[type, ...] = (OrderedDict, dict, list, tuple, object)
    base: Any = next(base for base in bases if issubclass(kind, base))
    # Whoever has a ``__new__`` or a destructor of its own may mind being made, or deleted, once more.
    is_made_plainly = kind.__new__ is base.__new__ and not hasattr(kind, "__del__")
    return base if is_made_plainly else None


def _can_be_taken_apart(value: Any) -> bool:
    """True if a value can be made again of its parts, and for a plain object also if it holds tensors."""
    kind: Any = type(value)
    base = _base_of(kind)
    # These declare that they are nothing but their fields.
    if base is None or is_dataclass(kind) or hasattr(kind, "__attrs_attrs__"):
        return base is not None
    leaves = _leaves_within(value, ())
    if leaves is None:
        return False
    return base is not object or any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _leaves_within(value: Any, around: tuple[Any, ...]) -> list[Any] | None:
    """The tensors and plain values that an object is made of, at any depth; None if it has other parts."""
    # An object of C++ has no namespace that shows what it holds.
    kind: Any = type(value)
    has_parts = _base_of(kind) is not object or isinstance(attribute_of(value, "__dict__"), dict)
    # One that holds itself would be taken apart for ever.
    holds_itself = any(value is outer for outer in around)
    if not has_parts or holds_itself:
        return None
    leaves: list[Any] = []
    parts, _ = _taken_apart(value)
    for leaf in tree_leaves(parts):
        if isinstance(leaf, (torch.Tensor, *_PLAIN)):
            leaves.append(leaf)
            continue
        inner_kind: Any = type(leaf)
        if _base_of(inner_kind) is None:
            return None
        inner_leaves = _leaves_within(leaf, (*around, value))
        if inner_leaves is None:
            return None
        leaves += inner_leaves
    return leaves


def _taken_apart(record: Any) -> tuple[list[Any], Any]:
    """The values of an object's fields and entries, and of what else was set; and what makes such an object again."""
    kind = type(record)
    names: dict[str, None] = {}
    if is_dataclass(kind) or hasattr(kind, "__attrs_attrs__"):
        declared = fields(kind) if is_dataclass(kind) else kind.__attrs_attrs__
        names.update(dict.fromkeys(field.name for field in declared))
    namespace = attribute_of(record, "__dict__", ())
    # A dict may be its own namespace, as one whose entries are attributes.
    shows_itself = namespace is record
    if not shows_itself:
        names.update(dict.fromkeys(namespace))
    attributes: dict[str, Any] = {}
    for name in names:
        # A declared field may have no value yet, or be deleted.
        value = attribute_of(record, name, _MISSING)
        if value is not _MISSING:
            attributes[name] = value
    keys, entries = _entries_of(record)
    return [*entries, *attributes.values()], (kind, keys, tuple(attributes), shows_itself)


def _entries_of(record: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Keys and values of a container of a class of the user's, whose own methods are not asked; of others, none."""
    # By type(): isinstance asks an object for its class, which may raise.
    kind = type(record)
    if issubclass(kind, dict):
        # dict.items does not see the order of an OrderedDict.
        base = OrderedDict if issubclass(kind, OrderedDict) else dict
        items = [*base.items(record)]
        return tuple(key for key, _ in items), [value for _, value in items]
    entries: list[Any] = []
    if issubclass(kind, tuple):
        entries += tuple.__iter__(record)
    elif issubclass(kind, list):
        entries += list.__iter__(record)
    return tuple(range(len(entries))), entries


def _named(record: Any) -> tuple[list[tuple[Any, Any]], Any]:
    values, context = _taken_apart(record)
    _, keys, names, _ = context
    of_entries: type = MappingKey if issubclass(type(record), dict) else SequenceKey
    ways = [*map(of_entries, keys), *map(GetAttrKey, names)]
    return list(zip(ways, values, strict=True)), context


def _put_together(values: Iterable[Any], context: Any) -> Any:
    """An object with these entries and attributes. Its class is not asked: ``__post_init__`` might make other ones."""
    kind, keys, names, shows_itself = context
    parts = list(values)
    entries = parts[: len(keys)]
    if issubclass(kind, tuple):
        record = tuple.__new__(kind, entries)
    elif issubclass(kind, list):
        record = list.__new__(kind)
        list.extend(record, entries)
    elif issubclass(kind, dict):
        base = OrderedDict if issubclass(kind, OrderedDict) else dict
        record = base.__new__(kind)
        base.update(record, zip(keys, entries, strict=True))
        if shows_itself:
            object.__setattr__(record, "__dict__", record)
    else:
        record = object.__new__(kind)
    for name, value in zip(names, parts[len(keys) :], strict=True):
        # A frozen dataclass refuses to be set in its own way.
        object.__setattr__(record, name, value)
    return record


register_pytree_node(_NamedTuple, _NamedTuple.parts, _put_together, flatten_with_keys_fn=_NamedTuple.named_parts)


def is_plain_container(value: Any) -> bool:
    """True for a tuple or list whose parts are its entries alone."""
    kind: Any = type(value)
    if kind in (tuple, list):
        return True
    return issubclass(kind, (tuple, list)) and _base_of(kind) is None and not is_users_named_tuple(value)


def leaves_by_path(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each leaf and the way to it. Parts of containers that were registered without names for them are numbered."""
    entries, _ = tree_flatten_with_path(_shown(value), is_leaf=_is_nameless)
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
    # A closure holds the names that it mentions, and with this one all tensors.
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
