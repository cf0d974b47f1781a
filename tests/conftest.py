"""What every test relies on: one thread, a fixed seed, no display, and GPU tests only where there is a GPU."""

from __future__ import annotations

import os

# Read once, when torch and matplotlib are imported. Two test processes on two cores: one thread each.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import random

import hypothesis
import numpy as np
import pytest
import torch

torch.set_num_threads(1)

# Profiling takes as long as it takes, so no deadline. Continuous integration must not fail by chance; developers search anew each time.
hypothesis.settings.register_profile("rotor", deadline=None, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("rotor")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (users and Lightning's seed_everything still use the global generator)
    torch.manual_seed(0)
