"""What lies between two modules without inputs: the output of the one before, or how to come by it.

::

    forward    x ─ A ─► a ─ B ─► b ─ C ─► c          each takes over from the one before: only c is held
                        ▲        ▲        │
    backward            └── B⁻¹ ─┴── C⁻¹ ─┘          each inverse fills the boundary before it

Nothing is taken from anybody: whoever else holds a tensor of a boundary goes on holding it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lightning_rotor.errors import ExecutionError
from lightning_rotor.private.torch_names import version_of


class Boundary:
    """The output of one module, by reference, or by the inverse of the module after it.

    Attributes:
        name: Of the module that made it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._tensors: list[torch.Tensor] | None = None
        self._versions: list[int] = []
        self._rebuild: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None
        self._after: Boundary | None = None
        self._is_released = False

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hold tensors."""
        self._tensors = [tensor.detach() for tensor in tensors]
        self._versions = [version_of(tensor) for tensor in self._tensors]

    def shows(self, number: int, tensor: torch.Tensor) -> bool:
        """True if a tensor is the same part of the same memory as one that is held."""
        return self._tensors is not None and self._tensors[number].is_set_to(tensor)

    def hand_over(self, rebuild: Callable[[list[torch.Tensor]], list[torch.Tensor]], after: Boundary) -> None:
        """Drop the tensors: they can be rebuilt from those of a later boundary. Only the first to take over does."""
        if self._tensors is not None and self._after is None:
            self._require_untouched()
            self._tensors, self._rebuild, self._after = None, rebuild, after

    def refill(self, tensors: Sequence[torch.Tensor], *, for_good: bool) -> None:
        """Take tensors that a later inverse rebuilt.

        Args:
            tensors: What was handed over.
            for_good: They cannot be rebuilt any more.
        """
        if self._after is None or self._is_released:
            return
        self.hold(tensors)
        if for_good:
            self._rebuild = self._after = None

    def lend(self, *, for_good: bool) -> list[torch.Tensor]:
        """The tensors. What can be rebuilt is held no more afterwards.

        Args:
            for_good: Nobody will ask again, so nothing is.
        """
        waiting: list[Boundary] = []
        boundary = self
        while boundary._tensors is None:
            waiting.append(boundary)
            if boundary._after is None:
                raise second_backward(self.name)
            boundary = boundary._after
        boundary._require_untouched()
        tensors = list(boundary._tensors)
        for before in reversed(waiting):
            assert before._rebuild is not None
            tensors = before._rebuild(tensors)
        if for_good:
            self._is_released = True
            self._tensors = self._rebuild = self._after = None
        elif self._after is not None:
            self._tensors = None
        return tensors

    def _require_untouched(self) -> None:
        if self._tensors is not None and [version_of(tensor) for tensor in self._tensors] != self._versions:
            raise ExecutionError(
                f"the output of {self.name!r} was changed in place, so its input cannot be rebuilt: expected it untouched until the backward. "
                "Use an operation that is not in place on it"
            )


def second_backward(name: str) -> ExecutionError:
    """The error for a backward through what an earlier one has used up."""
    return ExecutionError(
        f"backward ran a second time through {name!r}, whose output is held no more: expected one backward per forward. "
        "Call backward(retain_graph=True) the first time, or run the forward again"
    )
