"""Boundaries between modules that run without their input: tensors that are held, or can be rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.nested_backward import Tensors
from lightning_rotor.private import torch_names as private


class Rebuilder(Protocol):
    """A run of a module that took the tensors as its input, and can rebuild them from its output."""

    @property
    def name(self) -> str:
        """Name of the module's stage."""


class Output:
    """The output of a module, for the modules around it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held: list[Callable[[], Any]] | None = None
        # Versions of the tensors; None where hooks bring back what they like.
        self._versions: list[int] | None = None
        # The run that can rebuild them.
        self._after: Rebuilder | None = None

    def hold(self, tensors: Tensors) -> None:
        """Hold the tensors."""
        self._held = list(map(_holding, tensors))
        self._versions = None
        if _hooks() is None:
            self._versions = list(map(private.version_of, tensors))

    def hand_over(self, after: Rebuilder, tensors: Tensors) -> None:
        """Drop the tensors, which a run can rebuild from its output; only the first call does so."""
        # Several modules may take the output. One of them rebuilds it, and the others find it there in the backward.
        if self._after is None:
            self._require_untouched(tensors)
            self._held = None
            self._after = after

    def refill(self, tensors: Tensors, *, for_good: bool) -> None:
        """Take tensors that a run has rebuilt, ``for_good`` if it cannot do so again."""
        if self._after is not None:
            self.hold(tensors)
            if for_good:
                self._after = None

    def lend(self, *, for_good: bool) -> list[torch.Tensor]:
        """The tensors; what can be rebuilt is then dropped, and everything is if they are lent ``for_good``."""
        if self._held is None and self._after is not None:
            raise ExecutionError(
                f"a backward reaches {self._name!r} and has not passed {self._after.name!r}, which took its output "
                "and rebuilds it: expected one backward through both, such as that of the sum of the losses. Or call "
                "the second one plainly"
            )
        if self._held is None:
            raise second_backward(self._name)
        tensors = [get() for get in self._held]
        self._require_untouched(tensors)
        # What can be rebuilt is rebuilt once more in the next backward, so it need not be held until then.
        if for_good or self._after is not None:
            self._held = None
        if for_good:
            self._after = None
        return tensors

    def _require_untouched(self, tensors: Tensors) -> None:
        if self._versions is None:
            return
        # A tensor that was changed in place would give the inverse another output than the forward made.
        if list(map(private.version_of, tensors)) != self._versions:
            raise ExecutionError(
                f"the output of {self._name!r} was changed in place, so its input cannot be rebuilt: expected it "
                "untouched until the backward. Use an operation that is not in place on it"
            )


def _holding(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that gives a tensor back, which went through whatever hooks are set."""
    # With its graph it would hold the node that holds it.
    detached = tensor.detach()
    hooks = _hooks()
    if hooks is None:
        return lambda: detached
    pack, unpack = hooks
    with torch.no_grad():
        return partial(unpack, pack(detached))


def _hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Hooks through which a tensor goes that is saved now, so that a surrounding segment drops it; None without any."""
    return private.hooks_for_saved_tensors() if torch.is_grad_enabled() else None


def second_backward(name: str) -> ExecutionError:
    """The error for a backward through what an earlier one has used up."""
    return ExecutionError(
        f"backward ran a second time through {name!r}, whose output is held no more: expected one backward per "
        "forward. Call backward(retain_graph=True) the first time, or run the forward again"
    )


def is_whole(tensor: torch.Tensor) -> bool:
    """True if a tensor is dense and fills its memory, so that a copy of its numbers can stand for it."""
    # A slice of a larger tensor keeps all of it alive, so that dropping the slice frees nothing.
    if tensor.nbytes != tensor.untyped_storage().nbytes():
        return False
    # An overlapping tensor may have as many bytes, and other strides than a dense one.
    dense = torch.empty_like(tensor, device="meta")
    return dense.stride() == tensor.stride()
