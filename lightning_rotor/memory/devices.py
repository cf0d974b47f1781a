"""Memory of a device: how much there is, how much is free, and what a user's limit means on it.

On a GPU the driver counts blocks that torch's caching allocator keeps for reuse as taken; they are free to us. On the
CPU a container's limit counts, not the machine's memory. Control groups nest, and the tightest one decides::

    /sys/fs/cgroup                   memory.max = max
      └─ kubepods                    memory.max = 64 GiB   memory.current = 60 GiB   <- 4 GiB left for everyone below
           └─ pod1234                memory.max = 16 GiB   memory.current =  2 GiB

``ProfilingError`` says that the memory of a kind of device cannot be read; tests pass a ``system_root``, where ``proc``
and ``sys`` are.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_rotor.errors import ProfilingError, RotorWarning
from lightning_rotor.units import MemoryLimit, format_bytes

_ROOT = Path("/")
# The size of the segments from which CUDA's caching allocator takes blocks of 1 to 10 MiB.
_SEGMENT_BYTES = 20 * 2**20


def total_bytes(device: torch.device | str, *, system_root: Path = _ROOT) -> int:
    """Memory that this process may ever have on a device.

    That is a GPU's memory times ``torch.cuda.set_per_process_memory_fraction``, and on the CPU the lesser of the
    machine's memory and the tightest control group's limit.
    """
    return _memory(torch.device(device), system_root).total_bytes


def free_bytes(device: torch.device | str, *, system_root: Path = _ROOT) -> int:
    """Memory that this process can still allocate on a device, beyond what its tensors take now.

    On a GPU that is what the driver has left plus what the caching allocator holds without using it. On the CPU it is
    the lesser of what the machine can give without swapping and what the tightest control group has left; in both, the
    page cache of files that nobody has read lately counts as free.
    """
    return _memory(torch.device(device), system_root).free_bytes


def usable_bytes(device: torch.device | str, *, system_root: Path = _ROOT) -> int:
    """What tensors of this process can still take on a device, without any allocation that fails.

    That is what is free, less what CUDA's caching allocator may reserve beyond what it gives out: room in segments in
    use, two segments filled in part, and a twentieth for holes that no block fits. What it caches is given back first.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return free_bytes(device, system_root=system_root)
    torch.cuda.empty_cache()
    free = free_bytes(device)
    in_segments = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free - in_segments - 2 * _SEGMENT_BYTES - free // 20)


def resolve_limit(limit: MemoryLimit | None, device: torch.device | str, *, system_root: Path = _ROOT) -> int:
    """A user's limit in bytes; None is :func:`usable_bytes`, fractions are of the total. Warns above the device.

    Example:
        >>> resolve_limit(MemoryLimit(size_bytes=2**20), "cpu")
        1048576
    """
    if limit is None:
        return usable_bytes(device, system_root=system_root)
    if limit.fraction is not None:
        return limit.on_device(total_bytes(device, system_root=system_root))
    size_bytes = limit.on_device(0)
    try:
        available_bytes = total_bytes(device, system_root=system_root)
    except ProfilingError:
        return size_bytes  # a limit in bytes needs nothing from the device
    if size_bytes > available_bytes:
        warnings.warn(
            f"the memory limit of {format_bytes(size_bytes)} is more than the {format_bytes(available_bytes)} that "
            f"{device} has for this process: training can run out of memory inside the limit. Lower it, or leave it "
            "out to use what is free",
            RotorWarning,
            stacklevel=2,
        )
    return size_bytes


@dataclass(frozen=True, slots=True)
class _Memory:
    """Bytes of a device, a machine or a control group."""

    total_bytes: int
    free_bytes: int


def _memory(device: torch.device, system_root: Path) -> _Memory:
    if device.type != "cpu":
        return _accelerator(device)
    every = [_machine(system_root), *_control_groups(system_root)]
    return _Memory(min(each.total_bytes for each in every), max(0, min(each.free_bytes for each in every)))


def _accelerator(device: torch.device) -> _Memory:
    """Memory of a GPU, as far as this process may use it."""
    if device.type not in ("cuda", "xpu"):
        raise ProfilingError(
            f"the memory of device {str(device)!r} cannot be read: expected a CPU, CUDA or XPU device; for another "
            "one give the memory limit in bytes"
        )
    module = torch.get_device_module(device)
    if not module.is_available():
        raise ProfilingError(
            f"device {str(device)!r} is not available here: move the model to one that is, or install a torch that "
            "supports it"
        )
    driver_free, total = module.mem_get_info(device)
    allocated = module.memory_allocated(device)
    allowed = int(module.get_per_process_memory_fraction(device) * total)
    unused = driver_free + module.memory_reserved(device) - allocated
    return _Memory(total_bytes=allowed, free_bytes=max(0, min(unused, allowed - allocated)))


# -------------------------------------------------------------------- the machine


def _machine(system_root: Path) -> _Memory:
    """The machine's memory, from ``/proc`` where there is one."""
    sizes = _read_sizes(system_root / "proc/meminfo")
    if "MemTotal" in sizes:
        # Kernels before 3.14 have no MemAvailable.
        available = sizes.get("MemAvailable", sizes.get("MemFree", 0) + sizes.get("Cached", 0))
        return _Memory(sizes["MemTotal"] * 1024, available * 1024)
    try:  # macOS, Windows and the rest
        import psutil  # type: ignore[import-untyped,unused-ignore]  # not a dependency: only where /proc is missing
    except ImportError as error:
        raise ProfilingError(
            "this machine's memory cannot be read: install psutil, or give the memory limit in bytes"
        ) from error
    memory = psutil.virtual_memory()
    return _Memory(int(memory.total), int(memory.available))


def _read_sizes(path: Path) -> dict[str, int]:
    """Lines such as ``MemTotal:  16318 kB`` or ``inactive_file 4096`` as a mapping; empty without the file."""
    sizes = {}
    for line in _read(path).splitlines():
        name, _, rest = line.replace(":", " ").partition(" ")
        value = rest.split()
        if value and value[0].isdigit():
            sizes[name] = int(value[0])
    return sizes


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# -------------------------------------------------------------------- control groups


# Version 2 slows a group down, to a standstill if need be, over memory.high: for training that is a limit, too.
_FILES = {
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
"""Where each version keeps limits, usage and, in ``memory.stat``, what can be reclaimed."""


def _control_groups(system_root: Path) -> Iterator[_Memory]:
    """Every control group with a limit that this process is in, directly or through a parent."""
    for kind, path, mounted, mount_point in _memberships(system_root):
        # In a container that mounts only its own group, the path from the host's point of view goes on above the mount.
        inside = path.relative_to(mounted) if path.is_relative_to(mounted) else Path()
        own = mount_point / inside
        for folder in (own, *own.parents):
            group = _read_group(folder, *_FILES[kind])
            if group is not None:
                yield group
            if folder == mount_point:
                break


def _memberships(system_root: Path) -> Iterator[tuple[str, Path, Path, Path]]:
    """Kind of hierarchy, the process's path in it, the path that is mounted, and where."""
    paths = {}
    for line in _read(system_root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        # ".." appears when the process was moved out of the part that its namespace shows.
        clean = Path(os.path.normpath(path))
        if number == "0":
            paths["cgroup2"] = clean
        elif "memory" in controllers.split(","):
            paths["cgroup"] = clean
    for line in _read(system_root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, *_, options = after.split() or [""]
        if kind in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            mounted, mount_point = before.split()[3:5]
            yield kind, paths[kind], Path(mounted), system_root / mount_point.lstrip("/")


def _read_group(folder: Path, limit_names: Sequence[str], usage_name: str, reclaimable: str) -> _Memory | None:
    """The memory of one control group; None if it has no limit ("max", or no such file, as at the root)."""
    limits = [int(text) for name in limit_names if (text := _read(folder / name).strip()).isdigit()]
    usage = _read(folder / usage_name).strip()
    if not limits or not usage.isdigit():
        return None
    reclaimable_bytes = _read_sizes(folder / "memory.stat").get(reclaimable, 0)
    return _Memory(min(limits), min(limits) - int(usage) + reclaimable_bytes)
