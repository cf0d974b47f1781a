"""The other memory of a process: one for each target and device, refused where it is none."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from lightning_rotor.errors import OffloadError
from lightning_rotor.execution.file_memory import FileMemory
from lightning_rotor.memory import device_memory
from lightning_rotor.offload import Offload, parse_offload
from lightning_rotor.planned import offloading
from lightning_rotor.planned.offloading import Offloading

CPU, META = torch.device("cpu"), torch.device("meta")
GIB = 2**30


def to(folder: Path, limit: str | None = None) -> Offload:
    return Offload(f"disk:{folder}", limit=limit, bandwidth=(1e9, 2e9))


def test_modules_share_the_memory_of_a_target_for_as_long_as_one_of_them_has_it(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = offloading.offloading(to(tmp_path), CPU)
    assert offloading.offloading(to(tmp_path), CPU) is first
    other = offloading.offloading(to(tmp_path / "other"), CPU)
    assert other is not first
    gone = weakref.ref(first.memory)
    del first
    gc.collect()
    assert gone() is None


def test_a_file_has_the_room_that_the_user_gives_or_that_the_disk_has(tmp_path: Path) -> None:
    limited = Offloading(to(tmp_path, "3MiB"), CPU)
    assert isinstance(limited.memory, FileMemory)
    assert limited.link.room_bytes == 3 * 2**20
    assert (limited.link.out, limited.link.back) == (1e9, 2e9)
    free = Offloading(to(tmp_path), CPU).link.room_bytes
    assert free is not None
    assert free > 3 * 2**20


def test_a_speed_that_nobody_gives_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "disk_speed", lambda folder: (5.0, 6.0, 7.0))
    target = parse_offload(f"disk:{tmp_path}")
    assert target is not None
    link = Offloading(target, CPU).link
    assert (link.out, link.back, link.latency) == (5.0, 6.0, 7.0)


@pytest.mark.parametrize(
    ("target", "device", "message"),
    [
        ("host", CPU, r"these tensors are on 'cpu': expected offload=\"disk:/a/folder\""),
        ("host", META, r"these tensors are on 'meta': expected a CUDA device, or training without offload"),
        ("disk:/tmp", META, r"these tensors are on 'meta': expected offload=\"host\""),
    ],
)
def test_what_is_no_other_memory_for_a_device_is_refused_by_name(
    target: str, device: torch.device, message: str
) -> None:
    offload = parse_offload(target)
    assert offload is not None
    with pytest.raises(OffloadError, match=message):
        Offloading(offload, device)


def test_processes_on_one_host_share_half_of_what_it_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = offloading._share_of_host(CPU)
    assert 0 < alone <= offloading.device_memory("cpu").free_bytes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert 0.2 * alone < offloading._share_of_host(CPU) < 0.3 * alone


def test_a_container_smaller_than_its_host_gives_half_of_what_is_left_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    files = {
        "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 41943040 kB",
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": 8 * GIB,
        "sys/fs/cgroup/memory.high": "max",
        "sys/fs/cgroup/memory.current": 6 * GIB,
        "sys/fs/cgroup/memory.stat": "inactive_file 0",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    monkeypatch.setattr(device_memory, "_ROOT", tmp_path)
    assert offloading._share_of_host(CPU) == GIB
