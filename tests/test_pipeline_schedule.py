"""Orders of work in a pipeline: those of torch, action by action."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _ComputationType

from lightning_rotor.pipeline import pipeline_schedule
from lightning_rotor.pipeline.pipeline_schedule import (
    Action,
    PipelineError,
    actions,
    lingering,
    most_in_flight,
    orders,
)
from lightning_rotor.pipeline.runner import _torch_schedule

WORK = {_ComputationType.FORWARD: "forward", _ComputationType.FULL_BACKWARD: "backward"}
SIZES = [(devices, micro_batches) for devices in (1, 2, 3, 4, 7) for micro_batches in (1, 2, 3, 4, 7, 8, 12)]


def plain(torchs):
    """torch's actions without waiting and without the reduction of gradients."""
    return tuple(
        Action(each.stage_index, WORK[each.computation_type], each.microbatch_index)
        for each in torchs
        if each is not None and each.computation_type in WORK
    )


class Recorder:
    """Stands for a ``PipelineStage`` that has nothing to compute, send or receive."""

    def __init__(self, stage_index):
        self.stage_index = stage_index
        self.actions = []

    def forward_one_chunk(self, micro_batch, *_, **__):
        self.actions.append(Action(self.stage_index, "forward", micro_batch))

    def backward_one_chunk(self, micro_batch, *_, **__):
        self.actions.append(Action(self.stage_index, "backward", micro_batch))

    def get_fwd_recv_ops(self, _):
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, _):
        pass


def executed(schedule, devices, micro_batches):
    """What torch's schedule calls on each rank. (What it prints differs: Schedule1F1B misnumbers the last rank's forwards there.)"""
    orders = []
    for rank in range(devices):
        stage = Recorder(rank)
        nothing = [()] * micro_batches
        torchs = SimpleNamespace(
            _stage=stage,
            _num_stages=devices,
            _n_microbatches=micro_batches,
            scale_grads=False,
            _check_inputs=lambda *_, nothing=nothing: (nothing, nothing),
            _initialize_stage=lambda *_: None,
            _maybe_compute_loss=lambda *_: None,
            _maybe_get_loss=lambda *_: None,
            _update_losses=lambda *_: None,
        )
        schedule._step_microbatches(torchs)
        orders.append(tuple(stage.actions))
    return tuple(orders)


@pytest.mark.parametrize(("devices", "micro_batches"), SIZES)
def test_gpipe_is_what_torch_runs(devices, micro_batches):
    assert tuple(map(actions, orders("gpipe", devices, micro_batches=micro_batches))) == executed(
        ScheduleGPipe, devices, micro_batches
    )


# torch refuses fewer micro-batches than stages, though its loop runs them.
@pytest.mark.parametrize(("devices", "micro_batches"), SIZES)
def test_1f1b_is_what_torch_runs(devices, micro_batches):
    assert tuple(map(actions, orders("1f1b", devices, micro_batches=micro_batches))) == executed(
        Schedule1F1B, devices, micro_batches
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize(("devices", "micro_batches"), SIZES)
def test_interleaved_is_what_torch_runs(devices, micro_batches, stages):
    rounds = max(1, micro_batches // devices)
    if micro_batches % rounds:
        with pytest.raises(
            PipelineError, match=rf"{rounds} rounds of micro-batches, and {micro_batches} do not divide"
        ):
            orders("interleaved", devices, micro_batches=micro_batches, stages_per_device=stages)
        return
    schedule = SimpleNamespace(
        n_local_stages=stages,
        microbatches_per_round=micro_batches // rounds,
        pp_group_size=devices,
        _n_microbatches=micro_batches,
    )
    ours = tuple(map(actions, orders("interleaved", devices, micro_batches=micro_batches, stages_per_device=stages)))
    torchs = [ScheduleInterleaved1F1B._calculate_single_rank_operations(schedule, rank) for rank in range(devices)]
    assert ours == tuple(map(plain, torchs))


def test_the_number_of_micro_batches_that_is_offered_instead_works():
    with pytest.raises(PipelineError, match="use micro_batches=8 or micro_batches=12"):
        orders("interleaved", 4, micro_batches=11)
    for micro_batches in (8, 12):
        orders("interleaved", 4, micro_batches=micro_batches)


@pytest.mark.parametrize(("devices", "micro_batches"), SIZES)
def test_1f1b_holds_as_many_micro_batches_as_there_are_stages_from_there_on(devices, micro_batches):
    for stage, order in enumerate(orders("1f1b", devices, micro_batches=micro_batches)):
        assert most_in_flight(order) == {stage: min(micro_batches, devices - stage)}


def test_gpipe_holds_every_micro_batch():
    assert [most_in_flight(order) for order in orders("gpipe", 2, micro_batches=5)] == [{0: 5}, {1: 5}]


def test_interleaved_holds_more_of_the_first_stages():
    found = orders("interleaved", 2, micro_batches=4, stages_per_device=2)
    assert [most_in_flight(order) for order in found] == [{0: 4, 2: 2}, {1: 3, 3: 1}]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_every_action_is_there_once_and_backwards_follow_forwards(schedule):
    for order in orders(schedule, 3, micro_batches=6, stages_per_device=2 if schedule == "interleaved" else 1):
        order = actions(order)
        assert len(set(order)) == len(order)
        for place, (stage, work, micro_batch) in enumerate(order):
            if work == "backward":
                assert Action(stage, "forward", micro_batch) in order[:place]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"schedule": "zb"}, "schedule is 'zb': expected one of 'gpipe', '1f1b', 'interleaved'"),
        ({"schedule": "InterleavedZeroBubble"}, "expected one of 'gpipe', '1f1b', 'interleaved'"),
        ({"devices": 0}, "devices is 0: expected a positive integer"),
        ({"micro_batches": 2.0}, "micro_batches is 2.0: expected a positive integer"),
        ({"stages_per_device": 2}, 'use schedule="interleaved"'),
    ],
)
def test_what_cannot_run_is_refused(arguments, text):
    arguments = {"schedule": "1f1b", "devices": 2, "micro_batches": 4, **arguments}
    with pytest.raises(PipelineError, match=text):
        orders(arguments.pop("schedule"), arguments.pop("devices"), **arguments)


def test_a_schedule_without_an_order_or_a_class_of_torch_is_refused_and_does_not_run_as_gpipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline_schedule, "SCHEDULES", (*pipeline_schedule.SCHEDULES, "zb"))
    order = orders("gpipe", 2, micro_batches=4)[0]
    with pytest.raises(PipelineError, match="schedule is 'zb': expected one of"):
        orders("zb", 2, micro_batches=4)
    with pytest.raises(PipelineError, match="schedule is 'zb': expected one of"):
        lingering("zb", order, stages=2, outputs_linger=True)
    with pytest.raises(PipelineError, match="schedule is 'zb': expected one of"):
        _torch_schedule("zb", [SimpleNamespace(group_size=2)], 4, None)
