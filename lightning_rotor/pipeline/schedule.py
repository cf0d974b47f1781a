r"""In which order the devices of a pipeline work: one plain list of actions per device.

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

:mod:`torch.distributed.pipelining` runs these lists; :mod:`.simulator` says what an action waits for.

Sources: Huang et al., "GPipe", arXiv:1811.06965; Narayanan et al., "PipeDream", SOSP 2019 (1F1B), and "Efficient
large-scale language model training on GPU clusters", arXiv:2104.04473 (interleaved).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias, get_args

from lightning_rotor.errors import RotorError

PipelineScheduleName: TypeAlias = Literal["gpipe", "1f1b", "interleaved"]
Work: TypeAlias = Literal["forward", "backward"]

_NO_ZERO_BUBBLES = (
    ". Zero-bubble schedules run each backward in two parts, and a stage that recomputes would do so in both"
)
SCHEDULES: tuple[PipelineScheduleName, ...] = get_args(PipelineScheduleName)


class PipelineError(RotorError, ValueError):
    """A pipeline cannot be built as asked: too many stages, no such schedule, a balance that does not add up."""


class Action(NamedTuple):
    """Work of one pipeline stage on one micro-batch."""

    stage: int
    work: Work
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work[0].upper()}{self.micro_batch}"


Actions: TypeAlias = tuple[Action, ...]


@lru_cache(maxsize=2, typed=True)
def actions(
    schedule: PipelineScheduleName, devices: int, *, micro_batches: int, stages_per_device: int = 1
) -> tuple[Actions, ...]:
    """Actions of each device in order; stage ``s`` is on device ``s % devices``.

    Example:
        >>> [str(each) for each in actions("1f1b", 2, micro_batches=3)[0]]
        ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    check_numbers(schedule, devices, micro_batches, stages_per_device)
    if schedule == "interleaved":
        return tuple(_interleaved(device, devices, micro_batches, stages_per_device) for device in range(devices))
    # GPipe runs all forwards ahead, 1F1B as many as there are stages from a device on.
    ahead = [micro_batches if schedule == "gpipe" else devices - device for device in range(devices)]
    return tuple(_one_by_one(device, micro_batches, ahead[device]) for device in range(devices))


def check_numbers(schedule: PipelineScheduleName, devices: int, micro_batches: int, stages_per_device: int) -> None:
    """Raise a :class:`PipelineError` that says what would work if a schedule cannot run."""
    if schedule not in SCHEDULES:
        known = f"schedule is {schedule!r}: expected one of {', '.join(map(repr, SCHEDULES))}"
        raise PipelineError(known + (_NO_ZERO_BUBBLES if re.search("(?i)zb|zero|dual", str(schedule)) else ""))
    numbers = {"devices": devices, "micro_batches": micro_batches, "stages_per_device": stages_per_device}
    for name, value in dict[str, object](numbers).items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PipelineError(f"{name} is {value!r}: expected a positive integer")
    if schedule != "interleaved" and stages_per_device > 1:
        raise PipelineError(
            f"schedule {schedule!r} has one stage per device, but stages_per_device is {stages_per_device}: "
            'use schedule="interleaved"'
        )
    rounds = max(1, micro_batches // devices)
    if schedule == "interleaved" and micro_batches % rounds:
        fewer, more = micro_batches - micro_batches % devices, micro_batches + -micro_batches % devices
        raise PipelineError(
            f"the interleaved schedule on {devices} devices works in {rounds} rounds of micro-batches, and "
            f"{micro_batches} do not divide evenly: use micro_batches={fewer} or micro_batches={more}"
        )


def most_in_flight(order: Iterable[Action]) -> dict[int, int]:
    """By stage of a device, the most micro-batches between the start of their forward and the end of their backward."""
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for stage, work, _ in order:
        now[stage] = now.get(stage, 0) + (1 if work == "forward" else -1)
        most[stage] = max(most.get(stage, 0), now[stage])
    return most


def _one_by_one(device: int, micro_batches: int, ahead: int) -> Actions:
    """Actions: ``ahead`` forwards, then a backward and a forward in turn, then the remaining backwards."""
    order = [Action(device, "forward", number) for number in range(min(ahead, micro_batches))]
    for number in range(micro_batches):
        order.append(Action(device, "backward", number))
        if number + ahead < micro_batches:
            order.append(Action(device, "forward", number + ahead))
    return tuple(order)


def _interleaved(device: int, devices: int, micro_batches: int, stages: int) -> Actions:
    """Actions of a device that takes a round of micro-batches through one of its stages, then through the next.

    The last device has seen the first round through all stages but its last when the first backward can begin; a device
    that is ``h`` hops away is ``2h`` forwards ahead of that.
    """
    together = micro_batches // max(1, micro_batches // devices)
    total = stages * micro_batches
    ahead = min((stages - 1) * together + 2 * (devices - 1 - device), total)

    # By step, through which of its stages a device takes which micro-batch.
    steps = [
        (step // together % stages, step // (together * stages) * together + step % together) for step in range(total)
    ]
    forwards = [Action(place * devices + device, "forward", number) for place, number in steps]
    backwards = [Action((stages - 1 - place) * devices + device, "backward", number) for place, number in steps]
    turns = zip(forwards[ahead:], backwards, strict=False)
    return (*forwards[:ahead], *chain.from_iterable(turns), *backwards[total - ahead :])


def lingering(schedule: PipelineScheduleName, order: Actions, *, stages: int, outputs_linger: bool) -> tuple[int, ...]:
    """By action of a device, the last action during which torch's loop still holds its result, sent or for all."""
    end = len(order) - 1
    until = list(range(len(order)))
    works = [action.work for action in order]
    if schedule == "1f1b":
        ahead = works.index("backward")
        first_left = len(order) - 1 - works[::-1].index("forward") + 1  # the backward behind the last forward
        if ahead > 1 and outputs_linger:
            until[ahead - 2] = first_left
        for place in range(first_left, end):
            until[place] = place + 1
    for place, action in enumerate(order):
        lingers = schedule != "1f1b" and (outputs_linger or action.work == "backward")
        if lingers or (action.stage, action.work) in ((stages - 1, "forward"), (0, "backward")):
            until[place] = end
    return tuple(until)
