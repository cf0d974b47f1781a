"""Tensors that modules return in a dry run, and whether the step makes anything of them.

A language model that is given labels returns its loss and its logits, and a step that takes the loss lets the logits go
at once. They are as large as all layers' activations together, so a plan that kept them for the caller, and a gradient
of them, would refuse limits that training keeps with ease: of a GPT-2 with 16 x 1,024 tokens, 13.8 GiB for 11.4.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_rotor.private.torch_names import identity_of
from lightning_rotor.private.values import plain_parts, tensors_in


@dataclass(slots=True, eq=False)
class _Call:
    """Tensors that one call of a module has returned, in their order.

    Attributes:
        tensors: Weak references to them.
        used: Places of those that an operation behind the call has taken, or somebody holds at the end.
    """

    tensors: list[weakref.ref[torch.Tensor]]
    used: set[int] = field(default_factory=set)


class ReturnedTensors:
    """Follows the tensors that modules return in one step, by the modules' names."""

    def __init__(self) -> None:
        self._calls: defaultdict[str, list[_Call]] = defaultdict(list)
        # Of what is followed: for each storage, the module, its call and the tensor's place in what that returned.
        self._followed: defaultdict[int, list[tuple[str, _Call, int]]] = defaultdict(list)
        self._is_over = False

    def follow(self, name: str, output: Any) -> None:
        """Note what a call of a module has returned."""
        # Weakly: who followed tensors by holding them would make the step hold them.
        tensors = tensors_in(output)
        call = _Call([weakref.ref(tensor) for tensor in tensors])
        self._calls[name].append(call)
        # A step that makes nothing of the only one does not learn from the call.
        if len(tensors) < 2:
            call.used.update(range(len(tensors)))
            return
        for place, tensor in enumerate(tensors):
            for part in plain_parts(tensor):
                self._followed[identity_of(part.untyped_storage())].append((name, call, place))

    def note_operation(self, inputs: Any, running: Iterable[str]) -> None:
        """Note that an operation takes these tensors while these modules run."""
        if not self._followed:
            return
        inside = set(running)
        for tensor in tensors_in(inputs):
            for part in plain_parts(tensor):
                for name, call, place in self._followed.get(identity_of(part.untyped_storage()), ()):
                    # A storage that is gone may have given its identity to another: then too much counts as used.
                    if name not in inside:
                        call.used.add(place)

    def end_step(self) -> None:
        """The step has returned: what somebody still holds is used, too."""
        for calls in self._calls.values():
            for call in calls:
                # In a list, a closure or an attribute, say: no operation tells of that.
                call.used.update(place for place, tensor in enumerate(call.tensors) if tensor() is not None)
        self._followed.clear()
        self._is_over = True

    def unused(self, name: str) -> frozenset[int]:
        """Places of the tensors, among those that a module returns, that no call's caller made anything of.

        None of them is if the step did not come to its end, or the calls return different numbers of tensors.
        """
        calls = self._calls.get(name, [])
        if not self._is_over or len({len(call.tensors) for call in calls}) != 1:
            return frozenset()
        places = set(range(len(calls[0].tensors)))
        for call in calls:
            places -= call.used
        return frozenset(places)
