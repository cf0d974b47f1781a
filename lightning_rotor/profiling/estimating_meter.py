"""A meter for tensors without memory, and a clock that runs by a roofline.

The meter follows the life of every storage: what operators return counts until its storage dies. What a kernel
allocates for itself while it runs (a convolution's workspace, say) is not seen, so peaks are lower bounds, exact for
kernels that need nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_rotor.private.torch_names import TorchDispatchMode, identity_of, schema_of
from lightning_rotor.private.values import tree_leaves
from lightning_rotor.profiling.accelerators import Accelerator
from lightning_rotor.profiling.memory_recording import Recording
from lightning_rotor.profiling.meters import Meter
from lightning_rotor.units import in_blocks

_aten = torch.ops.aten

# Missing in torch's own register: the attention that fake tensors on the CPU choose.
_FLOPS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


class EstimatingMeter(TorchDispatchMode, Meter):
    """Bytes of storages, rounded up to blocks, and seconds of a roofline, for what runs while this mode is active."""

    # A roofline says the same of every run.
    repeats_itself = True

    def __init__(self, accelerator: Accelerator, *, block_bytes: int = 1) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.block_bytes = block_bytes
        self._seconds = 0.0
        # By identity, since tensors without memory have no address.
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._recording = Recording()

    def new_recording(
        self,
        *,
        of_step: bool = False,
        older: Mapping[int, int] | None = None,
        unknown_too: bool = False,
    ) -> Recording:
        """A recording of what is made from now on, until the next one."""
        self._recording = Recording()
        return self._recording

    def now(self) -> float:
        """Seconds that everything so far would have taken."""
        return self._seconds

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        taken = _tensors_in((args, kwargs))
        # Before the call, since a result may share the storage of an argument.
        storages_before = {identity_of(tensor.untyped_storage()) for tensor in taken}
        result = func(*args, **kwargs)
        made = _tensors_in(result)
        # Results in place and views are made by an operator as well; their storages are counted already.
        for tensor in made:
            self._count_until_freed(tensor.untyped_storage())
        # A view is a matter of the host, and takes no kernel.
        if made and not _is_view(func, made, storages_before):
            moved_bytes = _bytes_of_storages([*taken, *made])
            element_bytes = min(tensor.element_size() for tensor in made)
            operations = _operations(func, args, kwargs, result)
            self._seconds += self._accelerator.seconds(operations, moved_bytes, element_bytes)
        return result

    def _count_until_freed(self, storage: torch.UntypedStorage) -> None:
        identity = identity_of(storage)
        if identity in self._alive:
            return
        size_bytes = in_blocks(storage.nbytes(), self.block_bytes)
        # A block that dies in a later recording counts for the one that saw it taken, as older blocks do on the CPU.
        recording = self._recording

        # By a weak reference, as a meter that held storages would let none of them die.
        def forget(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._alive[identity]
            recording.count(-size_bytes)

        self._alive[identity] = weakref.ref(storage, forget)
        recording.count(size_bytes)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_view(func: Any, made: Sequence[torch.Tensor], storages_before: set[int]) -> bool:
    """True if an operator has moved no bytes: it made nothing new, and changed nothing in place."""
    if schema_of(func).is_mutable:
        return False
    return all(identity_of(tensor.untyped_storage()) in storages_before for tensor in made)


def _bytes_of_storages(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes that an operator reads or writes: of each storage, those of the last tensor in it."""
    sizes = {}
    for tensor in tensors:
        sizes[identity_of(tensor.untyped_storage())] = tensor.nbytes
    return sum(sizes.values())


def _operations(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> float:
    """FLOPs of an operator that multiplies matrices; 0 for others, whose time is that of their bytes."""
    count: Any = _FLOPS.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
    if count is None:
        return 0.0
    return float(count(*args, **kwargs, out_val=result))
