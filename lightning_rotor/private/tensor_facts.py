"""Facts about a tensor: its version, its storage, and the parts of a sparse one."""

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["identity_of", "is_traceable_wrapper_subclass", "sparse_parts", "stamps", "version_of"]

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Number of changes of a tensor in place. torch's notes on autograd describe it; only ``_version`` tells it."""
identity_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""A number for a storage while it lives. ``data_ptr()`` is 0 for those on meta or in fake tensors."""


def stamps(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Numbers that change with tensors: their :func:`version_of`, then :func:`identity_of` their storages."""
    # Of all tensors at once, since guards ask for some hundred at every call.
    try:
        return [*map(version_of, tensors), *map(identity_of, map(torch.Tensor.untyped_storage, tensors))]
    except RuntimeError:
        # One by one: tensors of inference mode have no version, sparse ones no storage.
        versions = [_version_or_0(tensor) for tensor in tensors]
        identities = [_identity_or_0(tensor) for tensor in tensors]
        return [*versions, *identities]


def _version_or_0(tensor: torch.Tensor) -> int:
    try:
        return version_of(tensor)
    except RuntimeError:
        return 0


def _identity_or_0(tensor: torch.Tensor) -> int:
    try:
        return identity_of(tensor.untyped_storage())
    except RuntimeError:
        return 0


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse COO tensor as it is. ``indices()`` and ``values()`` want it coalesced."""
    return tensor._indices(), tensor._values()


def is_without_memory(tensor: torch.Tensor) -> bool:
    """True for what ``torch.func`` computes with: a wrapper around a tensor, or a zero that is stored nowhere."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor()
