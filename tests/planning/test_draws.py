"""Steps whose size is a draw: they are told from others, measured until they are calm, and then ever more rarely."""

from __future__ import annotations

from lightning_rotor.planning.draws import Draws, is_sample_step

LIMIT = 10_000


def test_steps_that_differ_under_one_plan_are_all_measured_until_they_are_calm() -> None:
    draws, plans = Draws(), [object()]
    for _ in range(10):
        draws.learn(plans, 5000, LIMIT)  # type: ignore[arg-type]
    assert not draws.are_seen
    assert not any(map(draws.is_due, range(1, 200)))
    draws.learn(plans, 4000, LIMIT)  # type: ignore[arg-type]
    assert draws.are_seen
    assert draws.spread_bytes == 1000
    assert all(map(draws.is_due, range(1, 200)))
    for _ in range(2 * 64):
        draws.learn(plans, 4500, LIMIT)  # type: ignore[arg-type]
    assert [number for number in range(1, 13) if draws.is_due(number)] == [4, 8, 12]
    draws.learn(plans, 6000, LIMIT)  # type: ignore[arg-type]
    assert all(map(draws.is_due, range(1, 200)))


def test_other_plans_are_no_draw() -> None:
    draws, one, other = Draws(), object(), object()
    for plans, peak in (([one], 5000), ([other], 7000), ([one, other], 9000)):
        draws.learn(plans, peak, LIMIT)  # type: ignore[arg-type]
    assert not draws.are_seen


def test_samples_come_more_and_more_rarely_but_go_on() -> None:
    assert [number for number in range(1, 3000) if is_sample_step(number)] == [8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    assert is_sample_step(3 * 1024)
