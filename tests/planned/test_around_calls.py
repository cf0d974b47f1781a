"""Bytes that steps have taken around calls, for their paths and for others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_rotor.link import Link
from lightning_rotor.planned.around_calls import Around, AroundCalls, with_link_of
from lightning_rotor.planned.joint_paths import Path
from lightning_rotor.planned.running_step import Call
from lightning_rotor.planning import scheduled
from lightning_rotor.planning.joint_chain import Outside
from lightning_rotor.planning.step_phases import PhaseKind
from lightning_rotor.schedule import Move, Schedule
from tests.planned.joint_steps import Limit, Module, path, phases_of, run, step_of

MUCH = 10**6


def runs(planned: Path) -> list[Call]:
    """The calls of a path, run without recomputation."""
    for key in planned:
        module: Any = key.plans
        chain = module.chain_of(key.signature)
        module.use_plan(key.signature, module.costs(key.signature, key.turn), scheduled(chain, Schedule.keep_all(4)))
    return [run(key) for key in planned]


def learned(around: AroundCalls, planned: Path, peak_bytes: int, *, exceeds: bool = False) -> bool:
    calls = runs(planned)
    return around.learn(planned, calls, step_of(calls), phases_of(calls, lambda _: peak_bytes), exceeds=exceeds)


def chains_of(planned: Path) -> list[Any]:
    plans: list[Any] = [key.plans for key in planned]
    return [module.chain_of(key.signature) for module, key in zip(plans, planned, strict=True)]


def after_bytes(around: AroundCalls, planned: Path) -> list[int]:
    measured = around.of(planned, chains_of(planned))
    assert measured is not None
    return [outside.after_bytes for outside in measured.outside]


def test_bytes_around_larger_calls_grow_in_proportion_and_around_smaller_ones_stay() -> None:
    measured = Around([Outside(after_bytes=10)], kept_bytes=100)
    assert measured.scaled_to(200).outside == [Outside(after_bytes=20)]
    assert measured.scaled_to(50) is measured
    assert measured.at_least(Around([Outside(7, 3)], 1)).outside == [Outside(7, 10)]


def test_a_path_that_was_measured_first_is_told_and_later_steps_of_its_sizes_replace_it() -> None:
    around, planned = AroundCalls(Limit(MUCH)), path("left", "right")
    assert around.of(planned, chains_of(planned)) is None
    assert learned(around, planned, MUCH)
    first = after_bytes(around, planned)
    assert min(first) > 0
    assert not learned(around, planned, MUCH - 100)
    assert after_bytes(around, planned) == [size - 100 for size in first]
    # Beyond the limit, what was measured before still counts.
    assert not learned(around, planned, MUCH - 200, exceeds=True)
    assert after_bytes(around, planned) == [size - 100 for size in first]
    around.forget(planned)
    assert around.of(planned, chains_of(planned)) is None


def test_calls_of_smaller_sizes_replace_no_measurement() -> None:
    around, module = AroundCalls(Limit(MUCH)), Module("net")
    planned = path(module)
    learned(around, planned, MUCH)
    before = after_bytes(around, planned)
    (key,) = planned
    calls = [run(key, module.signature(4))]
    phases = phases_of(calls, lambda _: 2 * MUCH)
    assert not around.learn(planned, calls, step_of(calls), phases, exceeds=False)
    assert after_bytes(around, planned) == before
    assert not around.learn(planned, calls, step_of(calls), phases, exceeds=True)
    assert after_bytes(around, planned) > before


def test_a_backward_that_was_not_seen_is_waited_for_once() -> None:
    around, planned = AroundCalls(Limit(MUCH)), path("net")
    calls = runs(planned)
    phases = [phase for phase in phases_of(calls, lambda _: MUCH) if phase.kind is not PhaseKind.BACKWARD]
    assert not around.learn(planned, calls, step_of(calls), phases, exceeds=False)
    assert around.of(planned, chains_of(planned)) is None
    assert around.learn(planned, calls, step_of(calls), phases, exceeds=False)
    assert not around.learn(planned, calls, step_of(calls), [], exceeds=False)  # not measured at all


def test_another_size_of_the_same_calls_has_as_much_in_proportion() -> None:
    around, module = AroundCalls(Limit(MUCH)), Module("net")
    learned(around, path(module, rows=8), MUCH)
    measured = after_bytes(around, path(module, rows=8))
    assert after_bytes(around, path(module, rows=16)) == [2 * size for size in measured]
    assert after_bytes(around, path(module, rows=4)) == measured


def test_a_path_of_other_calls_takes_over_call_by_call_and_the_most_for_those_that_are_new() -> None:
    around, left, right = AroundCalls(Limit(MUCH)), Module("left"), Module("right")
    planned = path(left, right)
    calls = runs(planned)
    # Much behind the last call, where the loss is, and little elsewhere.
    phases = phases_of(calls, lambda kind: MUCH if kind in (PhaseKind.AFTER, PhaseKind.LOSS) else 0)
    around.learn(planned, calls, step_of(calls), phases, exceeds=False)
    own = around.of(planned, chains_of(planned))
    assert own is not None
    other = path(left, Module("new"))
    taken_over = around.of(other, chains_of(other))
    assert taken_over is not None
    assert taken_over.outside[0] == own.outside[0]
    assert taken_over.outside[1] == own.outside[0].at_least(own.outside[1]).at_least(Outside())
    # Behind the last call comes the loss, whichever call that is.
    last = path(right, left)
    assert around.of(last, chains_of(last)).outside[1].loss_bytes == own.outside[1].loss_bytes  # type: ignore[union-attr]


def test_an_excess_raises_what_is_known_of_the_same_calls_with_other_sizes() -> None:
    around, module = AroundCalls(Limit(MUCH)), Module("net")
    small, large, unknown = (path(module, rows=rows) for rows in (4, 8, 16))
    learned(around, small, MUCH)
    learned(around, large, MUCH)
    before = after_bytes(around, large)
    learned(around, small, 4 * MUCH, exceeds=True)
    around.learn_excess(small, [large, unknown])
    exceeded = after_bytes(around, small)
    assert after_bytes(around, large) == [2 * size for size in exceeded] > before
    assert unknown not in around._measured


def test_what_seems_to_lie_around_calls_with_bounds_on_costs_is_too_little_for_measured_ones() -> None:
    around, module = AroundCalls(Limit(MUCH)), Module("net")
    module.has_bounds = True
    bounded = path(module, rows=8)
    assert learned(around, bounded, MUCH)
    module.has_bounds = False
    exact = path(module, rows=16)
    assert around.of(exact, chains_of(exact), is_exact=True) is None
    # Once costs of a path were measured, what it has shown beside bounds serves no more.
    again = path(module, rows=8)
    assert around.of(again, chains_of(again), is_exact=False) is not None
    assert around.of(again, chains_of(again), is_exact=True) is None
    assert learned(around, again, MUCH)
    assert not learned(around, again, MUCH)
    found = around.of(exact, chains_of(exact), is_exact=True)
    assert found is not None
    assert found.is_exact
    # And serves for bounds: those have too much already.
    assert around.of(bounded, chains_of(bounded), is_exact=False) is not None


@pytest.mark.parametrize("moves", [False, True])
def test_a_call_that_moves_brings_its_link_into_the_step(moves: bool) -> None:
    module = Module("net")
    plan = scheduled(module.chain_of(module.signature(8)), Schedule.keep_all(4))
    link = Link(1.0, 1.0, 0.0, 1)
    if moves:
        plan = replace(plan, schedule=Schedule(plan.schedule.items, (Move(item=0, release=2, fetch=5),)), link=link)
    assert with_link_of([plan], {"lingering_bytes": 3}) == {"lingering_bytes": 3, **({"link": link} if moves else {})}
