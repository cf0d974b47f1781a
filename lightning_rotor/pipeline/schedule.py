r"""In which order the devices of a pipeline work: one plain list of actions per device.

``0F2`` is the forward of micro-batch 2 through pipeline stage 0, ``0B2`` its backward, as torch prints them. With three devices and
four micro-batches, ``.`` is a device that waits::

    gpipe         device 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3      every forward, then every backward:
                  device 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3         a device holds all micro-batches
                  device 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3

    1f1b          device 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3      stage s of S holds min(m, S - s) micro-batches
                  device 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
                  device 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3

    interleaved   each device has several stages, device d those numbered d, d + D, d + 2D, ...: a micro-batch travels round the devices
                  as often, so that devices start working earlier; they hold more micro-batches and send more

The lists are those of ``ScheduleGPipe``, ``Schedule1F1B`` and ``ScheduleInterleaved1F1B`` in :mod:`torch.distributed.pipelining`, which
run them; what an action waits for is another matter, see :mod:`lightning_rotor.pipeline.simulator`.

Sources: Huang et al., "GPipe", arXiv:1811.06965; Narayanan et al., "PipeDream", SOSP 2019 (1F1B), and "Efficient large-scale language
model training on GPU clusters", arXiv:2104.04473 (interleaved).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias, get_args

from lightning_rotor.errors import RotorError

PipelineScheduleName: TypeAlias = Literal["gpipe", "1f1b", "interleaved"]
Work: TypeAlias = Literal["forward", "backward"]

_ZERO_BUBBLE = re.compile("zb|zero|dual", re.IGNORECASE)
_NO_ZERO_BUBBLES = (
    ". Zero-bubble schedules run each backward in two parts, and a stage that recomputes would do so in both"
)
SCHEDULES: tuple[PipelineScheduleName, ...] = get_args(PipelineScheduleName)


class PipelineError(RotorError, ValueError):
    """A pipeline cannot be built as asked: too many stages, a schedule that does not exist, a balance that does not add up."""


class Action(NamedTuple):
    """One pipeline stage works on one micro-batch.

    Attributes:
        stage: Number of the pipeline stage.
        work: Its forward, or its backward together with all recomputation.
        micro_batch: Number of the micro-batch.
    """

    stage: int
    work: Work
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work[0].upper()}{self.micro_batch}"


Actions: TypeAlias = tuple[Action, ...]


def actions(
    schedule: PipelineScheduleName, devices: int, *, micro_batches: int, stages_per_device: int = 1
) -> tuple[Actions, ...]:
    """What every device does, in order.

    Args:
        schedule: ``"gpipe"``, ``"1f1b"`` or ``"interleaved"``.
        devices: How many there are.
        micro_batches: Into how many parts a batch is split.
        stages_per_device: Pipeline stages on each device; more than one with ``"interleaved"`` only. Stage ``s`` is on device
            ``s % devices``.
    Returns:
        The actions of each device, every forward and backward of its stages once.
    Raises:
        PipelineError: No such schedule, or it cannot run with these numbers.
    Example:
        >>> [str(each) for each in actions("1f1b", 2, micro_batches=3)[0]]
        ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    check_numbers(schedule, devices, micro_batches, stages_per_device)
    if schedule == "gpipe":
        return tuple(_gpipe(device, micro_batches) for device in range(devices))
    if schedule == "1f1b":
        return tuple(_one_by_one(device, devices, micro_batches) for device in range(devices))
    return tuple(_interleaved(device, devices, micro_batches, stages_per_device) for device in range(devices))


def check_numbers(schedule: PipelineScheduleName, devices: int, micro_batches: int, stages_per_device: int) -> None:
    """Check that a schedule can run.

    Raises:
        PipelineError: It cannot; says what would work.
    """
    if schedule not in SCHEDULES:
        known = f"schedule is {schedule!r}: expected one of {', '.join(map(repr, SCHEDULES))}"
        raise PipelineError(known + (_NO_ZERO_BUBBLES if _ZERO_BUBBLE.search(str(schedule)) else ""))
    numbers: dict[str, object] = {
        "devices": devices,
        "micro_batches": micro_batches,
        "stages_per_device": stages_per_device,
    }
    for name, value in numbers.items():
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
            f"the interleaved schedule on {devices} devices works in {rounds} rounds of micro-batches, and {micro_batches} do not "
            f"divide evenly: use micro_batches={fewer} or micro_batches={more}"
        )


def most_in_flight(order: Iterable[Action]) -> dict[int, int]:
    """For each stage in a device's actions, the most micro-batches whose forward is done or running while their backward is not."""
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for stage, work, _ in order:
        now[stage] = now.get(stage, 0) + (1 if work == "forward" else -1)
        most[stage] = max(most.get(stage, 0), now[stage])
    return most


def _gpipe(device: int, micro_batches: int) -> Actions:
    forwards = [Action(device, "forward", number) for number in range(micro_batches)]
    return (*forwards, *(Action(device, "backward", number) for number in range(micro_batches)))


def _one_by_one(device: int, devices: int, micro_batches: int) -> Actions:
    """As many forwards as there are stages from here on, then a backward and a forward in turn, then the backwards that are left."""
    ahead = min(micro_batches, devices - device)
    order = [Action(device, "forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        order.append(Action(device, "backward", number))
        if number + ahead < micro_batches:
            order.append(Action(device, "forward", number + ahead))
    return tuple(order)


def _interleaved(device: int, devices: int, micro_batches: int, stages: int) -> Actions:
    """The same, where each device takes some micro-batches through one of its stages, then through the next, and so on.

    The first round is of ``together`` micro-batches. The last device has seen it through all stages but its last when the first backward
    can begin; a device that is ``h`` hops away is ``2h`` forwards ahead of that.
    """
    together = micro_batches // max(1, micro_batches // devices)
    total = stages * micro_batches
    ahead = min((stages - 1) * together + 2 * (devices - 1 - device), total)

    def local(step: int) -> int:
        return (step // together) % stages

    done = {"forward": [0] * stages, "backward": [0] * stages}

    def next_action(work: Work, place: int) -> Action:
        number = done[work][place]
        done[work][place] += 1
        return Action(place * devices + device, work, number)

    order = [next_action("forward", local(step)) for step in range(ahead)]
    for step in range(total):
        if step + ahead < total:
            order.append(next_action("forward", local(step + ahead)))
        order.append(next_action("backward", stages - 1 - local(step)))
    return tuple(order)


# ----------------------------------------------------------------------------------------------------
# How long a device holds on to what it has sent, or made for everybody, under the schedules of
# :mod:`torch.distributed.pipelining`.


def lingering(schedule: PipelineScheduleName, order: Actions, *, stages: int, outputs_linger: bool) -> tuple[int, ...]:
    """By action of a device, the place of the last action while which what it made is still there; its own place if it goes at once.

    Args:
        schedule: Which of torch's loops runs the actions.
        order: Of one device.
        stages: How many pipeline stages there are on all devices.
        outputs_linger: Torch holds on to outputs whose sending is done, see :func:`lightning_rotor.private.torch_names.sent_outputs_linger`.
    """
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
