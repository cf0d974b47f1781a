"""Schedules of one table near a budget: stairs in order, and the fastest that fits in bytes."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

from lightning_rotor.planning.candidates import Candidates, by_peak
from lightning_rotor.planning.effort import Effort
from lightning_rotor.planning.schedule_search import keep_all_fastest, solved_table
from lightning_rotor.simulator import simulate
from tests.strategies import random_chain


@pytest.mark.parametrize("seed", range(3))
def test_the_fastest_that_fits_is_found_for_every_budget(seed: int) -> None:
    chain = random_chain(random.Random(seed), 7, "cnn")
    judge = partial(simulate, chain)
    kept = judge(keep_all_fastest(chain))
    table, unit, is_exact = solved_table(chain, 2 * kept.peak_bytes, 400, gradients_exist=False)
    candidates = Candidates(chain, table, unit, is_exact, judge, 0, False, Effort())
    every = [candidates[stair] for stair in range(len(candidates))]
    assert candidates.lowest_bytes < math.inf
    assert [found.seconds for found in every] == sorted((found.seconds for found in every), reverse=True)

    for budget in {found.peak_bytes for found in every}:
        best = candidates.fastest(budget)
        assert best is not None
        assert best.peak_bytes <= budget
        assert best.seconds == min(found.seconds for found in every if found.peak_bytes <= budget)
    assert candidates.fastest(min(found.peak_bytes for found in every) - 1) is None
    lowest = candidates.lowest()
    assert lowest == sorted(lowest, key=by_peak)
