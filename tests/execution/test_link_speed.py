"""The speed of copies, by the clock: of the middle one, without the first, with two digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rotor.execution import link_speed

CPU = torch.device("cpu")


class Memory:
    """Another memory whose copies take what a test says, by a clock of its own."""

    def __init__(self, *, out: list[float], back: float, small: float) -> None:
        self.now = 0.0
        self._out, self._back, self._small = out, back, small
        self._late = 0.0

    def clock(self) -> float:
        return self.now

    def drain(self) -> None:
        self.now += self._late
        self._late = 0.0

    def copy_out(self, storage: torch.UntypedStorage) -> Copy:
        is_small = storage.nbytes() == link_speed._SMALL_BYTES
        self._late += self._small if is_small else self._out.pop(0)
        return Copy(self, self._small if is_small else self._back)

    def late(self, seconds: float) -> None:
        self._late += seconds


class Copy:
    def __init__(self, memory: Memory, back: float) -> None:
        self._memory, self._back = memory, back

    def wait_out(self) -> None:
        pass

    def begin_back(self) -> None:
        self._memory.late(self._back)

    def wait_back(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "_SAMPLE_BYTES", 2**20)


def speeds(monkeypatch: pytest.MonkeyPatch, **seconds: Any) -> tuple[float, float, float]:
    memory: Any = Memory(**seconds)
    monkeypatch.setattr(link_speed.time, "perf_counter", memory.clock)
    return link_speed._speeds(memory, CPU)


def test_the_first_copy_and_interruptions_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    out = [60.0, 1.0, 1.0, 9.0, 1.0, 9.0]
    assert speeds(monkeypatch, out=out, back=2.0, small=0.25) == (1.0e6, 5.2e5, 0.2)


def test_a_millionth_more_is_the_same_link(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = speeds(monkeypatch, out=[1.0] * 6, back=1.0, small=0.1)
    assert speeds(monkeypatch, out=[1.0 + 1e-6] * 6, back=1.0, small=0.1 + 1e-6) == exact
    assert speeds(monkeypatch, out=[1.5] * 6, back=1.0, small=0.1) != exact


def test_a_folder_is_measured_once(tmp_path: Path) -> None:
    link_speed.disk_speed.cache_clear()
    out, back, latency = link_speed.disk_speed(tmp_path)
    assert out > 0
    assert back > 0
    assert 0 < latency < 1
    assert link_speed.disk_speed(tmp_path) == (out, back, latency)
    assert link_speed.disk_speed.cache_info().hits == 1
