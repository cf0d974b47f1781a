"""Tensors without values, which have no public home in torch, and single values that they may have all the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "fake_mode",
    "fake_with_value",
    "forget_value",
    "mode_of",
    "value_of",
    "with_values",
]


@contextmanager
def fake_mode(*, allow_fallback_kernels: bool = True) -> Iterator[FakeTensorMode]:
    """Context with a mode whose tensors have no values, which lets go of the user's tensors at its end.

    The mode keeps a weak reference to each tensor that it has met, and lives on in reference cycles until Python
    collects them. As long as there is one, torch cannot move a parameter of a tensor subclass (``swap_tensors``
    refuses).
    """
    # Code keeps real tensors as constants, and mixes them with the copies without values that it is given.
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=allow_fallback_kernels)
    try:
        yield mode
    finally:
        mode.fake_tensor_converter = fake_tensor.FakeTensorConverter()


@contextmanager
def with_values(most_elements: int) -> Iterator[None]:
    """Context in which operations on tensors of :func:`fake_with_value` alone compute values as well.

    torch follows the values of single numbers by itself, and has no public name for the size up to which it does.
    """
    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = most_elements
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = before


def fake_with_value(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a fake mode that answers questions for values like ``tensor``, which stays as it is."""
    # A clone that the mode sees would have no values.
    with no_dispatch():
        copy = tensor.detach().clone()
    return cast(torch.Tensor, mode.fake_tensor_converter.from_real_tensor(mode, copy, make_constant=True))


def mode_of(tensor: torch.Tensor) -> FakeTensorMode:
    """The mode that a fake tensor belongs to."""
    return cast(FakeTensor, tensor).fake_mode


def forget_value(tensor: torch.Tensor) -> None:
    """Let a fake tensor have no values from now on."""
    if isinstance(tensor, FakeTensor):
        tensor.constant = None


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a fake tensor; None if it has none."""
    return cast("torch.Tensor | None", getattr(tensor, "constant", None))
