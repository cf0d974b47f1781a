"""Races without a GPU: copies at the last and at the first moment that is legal, and the executor with one wait missing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import cuda_device
from tests.processes import ROOT

pytestmark = pytest.mark.skipif(cuda_device.missing() is not None, reason=str(cuda_device.missing()))


def runs(copies: str) -> dict[str, bool]:
    """What kept the bits of plain training."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.execution.late_copy_runs"],
        cwd=ROOT,
        env=cuda_device.environment(copies=copies),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, bool] = json.loads(done.stdout)
    return found


def test_copies_at_the_last_legal_moment_give_the_same_bits_and_show_waits_that_are_missing() -> None:
    assert {name for name, same in runs("late").items() if not same} == {
        "no wait before memory is given back",
        "no wait before use",
        "abandoned without a wait",
    }


def test_copies_at_the_first_legal_moment_give_the_same_bits_and_show_waits_that_are_missing() -> None:
    assert {name for name, same in runs("early").items() if not same} == {
        "copies out do not wait",
        "copies back do not wait",
        "always the default stream",
    }
