"""Memory that a device has and has free, and the bytes that a user's limit means on it.

A CPU's memory is the machine's, or that of the tightest control group that the process is in: in a container,
``/proc/meminfo`` still shows the whole machine, and the kernel ends a process that believes it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from lightning_rotor.devices import HOST, KINDS, DeviceKind, expected_kinds
from lightning_rotor.errors import ProfilingError, RotorWarning
from lightning_rotor.units import MemoryLimit, format_bytes

# The size of the segments from which CUDA's caching allocator takes blocks of 1 to 10 MiB.
_SEGMENT_BYTES = 20 * 2**20
# Where ``proc`` and ``sys`` are.
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory that this process may ever have on a device, and what it can still allocate there."""

    total_bytes: int
    free_bytes: int


def device_memory(device: torch.device | str) -> DeviceMemory:
    """Memory of a CPU or CUDA device; ``ProfilingError`` if it cannot be read.

    A GPU has what ``set_per_process_memory_fraction`` leaves, and what its caching allocator keeps for reuse is free. A
    CPU has what the machine or the tightest control group has; files that nobody has read lately are free.
    """
    device = torch.device(device)
    kind = KINDS.get(device.type)
    if kind is HOST:
        return _tightest([_machine(), *_control_groups()])
    if kind is not None and kind.trains:
        return _accelerator(kind, device)
    raise ProfilingError(
        f"the memory of device {str(device)!r} cannot be read: expected {expected_kinds()}; for another "
        "one give the memory limit in bytes"
    )


def _tightest(memories: list[DeviceMemory]) -> DeviceMemory:
    """The least of each: one group may have the lowest limit, and another one be fuller."""
    total_bytes = min(memory.total_bytes for memory in memories)
    free_bytes = min(memory.free_bytes for memory in memories)
    return DeviceMemory(total_bytes, max(0, free_bytes))


def _accelerator(kind: DeviceKind, device: torch.device) -> DeviceMemory:
    if not kind.is_available():
        raise ProfilingError(
            f"device {str(device)!r} is not available here: move the model to one that is, or install a torch that "
            "supports it"
        )
    # The driver's figure counts other processes of the device, the allocator's counts this one alone.
    driver_free, total = kind.driver_memory(device)
    allocated = kind.allocated_bytes(device)
    allowed = int(kind.process_share(device) * total)
    # What the allocator has reserved and not given out is free for this process.
    unused = driver_free + kind.reserved_bytes(device) - allocated
    return DeviceMemory(allowed, max(0, min(unused, allowed - allocated)))


def _machine() -> DeviceMemory:
    sizes = _read_sizes(_ROOT / "proc/meminfo")
    if "MemAvailable" in sizes:
        return DeviceMemory(sizes["MemTotal"] * 1024, sizes["MemAvailable"] * 1024)
    # macOS, Windows and the rest. It is no dependency, since it is needed only where /proc is missing.
    try:
        import psutil  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise ProfilingError(
            "this machine's memory cannot be read: install psutil, or give the memory limit in bytes"
        ) from error
    # Its "available" counts pages that can be reclaimed, as MemAvailable does; its "free" does not.
    memory = psutil.virtual_memory()
    return DeviceMemory(int(memory.total), int(memory.available))


class _GroupFiles(NamedTuple):
    """Files of control groups, by version.

    Attributes:
        folder: Below the mount.
        limits: Files of a group with its limits.
        usage: The file with its usage.
        reclaimable: The line of ``memory.stat`` with bytes that the kernel takes back when it needs them.
    """

    folder: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_VERSION_1 = _GroupFiles("memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
# Version 2 slows a group down, to a standstill if need be, over memory.high: for training that is a limit, too.
_VERSION_2 = _GroupFiles("", ("memory.max", "memory.high"), "memory.current", "inactive_file")


def _control_groups() -> Iterator[DeviceMemory]:
    """Every control group with a limit that this process is in.

    They nest, and the tightest one decides::

        /sys/fs/cgroup           memory.max = max
          └─ kubepods            memory.max = 64 GiB   memory.current = 60 GiB   <- 4 GiB left for everyone below
               └─ pod1234        memory.max = 16 GiB   memory.current =  2 GiB
    """
    for line in _read(_ROOT / "proc/self/cgroup").splitlines():
        # A group of version 2 has no controllers in its line.
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _VERSION_1 if controllers else _VERSION_2
        top = _ROOT / "sys/fs/cgroup" / files.folder
        # A process outside of its cgroup namespace is shown as "/../..": above the root there is the root.
        relative = os.path.normpath(path).lstrip("/")
        # A container that mounts only its own group may name it as the host does: then only the mount is there.
        own = top / relative
        depth = len(own.parts) - len(top.parts)
        # A limit of any group above holds for all that are in it.
        for folder in (own, *own.parents[:depth]):
            memory = _group_memory(folder, files)
            if memory is not None:
                yield memory


def _group_memory(folder: Path, files: _GroupFiles) -> DeviceMemory | None:
    """Memory of one control group; None if it has no limit."""
    limits = []
    for name in files.limits:
        text = _read(folder / name).strip()
        # "max" is no limit.
        if text.isdigit():
            limits.append(int(text))
    usage = _read(folder / files.usage).strip()
    # A group whose usage is hidden cannot say what is left, and another one above it may.
    if not limits or not usage.isdigit():
        return None
    reclaimable_bytes = _read_sizes(folder / "memory.stat").get(files.reclaimable, 0)
    return DeviceMemory(min(limits), min(limits) - int(usage) + reclaimable_bytes)


def _read_sizes(path: Path) -> dict[str, int]:
    """Lines such as ``MemTotal:  16318 kB`` or ``inactive_file 4096`` as a mapping; empty without the file."""
    sizes = {}
    for line in _read(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            sizes[words[0]] = int(words[1])
    return sizes


def _read(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def usable_bytes(device: torch.device | str) -> int:
    """Bytes that tensors of this process can still take on a device, without any allocation that fails.

    Gives back the blocks that an allocator of the device's own keeps unused.
    """
    device = torch.device(device)
    kind = KINDS.get(device.type)
    if kind is None or not kind.has_own_memory:
        return device_memory(device).free_bytes
    # CUDA's caching allocator may reserve more than it gives out: room in segments in use, two segments filled in part,
    # and a twentieth for holes that no block fits.
    kind.empty_cache()
    # With what is left unused in segments that hold a block, which a new block seldom fits.
    free_bytes = device_memory(device).free_bytes
    in_segments = kind.reserved_bytes(device) - kind.allocated_bytes(device)
    return max(0, free_bytes - in_segments - 2 * _SEGMENT_BYTES - free_bytes // 20)


def resolve_limit(limit: MemoryLimit | None, device: torch.device | str) -> int:
    """A user's limit in bytes; None is :func:`usable_bytes`, fractions are of the total. Warns above the device.

    Example:
        >>> resolve_limit(MemoryLimit(size_bytes=2**20), "cpu")
        1048576
    """
    if limit is None:
        return usable_bytes(device)
    size_bytes = limit.size_bytes
    if size_bytes is None:
        return limit.on_device(device_memory(device).total_bytes)
    try:
        available_bytes = device_memory(device).total_bytes
    except ProfilingError:
        # A limit in bytes needs nothing from the device.
        return size_bytes
    if size_bytes > available_bytes:
        # No error: a plan for a larger machine can be made, and looked at, on a smaller one.
        warnings.warn(
            f"the memory limit of {format_bytes(size_bytes)} is more than the {format_bytes(available_bytes)} that "
            f"{device} has for this process: training can run out of memory inside the limit. Lower it, or leave it "
            "out to use what is free",
            RotorWarning,
            stacklevel=2,
        )
    return size_bytes
