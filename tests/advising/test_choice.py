"""A way to train: its name, and what takes most of its step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_rotor.advising.choice import Choice, StepSeconds


def test_seconds_are_limited_by_the_largest_wait_of_a_tenth() -> None:
    assert StepSeconds(10.0, 0.5, 0.4).limited_by == "compute"
    assert StepSeconds(8.0, 0.5, 1.0, 1.5).limited_by == "bubble"


def test_all_parts_of_a_step_add_up() -> None:
    assert StepSeconds(8.0, 0.5, 1.0, 1.5).total == 11.0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "DDP"),
        ({"kind": "one device", "devices": 1}, "one device"),
        ({"kind": "FSDP2", "reshard": False}, "FSDP2, reshard=False"),
        ({"kind": "pipeline", "stages": 4, "schedule": "1f1b"}, "pipeline of 4, 1f1b"),
        ({"kind": "pipeline", "stages": 2, "schedule": "gpipe", "copies": 4}, "pipeline of 2, gpipe, x 4 DDP"),
    ],
)
def test_a_name_says_what_tells_a_way_from_others(changes: dict[str, object], name: str) -> None:
    ddp = Choice("DDP", devices=8, batch_per_device=4, peak_bytes=1, seconds=StepSeconds(1.0), lines="", copies=8)
    assert replace(replace(ddp, copies=1), **changes).name == name  # type: ignore[arg-type]
