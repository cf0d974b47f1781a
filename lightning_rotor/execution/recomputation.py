"""Drops what autograd saves in a forward, and runs the forward again when a backward asks for the first of it.

torch's non-reentrant checkpoint works alike, and a plan would run with it too. This one knows what runs again, so that
a segment takes less of the host. Each saved tensor leaves a place behind::

    forward             saves 1   2   3         places 1 2 3, all empty
    backward            asks for 3              runs again up to the third save, which fills 1 2 3; gives 3 away
                        asks for 2 … 1          gives them away

The places die with the graph, and their tensors with them: what a first part of the backward has freed is not filled
again by a second one.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ReferenceType, ref

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.errors import ExecutionError
from lightning_rotor.private import torch_names as private


class _Enough(BaseException):  # no user code that survives errors shall survive this
    """All places are filled, so the rest of the forward need not run."""


class _Place:
    """Where autograd would have saved a tensor: what fills it, by the number of the backward that asked."""

    __slots__ = ("__weakref__", "filled")

    def __init__(self) -> None:
        self.filled: dict[int | None, torch.Tensor] = {}


class Recomputation:
    """What a forward saves while it runs in :meth:`dropping`, by running again in each backward.

    Args:
        name: Of the forward, in messages.
        again: Runs the forward again, with gradients.
    """

    __slots__ = ("_again", "_asked", "_kinds", "_name", "_places")

    def __init__(self, name: str, again: Callable[[], object]) -> None:
        self._name, self._again = name, again
        self._places: list[ReferenceType[_Place]] = []
        self._kinds: list[tuple[torch.dtype, torch.Size, torch.device]] = []
        self._asked: set[int] = set()

    def dropping(self) -> saved_tensors_hooks:
        """Context of the forward."""
        return saved_tensors_hooks(self._drop, self._get)

    def _drop(self, tensor: torch.Tensor) -> _Place:
        place = _Place()
        self._places.append(ref(place))
        self._kinds.append((tensor.dtype, tensor.shape, tensor.device))
        return place

    def _get(self, place: _Place) -> torch.Tensor:
        backward = private.backward_number()
        if backward not in place.filled:
            if backward in self._asked:
                raise ExecutionError(
                    f"a backward asked {self._name} twice for the same saved tensor: expected once. "
                    "Read ctx.saved_tensors once in the backward of a torch.autograd.Function"
                )
            if backward is not None:
                self._asked.add(backward)
            self._fill(backward)
        return place.filled.pop(backward)

    def _fill(self, backward: int | None) -> None:
        """Run again until all places that are there now have been saved to."""
        number = 0

        def save(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal number
            if tensor.requires_grad:
                tensor = tensor.detach()  # its node would hold it, and it holds its node
            if number < len(self._places):
                place = self._places[number]()
                if place is not None:
                    if self._kinds[number] != (tensor.dtype, tensor.shape, tensor.device):
                        raise self._differs(f"{tensor.dtype} of shape {tuple(tensor.shape)}", self._kinds[number])
                    place.filled[backward] = tensor
                number += 1
            if number == len(self._places):
                raise _Enough
            return tensor

        try:
            with saved_tensors_hooks(save, lambda tensor: tensor), torch.enable_grad():
                self._again()
        except _Enough:
            pass
        if number < len(self._places):
            raise self._differs("none", self._kinds[number])

    def _differs(self, received: str, kind: tuple[torch.dtype, torch.Size, torch.device]) -> ExecutionError:
        return ExecutionError(
            f"{self._name} ran again in the backward and saved other tensors than before: expected {kind[0]} of shape "
            f"{tuple(kind[1])} on {kind[2]}, received {received}. Its forward depends on what a recomputation does "
            "not see again: move that into its arguments, or out of the module"
        )
