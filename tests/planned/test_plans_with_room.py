"""Plans that a call borrows from others: of its own recording, for no smaller sizes, with room for those before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_rotor.planned.later_calls import CallOrder
from lightning_rotor.planned.plans_with_room import PlansWithRoom
from lightning_rotor.planned.prepared import Prepared
from lightning_rotor.planning import minimum_budget, scheduled
from lightning_rotor.schedule import Schedule
from tests.planned.joint_steps import Module, Recording


@pytest.fixture
def module() -> Module:
    return Module("net")


def lend(
    module: Module,
    rows: int,
    *,
    turn: tuple[str, ...] = (),
    room_bytes: int | None = 100,
    is_lean: bool = False,
    recording: Recording | None = None,
) -> Prepared:
    """A plan that is in use for so many rows; a lean one recomputes all it can."""
    signature = module.signature(rows, recording)
    chain = module.chain_of(signature)
    schedule = minimum_budget(chain).schedule if is_lean else Schedule.keep_all(len(chain))
    prepared = module.use_plan(signature, module.costs(signature, turn), scheduled(chain, schedule))
    prepared = replace(prepared, room_bytes=room_bytes)
    module.cache.put(signature, prepared)
    return prepared


def borrowed(module: Module, rows: int, held_bytes: int = 0, turn: tuple[str, ...] = ()) -> Prepared | None:
    lent = PlansWithRoom(CallOrder())
    shared = lent.serving(module, module.signature(rows), turn, held_bytes)  # type: ignore[arg-type]
    return None if shared is None else shared.prepared


def test_the_nearest_size_that_is_no_smaller_serves(module: Module) -> None:
    lend(module, 4)
    near, _ = lend(module, 10), lend(module, 20)
    assert borrowed(module, 8) is near
    assert borrowed(module, 30) is None


def test_another_recording_serves_never_though_its_stages_have_equal_names(module: Module) -> None:
    lend(module, 10, recording=Recording(4))
    assert borrowed(module, 8) is None
    own = lend(module, 20)
    assert borrowed(module, 8) is own


def test_a_plan_without_room_for_what_is_held_serves_not(module: Module) -> None:
    lend(module, 10, room_bytes=99)
    roomy = lend(module, 20, room_bytes=100)
    assert borrowed(module, 8, held_bytes=100) is roomy
    assert borrowed(module, 8, held_bytes=101) is None


def test_a_plan_that_was_made_without_a_look_at_others_or_chosen_by_the_user_serves_not(module: Module) -> None:
    lend(module, 10, room_bytes=None)
    assert borrowed(module, 8) is None
    chosen = replace(lend(module, 10), is_chosen=True)
    module.cache.put(chosen.signature, chosen)
    assert borrowed(module, 8) is None


def test_the_same_turn_goes_before_a_nearer_size(module: Module) -> None:
    of_other_turn = lend(module, 10)
    assert borrowed(module, 8, turn=("other",)) is of_other_turn
    of_this_turn = lend(module, 20, turn=("other",))
    assert borrowed(module, 8, turn=("other",)) is of_this_turn


def test_the_second_call_of_a_module_runs_under_no_plan_of_the_first(module: Module) -> None:
    lend(module, 10)
    assert borrowed(module, 8, turn=("net",)) is None
    second = lend(module, 10, turn=("net",))
    assert borrowed(module, 8, turn=("net",)) is second


def test_a_plan_behind_calls_that_may_still_come_serves_not(module: Module) -> None:
    order = CallOrder()
    lent = PlansWithRoom(order)
    order.note(["other", "net"])
    behind = lend(module, 10, turn=("other",))
    assert lent.serving(module, module.signature(8), (), 0) is None  # type: ignore[arg-type]
    order.note(["net"])  # a step without the other one
    shared = lent.serving(module, module.signature(8), (), 0)  # type: ignore[arg-type]
    assert shared is not None
    assert shared.prepared is behind


def test_a_plan_that_was_borrowed_before_serves_while_it_is_in_use_and_has_room(module: Module) -> None:
    lent = PlansWithRoom(CallOrder())
    wanted = module.signature(8)
    far = lend(module, 20)
    first = lent.serving(module, wanted, (), 0)  # type: ignore[arg-type]
    assert first is not None
    near = lend(module, 10)
    assert lent.serving(module, wanted, (), 0) is first  # type: ignore[arg-type]
    module.cache.put(far.signature, replace(far, room_bytes=50))
    again = lent.serving(module, wanted, (), 0)  # type: ignore[arg-type]
    assert again is not None
    assert again.prepared is near


def test_a_lean_plan_loses_what_smaller_sizes_need_not_recompute(module: Module) -> None:
    lean = lend(module, 20, is_lean=True)
    lent = PlansWithRoom(CallOrder())
    alone = lent.serving(module, module.signature(10), (), 0)  # type: ignore[arg-type]
    assert alone is not None
    most_seconds = lean.plan.overhead * lean.plan.seconds / (1 + lean.plan.overhead)
    assert alone.lost_seconds == pytest.approx(most_seconds / 2)  # half of the rows
    lend(module, 5, is_lean=True)
    beside = PlansWithRoom(CallOrder()).serving(module, module.signature(10), (), 0)  # type: ignore[arg-type]
    assert beside is not None
    assert beside.lost_seconds == pytest.approx(0.0)
