"""Schedules as text, as trees and as rotor's operations."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rotor.errors import RotorError, ScheduleError
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment, leaves, schedule_line
from tests.strategies import random_chain, random_schedule


@given(st.randoms(use_true_random=False), st.integers(1, 14))
def test_text_round_trips(rng: random.Random, stages: int) -> None:
    schedule = random_schedule(rng, random_chain(rng, stages, "options"))
    assert Schedule.parse(str(schedule)) == schedule


@given(st.randoms(use_true_random=False), st.integers(1, 14))
def test_operations_run_every_backward_once_in_reverse_and_after_its_recording(rng: random.Random, stages: int) -> None:
    schedule = random_schedule(rng, random_chain(rng, stages, "heterogeneous"))
    operations = schedule.operations()
    assert [each for each in operations if each.startswith("B")] == [f"B {stage}" for stage in reversed(range(stages))]
    for stage in range(stages):
        assert operations.count(f"Fall {stage}") == 1
        assert operations.index(f"Fall {stage}") < operations.index(f"B {stage}")


@given(st.randoms(use_true_random=False), st.integers(1, 14))
def test_recomputed_stages_are_those_that_run_forward_more_than_once(rng: random.Random, stages: int) -> None:
    schedule = random_schedule(rng, random_chain(rng, stages, "heterogeneous"))
    forwards = [int(each.split()[1]) for each in schedule.operations() if not each.startswith("B")]
    assert schedule.recomputed == tuple(stage for stage in range(stages) if forwards.count(stage) > 1)


def test_documented_examples_read_as_they_say() -> None:
    schedule = Schedule.parse("0 ((1 2) 3 4) 5")
    assert schedule.items == (
        Leaf(0),
        Segment((Segment((Leaf(1), Leaf(2))), Leaf(3), Leaf(4))),
        Leaf(5),
    )
    assert str(schedule) == "0 ((1-2) 3-4) 5"
    assert (len(schedule), schedule.segments, schedule.recomputed) == (6, 2, (1, 2, 3, 4))


def test_options_are_written_behind_a_colon() -> None:
    schedule = Schedule.parse("0-1 (2:3 3-4) 5:1")
    assert schedule.items == (Leaf(0), Leaf(1), Segment((Leaf(2, 3), Leaf(3), Leaf(4))), Leaf(5, 1))
    assert str(schedule) == "0-1 (2:3 3-4) 5:1"


def test_keep_all_is_one_run() -> None:
    assert str(Schedule.keep_all(4)) == "0-3"
    assert str(Schedule.keep_all(1)) == "0"
    assert Schedule.keep_all(4).recomputed == ()


def test_operations_of_nested_segments() -> None:
    assert Schedule.parse("((0 1) 2) 3").operations() == (
        *("Fck 0", "Fn 1", "Fn 2", "Fall 3", "B 3"),
        *("Fck 0", "Fn 1", "Fall 2", "B 2"),
        *("Fall 0", "Fall 1", "B 1", "B 0"),
    )


def test_leaves_come_from_left_to_right() -> None:
    segment = Schedule.parse("((0 (1 2) 3) 4) 5").items[0]
    assert [leaf.stage for leaf in leaves(segment)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 (1 2", "lacks a closing parenthesis"),
        ("0 1) 2", "has a closing parenthesis too many"),
        ("0 x 1", "holds 'x': expected stage numbers"),
        ("0 1-", "holds '1-': expected stage numbers"),
        ("0 -1", "holds '-1': expected stage numbers"),
        ("0 1.5", "holds '1.5': expected stage numbers"),
        ("0 2-1 1", "holds '2-1': expected stage numbers"),
        ("0 () 1", "without items: expected at least one stage"),
        ("", "without items: expected at least one stage"),
        ("1 2", "starts at stage 1: expected stage 0"),
        ("0 2", "stage 2 follows stage 0: expected every stage once, in order"),
        ("0 1 1", "stage 1 follows stage 1: expected every stage once, in order"),
        ("0 (2 1) 3", "stage 1 follows stage 2: expected every stage once, in order"),
        ("(0 (1 2)) 3", "ends in another segment: the last item of a segment is a stage"),
    ],
)
def test_malformed_texts_are_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message.replace("(", r"\(").replace(")", r"\)")):
        Schedule.parse(text)


def test_schedule_error_is_a_rotor_error_and_a_value_error() -> None:
    assert issubclass(ScheduleError, RotorError)
    assert issubclass(ScheduleError, ValueError)


@pytest.mark.parametrize(
    ("text", "most", "line"),
    [
        ("0 ((1 2) 3 4) 5", 100, "0 ((1-2) 3-4) 5"),
        ("0 ((1 2) 3 4) 5", 12, "0 (…) 5"),
        ("0 ((1 2) 3 4) 5", 6, "0 … 5"),
        ("0 (((1-2) 3) (4-5) 6) (7-8) 9", 22, "0 (…) (…) 9"),
        ("0 (1) (2) 3", 8, "0 … 3"),
        ("0:1 1:2 2:1 3:2 4:1 5:2 6:1", 15, "0:1 … 5:2 6:1"),
        ("0:1 1:1 2:1 3:1 4:1 5:1 6", 15, "0-5:1 6"),
    ],
)
def test_a_long_schedule_loses_its_inside(text, most, line):
    assert schedule_line(Schedule.parse(text), most_characters=most) == line


@st.composite
def items(draw: st.DrawFn, first: int, last: int, depth: int) -> tuple[Item, ...]:
    """Items for stages ``first .. last``, the last one a leaf."""
    made: list[Item] = []
    while first < last:
        end = draw(st.integers(first, last - 1))
        if depth and draw(st.booleans()):
            made.append(Segment(draw(items(first, end, depth - 1))))
        else:
            made.extend(Leaf(number, draw(st.integers(0, 2))) for number in range(first, end + 1))
        first = end + 1
    return (*made, Leaf(last))


@given(st.integers(0, 60).flatmap(lambda last: items(0, last, 4)), st.integers(20, 120))
def test_a_schedule_line_is_short_balanced_and_complete_when_it_fits(made, most):
    text = str(Schedule(made))
    line = schedule_line(Schedule(made), most_characters=most)
    assert len(line) <= most
    assert "\n" not in line
    if len(text) <= most:
        assert line == text
    else:
        assert "…" in line
        assert line.count("(") == line.count(")")
        assert line.endswith(text.rpartition(" ")[2])
