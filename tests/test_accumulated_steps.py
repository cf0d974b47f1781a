"""Under accumulation the limit holds from the second step on: the first of each sum leaves room that the others need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.test_whole_steps import OPTIMIZERS, STEPS, Task, deep, run, wide


@pytest.mark.parametrize(
    ("optimizer", "make", "batch_size", "share"),
    [
        ("SGD", deep, 256, 1.3),
        pytest.param("Adam foreach", deep, 256, 1.05, marks=pytest.mark.wide),
        ("Adam foreach", wide, 8, 1.0),
    ],
)
def test_a_step_that_finds_no_gradients_gives_none_of_its_room_away(
    optimizer: str, make: Any, batch_size: int, share: float, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1, "batch_size": batch_size}
    _, _, error = run(lambda: Task(make, OPTIMIZERS[optimizer]), tmp_path, 1024, **options)
    assert error is not None
    limit = int(share * error.minimum_bytes)
    peaks, rotor, another = run(lambda: Task(make, OPTIMIZERS[optimizer]), tmp_path, limit, **options)
    assert another is None, another
    assert len(peaks.peaks) == STEPS
    assert max(peaks.peaks[1:]) <= limit, [round(peak / limit, 3) for peak in peaks.peaks]
    assert rotor is not None
    assert rotor.plan is not None
