"""A meter for tensors without memory: it follows the life of every storage, and its clock runs by a roofline.

What operators return counts until its storage dies. What a kernel allocates for itself while it runs (a convolution's
workspace, say) is not seen, so peaks are lower bounds, exact for kernels that need nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_rotor.private.torch_names import TorchDispatchMode, identity_of, schema_of
from lightning_rotor.private.values import tree_leaves
from lightning_rotor.profiling.meters import MeteredPhase
from lightning_rotor.units import in_blocks

# ----------------------------------------------------------------------------------------------------
# How long an operator takes on an accelerator, from its arithmetic and the bytes that it moves.


# What well-tuned kernels reach of a data sheet's figures. Both factors cancel where one limit decides everything.
_ARITHMETIC_EFFICIENCY = 0.6
_BANDWIDTH_EFFICIENCY = 0.8
# The gap between two kernels in a stream, when the host keeps up.
_LAUNCH_SECONDS = 3e-6


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device as a roofline sees it.

    Attributes:
        memory_bytes: As the driver shows it.
        bandwidth: Bytes per second between memory and chip.
        flops: Operations per second on 4-byte numbers (a fused multiply-add is two), without TF32, as torch's default.
        half_flops: Operations per second on 2-byte numbers (dense, on tensor cores).
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    half_flops: float

    def seconds(self, operations: float, moved_bytes: float, element_bytes: int) -> float:
        """Estimated duration of one operator that multiplies numbers of ``element_bytes``."""
        peak = self.half_flops if element_bytes <= 2 else self.flops
        arithmetic = operations / (_ARITHMETIC_EFFICIENCY * peak)
        movement = moved_bytes / (_BANDWIDTH_EFFICIENCY * self.bandwidth)
        return max(arithmetic, movement, _LAUNCH_SECONDS)


def _gpu(name: str, mebibytes: int, gigabytes_per_second: float, teraflops: float, half: float) -> Accelerator:
    return Accelerator(name, mebibytes * 2**20, gigabytes_per_second * 1e9, teraflops * 1e12, half * 1e12)


# Vendor's data sheets; memory is what `nvidia-smi` shows of it.
GPUS: dict[str, Accelerator] = {
    gpu.name: gpu
    for gpu in (
        _gpu("B200", 183_359, 8000, 75, 2250),
        _gpu("H200", 143_771, 4800, 67, 989),
        _gpu("H100", 81_559, 3350, 67, 989),
        _gpu("H100-PCIe", 81_559, 2000, 51, 756),
        _gpu("A100-80GB", 81_920, 2039, 19.5, 312),
        _gpu("A100-40GB", 40_960, 1555, 19.5, 312),
        _gpu("L40S", 46_068, 864, 91.6, 362),
        _gpu("L4", 23_034, 300, 30.3, 121),
        _gpu("A10G", 23_028, 600, 31.5, 70),
        _gpu("V100-32GB", 32_768, 900, 15.7, 125),
        _gpu("V100-16GB", 16_384, 900, 15.7, 125),
        _gpu("T4", 15_360, 320, 8.1, 65),
        _gpu("RTX-5090", 32_607, 1792, 104.8, 209.5),
        _gpu("RTX-4090", 24_564, 1008, 82.6, 165.2),
        _gpu("RTX-3090", 24_576, 936, 35.6, 71),
    )
}


# ----------------------------------------------------------------------------------------------------


_aten = torch.ops.aten


class EstimatingMeter(TorchDispatchMode):
    """Bytes of storages, rounded up to blocks, and seconds of a roofline, for what runs while this mode is active."""

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
        """Seconds from ``start`` to ``end``."""
        return end - start

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Before the call, since a result may share the storage of an argument.
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
        """Count a new storage."""
        self._level += size_bytes
        self._peak = max(self._peak, self._level)

    def freed(self, size_bytes: int) -> None:
        """Subtract a storage of this recording that died."""
        self._level -= size_bytes

    @property
    def phases(self) -> tuple[MeteredPhase, ...]:
        """All phases, once the recording has ended."""
        return tuple(self._phases)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


# Missing in torch's own register: the attention that fake tensors on the CPU choose.
_FLOPS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
