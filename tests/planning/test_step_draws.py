"""Steps whose size is a draw: they are told from others, measured until they are calm, and then ever more rarely."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rotor.planning.step_draws import Draws, is_sample_step

LIMIT = 10_000
PLANS: Any = [object()]  # of a plan, only who it is


def drawn(*peaks: int, processes: int = 1) -> Draws:
    """What is known after steps with these peaks under the same plans."""
    draws = Draws()
    for peak in peaks:
        draws.learn(PLANS, peak, LIMIT, processes=processes)
    return draws


def first_due(draws: Draws) -> list[int]:
    return [number for number in range(1, 200) if draws.is_due(number)][:3]


def test_equal_steps_are_no_draw_and_never_due() -> None:
    draws = drawn(*[5000] * 10)
    assert not draws.are_seen
    assert draws.spread_bytes == 0
    assert first_due(draws) == []
    assert Draws().spread_bytes == 0


@pytest.mark.parametrize(("peak", "are_seen"), [(9970, False), (9969, True), (10_029, False), (10_030, True)])
def test_steps_differ_from_three_thousandths_on(peak: int, are_seen: bool) -> None:
    assert drawn(10_000, peak).are_seen is are_seen


@pytest.mark.parametrize(("peak", "are_seen"), [(9000, False), (8999, True), (11_000, False), (11_001, True)])
def test_steps_of_several_processes_differ_from_a_tenth_on(peak: int, are_seen: bool) -> None:
    assert drawn(10_000, peak, processes=2).are_seen is are_seen


@pytest.mark.parametrize(("spread", "is_due"), [(600, False), (700, True)])
def test_draws_that_leave_eight_times_their_spread_are_not_looked_for(spread: int, is_due: bool) -> None:
    draws = drawn(5000, 5000 - spread)
    assert draws.are_seen
    assert bool(first_due(draws)) is is_due


def test_once_seen_draws_stay_seen() -> None:
    assert drawn(5000, 4000, *[4500] * 10).are_seen


def test_the_spread_is_the_largest_of_all_sets_of_plans() -> None:
    draws = drawn(5000, 4000, 4700)
    assert draws.spread_bytes == 1000
    other: Any = [object()]
    for peak in (300, 100):
        draws.learn(other, peak, LIMIT)
    assert draws.spread_bytes == 1000


@pytest.mark.parametrize(("calm", "due"), [(64, [2, 4, 6]), (2 * 64, [4, 8, 12]), (3 * 64, [8, 16, 24])])
def test_calm_steps_are_measured_ever_more_rarely(calm: int, due: list[int]) -> None:
    assert first_due(drawn(5000, 4000, *[4500] * (calm - 2))) == due


def test_after_63_calm_steps_all_are_measured_and_after_64_every_second() -> None:
    draws = drawn(5000, 4000, *[4500] * 61)
    assert first_due(draws) == [1, 2, 3]
    draws.learn(PLANS, 4500, LIMIT)
    assert first_due(draws) == [2, 4, 6]


def test_at_least_one_step_in_64_is_measured_however_calm() -> None:
    assert first_due(drawn(5000, 4000, *[4500] * 1000)) == [64, 128, 192]


@pytest.mark.parametrize(("peak", "is_calm"), [(5014, True), (5015, False), (LIMIT, False), (4000, True)], ids=str)
def test_a_step_that_exceeds_all_before_begins_anew(peak: int, is_calm: bool) -> None:
    draws = drawn(5000, 4000, *[4500] * 70)
    draws.learn(PLANS, peak, LIMIT)
    assert first_due(draws) == ([2, 4, 6] if is_calm else [1, 2, 3])


@pytest.mark.parametrize(("limit", "due"), [(4500, [2, 4, 6]), (4499, [1, 2, 3])])
def test_a_step_beyond_the_limit_begins_anew(limit: int, due: list[int]) -> None:
    draws = drawn(5000, 4000, *[4500] * 70)
    draws.learn(PLANS, 4500, limit)
    assert first_due(draws) == due


def test_calm_begins_with_the_step_behind_the_one_that_exceeded() -> None:
    draws = drawn(5000, 4000, 6000, *[4500] * 63)
    assert first_due(draws) == [1, 2, 3]
    draws.learn(PLANS, 4500, LIMIT)
    assert first_due(draws) == [2, 4, 6]


def test_other_plans_are_no_draw() -> None:
    draws, one, other = Draws(), object(), object()
    for plans, peak in (([one], 5000), ([other], 7000), ([one, other], 9000)):
        draws.learn(plans, peak, LIMIT)  # type: ignore[arg-type]
    assert not draws.are_seen
    draws.learn([other, one, one], 9500, LIMIT)  # type: ignore[arg-type]
    assert draws.are_seen  # the same plans in another order


def test_the_oldest_of_many_sets_of_plans_is_forgotten() -> None:
    sets: Any = [[object()] for _ in range(65)]
    for number in (64, 65):
        draws = Draws()
        for plans in sets[:number]:
            draws.learn(plans, 5000, LIMIT)
        draws.learn(sets[0], 6000, LIMIT)
        assert draws.are_seen is (number == 64)


def test_samples_come_more_and_more_rarely_but_go_on() -> None:
    assert [number for number in range(1, 3000) if is_sample_step(number)] == [8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    assert is_sample_step(3 * 1024)
