"""Tensors that autograd would save in a forward are dropped, and made again by a second forward (rule 10).

torch's non-reentrant checkpoint does so for any function. Where what runs again is known, half of its time is enough:
0.42 ms of the host for a segment around next to nothing, where torch's takes 0.77 (one core of an EPYC)::

    forward             saves 1   2   3         leaves places 1 2 3
    backward            asks for 3, 2, 1        the first time, runs again up to the third save, which fills 1 2 3

The places die with the graph: what a first backward has freed is not filled again for a second one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias
from weakref import ReferenceType, ref

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.errors import ExecutionError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import shape_of

_KindOfTensor: TypeAlias = tuple[torch.dtype, tuple[int, ...], torch.device]


# No user code that survives errors shall survive this.
class _Enough(BaseException):
    """All places are filled, so the rest of the forward need not run."""


class _Place:
    """Where autograd would have saved a tensor: what fills it, by the number of the backward that asked."""

    __slots__ = ("__weakref__", "filled")

    def __init__(self) -> None:
        self.filled: dict[int | None, torch.Tensor] = {}


class Recomputation:
    """Tensors that a forward saves while it runs in :meth:`dropping`, made by running again in each backward.

    Args:
        name: Of the forward, in messages.
        again: Runs the forward again, with gradients.
    """

    __slots__ = ("_again", "_asked", "_kinds", "_name", "_places")

    def __init__(self, name: str, again: Callable[[], object]) -> None:
        self._name = name
        self._again = again
        # Weakly: a place lives as long as the node of the graph that has it.
        self._places: list[ReferenceType[_Place]] = []
        self._kinds: list[_KindOfTensor] = []
        # Backwards for which it has run again.
        self._asked: set[int] = set()

    def dropping(self) -> saved_tensors_hooks:
        """Context of the forward."""
        return saved_tensors_hooks(self._drop, self._get)

    def _drop(self, tensor: torch.Tensor) -> _Place:
        place = _Place()
        self._places.append(ref(place))
        self._kinds.append(_kind_of(tensor))
        return place

    def _get(self, place: _Place) -> torch.Tensor:
        backward = private.backward_number()
        if backward not in place.filled:
            # Running once more would give the tensor again, and hide that each read costs a whole segment.
            if backward in self._asked:
                raise ExecutionError(
                    f"a backward asked {self._name} twice for the same saved tensor: expected once. "
                    "Read ctx.saved_tensors once in the backward of a torch.autograd.Function"
                )
            if backward is not None:
                self._asked.add(backward)
            self._fill(backward)
        # Taken out: autograd holds the tensor from here on, and no longer than it needs it.
        return place.filled.pop(backward)

    def _fill(self, backward: int | None) -> None:
        """Run again until all places that are there now have been saved to."""
        refill = _Refill(self, backward)
        try:
            # A backward runs without gradients, and what saves nothing fills no place.
            with saved_tensors_hooks(refill.save, _unchanged), torch.enable_grad():
                self._again()
        except _Enough:
            pass
        if refill.number < len(self._places):
            raise self._differs("none", self._kinds[refill.number])

    def _differs(self, received: str, kind: _KindOfTensor) -> ExecutionError:
        dtype, shape, device = kind
        return ExecutionError(
            f"{self._name} ran again in the backward and saved other tensors than before: expected {dtype} of shape "
            f"{tuple(shape)} on {device}, received {received}. Its forward depends on what a recomputation does "
            "not see again: move that into its arguments, or out of the module"
        )


class _Refill:
    """A second forward that fills the places of a recomputation; ``number`` is that of the next one."""

    def __init__(self, recomputation: Recomputation, backward: int | None) -> None:
        self._of = recomputation
        self._backward = backward
        self.number = 0

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take a tensor that autograd saves, for the next place."""
        places, number = self._of._places, self.number
        if tensor.requires_grad:
            # Its node would hold it, and it holds its node.
            tensor = tensor.detach()
        if number < len(places):
            # A place may be gone: its node was freed, since nobody wants a gradient behind it. The numbers of the
            # others stay.
            place = places[number]()
            if place is not None:
                expected = self._of._kinds[number]
                # Kinds and not values: comparing values would need the dropped tensors. Equal kinds in the same order
                # is what torch's own checkpoint requires as well.
                if _kind_of(tensor) != expected:
                    raise self._of._differs(f"{tensor.dtype} of shape {tuple(shape_of(tensor))}", expected)
                place.filled[self._backward] = tensor
            self.number += 1
        if self.number == len(places):
            raise _Enough
        return tensor


def _kind_of(tensor: torch.Tensor) -> _KindOfTensor:
    return tensor.dtype, shape_of(tensor), tensor.device


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
