"""Tensors in what user code takes and gives, and the memory under them as torch asked for it.

A tensor may be made of others (DTensor, quantized weights, nested tensors), sparse, or without values. Bytes, addresses
and versions are those of the plain tensors inside, and this is the one place that takes tensors apart.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch

from lightning_rotor.errors import SampleError
from lightning_rotor.private.fake_tensors import FakeTensor
from lightning_rotor.private.nestings import (
    TreeSpec,
    attribute_of,
    flatten,
    is_plain_container,
    is_users_named_tuple,
    keystr,
    leaves_by_path,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
    watch_containers,
)
from lightning_rotor.private.tensor_facts import (
    identity_of,
    is_traceable_wrapper_subclass,
    is_without_memory,
    sparse_parts,
)
from lightning_rotor.units import in_blocks

# Nearly whoever asks for tensors takes nestings apart as well.
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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a nesting that torch's pytree knows."""
    # By type(): isinstance asks an object for its class, where a dead proxy raises.
    return [leaf for leaf in flatten(value)[0] if issubclass(type(leaf), torch.Tensor)]


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The Python attributes that user code has given a tensor."""
    # Tensors that are made of others keep those there.
    if is_fake(tensor) or hasattr(tensor, "__tensor_flatten__"):
        return {}
    return vars(tensor)


def watch_attributes(tensors: Iterable[torch.Tensor]) -> Callable[[], bool]:
    """A function that says whether tensors have other attributes than now. It keeps none alive."""
    # The dicts themselves, which live on without their tensors.
    before = [(attributes, dict(attributes)) for attributes in map(attributes_of, tensors)]

    def changed() -> bool:
        for now, then in before:
            # By identity: users' objects may compare as they like.
            if now.keys() != then.keys() or not all(map(is_, now.values(), then.values())):
                return True
        return False

    return changed


def like(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The tensor, made of ``source``, with the attributes of that."""
    attributes = attributes_of(source)
    if attributes:
        vars(tensor).update(attributes)
    return tensor


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Sizes of a tensor, -1 for a dimension of a nested one in which its parts differ."""
    if not tensor.is_nested:
        return tensor.shape
    if tensor.layout is torch.strided:
        # Torch tells the sizes of each part alone.
        return (tensor.size(0), *[-1] * (tensor.dim() - 1))
    # A jagged tensor has another symbol for each tensor of offsets, made anew in a second forward.
    sizes: Sequence[int | torch.SymInt] = tensor.shape
    return tuple(size if isinstance(size, int) else -1 for size in sizes)


def spelled(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Type and shape as one word, such as ``"float32[4, 64, 8, 8]"``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def is_fake(tensor: object) -> bool:
    """True if a tensor stands for one that was never computed: it has neither memory nor values."""
    return isinstance(tensor, FakeTensor)


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc)


def is_made_of_others(tensor: Any) -> bool:
    """True for a tensor that keeps its values in others: a DTensor, quantized weights, a sparse or nested tensor."""
    return tensor.layout in _SPARSE or bool(is_traceable_wrapper_subclass(tensor))


def plain_parts(tensor: Any) -> list[torch.Tensor]:
    """The dense tensors that a tensor is made of, which have its memory; mostly the tensor itself."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        parts = [attribute_of(tensor, name) for name in names]
        # A DTensor lists its mesh as well.
        parts = [part for part in parts if isinstance(part, torch.Tensor)]
    elif tensor.layout is torch.sparse_coo:
        parts = list(sparse_parts(tensor))
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        return [tensor]
    # A part may be made of others in its turn, as in a DTensor of quantized weights.
    plain: list[torch.Tensor] = []
    for part in parts:
        plain += plain_parts(part)
    return plain


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, those of this process where it is spread over several."""
    if not is_made_of_others(tensor):
        return tensor.nbytes
    return sum(part.nbytes for part in plain_parts(tensor))


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
    # All fake tensors have the address 0. Empty ones keep it, as real ones without memory do.
    if is_fake(tensor):
        return identity_of(storage) if storage.nbytes() else 0
    try:
        return storage.data_ptr()
    except RuntimeError as error:
        if is_without_memory(tensor):
            return 0
        # It has no memory of its own. What is inside might be read as an attribute, which no recording would see.
        raise SampleError(
            f"a {type(tensor).__name__} has no memory of its own and does not say which tensors it is made of: "
            "expected plain tensors, or a class with __tensor_flatten__ (torch's guide to tensor subclasses)"
        ) from error


def bytes_in_blocks(tensors: Iterable[torch.Tensor], block_bytes: int) -> int:
    """Bytes of the distinct storages under dense tensors, as an allocator with blocks of that size counts them."""
    return sum(in_blocks(size, block_bytes) for size in sizes_by_address(tensors).values())


def sizes_by_address(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The distinct storages under some dense tensors, and how many bytes torch asked for."""
    # By address, so that a view counts with its base. The storage's bytes, as a small view keeps all of it alive.
    sizes = {}
    for tensor in tensors:
        parts = plain_parts(tensor) if is_made_of_others(tensor) else [tensor]
        for part in parts:
            sizes[address_of(part)] = part.untyped_storage().nbytes()
    return sizes


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if two tensors have the same shape, dtype, device and values. A NaN is the same as another."""
    if left is right:
        return True
    if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
        return False
    # Without values, nothing but the shape could differ.
    if is_fake(left) or is_fake(right) or left.is_meta:
        return True
    if is_made_of_others(left) or is_made_of_others(right):
        left_parts = plain_parts(left)
        right_parts = plain_parts(right)
        if type(left) is not type(right) or len(left_parts) != len(right_parts):
            return False
        return all(map(same_bits, left_parts, right_parts))
    if torch.sparse_coo in (left.layout, right.layout):
        if left.layout != right.layout:
            return False
        # Such as gradients of ``nn.Embedding(sparse=True)``, for which equality has no kernel.
        left, right = left.detach().coalesce(), right.detach().coalesce()
        return same_bits(left.indices(), right.indices()) and same_bits(left.values(), right.values())
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
    layout = other_layout(tensors)
    if layout:
        raise SampleError(
            f"the input holds a tensor of layout {layout}: expected dense ones, as the memory of others cannot be "
            "followed. Name a submodule that takes dense tensors, or give it their parts (indices, values, offsets)"
        )


def other_layout(tensors: Iterable[torch.Tensor]) -> str:
    """The layout of the first tensor that is not dense; empty if all are."""
    for tensor in tensors:
        # Of a nested tensor, torch says "strided".
        layout = "torch.nested" if tensor.is_nested else str(tensor.layout)
        if layout != "torch.strided":
            return layout
    return ""


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
    args = sample if isinstance(sample, tuple) else (sample,)
    return args, {}


def uncounted_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, on the CPU in NumPy's memory, so that it does not show in the peak of torch's allocator."""
    # Its class says how it is copied; nobody else can put it together.
    if is_made_of_others(tensor):
        return tensor.detach().clone()
    return uncounted_like(tensor).copy_(tensor.detach())


def uncounted_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for such a copy, with any values."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not tensor.numel() or is_made_of_others(tensor):
        return torch.empty_like(tensor)
    # Not by tensor.numpy(), after which nobody can resize the tensor.
    # In bytes, for NumPy has no bfloat16.
    memory = torch.from_numpy(np.empty(tensor.nbytes, np.uint8))
    return memory.view(tensor.dtype).view(tensor.shape)
