"""The simulator on examples that can be counted by hand, and what must hold for every chain and schedule."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rotor.chain import BackwardPeaks, Chain, Option, StageCost
from lightning_rotor.errors import ScheduleError
from lightning_rotor.schedule import Leaf, Schedule, Segment
from lightning_rotor.simulator import Simulation, check_schedule, first_inverted, held_by_stage, simulate
from tests.strategies import KINDS, random_chain, random_schedule, with_skips

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


def chain_of(*stages: StageCost, **settings: float) -> Chain:
    return Chain(tuple(replace(stage, name=f"stage{index}") for index, stage in enumerate(stages)), **settings)  # type: ignore[arg-type]


def with_keep(**costs: Any) -> StageCost:
    return replace(STAGE, options=(replace(KEEP, **costs),))


def timeline(simulation: Simulation) -> list[tuple[str, int, int, int]]:
    """Phase, stage, peak, what is allocated afterwards."""
    return [(event.phase, event.stage, event.peak_bytes, event.after_bytes) for event in simulation.events]


THREE = chain_of(STAGE, STAGE, STAGE)

# ---------------------------------------------------------------------------------------------------- by hand


def test_keep_all_piles_up_boundaries_and_saved_tensors() -> None:
    simulation = simulate(THREE, Schedule.keep_all(3))
    assert timeline(simulation) == [
        ("forward", 0, 20, 20),  # boundary 1 and 10 saved; the chain's input is the caller's
        ("forward", 1, 40, 40),
        ("forward", 2, 60, 60),
        ("backward", 2, 80, 50),  # frees boundary 2 and 10 saved, leaves the gradient of boundary 2
        ("backward", 1, 60, 30),
        ("backward", 0, 40, 20),  # the output and the gradient of the input
    ]
    assert (simulation.peak_bytes, simulation.peak_stage, simulation.seconds) == (80, 2, 9.0)
    assert simulation.recompute_seconds == simulation.overhead == 0.0


def test_segment_holds_its_input_and_is_replayed_up_to_the_last_saved_tensor() -> None:
    simulation = simulate(THREE, Schedule.parse("(0-1) 2"))
    assert timeline(simulation) == [
        ("forward", 0, 20, 10),  # nothing saved
        ("forward", 1, 30, 20),
        ("forward", 2, 30, 30),  # boundary 1 is gone: only what stage 2 keeps is left
        ("backward", 2, 50, 20),
        ("recompute", 0, 40, 40),
        ("recompute", 1, 50, 50),  # the replay of a last stage makes no output
        ("backward", 1, 60, 30),
        ("backward", 0, 40, 20),
    ]
    assert simulation.seconds == pytest.approx(9.0 + 1.0 + 0.9)
    assert simulation.overhead == pytest.approx(1.9 / 9)


def test_nested_segment_runs_a_third_time() -> None:
    simulation = simulate(THREE, Schedule.parse("((0) 1) 2"))
    assert timeline(simulation) == [
        ("forward", 0, 20, 10),
        ("forward", 1, 30, 20),
        ("forward", 2, 30, 30),
        ("backward", 2, 50, 20),
        ("recompute", 0, 40, 30),
        ("recompute", 1, 40, 40),
        ("backward", 1, 50, 20),
        ("recompute", 0, 30, 30),
        ("backward", 0, 40, 20),
    ]
    assert simulation.peak_bytes == 50


def test_boundary_that_both_sides_save_counts_once() -> None:
    saves_output = with_keep(saved_output_bytes=10)
    assert simulate(chain_of(saves_output, STAGE, STAGE), Schedule.keep_all(3)).events[2].after_bytes == 60


def test_boundary_that_nobody_saves_is_gone_when_the_forward_has_passed() -> None:
    forgets_input = with_keep(saved_input_bytes=0)
    assert simulate(chain_of(STAGE, forgets_input, STAGE), Schedule.keep_all(3)).events[2].after_bytes == 50


@pytest.mark.parametrize(
    ("text", "saved_before", "level"),
    [
        ("0-1", False, 40 + 120),  # nobody but the stage itself holds its input
        ("0-1", True, 40 + 140),  # the stage before saved it
        ("0 (1) 2", False, 40 + 120),  # the segment gives it up once it is recomputed
        ("0 ((1) 2) 3", False, 40 + 120),  # so does the one around it
        ("(0 (1) 2) 3", False, 40 + 120),  # a nested segment gives it up once it is recomputed
    ],
)
def test_backward_peak_depends_on_who_holds_the_input(text: str, saved_before: bool, level: int) -> None:
    first = with_keep(saved_output_bytes=10 if saved_before else 0)
    probe = with_keep(
        backward_peak_bytes=120,
        backward_segment_peak_bytes=130,
        backward_held_peak_bytes=140,
        accumulating=BackwardPeaks(plain_bytes=70, segment_bytes=80, held_bytes=90, replayed_bytes=70),
    )
    schedule = Schedule.parse(text)
    chain = chain_of(first, probe, *[STAGE] * (len(schedule) - 2))
    # Alive besides: the output, what stage 0 saved, boundary 1, and what stage 1 saved.
    for gradients_exist, less in ((False, 0), (True, 50)):
        events = simulate(chain, schedule, gradients_exist=gradients_exist).events
        assert [event.peak_bytes + less for event in events if (event.phase, event.stage) == ("backward", 1)] == [level]


def test_segment_holds_an_input_that_gets_no_gradient() -> None:
    """Nothing tells it that no other backward follows."""
    frozen, trained = (
        with_keep(input_gradient_bytes=size, backward_peak_bytes=120, backward_segment_peak_bytes=130)
        for size in (0, 10)
    )
    peaks = [
        simulate(chain_of(STAGE, stage, STAGE), Schedule.parse("0 (1) 2")).peak_bytes for stage in (frozen, trained)
    ]
    assert peaks == [40 + 130, 40 + 120]


def test_stage_that_saves_nothing_is_not_recomputed_at_the_end_of_a_segment() -> None:
    saves_nothing = with_keep(
        saved_bytes=0, saved_input_bytes=0, saved_tensors=0, replay_peak_bytes=0, replay_seconds=0.0
    )
    simulation = simulate(chain_of(STAGE, saves_nothing, STAGE), Schedule.parse("(0-1) 2"))
    assert [(event.phase, event.stage) for event in simulation.events][3:] == [
        ("backward", 2),
        ("backward", 1),
        ("recompute", 0),
        ("backward", 0),
    ]


def test_parameter_gradients_pile_up_unless_they_exist() -> None:
    chain = chain_of(*[with_keep(parameter_gradient_bytes=100)] * 3)
    assert simulate(chain, Schedule.keep_all(3)).events[-1].after_bytes == 320
    assert simulate(chain, Schedule.keep_all(3), gradients_exist=True).events[-1].after_bytes == 20


def test_lingering_bytes_count_in_the_forward_alone() -> None:
    plain = simulate(THREE, Schedule.keep_all(3))
    lingering = simulate(THREE, Schedule.keep_all(3), lingering_bytes=7)
    assert [event.peak_bytes for event in lingering.events[:3]] == [27, 47, 67]
    assert timeline(lingering)[3:] == timeline(plain)[3:]


def test_pinned_bytes_stay_to_the_end_of_the_step() -> None:
    pins = replace(STAGE, pinned_bytes=5)
    assert simulate(chain_of(pins, STAGE), Schedule.parse("(0) 1")).events[-1].after_bytes == 25


def test_a_discarded_forward_peaks_as_the_leafs_option_does() -> None:
    small = replace(KEEP, name="small", discard_peak_bytes=12)
    chain = chain_of(replace(STAGE, options=(KEEP, small)), STAGE)
    peaks = [simulate(chain, Schedule.parse(text)).events[0].peak_bytes for text in ("(0) 1", "(0:1) 1")]
    assert peaks == [20, 12]


def test_segment_that_draws_remembers_the_generators_and_sets_them_aside() -> None:
    draws = replace(STAGE, draws_random=True)
    plain = simulate(THREE, Schedule.parse("(0-1) 2"))
    remembering = simulate(chain_of(STAGE, draws, STAGE, rng_state_bytes=3), Schedule.parse("(0-1) 2"))
    extra = [right.peak_bytes - left.peak_bytes for left, right in zip(plain.events, remembering.events, strict=True)]
    assert extra == [3, 3, 3, 3, 6, 6, 3, 3]


def test_copies_of_buffers_that_a_recomputation_saves_stay_until_the_backward() -> None:
    saves = replace(STAGE, state_bytes=5, options=(replace(KEEP, saved_state_bytes=3),))
    plain, chain = simulate(THREE, Schedule.parse("(0-1) 2")), chain_of(saves, saves, STAGE)
    saving = simulate(chain, Schedule.parse("(0-1) 2"))
    extra = [right.peak_bytes - left.peak_bytes for left, right in zip(plain.events, saving.events, strict=True)]
    # Both stages' buffers are remembered; lent as well while 0 and 1 are recomputed; then the part that 1 and 0 save is left.
    assert extra == [10, 10, 10, 10, 20, 20, 10 + 6, 10 + 3]
    kept = simulate(chain, Schedule.keep_all(3))
    assert timeline(kept) == timeline(simulate(THREE, Schedule.keep_all(3)))


def test_every_run_of_a_segment_takes_its_host_time_and_a_little_every_stage_that_runs_apart() -> None:
    chain = chain_of(STAGE, STAGE, STAGE, segment_seconds=0.5)
    for text, host_seconds in (("0-2", 0.0), ("(0-1) 2", 0.53), ("(0) (1) 2", 1.03), ("((0) 1) 2", 1.53)):
        plain = simulate(THREE, Schedule.parse(text)).seconds
        assert simulate(chain, Schedule.parse(text)).seconds == pytest.approx(plain + host_seconds)


# ---------------------------------------------------------------------------------------------------- in general


@given(st.randoms(use_true_random=False), st.integers(1, 10), st.sampled_from(KINDS))
def test_step_leaves_the_output_and_gradients_and_nothing_else(rng: random.Random, stages: int, kind: str) -> None:
    chain = random_chain(rng, stages, kind)  # type: ignore[arg-type]
    # What a segment remembers of generators and buffers is only given back after the last backward.
    stateless = tuple(replace(stage, state_bytes=0) for stage in chain)
    chain = replace(chain, stages=stateless, rng_state_bytes=0)
    schedule = random_schedule(rng, chain)
    simulation = simulate(chain, schedule)
    used = [leaf.option for item in schedule.items for leaf in _leaves(item)]
    gradients = sum(stage.options[option].parameter_gradient_bytes for stage, option in zip(chain, used, strict=True))
    pinned = sum(stage.pinned_bytes for stage in chain)
    first = chain.stages[0].options[used[0]]
    left = chain.stages[-1].output_bytes + first.input_gradient_bytes + gradients + pinned
    assert simulation.events[-1].after_bytes == left


@given(st.randoms(use_true_random=False), st.integers(1, 10), st.sampled_from(KINDS))
def test_every_stage_runs_its_backward_once_after_its_recording(rng: random.Random, stages: int, kind: str) -> None:
    chain = random_chain(rng, stages, kind)  # type: ignore[arg-type]
    simulation = simulate(chain, random_schedule(rng, chain))
    assert [event.stage for event in simulation.events if event.phase == "backward"] == list(reversed(range(stages)))
    assert [event.stage for event in simulation.events if event.phase == "forward"] == list(range(stages))
    assert simulation.peak_bytes >= max(event.after_bytes for event in simulation.events)
    assert simulation.seconds >= sum(event.seconds for event in simulation.events)


@given(st.randoms(use_true_random=False), st.integers(2, 10))
def test_segment_in_the_forward_never_holds_more_than_keeping_its_stages(rng: random.Random, stages: int) -> None:
    chain = random_chain(rng, stages, "heterogeneous")
    kept = simulate(chain, Schedule.keep_all(stages))
    segmented = simulate(chain, Schedule((Segment(tuple(map(Leaf, range(stages - 1)))), Leaf(stages - 1))))
    assert segmented.events[stages - 1].after_bytes <= kept.events[stages - 1].after_bytes
    assert segmented.seconds >= kept.seconds


def _leaves(item: Leaf | Segment) -> list[Leaf]:
    return [item] if isinstance(item, Leaf) else [leaf for child in item.items for leaf in _leaves(child)]


# ---------------------------------------------------------------------------------------------------- broken schedules


@pytest.mark.parametrize("check", [check_schedule, simulate])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-1", "covers 2 stages, but the chain has 3"),
        ("0-3", "covers 4 stages, but the chain has 3"),
        ("0:1 1 2", "stage 'stage0' has 1 options, not option 1"),
        ("(0 1:2) 2", "stage 'stage1' has 1 options, not option 2"),
        ("0 (1) 2", "recomputes stage 'stage1', which does not give the same bits twice: keep it"),
        ("((0) 1) 2", "recomputes stage 'stage1', which does not give the same bits twice: keep it"),
    ],
)
def test_schedules_that_do_not_fit_the_chain_are_refused(check: object, text: str, message: str) -> None:
    chain = chain_of(STAGE, replace(STAGE, recomputable=False), STAGE)
    with pytest.raises(ScheduleError, match=message):
        check(chain, Schedule.parse(text))  # type: ignore[operator]


def fingerprint(kind: str) -> str:
    """Of every event of simulated steps of forty random chains with skips, under random schedules and conditions."""
    rng = random.Random(kind)
    events: list[object] = []
    for number in range(40):
        chain = random_chain(rng, rng.randint(3, 9), kind)  # type: ignore[arg-type]
        if number % 2:
            chain = with_skips(rng, chain)
        schedule = random_schedule(rng, chain)
        refused = first_inverted(chain, schedule)
        if refused is not None:
            events.append(refused)
            continue
        simulation = simulate(chain, schedule, gradients_exist=number % 3 == 0, lingering_bytes=7 * (number % 4))
        events.append((simulation, simulation.events, held_by_stage(chain, schedule)))
    return hashlib.sha256(repr(events).encode()).hexdigest()[:12]


FINGERPRINTS = {
    "cnn": "38ceaf750ec7",
    "transformer": "4ce2519c55a5",
    "heterogeneous": "7408b0e786aa",
    "odd": "c198f0de3f88",
    "options": "6eb3d67e7038",
    "invertible": "eafbe376e2d6",
}


@pytest.mark.parametrize("kind", FINGERPRINTS)
def test_steps_of_random_chains_are_to_the_byte_what_they_were(kind: str) -> None:
    """The allocator's own figures, which the model follows, are compared in tests of whole trainings; a change of the model changes these, too."""
    assert fingerprint(kind) == FINGERPRINTS[kind]
