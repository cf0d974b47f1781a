"""Ways to train in which each device has the whole model: one device, and DDP.

Bytes are ``memory.resident_memory``'s and the plan's, as in training, with DDP's buckets of gradients as messages.
While a device's backward goes on, the gradients of stages behind it are on their way, in the order in which they come::

    backward   stage 3 ──► stage 2 ──► stage 1 ──► stage 0
    link               ████ 3   ██████ 2    ███ 1        ████ 0        the step waits for the last message
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_rotor.advising.choice import Choice, Kind, StepSeconds
from lightning_rotor.advising.python_lines import ddp_lines, one_device_lines
from lightning_rotor.advising.task import Task
from lightning_rotor.errors import BudgetError
from lightning_rotor.planning import Plan
from lightning_rotor.simulator import Event


def whole_models(task: Task) -> list[Choice]:
    """The fastest number of accumulated batches that fits, on one device and under DDP on all."""
    choices = []
    # Once, where there is one device.
    for copies in dict.fromkeys((1, task.cluster.size)):
        samples = task.divided(copies)
        if samples is not None:
            fastest = _fastest(task, copies, samples)
            if fastest is not None:
                choices.append(fastest)
    return choices


def _fastest(task: Task, copies: int, samples: int) -> Choice | None:
    """The fastest choice for so many samples for each copy, of all powers of two into which a batch can be divided."""
    divisors = [1]
    while samples % (2 * divisors[-1]) == 0:
        divisors.append(2 * divisors[-1])
    fastest: Choice | None = None
    # Small batches first: they are planned at once, and once larger ones must recompute, more do not pay.
    for accumulated in reversed(divisors):
        choice = _choice(task, copies, samples, accumulated)
        if fastest is not None and (choice is None or choice.seconds.total > fastest.seconds.total):
            break
        fastest = choice or fastest
    return fastest


def _choice(task: Task, copies: int, samples: int, accumulated: int) -> Choice | None:
    """One device or DDP with so many samples for each copy; None if that does not fit."""
    costs = task.costs
    chain = costs.costs.at(samples // accumulated)
    resident = replace(
        costs.resident_at(samples // accumulated),
        # DDP's buckets hold all gradients once more.
        communication_bytes=costs.trained_bytes if copies > 1 else 0,
        # Gradients of the batch before are there.
        gradients_linger=accumulated == 1,
    )
    final_bytes = resident.staying_bytes + (resident.temporary_bytes or 0)
    if final_bytes > task.limit_bytes:
        # No plan changes what is there when the optimizer steps.
        return None
    budget = resident.budget(task.limit_bytes)
    try:
        plan = budget.plan(chain)
    except BudgetError:
        return None
    kind: Kind = "one device"
    lines = one_device_lines(task, accumulated)
    messages = 0.0
    if copies > 1:
        kind = "DDP"
        lines = ddp_lines(task, accumulated)
        message_seconds = []
        for stage in chain:
            seconds = task.cluster.sum_seconds(stage.keep.parameter_gradient_bytes, copies)
            message_seconds.append(seconds)
        # Once a step, for the batch that is accumulated last: the others send nothing.
        messages = exposed_seconds(plan.simulation.events, message_seconds)
    return Choice(
        kind=kind,
        devices=copies,
        copies=copies,
        batch_per_device=samples,
        accumulated=accumulated,
        peak_bytes=max(budget.reserved_bytes + plan.peak_bytes, final_bytes),
        seconds=StepSeconds(
            compute=accumulated * _compute_seconds(plan) + task.optimizer_seconds(costs.trained_bytes),
            recomputation=accumulated * plan.simulation.recompute_seconds,
            link=messages,
        ),
        recomputed=len(plan.recomputed),
        chain_length=len(chain),
        lines=lines,
    )


def _compute_seconds(plan: Plan) -> float:
    return plan.seconds - plan.simulation.recompute_seconds


def exposed_seconds(events: Sequence[Event], message_seconds: Sequence[float]) -> float:
    """Seconds after the last event in which messages are still on their way, one for each stage after its backward.

    Example:
        >>> backward = [Event("backward", 1, 4.0, 0, 0), Event("backward", 0, 4.0, 0, 0)]
        >>> exposed_seconds(backward, [1.0, 6.0])  # the second message leaves when the first one has come, at 10
        3.0
    """
    now = 0.0
    link_free = 0.0
    for event in events:
        now += event.seconds
        # The bucket of a stage is full when its backward is done.
        if event.phase == "backward":
            link_free = max(link_free, now) + message_seconds[event.stage]
    return max(0.0, link_free - now)
