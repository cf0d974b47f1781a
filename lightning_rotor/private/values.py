"""Nestings of tuples, lists, dicts, dataclasses, attrs classes, plain objects and registered containers.

``torch.utils._pytree`` is private in name alone: torch's own messages send users there to register containers, and
``torch.utils`` has no public module of the kind. The same in 2.11 to 2.15.
"""

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from operator import is_
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
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

from lightning_rotor.errors import SampleError
from lightning_rotor.private.torch_names import FakeTensor, identity_of, is_traceable_wrapper_subclass, sparse_parts
from lightning_rotor.units import in_blocks

__all__ = [
    "TreeSpec",
    "keystr",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
]


# --------------------- Containers that torch's pytree does not know by itself, and what user code does with containers.


def attribute_of(owner: Any, name: str, default: Any = None) -> Any:
    """An attribute that an object or its class has by itself. A ``__getattr__`` of the user's may raise anything."""
    try:
        return object.__getattribute__(owner, name)
    except Exception:  # a property of the user's, too
        return default


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """``tree_flatten`` that also looks into objects which are nothing but their values: it registers their classes.

    These are dataclasses and attrs objects; tuples, lists and dicts of a class of the user's; and other objects whose
    attributes are tensors and plain values, of which at least one is a tensor.
    """
    leaves, spec = tree_flatten(value)
    is_new = False
    for leaf in leaves:
        kind = type(leaf)
        if kind not in _SIMPLE and kind not in SUPPORTED_NODES and _can_be_taken_apart(leaf):
            register_pytree_node(kind, _taken_apart, _put_together, flatten_with_keys_fn=_named)
            is_new = True
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
    if kind.__module__.partition(".")[0] in _LIBRARIES or issubclass(kind, (defaultdict, BaseException, enum.Enum)):
        return None
    if kind.__module__ == "builtins" or any(vars(each).get("__slots__") for each in kind.__mro__):
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
    if not has_parts or any(value is each for each in around):
        return None
    found: list[Any] = []
    for leaf in tree_leaves(_taken_apart(value)[0]):
        if isinstance(leaf, (torch.Tensor, *_PLAIN)):
            found.append(leaf)
            continue
        inner_kind: Any = type(leaf)
        inner = None if _base_of(inner_kind) is None else _leaves_within(leaf, (*around, value))
        if inner is None:
            return None
        found += inner
    return found


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
    found = {name: attribute_of(record, name, _MISSING) for name in names}
    found = {name: value for name, value in found.items() if value is not _MISSING}
    keys, entries = _entries_of(record)
    return [*entries, *found.values()], (kind, keys, tuple(found), shows_itself)


def _entries_of(record: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Keys and values of a container of a class of the user's, whose own methods are not asked; of others, none."""
    if isinstance(record, dict):
        items = [*(OrderedDict if isinstance(record, OrderedDict) else dict).items(record)]
        return tuple(key for key, _ in items), [value for _, value in items]
    entries: list[Any] = []
    if isinstance(record, tuple):
        entries += tuple.__iter__(record)
    elif isinstance(record, list):
        entries += list.__iter__(record)
    return tuple(range(len(entries))), entries


def _named(record: Any) -> tuple[list[tuple[Any, Any]], Any]:
    values, context = _taken_apart(record)
    _, keys, names, _ = context
    of_entries: type = MappingKey if isinstance(record, dict) else SequenceKey
    ways = [*map(of_entries, keys), *map(GetAttrKey, names)]
    return list(zip(ways, values, strict=True)), context


def leaves_by_path(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each leaf and the way to it. Parts of containers that were registered without names for them are numbered."""
    found, _ = tree_flatten_with_path(value, is_leaf=_is_nameless)
    for way, leaf in found:
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
        object.__setattr__(record, name, value)
    return record


def is_plain_container(value: Any) -> bool:
    """True for a tuple or list whose parts are its entries alone."""
    kind: Any = type(value)
    return kind in (tuple, list) or (isinstance(value, (tuple, list)) and _base_of(kind) is None)


def watch_containers(value: Any) -> Callable[[], bool]:
    """A function that says whether containers in a value hold anything else than now. It keeps no tensor alive."""
    leaves, spec = tree_flatten(value)
    before = [ref(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    del leaves

    def changed() -> bool:
        now, structure = tree_flatten(value)
        return structure != spec or any(
            (was() if type(was) is ref else was) is not leaf for was, leaf in zip(before, now, strict=True)
        )

    return changed


# -------------------------- Tensors in what user code takes and gives, and the memory under them as torch asked for it.


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a nesting that torch's pytree knows."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The Python attributes that user code has given a tensor."""
    # Tensors that are made of others keep those there.
    return {} if is_fake(tensor) or hasattr(tensor, "__tensor_flatten__") else vars(tensor)


def watch_attributes(tensors: Iterable[torch.Tensor]) -> Callable[[], bool]:
    """A function that says whether tensors have other attributes than now. It keeps none alive."""
    before = [(attributes, dict(attributes)) for attributes in map(attributes_of, tensors)]
    return lambda: any(
        now.keys() != then.keys() or not all(map(is_, now.values(), then.values())) for now, then in before
    )


def like(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The tensor, made of ``source``, with the attributes of that."""
    if attributes := attributes_of(source):
        vars(tensor).update(attributes)
    return tensor


def spelled(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Type and shape as one word, such as ``"float32[4, 64, 8, 8]"``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def is_fake(tensor: object) -> bool:
    """True if a tensor stands for one that was never computed: it has neither memory nor values."""
    return isinstance(tensor, FakeTensor)


def is_made_of_others(tensor: Any) -> bool:
    """True for a tensor of a class that keeps its values in other tensors: DTensor, quantized weights, nested ones."""
    return bool(is_traceable_wrapper_subclass(tensor))


def plain_parts(tensor: Any) -> list[torch.Tensor]:
    """The dense tensors that a tensor is made of, which have its memory; mostly the tensor itself."""
    if is_made_of_others(tensor):  # a DTensor lists its mesh as well
        parts = [attribute_of(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        parts = [part for part in parts if isinstance(part, torch.Tensor)]
    elif tensor.layout is torch.sparse_coo:
        parts = list(sparse_parts(tensor))
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        return [tensor]
    return [each for part in parts for each in plain_parts(part)]


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, those of this process where it is spread over several."""
    return sum(part.nbytes for part in plain_parts(tensor)) if is_made_of_others(tensor) else tensor.nbytes


def storage_bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the storages under a tensor."""
    if not is_made_of_others(tensor):
        return tensor.untyped_storage().nbytes()
    return sum(sizes_by_address([tensor]).values())


def address_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's memory: equal for all that share it, 0 for none. Freed ones may be used again.

    Of a tensor that is made of others, it is that of the first one.
    """
    if is_made_of_others(tensor):
        return next(map(address_of, plain_parts(tensor)), 0)
    storage = tensor.untyped_storage()
    if is_fake(tensor):
        return identity_of(storage) if storage.nbytes() else 0
    return storage.data_ptr()


def bytes_in_blocks(tensors: Iterable[torch.Tensor], block_bytes: int) -> int:
    """Bytes of the distinct storages under dense tensors, as an allocator with blocks of that size counts them."""
    return sum(in_blocks(size, block_bytes) for size in sizes_by_address(tensors).values())


def sizes_by_address(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The distinct storages under some dense tensors, and how many bytes torch asked for."""
    parts = [part for tensor in tensors for part in (plain_parts(tensor) if is_made_of_others(tensor) else [tensor])]
    return {address_of(part): part.untyped_storage().nbytes() for part in parts}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if two tensors have the same shape, dtype, device and values. A NaN is the same as another."""
    if left is right:
        return True
    if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
        return False
    if is_fake(left) or is_fake(right):
        return True
    if is_made_of_others(left) or is_made_of_others(right):
        parts = plain_parts(left), plain_parts(right)
        return type(left) is type(right) and len(parts[0]) == len(parts[1]) and all(map(same_bits, *parts))
    # A NaN equals no NaN, so where both are one, the values are compared as "same".
    return bool(((left == right) | ((left != left) & (right != right))).all())


def require_tensors(value: Any) -> None:
    """Raise ``SampleError`` if an input holds no tensor, or one that is not dense."""
    tensors = tensors_in(value)
    if not tensors:
        raise SampleError(
            f"the input is {type(value).__name__} and holds no tensor: expected a tensor, or tensors in "
            "tuples, lists, dicts or dataclasses"
        )
    if layout := other_layout(tensors):
        raise SampleError(
            f"the input holds a tensor of layout {layout}: expected dense ones, as the memory of others cannot be "
            "followed. Name a submodule that takes dense tensors, or give it their parts (indices, values, offsets)"
        )


def other_layout(tensors: Iterable[torch.Tensor]) -> str:
    """The layout of the first tensor that is not dense; empty if all are."""
    layouts = ("torch.nested" if tensor.is_nested else str(tensor.layout) for tensor in tensors)
    return next((layout for layout in layouts if layout != "torch.strided"), "")


def check_sample(sample: Any) -> None:
    """Raise ``SampleError`` if a sample is missing, holds no tensor, or values that are not finite."""
    if sample is None:
        raise SampleError(
            "there is no sample: expected an input as in training, a tensor or tensors in tuples, lists, dicts or "
            "dataclasses"
        )
    require_tensors(sample)
    for tensor in tensors_in(sample):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise SampleError(
                f"the sample of shape {tuple(tensor.shape)} holds values that are not finite (NaN or "
                "infinity): expected an input as in training"
            )


def call_with(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with a sample: a tuple for several, a dict for keywords."""
    if isinstance(sample, dict):
        return (), sample
    return sample if isinstance(sample, tuple) else (sample,), {}


def uncounted_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, on the CPU in NumPy's memory, so that it does not show in the peak of torch's allocator."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not tensor.numel() or is_made_of_others(tensor):
        return tensor.clone()
    # Not by tensor.numpy(), after which nobody can resize the tensor.
    memory = torch.from_numpy(np.empty(tensor.nbytes, np.uint8))
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
