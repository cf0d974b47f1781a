"""The other memory of a process: one for each device and target, which all modules that move something share."""

from __future__ import annotations

import logging
import os
import shutil
from weakref import WeakValueDictionary

import torch

from lightning_rotor.devices import CUDA, HOST, KINDS
from lightning_rotor.errors import OffloadError
from lightning_rotor.execution.file_memory import FileMemory
from lightning_rotor.execution.link_speed import disk_speed, host_speed
from lightning_rotor.execution.pinned_memory import PinnedMemory
from lightning_rotor.link import Link
from lightning_rotor.memory.device_memory import device_memory
from lightning_rotor.offload import Offload
from lightning_rotor.units import format_bytes

_log = logging.getLogger(__name__)

# What training itself, loaders of data, and the system need of the host's memory is not known.
_SHARE_OF_HOST = 0.5


class Offloading:
    """A memory that plans for one device move to, and the link to it; :class:`.OffloadError` if there is none."""

    def __init__(self, offload: Offload, device: torch.device) -> None:
        self.memory: PinnedMemory | FileMemory
        folder = offload.folder
        _require_target(offload, device)
        if folder is None:
            room_bytes = offload.limit_bytes or _share_of_host(device)
            self.memory = PinnedMemory(device, limit_bytes=room_bytes)
        else:
            self.memory = FileMemory(folder, limit_bytes=offload.limit_bytes)
            room_bytes = offload.limit_bytes or shutil.disk_usage(folder).free
        link = offload.link(room_bytes)
        if link is None:
            # As measured, and not from a data sheet: links of GPUs carry from 25 to 410 GB/s, and less than they say.
            out, back, latency = host_speed(device) if folder is None else disk_speed(folder)
            link = Link(out, back, latency, room_bytes)
            _log.info(
                "The link to %s carries %s/s out and %s/s back, as measured; %s may be there",
                offload.target,
                format_bytes(out),
                format_bytes(back),
                format_bytes(room_bytes),
            )
        self.link = link


def _require_target(offload: Offload, device: torch.device) -> None:
    """Raise ``OffloadError`` if nothing can move from a device to where it is to move."""
    kind = KINDS.get(device.type)
    if offload.folder is None and kind is not CUDA:
        # Tensors on the host would move from memory to the same memory.
        expected = "a CUDA device, or training without offload"
        if kind is HOST:
            expected = 'offload="disk:/a/folder", which moves to a file'
        raise OffloadError(
            f'offload="host" moves from a GPU to the memory of the host, and these tensors are on '
            f"{str(device)!r}: expected {expected}"
        )
    if offload.folder is not None and kind is not HOST:
        raise OffloadError(
            f'offload="{offload.target}" moves from the CPU to a file, and these tensors are on '
            f'{str(device)!r}: expected offload="host", which moves to pinned memory of the host'
        )


# Weakly: pinned memory goes back to the host with the last training that moves something.
_offloadings: WeakValueDictionary[tuple[Offload, torch.device], Offloading] = WeakValueDictionary()


def offloading(offload: Offload, device: torch.device) -> Offloading:
    """The one of this process for a target and a device, made now if nobody has it."""
    # One for all modules, as pinned memory takes long to get.
    shared = _offloadings.get((offload, device))
    if shared is None:
        shared = Offloading(offload, device)
        _offloadings[offload, device] = shared
    return shared


def _share_of_host(device: torch.device) -> int:
    """A part of what the host has free, for one of the processes that are on it."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not processes and is_distributed:
        # Lightning's own launchers set no such variable. A host has at most a process for each of its GPUs.
        processes = min(torch.distributed.get_world_size(), torch.cuda.device_count())
    free_bytes = device_memory("cpu").free_bytes
    return int(_SHARE_OF_HOST * free_bytes) // max(processes, 1)
