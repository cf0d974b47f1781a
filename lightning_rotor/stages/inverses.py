"""An invertible module is one with an ``inverse``. There is no base class.

Forward, inverse and each repetition start from the same state of the generators and of the module's buffers, so a
module that draws in several places must draw the same numbers whichever place comes first (see ``AdditiveCoupling``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from lightning_rotor.errors import InverseError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import address_of, attribute_of, tree_leaves

DRAWS = (
    "The module draws random numbers (RNG): forward and inverse start from the same state of the generators, "
    "and each part must draw the same numbers in both, though the inverse may run the parts in another order"
)
"""Part of the message where an inverse is off."""


@runtime_checkable
class Invertible(Protocol):
    """A module that can rebuild its input.

    Input and output are a tensor, or tensors in a tuple, list or dict. The output takes at least as many bytes as the
    input. What it shows of the input's memory (a reshape, a part that is handed through) is held with it.
    """

    def inverse(self, output: Any, /) -> Any:
        """The input that made an output: same structure, shapes and dtypes."""


@runtime_checkable
class Reversible(Invertible, Protocol):
    """An invertible module with a fused backward, which evaluates what forward and inverse have in common once."""

    def reversible_backward(self, output: Any, gradient: Any, /) -> tuple[Any, Any]:
        """Rebuild the input and run the backward.

        Called without gradient recording; accumulates the gradients of the module's parameters in their ``grad``, as
        ``loss.backward()`` does.

        Args:
            output: Of the forward, detached.
            gradient: Of the loss for the output.
        Returns:
            The input, and the gradient of the loss for it.
        """


def is_invertible(module: object) -> bool:
    """True if a module has an ``inverse``, right or not: see :func:`~lightning_rotor.invertible.check_inverse`."""
    # Not getattr: a __getattr__ of the user's may raise anything, or answer to every name.
    inverse = attribute_of(module, "inverse")
    # A layer may have that name.
    return callable(inverse) and not isinstance(inverse, torch.nn.Module)


def has_fused_backward(module: object) -> bool:
    """True if a module has a ``reversible_backward`` besides its ``inverse``."""
    return is_invertible(module) and callable(attribute_of(module, "reversible_backward"))


def require_invertible(module: object, *, name: str) -> None:
    """Raise ``InverseError`` if a module has no inverse."""
    if not is_invertible(module):
        raise InverseError(
            f"{name!r} ({type(module).__name__}) has no inverse: expected a method inverse(output) that "
            "returns the input. Write one, or run the module plainly",
            stage=name,
        )


def shares_memory(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """True if outputs show memory of inputs."""
    # An empty tensor has the address 0, like every other one.
    taken = {address_of(tensor) for tensor in inputs if tensor.numel()}
    return any(address_of(tensor) in taken for tensor in outputs)


def require_own_output(
    inputs: Sequence[torch.Tensor],
    versions: Sequence[int],
    output: Any,
    *,
    name: str,
) -> list[torch.Tensor]:
    """The tensors of an output for which the input can be dropped, or ``InverseError``.

    ``versions`` are those of the inputs before the forward, which must not change them.
    """
    made = require_tensors(output, name=name, what="output")
    # The counter is the only thing that tells: values may happen to be the same.
    if list(map(private.version_of, inputs)) != list(versions):
        raise InverseError(
            f"{name!r} changes its input in place: expected an untouched input, which its other readers rely on. "
            "Use an operation that is not in place",
            stage=name,
        )
    # An output of fewer bytes cannot tell all inputs apart.
    taken_bytes = sum(tensor.nbytes for tensor in inputs)
    made_bytes = sum(tensor.nbytes for tensor in made)
    if made_bytes < taken_bytes:
        raise InverseError(
            f"{name!r} returns less than it takes, {made_bytes} of {taken_bytes} bytes: expected an output from which "
            "the input can be rebuilt. Keep what is left out in a second output, or run the module plainly",
            stage=name,
        )
    return made


def require_like(
    rebuilt: Any,
    shapes: Sequence[tuple[torch.Size, torch.dtype]],
    *,
    name: str,
    what: str = "inverse",
) -> list[torch.Tensor]:
    """The tensors that an inverse returned; ``InverseError`` if number, shapes or dtypes are not the forward's."""
    leaves = require_tensors(rebuilt, name=name, what=what)
    if len(leaves) != len(shapes):
        raise InverseError(
            f"the {what} of {name!r} returns {len(leaves)} tensors: expected {len(shapes)}, which the "
            "forward took. Return them all",
            stage=name,
        )
    for leaf, (shape, dtype) in zip(leaves, shapes, strict=True):
        if leaf.shape != shape or leaf.dtype != dtype:
            raise InverseError(
                f"the {what} of {name!r} returns a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}: "
                f"expected {tuple(shape)} and {dtype}, which the forward took. Return what it took",
                stage=name,
            )
    return leaves


def require_tensors(value: Any, *, name: str, what: str) -> list[torch.Tensor]:
    """The leaves of a value; ``InverseError`` if there is none, or one that is no tensor."""
    leaves = tree_leaves(value)
    # A number among them could not be rebuilt: it is in no tensor of the output.
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise InverseError(
            f"the {what} of {name!r} is {type(value).__name__}: expected a tensor, or tensors in a tuple, list or dict",
            stage=name,
        )
    return leaves
