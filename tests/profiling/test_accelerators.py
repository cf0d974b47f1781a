"""Seconds of operators by a roofline."""

from __future__ import annotations

import pytest

from lightning_rotor.profiling.accelerators import GPUS, Accelerator


def test_seconds_are_a_roofline() -> None:
    device = Accelerator("some", 2**30, bandwidth=1e9, flops=1e12, half_flops=4e12)
    assert device.seconds(0, 8e8, 4) == pytest.approx(1.0)
    assert device.seconds(6e11, 8, 4) == pytest.approx(1.0)
    assert device.seconds(6e11, 8, 2) == pytest.approx(0.25)
    assert device.seconds(0, 0, 4) == pytest.approx(3e-6)


def test_gpus_are_known_by_their_names() -> None:
    assert all(gpu.name == name for name, gpu in GPUS.items())
    assert GPUS["A100-80GB"].memory_bytes == 80 * 2**30
    # Tensor cores multiply halves faster.
    assert all(gpu.half_flops > gpu.flops for gpu in GPUS.values())
