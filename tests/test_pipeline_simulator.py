"""The judge of pipelines, against formulas and timelines made by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.device_levels import DeviceLevels
from lightning_rotor.pipeline.pipeline_schedule import orders
from lightning_rotor.pipeline.pipeline_simulator import simulate_pipeline
from lightning_rotor.pipeline.stage_loads import MicroBatchLoad, PipelineStageLoad, seconds_of
from lightning_rotor.pipeline.step_times import StepSimulator
from tests.pipeline_reference import slow_step_seconds


def stage(forward, backward, *, again=0.0, travel=(0.0, 0.0), **sizes):
    static = {name: sizes.pop(name) for name in ("static_bytes", "gradient_bytes") if name in sizes}
    load = MicroBatchLoad(forward, backward, again, **sizes)
    return PipelineStageLoad(load, send_forward_seconds=travel[0], send_backward_seconds=travel[1], **static)


def seconds_with(order, loads, *, micro_batches):
    return StepSimulator(order, stages=len(loads), micro_batches=micro_batches).step_seconds(loads)


def times(simulation, device):
    return [(str(each.action), each.start_seconds, each.end_seconds) for each in simulation.events[device]]


def test_two_stages_under_1f1b():
    simulation = simulate_pipeline(orders("1f1b", 2, micro_batches=3), [stage(1, 2), stage(1, 2)], micro_batches=3)
    assert times(simulation, 0) == [
        ("0F0", 0, 1),
        ("0F1", 1, 2),
        ("0B0", 4, 6),
        ("0F2", 6, 7),
        ("0B1", 7, 9),
        ("0B2", 10, 12),
    ]
    assert times(simulation, 1) == [
        ("1F0", 1, 2),
        ("1B0", 2, 4),
        ("1F1", 4, 5),
        ("1B1", 5, 7),
        ("1F2", 7, 8),
        ("1B2", 8, 10),
    ]
    assert simulation.seconds == 12
    assert simulation.bubble == pytest.approx(0.25)


def test_a_message_takes_its_time_in_both_directions_and_the_sender_goes_on():
    stages = [stage(1, 1, travel=(10, 0)), stage(1, 1, travel=(0, 5))]
    simulation = simulate_pipeline(orders("gpipe", 2, micro_batches=2), stages, micro_batches=2)
    assert times(simulation, 0) == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 28, 29), ("0B1", 33, 34)]
    # The second message waits for the first one: they leave at 1 and 2 and arrive at 11 and 21.
    assert times(simulation, 1) == [("1F0", 11, 12), ("1F1", 21, 22), ("1B0", 22, 23), ("1B1", 23, 24)]


def test_stages_of_one_device_pass_tensors_on_for_nothing():
    stages = [stage(1, 1, travel=(10, 10)), stage(1, 1, travel=(10, 10))]
    order = orders("interleaved", 1, micro_batches=2, stages_per_device=2)
    assert seconds_with(order, stages, micro_batches=2) == 8


@pytest.mark.parametrize("seed", range(40))
def test_gpipe_takes_what_the_formula_of_a_flow_shop_says(seed):
    rng = random.Random(seed)
    devices, m = rng.randint(1, 6), rng.randint(1, 12)
    forward, backward = ([rng.randint(1, 20) for _ in range(devices)] for _ in range(2))
    travel = [rng.choice((0, rng.randint(1, 30))) for _ in range(devices - 1)]
    stages = [
        stage(f, b, travel=(behind, before))
        for f, b, behind, before in zip(forward, backward, [*travel, 0], [0, *travel], strict=True)
    ]
    expected = sum(forward) + sum(backward) + 2 * sum(travel)
    expected += (m - 1) * (max(forward + travel) + max(backward + travel))
    assert seconds_with(orders("gpipe", devices, micro_batches=m), stages, micro_batches=m) == expected


@pytest.mark.parametrize("m", [4, 5, 9, 32])
def test_equal_stages_under_1f1b_reach_the_ideal(m):
    seconds = seconds_with(orders("1f1b", 4, micro_batches=m), [stage(1, 2)] * 4, micro_batches=m)
    assert seconds == 3 * (m + 4 - 1)


def test_unequal_stages_under_1f1b_follow_no_simple_formula():
    """(m - 1) times the slowest stage and the sum of all: too much if the first stage is slow, too little for others."""
    faster = [stage(10, 10), stage(1, 1)]
    assert seconds_with(orders("1f1b", 2, micro_batches=4), faster, micro_batches=4) == 80 < 22 + 3 * 20
    rng, larger = random.Random(0), 0.0
    for _ in range(500):
        loads = [stage(rng.randint(1, 20), rng.randint(1, 40)) for _ in range(rng.randint(2, 6))]
        m = rng.randint(1, 16)
        each = [load.micro_batch.forward_seconds + load.micro_batch.backward_seconds for load in loads]
        simulated = seconds_with(orders("1f1b", len(loads), micro_batches=m), loads, micro_batches=m)
        larger = max(larger, simulated / (sum(each) + (m - 1) * max(each)))
    assert larger > 1


def test_interleaving_makes_the_bubble_smaller():
    m, devices = 8, 4
    plain = simulate_pipeline(orders("1f1b", devices, micro_batches=m), [stage(2, 4)] * devices, micro_batches=m)
    order = orders("interleaved", devices, micro_batches=m, stages_per_device=2)
    halves = simulate_pipeline(order, [stage(1, 2)] * 2 * devices, micro_batches=m)
    assert plain.bubble == pytest.approx(3 / 11)
    assert halves.bubble == pytest.approx(1.5 / 9.5)


def test_memory_is_that_of_micro_batches_in_flight_and_the_running_one():
    load = stage(
        1,
        2,
        static_bytes=1000,
        gradient_bytes=100,
        held_bytes=10,
        forward_peak_bytes=13,
        backward_peak_bytes=17,
        first_backward_peak_bytes=19,
    )
    simulation = simulate_pipeline(orders("1f1b", 2, micro_batches=4), [load, load], micro_batches=4)
    first = [(str(each.action), each.peak_bytes, each.after_bytes) for each in simulation.events[0]]
    assert first == [
        ("0F0", 1013, 1010),
        ("0F1", 1023, 1020),
        ("0B0", 1110, 1110),  # its own peak is 1010 + 19, and the gradients have come to stay
        ("0F2", 1123, 1120),
        ("0B1", 1127, 1110),
        ("0F3", 1123, 1120),
        ("0B2", 1127, 1110),
        ("0B3", 1117, 1100),
    ]
    assert simulation.peak_bytes == (1127, 1117)
    for device, order in enumerate(orders("1f1b", 2, micro_batches=4)):
        memory = DeviceLevels(order, micro_batches=4)
        assert memory.peak_bytes([load, load]) == simulation.peak_bytes[device]


@pytest.mark.parametrize("m", [2, 8, 16])
def test_1f1b_holds_fewer_micro_batches_than_gpipe(m):
    load = stage(1, 2, held_bytes=10, forward_peak_bytes=10, backward_peak_bytes=10)
    peaks = {
        schedule: simulate_pipeline(orders(schedule, 4, micro_batches=m), [load] * 4, micro_batches=m).peak_bytes
        for schedule in ("gpipe", "1f1b")
    }
    assert peaks["gpipe"] == (10 * m,) * 4
    assert peaks["1f1b"] == tuple(10 * min(m, 4 - device) for device in range(4))


def test_the_last_micro_batch_may_be_another():
    usual, last = MicroBatchLoad(1, 3, 1, held_bytes=1), MicroBatchLoad(1, 2, held_bytes=7)
    simulation = simulate_pipeline(
        orders("gpipe", 1, micro_batches=3), [PipelineStageLoad(usual, last)], micro_batches=3
    )
    assert simulation.seconds == 3 + 3 + 3 + 2
    assert sum(each.recompute_seconds for each in simulation.events[0]) == 2
    assert [each.after_bytes for each in simulation.events[0]] == [1, 2, 9, 8, 7, 0]


def test_an_order_that_never_ends_is_refused():
    backward_first = orders("gpipe", 2, micro_batches=1)[:, ::-1].copy()
    backward_first[1] = backward_first[1, ::-1]
    with pytest.raises(PipelineError, match=r"for ever \(device 0 for 0B0, device 1 for 1F0\)"):
        seconds_with(backward_first, [stage(1, 1)] * 2, micro_batches=1)


def test_every_stage_needs_a_load():
    with pytest.raises(PipelineError, match="none of the 1 pipeline stages"):
        seconds_with(orders("1f1b", 2, micro_batches=2), [stage(1, 1)], micro_batches=2)


@pytest.mark.parametrize("seed", range(24))
def test_all_devices_and_partitions_at_once_take_as_long_as_one_after_the_other(seed):
    rng = random.Random(seed)
    schedule = ("gpipe", "1f1b", "interleaved")[seed % 3]
    devices, rounds = rng.randint(1, 7), 2 if schedule == "interleaved" else 1
    m = devices * rng.randint(1, 3)
    order = orders(schedule, devices, micro_batches=m, stages_per_device=rounds)
    stages = devices * rounds
    partitions = [[random_stage(rng) for _ in range(stages)] for _ in range(3)]
    simulator = StepSimulator(order, stages=stages, micro_batches=m)
    one_by_one = [slow_step_seconds(order, loads, m) for loads in partitions]
    assert [simulator.step_seconds(loads) for loads in partitions] == one_by_one
    every = np.array([[seconds_of(load) for load in loads] for loads in partitions])
    assert simulator.simulated(every).tolist() == one_by_one


def random_stage(rng):
    usual, last = (MicroBatchLoad(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(2))
    return PipelineStageLoad(
        usual, rng.choice((None, last)), send_forward_seconds=rng.choice((0, 5)), send_backward_seconds=3
    )
