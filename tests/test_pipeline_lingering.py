"""What stays behind when it has been sent; the engine's own test compares it with real processes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lightning_rotor.pipeline.device_levels import DeviceLevels
from lightning_rotor.pipeline.pipeline_schedule import actions, lingering, orders
from lightning_rotor.pipeline.pipeline_simulator import simulate_pipeline
from lightning_rotor.pipeline.stage_loads import MicroBatchLoad, PipelineStageLoad
from tests.pipeline_reference import slow_levels


def lasting(schedule, device, devices, m, outputs_linger=True):
    """What outlives its action or its micro-batch, and until when."""
    order = orders(schedule, devices, micro_batches=m)[device]
    until = lingering(schedule, order, stages=devices, outputs_linger=outputs_linger).tolist()
    order = actions(order)
    own = [order.index((device, "backward", each.micro_batch)) for each in order]
    return {str(order[place]): str(order[last]) for place, last in enumerate(until) if last > own[place]}


def test_1f1b_keeps_one_output_and_then_gradients_one_by_one():
    assert lasting("1f1b", 1, 4, 5) == {"1F1": "1B2", "1B2": "1B3", "1B3": "1B4"}
    # The first stage keeps gradients of the input, the last one outputs of the whole, to the end.
    assert lasting("1f1b", 0, 2, 4) == {"0F0": "0B2"} | {f"0B{number}": "0B3" for number in range(3)}
    assert lasting("1f1b", 1, 2, 3) == {"1F0": "1B2", "1F1": "1B2"}


def test_gpipe_keeps_everything_to_the_end():
    assert lasting("gpipe", 1, 3, 2) == {"1F0": "1B1", "1B0": "1B1"}


def test_newer_loops_let_go_of_outputs():
    assert lasting("1f1b", 1, 4, 5, outputs_linger=False) == {"1B2": "1B3", "1B3": "1B4"}
    assert lasting("gpipe", 1, 3, 2, outputs_linger=False) == {"1B0": "1B1"}
    # Every process is given the outputs of the whole.
    assert lasting("gpipe", 2, 3, 2, outputs_linger=False) == {"2F0": "2B1", "2B0": "2B1"}


def test_what_lingers_counts_until_it_goes():
    micro_batch = MicroBatchLoad(1, 1, held_bytes=100, forward_peak_bytes=100, backward_peak_bytes=100)
    stage = PipelineStageLoad(micro_batch, output_bytes=30, input_gradient_bytes=7)
    order = orders("1f1b", 3, micro_batches=4)
    until = [lingering("1f1b", each, stages=3, outputs_linger=True) for each in order]
    found = simulate_pipeline(order, [stage] * 3, micro_batches=4, lingering=until, results_bytes=1000)
    # F0 F1 B0 F2 B1 F3 B2 B3: output of 0 from B0 to B2, then the gradient of 2.
    assert [each.after_bytes for each in found.events[1]] == [100, 200, 130, 230, 130, 230, 107, 0]
    assert found.peak_bytes == (1000, 1000, 1000)


@pytest.mark.parametrize("seed", range(40))
def test_a_device_holds_what_its_actions_add_up_to(seed):
    rng = random.Random(seed)
    schedule, devices = rng.choice(("gpipe", "1f1b", "interleaved")), rng.randint(1, 4)
    rounds = 2 if schedule == "interleaved" else 1
    m = devices * rng.randint(1, 3)
    device = rng.randrange(devices)
    order = orders(schedule, devices, micro_batches=m, stages_per_device=rounds)[device]
    until = rng.choice(
        (None, *(lingering(schedule, order, stages=devices * rounds, outputs_linger=each) for each in (True, False)))
    )
    memory = DeviceLevels(order, until, micro_batches=m)
    for _ in range(5):
        loads = {stage: random_load(rng) for stage in memory.stages}
        expected = slow_levels(order, loads, m, until)
        assert list(zip(*memory.levels(loads), strict=True)) == expected
        assert memory.peak_bytes(loads) == max(peak for peak, _ in expected)


def random_load(rng):
    usual, last = (MicroBatchLoad(1, 1, 0, *(rng.randint(0, 99) for _ in range(4))) for _ in range(2))
    load = PipelineStageLoad(usual, rng.choice((None, last)), rng.randint(0, 9), rng.randint(0, 99))
    return replace(load, output_bytes=rng.randint(0, 99), input_gradient_bytes=rng.randint(0, 99))
