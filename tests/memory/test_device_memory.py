"""Memory of devices, on fake ``/proc`` and ``/sys`` trees and on the real machine."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import psutil
import pytest
import torch

from lightning_rotor.errors import ProfilingError, RotorWarning
from lightning_rotor.memory import device_memory as device_memory_module
from lightning_rotor.memory.device_memory import device_memory, resolve_limit
from lightning_rotor.units import MemoryLimit

GIB = 2**30
UNLIMITED_V1 = 9223372036854771712


def write(root: Path, name: str, text: object) -> None:
    path = root / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the package finds ``proc`` and ``sys``, empty."""
    monkeypatch.setattr(device_memory_module, "_ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def machine(root: Path) -> Path:
    """64 GiB, 40 of them available, no control groups."""
    write(
        root,
        "proc/meminfo",
        f"MemTotal: {64 * 2**20} kB\nMemFree: {8 * 2**20} kB\nMemAvailable:   {40 * 2**20} kB\nHugePages_Total: 0",
    )
    return root


def join_v2(root: Path, path: str) -> None:
    write(root, "proc/self/cgroup", f"0::{path}")


def join_v1(root: Path, path: str) -> None:
    write(root, "proc/self/cgroup", f"5:cpu,cpuacct:/elsewhere\n4:memory:{path}\n1:name=systemd:/")


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


def memory() -> tuple[int, int]:
    found = device_memory("cpu")
    return found.total_bytes, found.free_bytes


@pytest.mark.usefixtures("machine")
def test_a_machine_without_control_groups_has_what_meminfo_says() -> None:
    assert memory() == (64 * GIB, 40 * GIB)


def test_a_v2_limit_counts_and_inactive_files_are_free(machine: Path) -> None:
    join_v2(machine, "/")
    group_v2(machine, "sys/fs/cgroup", limit=16 * GIB, used=10 * GIB, inactive=3 * GIB)
    assert memory() == (16 * GIB, 9 * GIB)


def test_the_tightest_v2_ancestor_decides(machine: Path) -> None:
    join_v2(machine, "/kubepods/pod/box")
    group_v2(machine, "sys/fs/cgroup/kubepods", limit=32 * GIB, used=30 * GIB)
    group_v2(machine, "sys/fs/cgroup/kubepods/pod", limit=12 * GIB, used=2 * GIB)
    group_v2(machine, "sys/fs/cgroup/kubepods/pod/box", used=1 * GIB)
    group_v2(machine, "sys/fs/cgroup/kubepods/other", limit=1 * GIB, used=1 * GIB)
    assert memory() == (12 * GIB, 2 * GIB)


def test_memory_high_is_a_limit_too(machine: Path) -> None:
    join_v2(machine, "/a")
    group_v2(machine, "sys/fs/cgroup/a", limit=16 * GIB, high=8 * GIB, used=2 * GIB)
    assert memory() == (8 * GIB, 6 * GIB)


def test_a_v1_limit_counts_in_nested_groups(machine: Path) -> None:
    join_v1(machine, "/docker/box/inner")
    group_v1(machine, "sys/fs/cgroup/memory")
    group_v1(machine, "sys/fs/cgroup/memory/docker/box", limit=20 * GIB, used=9 * GIB, inactive=4 * GIB)
    group_v1(machine, "sys/fs/cgroup/memory/docker/box/inner", used=1)
    assert memory() == (20 * GIB, 15 * GIB)


@pytest.mark.parametrize("path", ["/docker/box", "/../sibling"])
def test_a_container_that_mounts_its_own_group_alone_reads_the_mount(machine: Path, path: str) -> None:
    join_v2(machine, path)
    group_v2(machine, "sys/fs/cgroup", limit=6 * GIB, used=1 * GIB)
    assert memory() == (6 * GIB, 5 * GIB)
    join_v1(machine, path)
    group_v1(machine, "sys/fs/cgroup/memory", limit=5 * GIB, used=1 * GIB)
    assert memory() == (5 * GIB, 4 * GIB)


def test_both_versions_at_once_take_the_tighter(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "4:memory:/one\n0::/two")
    group_v1(machine, "sys/fs/cgroup/memory/one", limit=30 * GIB, used=20 * GIB)
    group_v2(machine, "sys/fs/cgroup/two", limit=25 * GIB, used=1 * GIB)
    assert memory() == (25 * GIB, 10 * GIB)


def test_an_unlimited_group_changes_nothing(machine: Path) -> None:
    join_v1(machine, "/")
    group_v1(machine, "sys/fs/cgroup/memory", used=3 * GIB)
    assert memory() == (64 * GIB, 40 * GIB)


def test_a_group_over_its_limit_has_nothing_free(machine: Path) -> None:
    join_v2(machine, "/a")
    group_v2(machine, "sys/fs/cgroup/a", limit=4 * GIB, used=5 * GIB)
    assert memory() == (4 * GIB, 0)


@pytest.mark.usefixtures("root")
def test_a_platform_without_proc_asks_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()
    found = device_memory("cpu")
    assert found.total_bytes == memory.total
    assert 0 < found.free_bytes <= memory.total
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ProfilingError, match=r"machine's memory cannot be read.*give the memory limit in bytes"):
        resolve_limit(None, "cpu")
    assert resolve_limit(MemoryLimit(size_bytes=10), "cpu") == 10


def test_the_real_machine_tells_its_memory() -> None:
    found = device_memory(torch.device("cpu"))
    assert 0 < found.free_bytes < found.total_bytes


@pytest.mark.usefixtures("machine")
def test_a_limit_in_bytes_is_itself() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_limit(MemoryLimit(size_bytes=5 * GIB), "cpu") == 5 * GIB


@pytest.mark.usefixtures("machine")
def test_a_fraction_counts_from_the_total() -> None:
    assert resolve_limit(MemoryLimit(fraction=0.25), "cpu") == 16 * GIB


@pytest.mark.usefixtures("machine")
def test_no_limit_means_what_is_free() -> None:
    assert resolve_limit(None, "cpu") == 40 * GIB


@pytest.mark.usefixtures("machine")
def test_a_limit_above_the_device_warns_and_stays() -> None:
    with pytest.warns(RotorWarning, match=r"100 GiB is more than the 64.0 GiB that cpu has"):
        assert resolve_limit(MemoryLimit(size_bytes=100 * GIB), "cpu") == 100 * GIB


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_other_devices_say_what_to_do(device: str) -> None:
    with pytest.raises(
        ProfilingError, match=f"memory of device '{device}' cannot be read.*give the memory limit in bytes"
    ):
        device_memory(device)
    with pytest.raises(ProfilingError, match="cannot be read"):
        resolve_limit(MemoryLimit(fraction=0.5), device)
    assert resolve_limit(MemoryLimit(size_bytes=10), device) == 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_gpu_is_a_typed_error() -> None:
    with pytest.raises(ProfilingError, match="'cuda:0' is not available"):
        device_memory("cuda:0")


@pytest.mark.gpu
def test_cached_blocks_of_a_gpu_are_free_and_the_process_fraction_caps() -> None:
    device = torch.device("cuda", 0)
    tensor = torch.empty(2**28, dtype=torch.uint8, device=device)
    used = device_memory(device).free_bytes
    del tensor  # stays reserved
    assert device_memory(device).free_bytes - used == 2**28
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(0.1, device)
    try:
        assert device_memory(device).total_bytes == int(0.1 * total)
        assert device_memory(device).free_bytes == int(0.1 * total) - torch.cuda.memory_allocated(device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
