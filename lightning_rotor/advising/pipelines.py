"""Ways to train in which stages of the model are on different devices: pipelines, and copies of them.

Cuts, plans and bytes are ``pipeline.partition``'s, as ``RotorPipelineStrategy`` finds them on the devices. Copies add
up their gradients when their batches are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from lightning_rotor.advising.choice import Choice, StepSeconds
from lightning_rotor.advising.model_costs import StageTensors
from lightning_rotor.advising.python_lines import pipeline_lines
from lightning_rotor.advising.task import Task
from lightning_rotor.pipeline.partition import Partition, PartitionError, partition
from lightning_rotor.pipeline.pipeline_schedule import SCHEDULES, PipelineScheduleName
from lightning_rotor.planned.batch_sizes import AffineCosts
from lightning_rotor.private.torch_names import sent_outputs_linger

# Stages of a chain that is cut as it is. A longer one is cut between its units alone, or each plan takes a minute.
_FINE = 64
# Micro-batches for each device of a pipeline: more make the bubble smaller, and each of them slower.
_ROUNDS = (1, 2, 4, 8)


def pipelines(task: Task) -> list[Choice]:
    """The fastest number of micro-batches that fits, of each schedule over each number of devices."""
    choices = []
    for stages in _numbers_of_stages(task):
        for schedule in SCHEDULES:
            fastest = _fastest(task, stages, schedule)
            if fastest is not None:
                choices.append(fastest)
    return choices


def _fastest(task: Task, stages: int, schedule: PipelineScheduleName) -> Choice | None:
    fastest: Choice | None = None
    # Small micro-batches first: they are planned at once, and make the bubble small.
    for micro_batches in reversed(_micro_batches(task, stages)):
        choice = _choice(task, stages, schedule, micro_batches)
        # Fewer ones are larger, and take longer to plan: once they do not pay, still larger ones are not tried.
        if fastest is not None and (choice is None or choice.seconds.total > fastest.seconds.total):
            break
        fastest = choice or fastest
    return fastest


def _chain_and_tensors(task: Task) -> tuple[AffineCosts, StageTensors]:
    costs = task.costs
    # The strategy itself cuts more finely, so the way is at least as fast there.
    if len(costs.tensors.held_bytes) > _FINE and costs.sharding is not None:
        return costs.sharding.costs, costs.sharding.tensors
    return costs.costs, costs.tensors


def objection(task: Task) -> str:
    """The reason for which ``RotorPipelineStrategy`` refuses the model; empty if none is known."""
    if task.cluster.size == 1:
        return "there is one device"
    if not list(_numbers_of_stages(task)):
        return "no number of devices divides both the cluster and the batch, with a stage of the model for each"
    return ""


def _numbers_of_stages(task: Task) -> Iterator[int]:
    """Devices of a pipeline: divisors of all, for which the chain has stages, and the batch samples."""
    _, tensors = _chain_and_tensors(task)
    for stages in range(2, task.cluster.size + 1):
        samples = task.divided(task.cluster.size // stages)
        if task.cluster.size % stages == 0 and stages <= len(tensors.held_bytes) and samples:
            yield stages


def _micro_batches(task: Task, stages: int) -> list[int]:
    """Numbers of micro-batches that divide a copy's batch."""
    samples = task.divided(task.cluster.size // stages) or 0
    numbers = [rounds * stages for rounds in _ROUNDS if samples % (rounds * stages) == 0]
    if not numbers and samples > 1:
        # Too few samples for one of each device, so each sample is a micro-batch.
        numbers.append(samples)
    return numbers


def _choice(task: Task, stages: int, schedule: PipelineScheduleName, micro_batches: int) -> Choice | None:
    """A pipeline over so many devices, as often as there are devices for it; None if it does not fit."""
    costs = task.costs
    cluster = task.cluster
    copies = cluster.size // stages
    samples = task.divided(copies)
    assert samples is not None
    stages_per_device = 1
    if schedule == "interleaved":
        # With one, nothing would be interleaved.
        stages_per_device = 2
    of_sizes, tensors = _chain_and_tensors(task)
    if stages * stages_per_device > len(tensors.held_bytes):
        return None
    chain = of_sizes.at(samples // micro_batches)
    state_bytes = []
    for held, learning in zip(tensors.held_bytes, tensors.learning_bytes, strict=True):
        state_bytes.append(held + round(costs.state_scale * learning))
    shared = []
    for tensors_of_several in tensors.shared:
        optimizer_bytes = round(costs.state_scale * tensors_of_several.gradient_bytes)
        shared.append(replace(tensors_of_several, state_bytes=tensors_of_several.state_bytes + optimizer_bytes))
    # What is outside of the stages, and the whole batch, are on every device.
    around_bytes = tensors.outside_bytes + costs.resident_at(samples).batch_bytes
    # Then nothing is left for the stages, on any device.
    if around_bytes >= task.limit_bytes:
        return None
    try:
        cut = partition(
            chain,
            stages,
            micro_batches=micro_batches,
            memory_bytes=task.limit_bytes - around_bytes,
            schedule=schedule,
            stages_per_device=stages_per_device,
            state_bytes=state_bytes,
            shared=tuple(shared),
            link=cluster.between_neighbours(stages),
            outputs_linger=sent_outputs_linger(),
        )
    except PartitionError:
        return None
    held_by_device = _by_device(cut, state_bytes, [each.state_bytes for each in shared])
    learning_by_device = _by_device(cut, tensors.learning_bytes, [each.gradient_bytes for each in shared])
    # The simulator ends before the optimizers step, which may take more than any micro-batch did.
    final_bytes = 0
    for state, learning in zip(held_by_device, learning_by_device, strict=True):
        temporary = round(costs.temporary_scale * learning)
        final_bytes = max(final_bytes, state + learning + temporary)
    peak_bytes = around_bytes + max(*cut.simulation.peak_bytes, final_bytes)
    if peak_bytes > task.limit_bytes:
        return None
    # All devices wait for the one that has most to add up, and to step with.
    most_learning_bytes = max(learning_by_device)
    sums_seconds = cluster.sum_seconds(most_learning_bytes, copies, apart=stages)
    recomputed = 0
    for choice in cut.choices:
        recomputed += len(choice.plan.schedule.recomputed)
    return Choice(
        kind="pipeline",
        devices=cluster.size,
        copies=copies,
        stages=stages,
        schedule=schedule,
        micro_batches=micro_batches,
        batch_per_device=samples,
        peak_bytes=peak_bytes,
        seconds=_seconds(cut, sums_seconds, task.optimizer_seconds(most_learning_bytes)),
        recomputed=recomputed,
        chain_length=len(chain),
        lines=pipeline_lines(task, stages, schedule, micro_batches),
    )


def _seconds(cut: Partition, sums_seconds: float, optimizer_seconds: float) -> StepSeconds:
    """Seconds of a step: what devices compute on average, and the rest of it, in which they wait for one another."""
    busy_of_all = 0.0
    again_of_all = 0.0
    for events in cut.simulation.events:
        for event in events:
            busy_of_all += event.end_seconds - event.start_seconds
            again_of_all += event.recompute_seconds
    devices = len(cut.simulation.events)
    busy = busy_of_all / devices
    again = again_of_all / devices
    return StepSeconds(
        # Recomputation is a part of the backwards that it is for.
        compute=busy - again + optimizer_seconds,
        recomputation=again,
        link=sums_seconds,
        # All else: who has nothing to do waits for a message or for the stage that sends it.
        bubble=cut.seconds - busy,
    )


def _by_device(cut: Partition, of_stages: Sequence[int], of_shared: Sequence[int]) -> list[int]:
    """Sums over the chain's stages on each device, where what several stages share counts once."""
    before = [0, *accumulate(of_stages)]
    devices = len(cut.problem.devices)
    sums = [0] * devices
    readers = [[0] * devices for _ in cut.problem.shared]
    for number, choice in enumerate(cut.choices):
        device = number % devices
        sums[device] += before[choice.last + 1] - before[choice.first]
        for place, shared in enumerate(cut.problem.shared):
            readers[place][device] += sum(choice.first <= stage <= choice.last for stage in shared.stages)
    for size_bytes, readers_of_one in zip(of_shared, readers, strict=True):
        for device, count in enumerate(readers_of_one):
            sums[device] -= max(count - 1, 0) * size_bytes
    return sums
