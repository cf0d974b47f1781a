"""What an invertible module is: one with an ``inverse``. There is no base class.

Forward, inverse and every repetition of them start from the same state of the random number generators and of the module's buffers,
so a module that draws in several places must draw the same numbers whichever place comes first (see
:class:`~lightning_rotor.invertible.AdditiveCoupling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from lightning_rotor.errors import InverseError
from lightning_rotor.private.torch_names import version_of
from lightning_rotor.private.values import address_of, tree_leaves

DRAWS = (
    "The module draws random numbers (RNG): forward and inverse start from the same state of the generators, and each part must draw the "
    "same numbers in both, though the inverse may run the parts in another order"
)
"""Part of the message where an inverse is off."""


@runtime_checkable
class Invertible(Protocol):
    """A module that can rebuild its input.

    Input and output are a tensor, or tensors in a tuple, list or dict. The output takes at least as many bytes as the input. What it shows of the
    input's memory (a reshape, a part that is handed through) is held with it.
    """

    def inverse(self, output: Any, /) -> Any:
        """The input that made an output: same structure, shapes and dtypes."""


@runtime_checkable
class Reversible(Invertible, Protocol):
    """An invertible module with a fused backward, which evaluates what forward and inverse have in common once instead of twice."""

    def reversible_backward(self, output: Any, gradient: Any, /) -> tuple[Any, Any]:
        """Rebuild the input and run the backward.

        Called without gradient recording; accumulates the gradients of the module's parameters in their ``grad``, as ``loss.backward()`` does.

        Args:
            output: Of the forward, detached.
            gradient: Of the loss for the output.
        Returns:
            The input, and the gradient of the loss for it.
        """


def is_invertible(module: object) -> bool:
    """Whether a module has an ``inverse``. Whether that one is right, :func:`~lightning_rotor.invertible.check_inverse` finds out."""
    inverse = getattr(module, "inverse", None)
    return callable(inverse) and not isinstance(inverse, torch.nn.Module)  # a layer may have that name


def has_fused_backward(module: object) -> bool:
    """Whether a module has a ``reversible_backward`` besides its ``inverse``."""
    return is_invertible(module) and callable(getattr(module, "reversible_backward", None))


def require_invertible(module: object, *, name: str) -> None:
    """Check that a module has an inverse.

    Raises:
        InverseError: It has none.
    """
    if not is_invertible(module):
        raise InverseError(
            f"{name!r} ({type(module).__name__}) has no inverse: expected a method inverse(output) that returns the input. "
            "Write one, or run the module plainly",
            stage=name,
        )


def require_untouched(inputs: Sequence[torch.Tensor], versions: Sequence[int], *, name: str) -> None:
    """Check that a module has not changed its input in place.

    Args:
        inputs: Tensors that the module took.
        versions: Their :func:`version_of` from before.
        name: For error messages.
    Raises:
        InverseError: It has.
    """
    if [version_of(tensor) for tensor in inputs] != list(versions):
        raise InverseError(
            f"{name!r} changes its input in place: expected an untouched input, which its other readers rely on. "
            "Use an operation that is not in place",
            stage=name,
        )


def shares_memory(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """True if outputs show memory of inputs."""
    return bool(
        {address_of(tensor) for tensor in inputs if tensor.numel()} & {address_of(tensor) for tensor in outputs}
    )


def require_own_output(
    inputs: Sequence[torch.Tensor], versions: Sequence[int], output: Any, *, name: str
) -> list[torch.Tensor]:
    """Check that an input can be dropped for the output that was made of it.

    Args:
        inputs: Tensors that the module took.
        versions: Their ``_version`` from before.
        output: What it returned.
        name: For error messages.
    Returns:
        The tensors of the output.
    Raises:
        InverseError: The module changed its input in place, or returned no tensors, or less than it took.
    """
    made = require_tensors(output, name=name, what="output")
    require_untouched(inputs, versions, name=name)
    taken_bytes, made_bytes = (sum(tensor.nbytes for tensor in tensors) for tensors in (inputs, made))
    if made_bytes < taken_bytes:
        raise InverseError(
            f"{name!r} returns less than it takes, {made_bytes} of {taken_bytes} bytes: expected an output from which the input can be rebuilt. "
            "Keep what is left out in a second output, or run the module plainly",
            stage=name,
        )
    return made


def require_like(
    rebuilt: Any, shapes: Sequence[tuple[torch.Size, torch.dtype]], *, name: str, what: str = "inverse"
) -> list[torch.Tensor]:
    """Check that an inverse returned as many tensors as the forward took, with their shapes and dtypes.

    Returns:
        The tensors.
    Raises:
        InverseError: It did not.
    """
    leaves = require_tensors(rebuilt, name=name, what=what)
    if len(leaves) != len(shapes):
        raise InverseError(
            f"the {what} of {name!r} returns {len(leaves)} tensors: expected {len(shapes)}, which the forward took. Return them all",
            stage=name,
        )
    for leaf, (shape, dtype) in zip(leaves, shapes, strict=True):
        if leaf.shape != shape or leaf.dtype != dtype:
            raise InverseError(
                f"the {what} of {name!r} returns a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}: expected {tuple(shape)} and {dtype}, "
                "which the forward took. Return what it took",
                stage=name,
            )
    return leaves


def require_tensors(value: Any, *, name: str, what: str) -> list[torch.Tensor]:
    """The leaves of a value, all of which must be tensors.

    Raises:
        InverseError: There is none, or something else among them.
    """
    leaves = tree_leaves(value)
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise InverseError(
            f"the {what} of {name!r} is {type(value).__name__}: expected a tensor, or tensors in a tuple, list or dict",
            stage=name,
        )
    return leaves
