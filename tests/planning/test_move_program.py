"""Schedules of the program over memory and link: whole ones, whose moves are worth it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lightning_rotor.chain import Chain
from lightning_rotor.link import Link
from lightning_rotor.planning.move_program import MoveProgram, _longer
from lightning_rotor.planning.schedule_search import keep_all_fastest
from lightning_rotor.schedule import Leaf, Schedule, leaves
from lightning_rotor.simulator import simulate
from tests.strategies import KINDS, random_chain

SLOTS = 60


def program(chain: Chain, share: float, bytes_per_second: float) -> MoveProgram:
    """For a share of what plain training takes, over a link without latency."""
    budget_bytes = int(share * simulate(chain, keep_all_fastest(chain)).peak_bytes)
    link = Link(out=bytes_per_second, back=bytes_per_second, latency=0.0)
    return MoveProgram(chain, budget_bytes, link, slots=SLOTS, refined=True)


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_run_every_stage_in_order_and_move_items_that_they_have(kind: str) -> None:
    chain = random_chain(random.Random(3), 6, kind)
    solved = program(chain, 0.8, 1e3)
    for memory in (SLOTS, SLOTS * 3 // 4):
        solution = solved.schedule_at(memory)
        if solution is None:
            continue
        schedule, moved = solution
        stages = [leaf.stage for item in schedule.items for leaf in leaves(item)]
        assert stages == list(range(len(chain)))
        assert moved == sorted(set(moved))
        # The backward of the last item comes at once.
        assert all(number < len(schedule.items) - 1 for number in moved)
    assert solved.schedule_at(0) is None


def test_a_fast_link_moves_where_a_slow_one_recomputes() -> None:
    chain = random_chain(random.Random(1), 6, "cnn")
    fast = program(chain, 0.7, 1e15).schedule_at(SLOTS)
    assert fast is not None
    schedule, moved = fast
    assert moved
    assert all(isinstance(item, Leaf) for item in schedule.items)

    slow = program(chain, 0.7, 1e-15).schedule_at(SLOTS)
    assert slow is not None
    schedule, moved = slow
    assert not moved
    assert simulate(chain, Schedule(schedule.items)).recompute_seconds > 0


def test_all_is_kept_where_there_is_room() -> None:
    chain = random_chain(random.Random(2), 5, KINDS[0])
    chain = replace(chain, stages=tuple(replace(stage, options=stage.options[:1]) for stage in chain))
    solution = program(chain, 1.1, 1e3).schedule_at(SLOTS)
    assert solution == (Schedule.keep_all(len(chain)), [])


def test_segments_may_have_any_few_stages_and_some_numbers_of_many() -> None:
    """So that ways grow with n log n: whoever edits the schedule moves single stages in and out."""
    assert _longer(9) == list(range(9))
    numbers = _longer(400)
    assert len(numbers) < 30
    assert numbers[-1] > 300
