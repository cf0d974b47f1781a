"""Schedules that move what stages hold to another memory: as text, in files, and simulated."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_rotor.chain import BackwardPeaks, Chain, Option, StageCost
from lightning_rotor.checkpointable import Checkpointable
from lightning_rotor.errors import PlanError, ScheduleError
from lightning_rotor.link import Link
from lightning_rotor.planning import Plan, plan, scheduled
from lightning_rotor.planning.placing import placed
from lightning_rotor.schedule import Leaf, Move, Schedule, schedule_line
from lightning_rotor.simulator import Conditions, Simulation, first_inverted, least_seconds, levels, movable, simulate
from tests.strategies import KINDS, random_chain, random_link, random_moves, random_schedule, with_inversion, with_skips

FAST = Link(1e15, 1e15, latency=0.0)
KEEP = Option(
    name="keep",
    saved_bytes=10,
    saved_input_bytes=10,
    saved_output_bytes=0,
    saved_tensors=2,
    forward_peak_bytes=20,
    replay_peak_bytes=10,
    unpack_peak_bytes=10,
    unpack_bytes=10,
    backward_peak_bytes=20,
    backward_segment_peak_bytes=20,
    backward_held_peak_bytes=20,
    input_gradient_bytes=10,
    parameter_gradient_bytes=0,
    forward_seconds=1.0,
    replay_seconds=0.9,
    backward_seconds=2.0,
)
STAGE = StageCost("stage", output_bytes=10, discard_peak_bytes=20, discard_seconds=1.0, options=(KEEP,))


def chain_of(count: int) -> Chain:
    return Chain(tuple(replace(STAGE, name=f"stage{index}") for index in range(count)))


def random_case(rng: random.Random, *, most_stages: int = 9) -> tuple[Chain, Schedule]:
    """A chain, and a schedule that moves some of its items."""
    chain = random_chain(rng, rng.randint(1, most_stages), rng.choice((*KINDS, "invertible")))
    if len(chain) > 2 and rng.random() < 0.4:
        chain = with_skips(rng, chain)
    schedule = random_schedule(rng, chain)
    if first_inverted(chain, schedule) is not None:
        schedule = Schedule.keep_all(len(chain))
    return chain, random_moves(rng, chain, schedule)


def without_waits(simulation: Simulation) -> list[tuple[str, int, int, int]]:
    """Phase, stage, peak, what is allocated afterwards."""
    events = [event for event in simulation.events if event.phase != "wait"]
    return [(event.phase, event.stage, event.peak_bytes, event.after_bytes) for event in events]


# ---------------------------------------------------------------------------------------------------- as text


@given(st.randoms(use_true_random=False))
def test_text_round_trips(rng: random.Random) -> None:
    _, schedule = random_case(rng, most_stages=14)
    assert Schedule.parse(str(schedule)) == schedule


@given(st.randoms(use_true_random=False))
def test_memory_is_given_back_behind_the_copy_out_and_taken_again_before_the_backward(rng: random.Random) -> None:
    _, schedule = random_case(rng)
    operations = schedule.operations()
    assert len(operations) == len(Schedule(schedule.items).operations()) + 3 * len(schedule.moves)
    for move in schedule.moves:
        item = schedule.items[move.item]
        out, free, back = (operations.index(f"{verb} {item.first}") for verb in ("Out", "Free", "Back"))
        assert operations.index(f"B {schedule.items[-1].last}") < operations.index(f"B {item.last}")
        assert out < free < back < operations.index(f"B {item.last}")


def test_points_are_named_by_the_stage_that_runs_then() -> None:
    schedule = Schedule.parse("0> 1>3 2>b5<4 (3-4)><5 5")
    assert schedule.moves == (Move(0, 1, 9), Move(1, 3, 8), Move(2, 5, 6), Move(3, 4, 5))
    assert schedule.moved == (0, 1, 2, 3, 4)
    assert str(Schedule.parse("0-2> 3")) == "0-2> 3"
    assert Schedule.parse("0-2> 3").operations() == (
        *("Fall 0", "Out 0", "Free 0", "Fall 1", "Out 1", "Free 1", "Fall 2", "Out 2", "Free 2", "Fall 3"),
        *("B 3", "Back 2", "B 2", "Back 1", "B 1", "Back 0", "B 0"),
    )


def test_a_schedule_that_moves_something_is_not_plain() -> None:
    assert not Schedule.parse("0> 1").is_plain
    assert Schedule.parse("0 1").is_plain


def test_a_long_schedule_says_what_moves_on_one_line() -> None:
    schedule = Schedule.parse("0> ((1 2) 3 4)>6 5 6")
    assert schedule_line(schedule, most_characters=16) == "0> (…)>6 5-6"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 > 1", "holds '>': expected stage numbers"),
        ("0>x 1", "moves by '>x': expected > behind an item"),
        ("(0> 1) 2", "moves '0>' in a segment: expected it outside of one"),
        ("0 (1 (2)> 3) 4", "moves '>' in a segment"),
        ("0>2 (1-2) 3", "names stage 2 for a move: expected the first stage of an item"),
        ("0>b1 (1-2) 3", "names stage 1 for a move: expected the last stage of an item"),
        ("0>9 1", "names stage 9 for a move"),
        ("0 1>", "item 1 of 2 is given back at point 2 and fetched at 2"),
        ("0 1>0 2", "item 1 of 3 is given back at point 0"),
        ("0>b1<1 1 2", "item 0 of 3 is given back at point 4 and fetched at 4"),
    ],
)
def test_malformed_moves_are_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message.replace("(", r"\(").replace(")", r"\)")):
        Schedule.parse(text)


def test_moves_that_no_text_can_say_are_refused() -> None:
    items = (Leaf(0), Leaf(1), Leaf(2))
    with pytest.raises(ScheduleError, match="item 7 of 3 moves: expected a number below 3"):
        Schedule(items, (Move(7, 8, 9),))
    with pytest.raises(ScheduleError, match="item 0 moves behind item 1: expected each once, in order"):
        Schedule(items, (Move.whole(1, 3), Move.whole(0, 3)))
    with pytest.raises(ScheduleError, match=r"fetched at 2: expected .* at 3 to 5"):
        Schedule(items, (Move(0, 1, 2),))


# ---------------------------------------------------------------------------------------------------- simulated


def test_moved_tensors_are_gone_between_their_points() -> None:
    simulation = simulate(chain_of(3), Schedule.parse("0-1> 2"), link=FAST)
    assert without_waits(simulation) == [
        ("forward", 0, 20, 20),
        ("forward", 1, 30, 30),  # the 10 that stage 0 saved are away; boundary 1 is read now, and saved by stage 1
        ("forward", 2, 30, 30),  # what stage 1 saved is away as well, its input too
        ("backward", 2, 50, 20),
        ("backward", 1, 50, 20),  # back: 10 and boundary 1
        ("backward", 0, 40, 20),
    ]
    assert simulation.peak_bytes == 50 < simulate(chain_of(3), Schedule.keep_all(3)).peak_bytes
    assert simulation.host_bytes == 30
    assert simulation.stall_seconds < 1e-12


def test_copies_run_beside_the_computation_and_wait_for_each_other() -> None:
    # 10 bytes of stage 0 are out at 1 + 4, for which the forward of stage 1 waits; the 20 of that at 6 + 8, and so on.
    # The backward of stage 1 asks at 17 for 20 bytes, which are there at 21, that of stage 0 at 23 for 10.
    simulation = simulate(chain_of(3), Schedule.parse("0-1> 2"), link=Link(2.5, 5.0, latency=0.0))
    waits = [(event.stage, event.seconds) for event in simulation.events if event.phase == "wait"]
    assert waits == [(0, 4.0), (1, 8.0), (1, 4.0), (0, 2.0)]
    assert simulation.stall_seconds == 18.0
    assert simulation.seconds == 9.0 + 18.0


def test_later_points_hide_the_copies() -> None:
    link = Link(10.0, 10.0, latency=0.0)
    at_once = simulate(chain_of(4), Schedule.parse("0> 1-3"), link=link)
    later = simulate(chain_of(4), Schedule.parse("0>2<1 1-3"), link=link)
    assert (at_once.stall_seconds, later.stall_seconds) == (2.0, 0.0)


def test_a_boundary_that_both_sides_save_moves_once_and_goes_when_both_gave_it_back() -> None:
    both = replace(STAGE, options=(replace(KEEP, saved_output_bytes=10),))
    chain = Chain(tuple(replace(both, name=f"stage{index}") for index in range(3)))
    one = simulate(chain, Schedule.parse("0> 1-2"), link=FAST)
    two = simulate(chain, Schedule.parse("0-1> 2"), link=FAST)
    # Stage 0 saves 10 and boundary 1, stage 1 boundary 1 as well, 10 and boundary 2.
    assert (one.host_bytes, two.host_bytes) == (20, 40)
    held = {stage: after for phase, stage, _, after in without_waits(one) if phase == "forward"}
    assert held == {0: 20, 1: 30, 2: 50}  # boundary 1 stays for stage 1
    held = {stage: after for phase, stage, _, after in without_waits(two) if phase == "forward"}
    assert held == {0: 20, 1: 30, 2: 30}  # stage 2 saves 10 and boundary 2, and makes 10
    # Boundary 1 comes back for stage 1, and stays for stage 0.
    held = {stage: after for phase, stage, _, after in without_waits(two) if phase == "backward"}
    assert held == {2: 20, 1: 30, 0: 20}


def test_a_segment_that_moves_gives_back_its_input() -> None:
    chain = chain_of(4)
    stays = simulate(chain, Schedule.parse("0 (1-2) 3"))
    moves = simulate(chain, Schedule.parse("0 (1-2)> 3"), link=FAST)
    assert moves.held_bytes == stays.held_bytes - 10
    assert moves.host_bytes == 10


@given(st.randoms(use_true_random=False))
def test_bytes_are_those_of_every_link_and_no_more_than_without_moves(rng: random.Random) -> None:
    chain, schedule = random_case(rng)
    step = {"gradients_exist": rng.random() < 0.5, "lingering_bytes": rng.choice((0, 100))}
    slow, fast = (simulate(chain, schedule, link=link, **step) for link in (random_link(rng, chain), FAST))  # type: ignore[arg-type]
    assert (slow.peak_bytes, slow.held_bytes, slow.host_bytes) == (fast.peak_bytes, fast.held_bytes, fast.host_bytes)
    stays = simulate(chain, Schedule(schedule.items), **step)  # type: ignore[arg-type]
    assert fast.peak_bytes <= stays.peak_bytes
    assert slow.seconds >= fast.seconds - 1e-12
    assert fast.events[-1].after_bytes == stays.events[-1].after_bytes  # all is given up in the end


@given(st.randoms(use_true_random=False))
def test_a_faster_link_is_never_slower(rng: random.Random) -> None:
    chain, schedule = random_case(rng)
    link = random_link(rng, chain)
    faster = replace(link, out=link.out * rng.uniform(1, 4), back=link.back * rng.uniform(1, 4))
    slow, fast = (simulate(chain, schedule, link=each) for each in (link, faster))
    assert fast.seconds <= slow.seconds * (1 + 1e-12)
    assert fast.stall_seconds <= slow.stall_seconds + 1e-12 * slow.seconds


@given(st.randoms(use_true_random=False))
def test_without_moves_a_link_changes_nothing(rng: random.Random) -> None:
    chain, schedule = random_case(rng)
    stays = Schedule(schedule.items)
    assert simulate(chain, stays, link=random_link(rng, chain)) == simulate(chain, stays)


@given(st.randoms(use_true_random=False))
def test_levels_by_point_make_the_peak(rng: random.Random) -> None:
    chain, schedule = random_case(rng)
    found = levels(chain, schedule, {"link": FAST})
    assert max(found.peak_bytes) == found.simulation.peak_bytes
    assert set(found.freed_bytes) == {move.item for move in schedule.moves}


def test_moves_without_a_link_are_refused() -> None:
    with pytest.raises(ScheduleError, match="nothing says how fast copies are: expected a link, such as"):
        simulate(chain_of(3), Schedule.parse("0> 1-2"))


def test_what_holds_nothing_that_can_leave_does_not_move() -> None:
    saves_nothing = replace(STAGE, options=(replace(KEEP, saved_tensors=0, saved_bytes=0, saved_input_bytes=0),))
    chain = Chain((saves_nothing, STAGE, STAGE, STAGE))
    assert movable(chain, Schedule.parse("0 1 (2) 3").items) == [1, 2]
    for text in ("0> 1-3", "(0)> 1-3"):
        with pytest.raises(ScheduleError, match="which holds nothing that can leave: expected a kept stage that saves"):
            simulate(chain, Schedule.parse(text), link=FAST)


def test_the_neighbours_of_an_inverted_stage_stay() -> None:
    rng = random.Random(0)
    inverted = with_inversion(rng, STAGE, grain=1)
    chain = Chain((STAGE, STAGE, inverted, STAGE, STAGE))
    assert movable(chain, Schedule.parse("0-1 2:1 3-4").items) == [0, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0), "a link carries 0.0 bytes per second out: expected a positive number"),
        ((1.0, float("nan")), "a link carries nan bytes per second back"),
        ((1.0, float("inf")), "a link carries inf bytes per second back"),
        ((1.0, 1.0, -1.0), "a link has a latency of -1.0 s"),
        ((1.0, 1.0, 0.0, -5), "a link leads to -5 bytes of memory"),
    ],
)
def test_links_that_cannot_be_are_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Link(*arguments)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- in files


def test_a_plan_with_a_link_is_written_and_read(tmp_path: Path) -> None:
    chain, link = chain_of(4), Link(3.0, 4.0, 0.5, room_bytes=1000)
    moving = scheduled(chain, Schedule.parse("0>2 1> 2-3"), link=link)
    moving.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["format"] == 2
    read = Plan.load(tmp_path / "plan.json", chain)
    assert (read.schedule, read.link, read.simulation) == (moving.schedule, link, moving.simulation)
    assert (read.moved, read.host_bytes) == ((0, 1), 30)
    assert read.stall_seconds == moving.stall_seconds > 0
    assert "2 moved: 0>2 1> 2-3" in read.summary()


def test_a_plan_without_a_link_is_written_as_before(tmp_path: Path) -> None:
    plan(chain_of(4), 100).save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["format"] == 1
    assert "link" not in content


@pytest.mark.parametrize(
    "damage",
    [
        {"link": {"out": "fast", "back": 1.0, "latency": 0.0, "room_bytes": None}},
        {"link": {"out": 1.0, "back": 1.0, "latency": 0.0, "room_bytes": 1.5}},
        {"link": {"out": 1.0}},
        {"link": 3},
        {"link": None},
        {"format": 3},
    ],
)
def test_a_damaged_link_is_a_plan_error(tmp_path: Path, damage: dict[str, object]) -> None:
    path = tmp_path / "plan.json"
    scheduled(chain_of(3), Schedule.parse("0> 1-2"), link=FAST).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.raises(PlanError, match=r"holds no plan|has format 3: expected 1 or 2"):
        Plan.load(path, chain_of(3))


def test_the_backward_peak_is_that_of_a_held_input_where_the_stage_before_saved_it_too() -> None:
    """It came back for both."""
    held = BackwardPeaks(plain_bytes=20, segment_bytes=20, held_bytes=55, replayed_bytes=20)
    probe = replace(STAGE, options=(replace(KEEP, backward_held_peak_bytes=55, accumulating=held),))
    saves_output = replace(STAGE, options=(replace(KEEP, saved_output_bytes=10),))
    chain = Chain((saves_output, probe, STAGE))
    events = simulate(chain, Schedule.parse("0-1> 2"), link=FAST).events
    (level,) = [event.peak_bytes for event in events if (event.phase, event.stage) == ("backward", 1)]
    assert level == 10 + 20 + 55  # the output, what stage 1 saved, and its peak


def test_a_plan_that_moves_something_is_not_run_without_another_memory() -> None:
    net = Checkpointable(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4))
    assert net.chain is not None
    with pytest.raises(ScheduleError, match="there is no other memory to move it to"):
        net.use(scheduled(net.chain, Schedule.parse("0 1> 2"), link=FAST))


@given(st.randoms(use_true_random=False))
def test_least_seconds_are_those_of_a_step_that_moves_nothing_where_there_is_room(rng: random.Random) -> None:
    chain, schedule = random_case(rng)
    chain = replace(chain, segment_seconds=rng.choice((0.0, 0.25)))
    stays = simulate(chain, Schedule(schedule.items))
    for step in ({}, {"link": FAST}):
        least = least_seconds(chain, schedule, stays.peak_bytes, step)
        assert least == pytest.approx(stays.seconds, rel=1e-12)


@given(st.randoms(use_true_random=False))
def test_no_moves_within_a_budget_take_less_than_the_least_seconds(rng: random.Random) -> None:
    chain, schedule = random_case(rng)
    step: Conditions = {"gradients_exist": rng.random() < 0.5, "link": random_link(rng, chain)}
    found = simulate(chain, schedule, **step)
    assert least_seconds(chain, schedule, found.peak_bytes, step) <= found.seconds * (1 + 1e-9)


def test_what_the_link_cannot_carry_in_time_is_waited_for() -> None:
    chain = random_chain(random.Random(1), 6, "transformer")
    schedule = Schedule.keep_all(6)
    stays = simulate(chain, schedule)
    slow: Conditions = {"link": Link(1e3, 1e3, latency=0.0)}
    budget = stays.peak_bytes // 2
    found = placed(chain, schedule, movable(chain, schedule.items), budget, slow)
    assert found is not None
    assert found.stall_seconds > 0
    assert stays.seconds < least_seconds(chain, schedule, budget, slow) <= found.seconds
