"""Cuts into pipeline stages, against every way to cut, judged by the pipeline's simulator."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from dataclasses import replace

import pytest

from lightning_rotor.chain import Skip
from lightning_rotor.errors import PipelineError, RotorError
from lightning_rotor.pipeline.balances import balance_by_time
from lightning_rotor.pipeline.partition import Link, PartitionError, PipelineDevice, Problem, partition
from lightning_rotor.pipeline.partition.cuts import runs_of
from lightning_rotor.pipeline.partition.run_costs import Costs
from lightning_rotor.pipeline.partition.sub_chains import boundary_bytes, sub_chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from tests.grids import few
from tests.pipeline_reference import slow_step_seconds
from tests.strategies import KINDS, random_chain

MODES = ("rotor", "always", "except_last", "never")


def kept_bytes(chain):
    return sum(stage.output_bytes + stage.keep.saved_bytes for stage in chain)


def random_problem(rng, *, schedule, recompute="rotor", most_stages=8):
    n = rng.randint(2, most_stages)
    chain = random_chain(rng, n, rng.choice(KINDS))
    micro_batches, count = rng.randint(1, 8), rng.randint(1, min(4, n))
    memory = int(kept_bytes(chain) * rng.uniform(0.3, 2) * max(1, micro_batches / 2))
    devices = tuple(
        PipelineDevice(rng.choice((None, int(memory * rng.uniform(0.7, 1.3)))), rng.choice((0.5, 1, 1, 2)))
        for _ in range(count)
    )
    return Problem(
        chain,
        devices,
        micro_batches,
        schedule=schedule,
        recompute=recompute,
        state_bytes=tuple(rng.randint(0, 50) for _ in chain),
        link=rng.choice((Link(), Link(1e5, 1e-5), Link(1e6))),
    )


def solved(problem, **more):
    names = ("schedule", "stages_per_device", "recompute", "state_bytes", "link")
    arguments = {name: getattr(problem, name) for name in names}
    return partition(problem.chain, problem.devices, micro_batches=problem.micro_batches, **arguments, **more)


def best_of_all(problem):
    """Seconds of the fastest step over all cuts."""
    costs, n, best = Costs(problem), len(problem.chain), math.inf
    for middle in itertools.combinations(range(1, n), problem.stages - 1):
        choices = costs.together(runs_of((0, *middle), n))
        if all(choices):
            loads = [choice.load for choice in choices]
            best = min(best, slow_step_seconds(problem.order, loads, problem.micro_batches))
    return best


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", few(range(8), 0, 1, 2))
def test_no_other_cuts_are_faster(seed, schedule, recompute):
    rng = random.Random(f"{seed} {schedule} {recompute}")
    problem = random_problem(rng, schedule=schedule, recompute=recompute)
    best = best_of_all(problem)
    if best == math.inf:
        with pytest.raises(PartitionError, match="expected at least"):
            solved(problem)
        return
    found = solved(problem)
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.bound_seconds <= best * (1 + 1e-9)
    assert found.is_optimal
    for peak, device in zip(found.simulation.peak_bytes, problem.devices, strict=True):
        assert device.memory_bytes is None or peak <= device.memory_bytes


@pytest.mark.parametrize("seed", few(range(6), 0, 1, 2))
def test_interleaved_stages_fit_their_devices_together_and_the_bound_holds(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, schedule="1f1b", most_stages=10)
    count = max(1, min(3, len(problem.chain) // 2))
    devices = tuple(PipelineDevice(int(6 * kept_bytes(problem.chain))) for _ in range(count))
    problem = replace(problem, devices=devices, micro_batches=2 * count, schedule="interleaved", stages_per_device=2)
    found = solved(problem)
    assert found.bound_seconds <= found.seconds
    assert len(found.balance) == 2 * count
    for peak, device in zip(found.simulation.peak_bytes, devices, strict=True):
        assert peak <= device.memory_bytes
    # With memory to spare, no cuts of the few that there are would be faster.
    free = replace(problem, devices=(PipelineDevice(),) * count)
    if math.comb(len(problem.chain) - 1, free.stages - 1) <= 400:
        assert solved(free).seconds == pytest.approx(best_of_all(free))


def test_interleaved_stages_get_more_memory_than_the_sum_of_their_worst_moments():
    chain = random_chain(random.Random(1), 16, "cnn")
    memory = int(0.8 * kept_bytes(chain))
    found = partition(
        chain,
        2,
        micro_batches=4,
        memory_bytes=memory,
        schedule="interleaved",
        stages_per_device=2,
    )
    worst = [sum(choice.bytes for choice in found.choices[device::2]) for device in range(2)]
    assert max(found.simulation.peak_bytes) <= memory < max(worst)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_large_chain_is_cut_optimally(schedule):
    chain = random_chain(random.Random(4), 40, "cnn")
    found = partition(
        chain,
        4,
        micro_batches=8,
        memory_bytes=int((1.2 if schedule == "gpipe" else 0.6) * kept_bytes(chain)),
        schedule=schedule,
    )
    assert found.gap < 0.01
    assert any(each.recompute_seconds > 0 for events in found.simulation.events for each in events)


def test_many_unlike_stages_are_cut_with_a_small_gap():
    chain, devices, micro_batches = random_chain(random.Random(1), 76, "heterogeneous", grain=1024), 64, 128
    by_time = balance_by_time(chain, partitions=devices)
    free = partition(chain, devices, micro_batches=micro_batches, balance=by_time)
    costs = Costs(free.problem)
    memory = max(costs.least_bytes(stage, each.first, each.last) for stage, each in enumerate(free.choices))
    found = partition(chain, devices, micro_batches=micro_batches, memory_bytes=memory)
    tight = partition(chain, devices, micro_batches=micro_batches, memory_bytes=memory, balance=by_time)
    assert found.seconds <= tight.seconds
    assert found.gap < 0.01


def test_short_runs_that_do_not_fit_stay_known_when_longer_ones_are_looked_at():
    chain = random_chain(random.Random(0), 40, "transformer")
    problem = Problem(chain, (PipelineDevice(),) * 8, 8, state_bytes=(10**6,) * 40)
    costs = Costs(problem)
    small = tuple(PipelineDevice(costs.least_bytes(stage, stage, stage)) for stage in range(7))
    found = solved(replace(problem, devices=(*small, PipelineDevice())))
    assert found.balance == (*(1,) * 7, 33)


def test_a_slow_device_gets_less_and_one_without_memory_recomputes():
    chain = random_chain(random.Random(5), 24, "transformer")
    equal = partition(chain, 3, micro_batches=6)
    devices = [PipelineDevice(speed=1), PipelineDevice(speed=0.5), PipelineDevice(speed=1)]
    slow = partition(chain, devices, micro_batches=6)
    assert slow.balance[1] < equal.balance[1]
    peaks = equal.simulation.peak_bytes
    small = [PipelineDevice(peaks[0] * 8 // 10), PipelineDevice(), PipelineDevice()]
    tight = partition(chain, small, micro_batches=6)
    assert tight.simulation.peak_bytes[0] <= small[0].memory_bytes
    assert tight.seconds >= equal.seconds
    assert tight.balance != equal.balance or tight.choices[0].load.micro_batch.recompute_seconds > 0


def test_rotor_is_as_fast_as_the_other_modes_where_they_fit():
    chain = random_chain(random.Random(8), 20, "cnn")
    always = partition(chain, 2, micro_batches=4, recompute="always")
    never = partition(chain, 2, micro_batches=4, recompute="never")
    last = partition(chain, 2, micro_batches=4, recompute="except_last")
    assert never.seconds < last.seconds < always.seconds
    memory = max(always.simulation.peak_bytes)
    assert memory < max(never.simulation.peak_bytes)
    assert partition(chain, 2, micro_batches=4, memory_bytes=memory).seconds <= always.seconds
    roomy = partition(chain, 2, micro_batches=4, memory_bytes=max(never.simulation.peak_bytes) * 2)
    assert roomy.seconds == pytest.approx(never.seconds)


def test_except_last_recomputes_every_micro_batch_but_one():
    chain = random_chain(random.Random(8), 8, "cnn")
    found = partition(chain, 2, micro_batches=4, recompute="except_last")
    for events in found.simulation.events:
        again = {each.action.micro_batch for each in events if each.recompute_seconds > 0}
        assert again == {0, 1, 2}
    assert str(found.plan(0, last_micro_batch=True).schedule) == str(Schedule.keep_all(found.balance[0]))


def test_slow_links_move_the_cuts_to_small_boundaries():
    chain = random_chain(random.Random(2), 12, "heterogeneous")
    fast = partition(chain, 3, micro_batches=4)
    slow = partition(chain, 3, micro_batches=4, link=Link(bytes_per_second=1e4))

    def sent(found):
        return sum(boundary_bytes(chain, choice.first) for choice in found.choices[1:])

    assert sent(slow) < sent(fast)


def test_a_balance_by_hand_is_taken_as_it_is():
    chain = random_chain(random.Random(2), 9, "cnn")
    found = partition(chain, 3, micro_batches=4, balance=[3, 4, 2])
    assert found.balance == (3, 4, 2)
    assert found.seconds >= partition(chain, 3, micro_batches=4).seconds
    assert [choice.first for choice in found.choices] == [0, 3, 7]


def test_stages_that_are_alike_are_planned_once_and_keep_their_names():
    block = random_chain(random.Random(3), 3, "cnn").stages
    stages = [replace(stage, name=f"{number}.{stage.name}") for number in range(8) for stage in block]
    chain = replace(random_chain(random.Random(3), 3, "cnn"), stages=tuple(stages))
    found = partition(chain, 4, micro_batches=8, memory_bytes=int(0.8 * kept_bytes(chain)))
    names = [name for stage in range(4) for name in found.plan(stage).chain.names if name != "hand over"]
    assert names == list(chain.names)


def test_weights_gradients_and_optimizer_state_count():
    chain = random_chain(random.Random(5), 8, "cnn")
    without = partition(chain, 2, micro_batches=4)
    state = [1000 * number for number in range(8)]
    with_state = partition(chain, 2, micro_batches=4, state_bytes=state, balance=without.balance)
    cut = without.balance[0]
    for device, expected in enumerate((sum(state[:cut]), sum(state[cut:]))):
        assert with_state.simulation.peak_bytes[device] == without.simulation.peak_bytes[device] + expected


@pytest.mark.parametrize("m", [1, 4])
def test_buffers_are_those_that_torch_allocates(m):
    chain = random_chain(random.Random(5), 8, "cnn")
    found = partition(chain, 2, micro_batches=m, balance=[4, 4])
    assert [each.load.static_bytes for each in found.choices] == [m * boundary_bytes(chain, 4)] * 2


def test_one_device_is_a_pipeline_too():
    chain = random_chain(random.Random(5), 8, "cnn")
    found = partition(chain, 1, micro_batches=3)
    assert found.seconds == pytest.approx(3 * chain.step_seconds)
    assert found.simulation.bubble == pytest.approx(0)


# -------------------------------------------------------------------- parts of a chain with skips


def test_a_part_holds_skips_as_its_caller_would():
    chain = random_chain(random.Random(9), 4, "heterogeneous")
    chain = replace(chain, skips=(Skip(0, (2, 3), 10, (10, 10)), Skip(-1, (3,), 0, (0,))))
    front, back = sub_chain(chain, 0, 1), sub_chain(chain, 2, 3)
    assert front.skips == (Skip(0, (1,), 10, (0,), in_output=True),)
    assert back.skips == (Skip(-1, (0, 1), 0, (10, 10)), Skip(-1, (1,), 0, (0,)))
    assert [boundary_bytes(chain, cut) for cut in range(5)] == [
        0,
        chain.stages[0].output_bytes + 10,
        chain.stages[1].output_bytes + 10,
        chain.stages[2].output_bytes + 10,
        0,
    ]
    # Made by the last stage of a part, it is simply more output.
    assert sub_chain(chain, 0, 0).stages[0].output_bytes == chain.stages[0].output_bytes + 10
    assert sub_chain(chain, 0, 0).skips == ()
    # One that passes by is sent, and in no part.
    assert sub_chain(chain, 1, 1).skips == ()


@pytest.mark.parametrize("seed", few(range(30), *range(10)))
def test_parts_of_any_chain_can_be_simulated(seed):
    rng = random.Random(seed)
    chain = random_chain(rng, 7, KINDS[seed % len(KINDS)])
    skips = [
        Skip(born, uses, rng.randint(1, 9), tuple(rng.randint(0, 9) for _ in uses))
        for born, uses in ((0, (2, 5)), (1, (6,)), (2, (4,)), (3, (5, 6)))
    ]
    chain = replace(chain, skips=tuple(skips))
    first = rng.randint(0, 6)
    last = rng.randint(first, 6)
    part = sub_chain(chain, first, last)
    whole = simulate(chain, Schedule.keep_all(7))
    alone = simulate(part, Schedule.keep_all(len(part)))
    assert len(part) == last + 1 - first
    assert alone.seconds == pytest.approx(
        sum(stage.keep.forward_seconds + stage.keep.backward_seconds for stage in part)
    )
    assert alone.peak_bytes <= whole.peak_bytes + boundary_bytes(chain, first) + 2 * boundary_bytes(chain, last + 1)


def test_a_chain_with_skips_is_cut():
    chain = random_chain(random.Random(11), 8, "cnn")
    plain = partition(chain, 3, micro_batches=4, link=Link(1e4))
    cut = plain.choices[1].first
    heavy = replace(chain, skips=(Skip(cut - 1, (cut + 1,), 10_000, (10_000,)),) if cut + 1 < 8 else ())
    found = partition(heavy, 3, micro_batches=4, link=Link(1e4))
    assert heavy.skips
    assert found.seconds > plain.seconds
    assert cut not in [choice.first for choice in found.choices]  # sending it would take a second each way


# -------------------------------------------------------------------- refusals


def chain_of(n):
    return random_chain(random.Random(0), n, "cnn")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"devices": 9},
            "9 devices need 9 pipeline stages, but the chain has only 8 stages to share out: use fewer devices",
        ),
        (
            {"devices": 3, "schedule": "interleaved", "stages_per_device": 3, "micro_batches": 3},
            "3 devices with 3 stages each need 9 pipeline stages, but the chain has only 8",
        ),
        (
            {"balance": [3, 3]},
            r"balance=\[3, 3\] does not share out the model's 8 stages: .* such as balance=\[4, 4\]. Its stages are stage0, .*",
        ),
        (
            {"balance": [3, 6]},
            r"balance=\[3, 6\] does not share out the model's 8 stages: .* such as balance=\[4, 4\]",
        ),
        ({"balance": [8]}, r"balance=\[8\] does .*: expected 2 positive integers .* such as balance=\[4, 4\]"),
        ({"balance": [8, 0]}, r"balance=\[8, 0\] does .*: expected 2 positive integers that add up to 8, .*=\[4, 4\]"),
        ({"balance": [9, -1]}, r"balance=\[9, -1\] does .*: expected 2 positive integers"),
        ({"balance": [4.0, 4]}, r"balance=\[4.0, 4\] does .*: expected 2 positive integers"),
        ({"balance": "fast"}, r"balance is 'fast': expected \"auto\" or numbers such as \[4, 4\]"),
        (
            {"recompute": "sometimes"},
            "recompute is 'sometimes': expected one of 'rotor', 'always', 'except_last', 'never'",
        ),
        ({"schedule": "zb"}, "schedule is 'zb'"),
        ({"state_bytes": [1, 2]}, "state_bytes has 2 entries: expected one for each of the chain's 8 stages"),
        ({"devices": [PipelineDevice()], "memory_bytes": 5}, "memory_bytes goes with a number of devices"),
    ],
)
def test_arguments_without_sense_are_refused(arguments, text):
    arguments = {"devices": 2, "micro_batches": 4, **arguments}
    with pytest.raises(PipelineError, match=text):
        partition(chain_of(8), arguments.pop("devices"), **arguments)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PipelineDevice(-1), "memory_bytes is -1"),
        (lambda: PipelineDevice(speed=0), "speed is 0"),
        (lambda: Link(bytes_per_second=0), "expected a positive bandwidth"),
        (lambda: Link(latency_seconds=-1), "a latency that is not negative"),
    ],
)
def test_impossible_devices_and_links_are_refused(make, text):
    with pytest.raises(PipelineError, match=text):
        make()


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_too_little_memory_says_what_would_do(seed, recompute):
    chain = random_chain(random.Random(seed), 7, "cnn")
    arguments = {"micro_batches": 4, "recompute": recompute, "state_bytes": [20] * 7}
    with pytest.raises(PartitionError, match=r"no partition fits 3 devices: .* expected at least") as refused:
        partition(chain, 3, memory_bytes=30, **arguments)
    least = refused.value.minimum_bytes
    assert partition(chain, 3, memory_bytes=least, **arguments).seconds > 0
    with pytest.raises(PartitionError):
        partition(chain, 3, memory_bytes=int(0.998 * least) - 1, **arguments)


def test_a_balance_that_does_not_fit_is_named_and_the_way_out():
    with pytest.raises(
        PartitionError, match=r'balance=\[4, 4\] does not fit 2 devices: .* or balance="auto"'
    ) as refused:
        partition(chain_of(8), 2, micro_batches=4, balance=[4, 4], memory_bytes=1)
    assert partition(chain_of(8), 2, micro_batches=4, balance=[4, 4], memory_bytes=refused.value.minimum_bytes)


def test_without_rotor_its_use_is_proposed():
    with pytest.raises(PartitionError, match='or recompute="rotor"'):
        partition(chain_of(8), 2, micro_batches=4, recompute="never", memory_bytes=1)


def test_the_error_travels_between_processes():
    with pytest.raises(PartitionError, match="fits") as refused:
        partition(chain_of(8), 2, micro_batches=4, memory_bytes=1)
    again = pickle.loads(pickle.dumps(refused.value))
    assert (str(again), again.minimum_bytes, again.device) == (
        str(refused.value),
        refused.value.minimum_bytes,
        refused.value.device,
    )
    assert isinstance(again, RotorError)
    assert isinstance(again, ValueError)


def test_it_prints_as_a_table():
    text = str(partition(chain_of(8), 2, micro_batches=4))
    assert "on 2 devices, 1f1b with 4 micro-batches" in text
    assert "optimal" in text
    assert "stage0 … stage" in text
