"""Calls that wait together: the room between them, and the order in which their paths are planned."""

from __future__ import annotations

from dataclasses import replace

from lightning_rotor.planned.joint_paths import are_alike, demand_bytes, has_room, path_of
from lightning_rotor.planning import scheduled
from lightning_rotor.schedule import Schedule
from tests.planned.joint_steps import Module, path, run


def test_paths_are_alike_if_they_call_the_same_modules_with_any_sizes() -> None:
    left, right, twin = Module("left"), Module("right"), Module("left")
    assert are_alike(path(left, right), path(left, right, rows=3))
    assert not are_alike(path(left, right), path(right, left))
    assert not are_alike(path(left, right), path(twin, right))
    assert not are_alike(path(left, right), path(left))


def test_a_path_demands_what_its_calls_keep_and_nothing_for_those_that_are_forgotten() -> None:
    module = Module("net")
    (key,) = path(module)
    kept_bytes = module.chain_of(key.signature).kept_bytes
    assert demand_bytes((key, key)) == 2 * kept_bytes > 0
    module.cache.keep_only(lambda _: False)
    assert demand_bytes((key, key)) == 0


def test_each_call_needs_room_for_what_the_earlier_ones_hold() -> None:
    module = Module("net")
    calls = []
    for key in path(module, module):
        chain = module.chain_of(key.signature)
        module.use_plan(key.signature, module.costs(key.signature, key.turn), scheduled(chain, Schedule.keep_all(4)))
        calls.append(run(key))
    first, second = calls
    held_bytes = first.prepared.held_bytes
    assert held_bytes > 0
    assert not has_room([first])  # planned without a look at others
    first = replace(first, prepared=replace(first.prepared, room_bytes=0))
    second = replace(second, prepared=replace(second.prepared, room_bytes=held_bytes))
    assert has_room([first, second])
    assert not has_room([second, first])
    assert path_of([first, second]) == (first.key, second.key)
