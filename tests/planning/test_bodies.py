"""Bodies of segments from a table: those that reading the whole schedule finds."""

from __future__ import annotations

import random

import pytest

from lightning_rotor.planning.backtracking import schedule_at
from lightning_rotor.planning.bodies import Bodies
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.kernels import decide
from lightning_rotor.planning.requirements import requirements_of
from lightning_rotor.planning.schedule_search import keep_all_fastest
from lightning_rotor.schedule import Leaf, Segment
from lightning_rotor.simulator import simulate
from tests.grids import few
from tests.strategies import KINDS, random_chain


def table_of(seed: int, kind: str, stages: int = 8) -> Table:
    chain = random_chain(random.Random(seed), stages, kind)
    most_bytes = simulate(chain, keep_all_fastest(chain)).peak_bytes
    table = Table(requirements_of(chain, unit=most_bytes / 120, refined=True), slots=124, compiled=False)
    table.solve()
    return table


@pytest.mark.parametrize("kind", few(KINDS, "transformer", "odd"))
def test_a_first_segment_has_the_body_of_the_whole_schedule(kind: str) -> None:
    are_nested = []
    for seed in range(6):
        table = table_of(seed, kind)
        bodies = Bodies(table)
        last = len(table.requirements.endings) - 1
        for memory, seconds in enumerate(table.seconds.tolist()):
            if seconds == float("inf"):
                continue
            first = schedule_at(table, memory).items[0]
            if isinstance(first, Leaf):
                continue
            decision = decide(table.requirements, table.rows, memory, 0, last, 0, 0)
            assert bodies.body(decision.body_memory, 0, decision.end, decision.variant) == first.items
            are_nested.append(any(isinstance(item, Segment) for item in first.items))
    assert set(are_nested) == {False, True}
