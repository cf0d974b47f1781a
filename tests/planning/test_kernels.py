"""Loops of the dynamic program that stand alone, as plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_rotor.planning import kernels


@pytest.mark.parametrize("most", [0.5, 1.0, 2.5, 3.0, 9.0])
def test_the_first_slot_of_a_falling_column_is_found(most: float) -> None:
    seconds = np.array([math.inf, 3.0, 3.0, 2.0, 1.0, 1.0])
    below = np.flatnonzero(seconds <= most)
    expected = int(below[0]) if len(below) else len(seconds)
    assert kernels.first_at_most(seconds, 0, most) == expected


def test_functions_are_plain_where_python_imports_them() -> None:
    assert not kernels.IS_COMPILED
    assert not hasattr(kernels.solve, "py_func")
