"""Pinned memory of the host as the other memory of a training on a GPU: one stream copies out, and one back.

Streams wait for each other, and Python for none of them::

    compute   F0 ●      F1      ◌ 0 is free    ...    ● takes memory      B1     ◌ B0     ● event
    out          └► ───0───► ●──┘                     │                          │        ◌ wait
    back                                              └────► ───0───► ●──────────┘

* Memory of the device is given back and taken by the compute stream, which has waited: so it goes to whatever comes
  next in that stream, and no block is recorded on another stream. Recorded blocks are free when the device gets there,
  so what a step takes would depend on how far the host runs ahead.
* The compute stream is the one of the moment, asked anew each time: a module may change it.
* Torch rounds each pinned block of its own up to a power of two, so memory is registered here instead.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

from lightning_rotor.errors import OffloadError
from lightning_rotor.execution.places import Places
from lightning_rotor.units import format_bytes, in_blocks

_log = logging.getLogger(__name__)

_UNIT_BYTES = 512
"""Of the allocator on the device, in which plans count. Copies from and to such addresses are fastest."""
_PAGE_BYTES = mmap.PAGESIZE
# cudaMemcpyHostToDevice and cudaMemcpyDeviceToHost.
_TO_DEVICE, _TO_HOST = 1, 2
# cudaHostRegisterPortable: pinned for all devices of the process.
_PORTABLE = 1


class _Slab:
    """A piece of pinned memory, and who has what of it."""

    __slots__ = ("__weakref__", "address", "memory", "places")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.address = memory, memory.data_ptr()
        self.places = Places(memory.numel(), unit_bytes=_UNIT_BYTES)


class PinnedCopy:
    """A storage on its way to the host or back, or there; its place is free again when this is dropped."""

    __slots__ = ("__weakref__", "_at", "_back", "_home", "_memory", "_out", "_size_bytes", "_slab", "_target")

    def __init__(self, memory: PinnedMemory, storage: torch.UntypedStorage, slab: _Slab, at: int) -> None:
        self._memory = memory
        self._slab = slab
        self._at = at
        self._size_bytes = storage.nbytes()
        self._target: torch.UntypedStorage | None = None
        self._back: torch.cuda.Event | None = None
        # The stream whose pool the device's memory belongs to.
        self._home = memory.compute_stream()
        # What the item has computed must be there before it is copied.
        memory.out.wait_event(self._home.record_event())
        memory.copy(
            slab.address + at,
            storage.data_ptr(),
            self._size_bytes,
            _TO_HOST,
        )
        self._out = memory.out.record_event()

    def wait_out(self) -> None:
        """Let what follows on the compute stream wait until the storage is on the host."""
        self._home.wait_event(self._out)
        now = self._memory.compute_stream()
        # The module has changed streams: its next work may write to the storage, too.
        if now != self._home:
            now.wait_event(self._out)

    def begin_back(self) -> None:
        """Take memory of the compute stream, and begin to copy into it."""
        memory = self._memory
        self._home = memory.compute_stream()
        target = torch.empty(self._size_bytes, dtype=torch.uint8, device=memory.device)
        self._target = target.untyped_storage()
        # Whoever had the memory before may still use it.
        memory.back.wait_event(self._home.record_event())
        memory.back.wait_event(self._out)
        memory.copy(
            self._target.data_ptr(),
            self._slab.address + self._at,
            self._size_bytes,
            _TO_DEVICE,
        )
        self._back = memory.back.record_event()

    def wait_back(self) -> torch.UntypedStorage:
        """Let what follows on the compute stream wait until the memory holds what was copied, and give it away."""
        assert self._back is not None
        assert self._target is not None
        now = self._memory.compute_stream()
        now.wait_event(self._back)
        if now != self._home:
            # The module changes streams, and the memory is to go back to the pool of another one.
            self._home.wait_event(self._back)
            _bytes_of(self._target).record_stream(now)
        storage, self._target = self._target, None
        return storage

    def __del__(self) -> None:
        # Python may end, or the constructor have failed.
        with suppress(AttributeError, TypeError):
            if self._back is not None:
                if self._target is not None:
                    # Abandoned: nobody may get the memory while the copy writes into it.
                    self._home.wait_event(self._back)
                # The next copy to this place must not come before this one has been read.
                self._memory.out.wait_event(self._back)
            self._slab.places.give_back(self._at, self._size_bytes)


class PinnedMemory:
    """Memory of the host for copies from and to one GPU, registered with its driver until this is dropped.

    Args:
        device: A CUDA device.
        limit_bytes: Most that is registered; None for all that the host gives.
    """

    def __init__(self, device: torch.device, *, limit_bytes: int | None = None) -> None:
        # With its number.
        self.device = torch.empty(0, device=device).device
        self._limit_bytes = limit_bytes
        self.out, self.back = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self._copy = _runtime_copy()
        self._slabs: list[_Slab] = []

    def compute_stream(self) -> torch.cuda.Stream:
        """The stream that computes at this moment."""
        return torch.cuda.current_stream(self.device)

    @property
    def used_bytes(self) -> int:
        """Bytes of the host that hold something."""
        return sum(slab.places.used_bytes for slab in self._slabs)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the host that are registered."""
        return sum(slab.memory.numel() for slab in self._slabs)

    def reserve(self, size_bytes: int) -> None:
        """Register so much before steps need it: the device stands still meanwhile."""
        missing_bytes = size_bytes - self.reserved_bytes
        if missing_bytes <= 0:
            return
        if not self.used_bytes:
            # One piece for all, so that whatever fits together fits.
            self._slabs = []
            missing_bytes = size_bytes
        self._slabs.append(self._registered(missing_bytes))

    def copy_out(self, storage: torch.UntypedStorage) -> PinnedCopy:
        """Begin to copy a storage, which the caller keeps until it has waited for that."""
        size_bytes = storage.nbytes()
        if torch.cuda.is_current_stream_capturing():
            raise OffloadError(
                "a CUDA graph is being captured of a module whose plan moves what stages hold to the host: expected a "
                "plain run. Capture it in evaluation, or train without offload"
            )
        for slab in self._slabs:
            at = slab.places.take(size_bytes)
            if at is not None:
                return PinnedCopy(self, storage, slab, at)
        if self._slabs:
            _log.info(
                "%s more of the host is pinned, as calls wait for their backward together: the device stands still",
                format_bytes(size_bytes),
            )
        self._slabs.append(self._registered(size_bytes))
        return self.copy_out(storage)

    def copy(self, to: int, source: int, size_bytes: int, kind: int) -> None:
        """Enqueue a copy between two addresses on the stream of its direction.

        Torch's own copy takes ten times as long, of a host that is late already where stages are small.
        """
        stream = self.out if kind == _TO_HOST else self.back
        error = self._copy(to, source, size_bytes, kind, stream.cuda_stream)
        if error:
            torch.cuda.check_error(error)

    def drain(self) -> None:
        """Wait for all copies."""
        self.out.synchronize()
        self.back.synchronize()

    def _registered(self, size_bytes: int) -> _Slab:
        """So much pinned memory, with the bytes around it that pages take."""
        size_bytes = in_blocks(size_bytes, _PAGE_BYTES)
        taken_bytes = self.reserved_bytes + size_bytes
        if self._limit_bytes is not None and taken_bytes > in_blocks(self._limit_bytes, _PAGE_BYTES):
            raise OffloadError(
                f"what moves to the host takes {format_bytes(taken_bytes)} of its memory, more than the limit of "
                f"{format_bytes(self._limit_bytes)}: expected calls whose backwards come one after the other. Raise "
                'the limit, such as offload="host:64GiB", or train without offload'
            )
        try:
            pages = mmap.mmap(-1, size_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # the system may have none
                    pages.madvise(mmap.MADV_HUGEPAGE)
            memory = torch.frombuffer(pages, dtype=torch.uint8)
            # All threads ask the system for pages, which the driver would do with one.
            memory.zero_()
            with torch.cuda.device(self.device):
                runtime = torch.cuda.cudart()
                error = int(runtime.cudaHostRegister(memory.data_ptr(), size_bytes, _PORTABLE))
                if error:
                    with suppress(RuntimeError):  # the next launch would report it once more
                        torch.zeros(1, device=self.device)
                    torch.cuda.check_error(error)
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise OffloadError(
                f"the host does not give {format_bytes(size_bytes)} of pinned memory for what moves there ({reason}): "
                'expected RAM, and no memory of the GPU. Give less, such as offload="host:4GiB", raise the memory of '
                "the container, or train without offload"
            ) from error
        slab = _Slab(memory)
        weakref.finalize(slab, _unregister, memory, self.out, self.back)
        return slab


def _unregister(memory: torch.Tensor, *streams: torch.cuda.Stream) -> None:
    # Copies that are on their way would write to memory, or read from it, that the system has given to others.
    for stream in streams:
        stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


@lru_cache(maxsize=1)
def _runtime_copy() -> Callable[..., int]:
    """``cudaMemcpyAsync`` of the runtime that torch has loaded."""
    libraries: list[str | None] = [None]  # what this process sees as a whole
    with suppress(OSError):
        loaded = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        libraries += sorted({line.split()[-1] for line in loaded if "libcudart.so" in line})
    for library in libraries:
        copy = None
        with suppress(TypeError):  # Windows has no name for the process as a whole
            copy = getattr(ctypes.CDLL(library), "cudaMemcpyAsync", None)
        if copy is not None:
            # To, from, bytes, kind, stream. Without types, ctypes would cut addresses to 32 bits.
            pointer = ctypes.c_void_p
            copy.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer]
            copy.restype = ctypes.c_int
            found: Callable[..., int] = copy
            return found
    raise OffloadError(
        f"torch {torch.__version__} shows no cudaMemcpyAsync to copy to the host with: expected a torch for NVIDIA's "
        "CUDA. Train without offload"
    )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
