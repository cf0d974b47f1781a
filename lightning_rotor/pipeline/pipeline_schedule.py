r"""In which order the devices of a pipeline work: works by device, as arrays.

``0F2`` is the forward of micro-batch 2 through pipeline stage 0, ``0B2`` its backward, as torch prints them. With three
devices and four micro-batches, ``.`` is a device that waits::

    gpipe         device 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3      every forward, then every backward:
                  device 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3         a device holds all micro-batches
                  device 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3

    1f1b          device 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3      stage s of S holds min(m, S - s) micro-batches
                  device 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
                  device 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3

    interleaved   device d has stages d, d + D, d + 2D, ...: a micro-batch travels round the devices as often;
                  devices start working earlier, but hold more micro-batches and send more

:mod:`torch.distributed.pipelining` runs these lists; :mod:`.pipeline_simulator` says what an action waits for.

Sources: Huang et al., "GPipe", arXiv:1811.06965; Narayanan et al., "PipeDream", SOSP 2019 (1F1B), and "Efficient
large-scale language model training on GPU clusters", arXiv:2104.04473 (interleaved).
"""

from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from lightning_rotor.errors import PipelineError
from lightning_rotor.units import is_positive_integer

PipelineScheduleName: TypeAlias = Literal["gpipe", "1f1b", "interleaved"]
Work: TypeAlias = Literal["forward", "backward"]
WORKS: tuple[Work, ...] = get_args(Work)
Integers: TypeAlias = npt.NDArray[np.int64]

SCHEDULES: tuple[PipelineScheduleName, ...] = get_args(PipelineScheduleName)


class Action(NamedTuple):
    """Work of one pipeline stage on one micro-batch."""

    stage: int
    work: Work
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work[0].upper()}{self.micro_batch}"


def actions(order: Integers) -> tuple[Action, ...]:
    """Actions of a device, from its rows in :func:`orders`.

    Example:
        >>> [str(action) for action in actions(orders("1f1b", 2, micro_batches=3)[0])]
        ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    listed = []
    for stage, work, micro_batch in order.tolist():
        listed.append(Action(stage, WORKS[work], micro_batch))
    return tuple(listed)


@lru_cache(maxsize=2, typed=True)
def orders(
    schedule: PipelineScheduleName,
    devices: int,
    *,
    micro_batches: int,
    stages_per_device: int = 1,
) -> Integers:
    """Work in order, ``(devices, actions, 3)``: pipeline stage, place in ``WORKS``, micro-batch.

    Stage ``s`` is on device ``s % devices``. A device runs some forwards ahead, then a forward and a backward in turn,
    then the remaining backwards. It takes a round of micro-batches through one of its stages, then through the next.
    """
    check_numbers(schedule, devices, micro_batches, stages_per_device)
    # torch's interleaved schedule makes m // D rounds of equal size, or one if there are more devices than
    # micro-batches.
    round_size = micro_batches
    if schedule == "interleaved":
        round_size = micro_batches // max(1, micro_batches // devices)
    total = stages_per_device * micro_batches
    steps, device = np.arange(total), np.arange(devices)[:, None]
    # By forward of a device, in its order: which of its stages, and which micro-batch.
    place = steps // round_size % stages_per_device
    round_number = steps // (round_size * stages_per_device)
    micro_batch = round_number * round_size + steps % round_size
    # Stages behind a device: the first backward comes back from there.
    behind = devices - 1 - device
    if schedule == "interleaved":
        # The last device sees the first round through all stages but its last; each hop takes a forward either way.
        ahead = (stages_per_device - 1) * round_size + 2 * behind
    elif schedule == "1f1b":
        ahead = behind
    elif schedule == "gpipe":
        ahead = np.full_like(behind, total)
    else:
        raise unknown_schedule(schedule)
    # ``ahead + 1`` forwards come before the first backward, and there are ``total`` of them.
    ahead = np.minimum(ahead, total - 1)
    order = np.empty((devices, 2 * total, 3), np.int64)
    # A forward has all forwards before it in front, and the backwards that came in turn.
    forward_at = steps + np.maximum(steps - ahead, 0)
    stage = place * devices + device
    order[device, forward_at] = np.dstack(np.broadcast_arrays(stage, 0, micro_batch))
    # Backwards take the stages of a device in the other direction, and come in turn, or behind all forwards.
    backward_at = np.minimum(ahead + 1 + 2 * steps, total + steps)
    stage = (stages_per_device - 1 - place) * devices + device
    order[device, backward_at] = np.dstack(np.broadcast_arrays(stage, 1, micro_batch))
    return order


def unknown_schedule(schedule: object) -> PipelineError:
    """The error for a schedule that is none, or that has no entry yet where one is needed."""
    names = ", ".join(map(repr, SCHEDULES))
    return PipelineError(f"schedule is {schedule!r}: expected one of {names}")


def check_numbers(
    schedule: PipelineScheduleName,
    devices: int,
    micro_batches: int,
    stages_per_device: int,
) -> None:
    """Raise a :class:`PipelineError` that says what would work if a schedule cannot run."""
    if schedule not in SCHEDULES:
        raise unknown_schedule(schedule)
    numbers = {
        "devices": devices,
        "micro_batches": micro_batches,
        "stages_per_device": stages_per_device,
    }
    for name, value in numbers.items():
        if not is_positive_integer(value):
            raise PipelineError(f"{name} is {value!r}: expected a positive integer")
    if schedule != "interleaved" and stages_per_device > 1:
        raise PipelineError(
            f"schedule {schedule!r} has one stage per device, but stages_per_device is {stages_per_device}: "
            'use schedule="interleaved"'
        )
    rounds = max(1, micro_batches // devices)
    if schedule == "interleaved" and micro_batches % rounds:
        fewer = micro_batches - micro_batches % devices
        more = micro_batches + -micro_batches % devices
        raise PipelineError(
            f"the interleaved schedule on {devices} devices works in {rounds} rounds of micro-batches, and "
            f"{micro_batches} do not divide evenly: use micro_batches={fewer} or micro_batches={more}"
        )


def most_in_flight(order: Integers) -> dict[int, int]:
    """By stage of a device, the most micro-batches between the start of their forward and the end of their backward."""
    stages = order[:, 0]
    # A forward adds one, a backward takes one away.
    changes = 1 - 2 * order[:, 1]
    most = {}
    for stage in np.unique(stages).tolist():
        most[stage] = int(np.cumsum(changes[stages == stage]).max())
    return most


def lingering(
    schedule: PipelineScheduleName,
    order: Integers,
    *,
    stages: int,
    outputs_linger: bool,
) -> Integers:
    """By action of a device, the last action during which torch's loop still holds its result, sent or for all.

    torch's loops keep the operations of a send in local variables, and an operation keeps its tensor.
    """
    stage, is_backward = order[:, 0], order[:, 1] == 1
    until = np.arange(len(order))
    end = len(order) - 1
    if schedule == "1f1b":
        ahead = int(np.argmax(is_backward))
        # The backward behind the last forward.
        first_left = int(np.flatnonzero(~is_backward)[-1]) + 1
        if ahead > 1 and outputs_linger:
            until[ahead - 2] = first_left
        until[first_left:end] += 1
    elif schedule in ("gpipe", "interleaved"):
        until[is_backward | outputs_linger] = end
    else:
        raise unknown_schedule(schedule)
    # What the last stage makes and the gradients of the first one's inputs are kept for everybody, to the end.
    until[np.where(is_backward, stage == 0, stage == stages - 1)] = end
    return until
