"""A meter for tensors without memory: it follows the life of every storage, and its clock runs by a roofline.

Operators are seen from outside: what they return counts until its storage dies, wherever references to it are. What a kernel allocates
for itself while it runs (workspaces of convolutions, for one) is not seen, so peaks are lower bounds, and equal those of kernels that
need nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_rotor.estimation.roofline import Accelerator
from lightning_rotor.private.pytree import tree_leaves
from lightning_rotor.private.torch_names import TorchDispatchMode, identity_of, schema_of
from lightning_rotor.profiling.meters import MeteredPhase
from lightning_rotor.units import in_blocks

_aten = torch.ops.aten


class EstimatingMeter(TorchDispatchMode):
    """Bytes of storages and seconds of a roofline, for whatever runs while it is active as a mode.

    Args:
        accelerator: Whose time it tells.
        block_bytes: Sizes are rounded up to multiples of this, as the device's allocator does.
    """

    needs_warm_up = False

    def __init__(self, accelerator: Accelerator, *, block_bytes: int = 1) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.block_bytes = block_bytes
        self._seconds = 0.0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._recordings: list[EstimatedRecording] = []

    @contextmanager
    def recording(self) -> Iterator[EstimatedRecording]:
        """Record until the context ends."""
        recording = EstimatedRecording()
        self._recordings.append(recording)
        try:
            yield recording
        finally:
            self._recordings.remove(recording)
            recording.mark("")

    def now(self) -> float:
        """Seconds that everything so far would have taken."""
        return self._seconds

    def seconds_between(self, start: float, end: float) -> float:
        """Their difference."""
        return end - start

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Before the call: what it returns could have the storage of what it was given.
        before = {identity_of(tensor.untyped_storage()) for tensor in taken}
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._note(tensor.untyped_storage())
        is_view = (
            all(identity_of(tensor.untyped_storage()) in before for tensor in made) and not schema_of(func).is_mutable
        )
        if made and not is_view:
            self._seconds += self._duration(func, args, kwargs, taken, made, result)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = identity_of(storage)
        if key in self._known:
            return
        size = in_blocks(storage.nbytes(), self.block_bytes)
        recordings = list(self._recordings)

        def forget(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._known[key]
            for recording in recordings:
                recording.freed(size)

        self._known[key] = weakref.ref(storage, forget)
        for recording in recordings:
            recording.allocated(size)

    def _duration(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        taken: list[torch.Tensor],
        made: list[torch.Tensor],
        result: Any,
    ) -> float:
        count: Any = _FLOPS.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
        operations = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
        moved = sum({identity_of(tensor.untyped_storage()): tensor.nbytes for tensor in (*taken, *made)}.values())
        return self._accelerator.seconds(operations, moved, min(tensor.element_size() for tensor in made))


class EstimatedRecording:
    """Phases between marks, from the lives of storages that were made during the recording."""

    def __init__(self) -> None:
        self._phases: list[MeteredPhase] = []
        self._label, self._start, self._peak, self._level = "", 0, 0, 0

    def mark(self, label: str) -> None:
        """End the current phase and begin the next."""
        self._phases.append(MeteredPhase(self._label, self._start, self._peak, self._level))
        self._label, self._start, self._peak = label, self._level, self._level

    def allocated(self, size_bytes: int) -> None:
        """A storage was made."""
        self._level += size_bytes
        self._peak = max(self._peak, self._level)

    def freed(self, size_bytes: int) -> None:
        """A storage that was made during the recording died."""
        self._level -= size_bytes

    @property
    def phases(self) -> tuple[MeteredPhase, ...]:
        """All phases, once the recording has ended."""
        return tuple(self._phases)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


# What torch's own register lacks: the attention that fake tensors on the CPU choose.
_FLOPS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
