"""The speed of copies to another memory and back, measured once a process."""

from __future__ import annotations

import statistics
import time
from functools import lru_cache
from pathlib import Path

import torch

from lightning_rotor.execution.file_memory import FileMemory
from lightning_rotor.execution.pinned_memory import PinnedMemory

# Copies are of 1 to 500 MiB. Smaller ones are slower, which latency stands for.
_SAMPLE_BYTES = 64 * 2**20
_REPEATS = 5
_SMALL_BYTES = 4096
_SMALL_COPIES = 50


@lru_cache(maxsize=8)
def host_speed(device: torch.device) -> tuple[float, float, float]:
    """Bytes per second from a GPU to pinned memory of the host, and back, and the latency of a copy."""
    memory = PinnedMemory(device)
    memory.reserve(_SAMPLE_BYTES)
    return _speeds(memory, device)


@lru_cache(maxsize=8)
def disk_speed(folder: Path) -> tuple[float, float, float]:
    """Bytes per second from the CPU's memory to a file in a folder, and back, and the latency of a copy.

    They are of the system's cache, while it lasts.
    """
    return _speeds(FileMemory(folder), torch.device("cpu"))


def _speeds(memory: PinnedMemory | FileMemory, device: torch.device) -> tuple[float, float, float]:
    storage = torch.zeros(_SAMPLE_BYTES, dtype=torch.uint8, device=device).untyped_storage()
    out = []
    back = []
    # Whatever is on its way would be timed with the first copy.
    memory.drain()
    # The first one takes pages from the system.
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        copy = memory.copy_out(storage)
        memory.drain()
        sent = time.perf_counter()
        copy.wait_out()
        copy.begin_back()
        memory.drain()
        fetched = time.perf_counter()
        copy.wait_back()
        del copy
        out.append(sent - began)
        back.append(fetched - sent)
    return _rate(out[1:]), _rate(back[1:]), _latency(memory, device)


def _latency(memory: PinnedMemory | FileMemory, device: torch.device) -> float:
    """Seconds that a copy takes besides its bytes: mostly those of Python that asks for it. With one digit."""
    small = torch.zeros(_SMALL_BYTES, dtype=torch.uint8, device=device)
    storages = [small.untyped_storage()] * _SMALL_COPIES
    rounds = []
    for _ in range(3):
        memory.drain()
        began = time.perf_counter()
        copies = [memory.copy_out(storage) for storage in storages]
        for copy in copies:
            copy.wait_out()
            copy.begin_back()
            copy.wait_back()
        memory.drain()
        rounds.append((time.perf_counter() - began) / (2 * _SMALL_COPIES))
        # Their places are free again for the next round.
        del copies, copy
    # The least, as interruptions only make a round slower.
    return float(f"{min(rounds):.0e}")


def _rate(seconds: list[float]) -> float:
    """Bytes per second with two digits: plans with such numbers are the same in the next run, mostly."""
    return float(f"{_SAMPLE_BYTES / statistics.median(seconds):.1e}")
