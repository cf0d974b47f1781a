"""Memory of devices, on fake ``/proc`` and ``/sys`` trees and on the real machine."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from lightning_rotor.errors import ProfilingError, RotorWarning
from lightning_rotor.memory.devices import free_bytes, resolve_limit, total_bytes
from lightning_rotor.units import MemoryLimit

GIB = 2**30
UNLIMITED_V1 = 9223372036854771712


def write(root: Path, name: str, text: object) -> None:
    path = root / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """64 GiB, 40 of them available, no control groups."""
    write(
        tmp_path,
        "proc/meminfo",
        f"MemTotal: {64 * 2**20} kB\nMemFree: {8 * 2**20} kB\nMemAvailable:   {40 * 2**20} kB\nHugePages_Total: 0",
    )
    return tmp_path


def join_v2(root: Path, path: str, *, mounted: str = "/", mount_point: str = "/sys/fs/cgroup") -> None:
    mounts = [
        "23 22 0:22 / /proc rw - proc proc rw",
        f"35 32 0:29 {mounted} {mount_point} rw,nosuid shared:4 - cgroup2 cgroup rw,nsdelegate",
    ]
    write(root, "proc/self/cgroup", f"0::{path}")
    write(root, "proc/self/mountinfo", "\n".join(mounts))


def join_v1(root: Path, path: str, *, mounted: str = "/") -> None:
    write(root, "proc/self/cgroup", f"5:cpu,cpuacct:/elsewhere\n4:memory:{path}\n1:name=systemd:/")
    write(
        root,
        "proc/self/mountinfo",
        f"34 31 0:30 {mounted} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n35 31 0:32 {mounted} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
    )


def group_v2(
    root: Path, folder: str, *, limit: object = "max", high: object = "max", used: int = 0, inactive: int = 0
) -> None:
    write(root, f"{folder}/memory.max", limit)
    write(root, f"{folder}/memory.high", high)
    write(root, f"{folder}/memory.current", used)
    write(root, f"{folder}/memory.stat", f"anon 1\nfile 2\nactive_file 3\ninactive_file {inactive}")


def group_v1(root: Path, folder: str, *, limit: int = UNLIMITED_V1, used: int = 0, inactive: int = 0) -> None:
    write(root, f"{folder}/memory.limit_in_bytes", limit)
    write(root, f"{folder}/memory.usage_in_bytes", used)
    write(root, f"{folder}/memory.stat", f"inactive_file 7\ntotal_inactive_file {inactive}")


def memory(root: Path) -> tuple[int, int]:
    return total_bytes("cpu", system_root=root), free_bytes("cpu", system_root=root)


def test_a_machine_without_control_groups_has_what_meminfo_says(machine: Path) -> None:
    assert memory(machine) == (64 * GIB, 40 * GIB)


def test_an_old_kernel_without_mem_available_counts_free_and_cached(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 1000 kB\nMemFree: 100 kB\nCached: 50 kB")
    assert memory(tmp_path) == (1000 * 1024, 150 * 1024)


def test_a_v2_limit_counts_and_inactive_files_are_free(machine: Path) -> None:
    join_v2(machine, "/")
    group_v2(machine, "sys/fs/cgroup", limit=16 * GIB, used=10 * GIB, inactive=3 * GIB)
    assert memory(machine) == (16 * GIB, 9 * GIB)


def test_the_tightest_v2_ancestor_decides(machine: Path) -> None:
    join_v2(machine, "/kubepods/pod/box")
    group_v2(machine, "sys/fs/cgroup/kubepods", limit=32 * GIB, used=30 * GIB)
    group_v2(machine, "sys/fs/cgroup/kubepods/pod", limit=12 * GIB, used=2 * GIB)
    group_v2(machine, "sys/fs/cgroup/kubepods/pod/box", used=1 * GIB)
    group_v2(machine, "sys/fs/cgroup/kubepods/other", limit=1 * GIB, used=1 * GIB)
    assert memory(machine) == (12 * GIB, 2 * GIB)


def test_memory_high_is_a_limit_too(machine: Path) -> None:
    join_v2(machine, "/a")
    group_v2(machine, "sys/fs/cgroup/a", limit=16 * GIB, high=8 * GIB, used=2 * GIB)
    assert memory(machine) == (8 * GIB, 6 * GIB)


def test_a_v1_limit_counts_in_nested_groups(machine: Path) -> None:
    join_v1(machine, "/docker/box/inner")
    group_v1(machine, "sys/fs/cgroup/memory")
    group_v1(machine, "sys/fs/cgroup/memory/docker/box", limit=20 * GIB, used=9 * GIB, inactive=4 * GIB)
    group_v1(machine, "sys/fs/cgroup/memory/docker/box/inner", used=1)
    assert memory(machine) == (20 * GIB, 15 * GIB)


def test_a_container_that_mounts_its_own_v1_group_is_seen(machine: Path) -> None:
    join_v1(machine, "/docker/box/inner", mounted="/docker/box")
    group_v1(machine, "sys/fs/cgroup/memory", limit=20 * GIB, used=9 * GIB)
    group_v1(machine, "sys/fs/cgroup/memory/inner", limit=5 * GIB, used=1 * GIB)
    assert memory(machine) == (5 * GIB, 4 * GIB)


def test_a_process_outside_the_mounted_part_reads_the_mount(machine: Path) -> None:
    join_v2(machine, "/../sibling", mounted="/pod", mount_point="/mnt/groups")
    group_v2(machine, "mnt/groups", limit=6 * GIB, used=1 * GIB)
    assert memory(machine) == (6 * GIB, 5 * GIB)


def test_both_versions_at_once_take_the_tighter(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "4:memory:/one\n0::/two")
    write(
        machine,
        "proc/self/mountinfo",
        "1 2 0:1 / /v1 rw - cgroup cgroup rw,memory\n1 2 0:1 / /v2 rw - cgroup2 cgroup2 rw",
    )
    group_v1(machine, "v1/one", limit=30 * GIB, used=20 * GIB)
    group_v2(machine, "v2/two", limit=25 * GIB, used=1 * GIB)
    assert memory(machine) == (25 * GIB, 10 * GIB)


def test_an_unlimited_group_changes_nothing(machine: Path) -> None:
    join_v1(machine, "/")
    group_v1(machine, "sys/fs/cgroup/memory", used=3 * GIB)
    assert memory(machine) == (64 * GIB, 40 * GIB)


def test_a_group_over_its_limit_has_nothing_free(machine: Path) -> None:
    join_v2(machine, "/a")
    group_v2(machine, "sys/fs/cgroup/a", limit=4 * GIB, used=5 * GIB)
    assert memory(machine) == (4 * GIB, 0)


def test_a_platform_without_proc_still_tells_its_memory(tmp_path: Path) -> None:
    total, free = memory(tmp_path)
    assert 0 < free < total


def test_the_real_machine_tells_its_memory() -> None:
    assert 0 < free_bytes("cpu") < total_bytes(torch.device("cpu"))


def test_a_limit_in_bytes_is_itself(machine: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_limit(MemoryLimit(size_bytes=5 * GIB), "cpu", system_root=machine) == 5 * GIB


def test_a_fraction_counts_from_the_total(machine: Path) -> None:
    assert resolve_limit(MemoryLimit(fraction=0.25), "cpu", system_root=machine) == 16 * GIB


def test_no_limit_means_what_is_free(machine: Path) -> None:
    assert resolve_limit(None, "cpu", system_root=machine) == 40 * GIB


def test_a_limit_above_the_device_warns_and_stays(machine: Path) -> None:
    with pytest.warns(RotorWarning, match=r"100 GiB is more than the 64.0 GiB that cpu has"):
        assert resolve_limit(MemoryLimit(size_bytes=100 * GIB), "cpu", system_root=machine) == 100 * GIB


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_other_devices_say_what_to_do(device: str) -> None:
    with pytest.raises(
        ProfilingError, match=f"memory of device '{device}' cannot be read.*give the memory limit in bytes"
    ):
        free_bytes(device)
    with pytest.raises(ProfilingError, match="cannot be read"):
        resolve_limit(MemoryLimit(fraction=0.5), device)
    assert resolve_limit(MemoryLimit(size_bytes=10), device) == 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_gpu_is_a_typed_error() -> None:
    with pytest.raises(ProfilingError, match="'cuda:0' is not available"):
        total_bytes("cuda:0")


@pytest.mark.gpu
def test_cached_blocks_of_a_gpu_are_free_and_the_process_fraction_caps() -> None:
    device = torch.device("cuda", 0)
    tensor = torch.empty(2**28, dtype=torch.uint8, device=device)
    used = free_bytes(device)
    del tensor  # stays reserved
    assert free_bytes(device) - used == 2**28
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(0.1, device)
    try:
        assert total_bytes(device) == int(0.1 * total)
        assert free_bytes(device) == int(0.1 * total) - torch.cuda.memory_allocated(device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
