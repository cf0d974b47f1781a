"""Parameters and buffers that a forward reads must be what they were when it is repeated (rules 2 and 5).

torch counts writes in place to a tensor and its views, and ``data`` that is set has another storage. It does not count
what is written through ``tensor.data``, through NumPy, or by fused optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from operator import attrgetter
from typing import Any

import torch
from torch.nn import Module

from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.lent_tensors import Slot
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.private import torch_names as private
from lightning_rotor.stages.known_layers import NORMALIZATIONS

_requires_grad = attrgetter("requires_grad")


def first_changed(before: Sequence[int], tensors: Sequence[torch.Tensor], *, or_copies: bool = False) -> int | None:
    """Number of the first tensor that has changed, or None.

    Args:
        before: Stamps of the tensors, or the first of these: all versions stand before all storages.
        tensors: As they are now.
        or_copies: They may be copies of what they were, in other memory.
    """
    # All stamps in one list, whose comparison runs in C: it is asked before each recomputation.
    now = private.stamps(tensors)[: len(before)]
    if now == before:
        return None
    count = len(tensors)
    for number in range(count):
        if or_copies:
            # A copy is in other memory and begins to count anew. Only more changes of the same memory count.
            same_memory = now[number + count] == before[number + count]
            has_changed = same_memory and now[number] > before[number]
        else:
            # The version, and the storage if that is known.
            has_changed = now[number::count] != before[number::count]
        if has_changed:
            return number
    return None


class TensorsRead:
    """Parameters and buffers that a forward reads. A slot may hold None; ``name_of`` gives its name in messages."""

    def __init__(self, slots: Iterable[Slot], name_of: Callable[[dict[str, Any], str], str]) -> None:
        self.slots = list(slots)
        self._name_of = name_of
        self._read: list[Slot] = []
        self._tensors: list[torch.Tensor] = []
        for slot in self.slots:
            tensor = slot[2]
            if isinstance(tensor, torch.Tensor):
                self._read.append(slot)
                self._tensors.append(tensor)
        self._stamps = private.stamps(self._tensors)
        self._learning = list(map(_requires_grad, self._tensors))

    def require_untouched(self) -> None:
        """Raise ``ExecutionError`` if the forward itself has changed them."""
        for table, name, tensor in self._read:
            # Another tensor of the same name has a version of its own, which may be the same number.
            if table.get(name) is not tensor:
                raise self._changed_inside(table, name)
        number = first_changed(self._stamps, self._tensors)
        if number is not None:
            table, name, _ = self._read[number]
            raise self._changed_inside(table, name)

    def require_unchanged(self) -> None:
        """Raise ``ExecutionError``, before the forward is repeated, if somebody else has changed them."""
        number = first_changed(self._stamps, self._tensors)
        if number is not None:
            table, name, _ = self._read[number]
            raise changed_meanwhile(
                self._name_of(table, name),
                "Step optimizers, average weights and update buffers behind it",
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which those that were frozen, or set free, since the forward read them are what they were."""
        now = list(map(_requires_grad, self._tensors))
        # One comparison in C says that nothing is to be done, as in nearly every step.
        is_as_then = now == self._learning
        try:
            if not is_as_then:
                self._set_learning(self._learning)
            yield
        finally:
            if not is_as_then:
                self._set_learning(now)

    def _set_learning(self, learning: Iterable[bool]) -> None:
        for tensor, learns in zip(self._tensors, learning, strict=True):
            tensor.requires_grad_(learns)

    def standing_in(self, substitutes: Mapping[int, torch.Tensor]) -> TensorsRead:
        """Like :meth:`restored`, with others in the slots of some tensors, by the ``id`` of each."""
        # The originals are still what must not change, so all else is shared.
        other = copy(self)
        other.slots = []
        for table, name, tensor in self.slots:
            substitute = substitutes.get(id(tensor), tensor)
            other.slots.append((table, name, substitute))
        return other

    def _changed_inside(self, table: dict[str, Any], name: str) -> ExecutionError:
        return ExecutionError(
            f"the {self._name_of(table, name)} changed in a segment that is to be recomputed, but did not while it was "
            "measured, so its earlier value is gone: expected a forward that leaves parameters and large "
            "buffers alone, or updates them every time. Measure again with the module in its present state"
        )


def changed_meanwhile(what: str, remedy: str) -> ExecutionError:
    """The error for what has changed between the forward that read it and the backward that recomputes with it."""
    return ExecutionError(
        f"the {what} has changed since the forward read it, and the backward would recompute with another "
        f"value: expected it unchanged until the backward is over. {remedy}, or run the forward again"
    )


def slots_read(state: SegmentState) -> Iterator[Slot]:
    """Parameters and buffers that a repetition reads as they are now."""
    for module in state.parametrized:
        for name, parameter in module._parameters.items():
            yield module._parameters, name, parameter
    for module in state.buffered:
        # Asked at each forward, since a normalization may have been set to evaluate since.
        if not _leaves_statistics(module):
            for name, buffer in module._buffers.items():
                yield module._buffers, name, buffer
    for module, name in state.direct_reads:
        # Attributes are not followed.
        for table in (module._parameters, module._buffers):
            if name in table:
                yield table, name, table[name]


def _leaves_statistics(module: Module) -> bool:
    """True if a module does not read its statistics: normalization in training (rule 3)."""
    return module.training and isinstance(module, NORMALIZATIONS)
