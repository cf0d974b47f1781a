r"""The judge of pipelines: who works when, how long a step takes, how much each device holds at most.

An action of :mod:`lightning_rotor.pipeline.schedule` begins when its device has done all actions before it, and when what it needs has
arrived: the activations of the stage before for a forward, the gradient from the stage behind for a backward::

    device 0   F0 F1 F2 ..... B0───── F3 B1───── ..      F3 waits for its device, B1 for a gradient
               │└──────────────▲┘
               ▼   ┆gradient   ┆
    device 1   . F0 . B0───── F1 B1───── F2 ..

What is sent leaves when its action ends, while the device goes on, and arrives after the link's seconds. Each pair of devices has one link
for each direction, which carries one message after the other. That is what ``torch.distributed.pipelining`` does on devices that copy
beside computing; where sending holds up the sender, count the seconds as the stage's own.

Memory of a device, at any moment of an action of one of its stages::

    what is always there      weights, optimizer state, buffers for what is received     ``PipelineStageLoad.static_bytes``
    gradients of parameters   from the stage's first backward on                         ``gradient_bytes``
    micro-batches in flight   all but the running one, of all the device's stages        ``MicroBatchLoad.held_bytes`` each
    the running action        what it adds to that                                       ``forward_peak_bytes``, ``backward_peak_bytes``
    what lingers              sent, or made for everybody, and not let go                ``output_bytes``, ``input_gradient_bytes`` each
    results                   behind the last action, in the place of what lingers       ``results_bytes``

The peak is the largest sum over all actions, so it is exact where these loads are. Without ``lingering`` whatever was sent is gone at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from lightning_rotor.pipeline.schedule import Action, Actions, PipelineError, Work

_Times: TypeAlias = list[list[float]]


@dataclass(frozen=True, slots=True)
class MicroBatchLoad:
    """What one micro-batch costs in one pipeline stage.

    Attributes:
        forward_seconds: Duration of the forward.
        backward_seconds: Duration of the backward, recomputation included.
        recompute_seconds: The part of the backward that is recomputation.
        held_bytes: What stays between forward and backward.
        forward_peak_bytes: Peak of the forward beyond what was there before it.
        backward_peak_bytes: Peak of the backward; what the micro-batch held already counts, gradients of parameters that are there do not.
        first_backward_peak_bytes: The same where the gradients of parameters are not there yet and appear in it.
    """

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float = 0.0
    held_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    first_backward_peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PipelineStageLoad:
    """What one pipeline stage costs its device.

    Attributes:
        micro_batch: Every micro-batch, or every one but the last.
        last: The last micro-batch if it is another.
        static_bytes: Always there.
        gradient_bytes: Gradients of parameters.
        send_forward_seconds: How long what the stage makes travels to the stage behind.
        send_backward_seconds: How long the gradient of its input travels to the stage before.
        output_bytes: What of ``held_bytes`` is sent, or the output of the whole.
        input_gradient_bytes: The gradient of its input.
    """

    micro_batch: MicroBatchLoad
    last: MicroBatchLoad | None = None
    static_bytes: int = 0
    gradient_bytes: int = 0
    send_forward_seconds: float = 0.0
    send_backward_seconds: float = 0.0
    output_bytes: int = 0
    input_gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PipelineEvent:
    """One action, when it ran, and what its device held.

    Attributes:
        device: Number of the device.
        action: Which stage, forward or backward, which micro-batch.
        start_seconds: Since the step began.
        end_seconds: The same.
        recompute_seconds: The part of it that is recomputation, at its beginning.
        peak_bytes: Most that the device holds meanwhile.
        after_bytes: What it holds when the action is done.
    """

    device: int
    action: Action
    start_seconds: float
    end_seconds: float
    recompute_seconds: float
    peak_bytes: int
    after_bytes: int


@dataclass(frozen=True)
class PipelineSimulation:
    """One step of a pipeline.

    Attributes:
        seconds: From the first action to the end of the last one.
        events: By device, in order.
        peak_bytes: By device.
    """

    seconds: float
    events: tuple[tuple[PipelineEvent, ...], ...]
    peak_bytes: tuple[int, ...]

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """By device, how long it works."""
        return tuple(sum(each.end_seconds - each.start_seconds for each in events) for events in self.events)

    @property
    def bubble(self) -> float:
        """The part of all devices' time in which they wait: 0.25 is a quarter."""
        total = self.seconds * len(self.events)
        return 1 - sum(self.busy_seconds) / total if total else 0.0

    @property
    def recompute_seconds(self) -> float:
        """Recomputation on all devices."""
        return sum(each.recompute_seconds for events in self.events for each in events)

    def lines(self, columns: int = 100) -> tuple[str, ...]:
        """The step in characters, a line for each device.

        A digit is the forward of that micro-batch, ``r`` is recomputation, ``b`` the rest of a backward.

        Args:
            columns: Characters per line.
        Example:
            >>> simulation.lines(10)  # doctest: +SKIP
            ('01  rbbrbb', ' 0bb1bb   ')
        """
        scale = columns / self.seconds if self.seconds else 0.0
        return tuple(_drawn(events, scale, columns) for events in self.events)


def simulate_pipeline(
    order: Sequence[Actions],
    loads: Sequence[PipelineStageLoad],
    *,
    micro_batches: int,
    gradients_exist: bool = False,
    lingering: Sequence[Sequence[int]] = (),
    results_bytes: int = 0,
) -> PipelineSimulation:
    """Run a step on paper.

    Takes O(devices + actions).

    Args:
        order: By device, see :func:`lightning_rotor.pipeline.schedule.actions`.
        loads: By pipeline stage.
        micro_batches: How many there are.
        gradients_exist: Gradients of parameters are there before the step: it accumulates, or the step before has left them.
        lingering: By device, see :func:`lightning_rotor.pipeline.schedule.lingering`.
        results_bytes: What every device is given behind the step.
    Raises:
        PipelineError: The devices wait for one another for ever, or an action has no stage.
    """
    starts, ends = _run(order, loads, micro_batches)
    events = tuple(
        _Device(number, loads, micro_batches, gradients_exist, lingering[number] if lingering else ()).events(
            order[number], starts[number], ends[number]
        )
        for number in range(len(order))
    )
    seconds = max((device[-1] for device in ends if device), default=0.0)
    peaks = tuple(_peak(device, order[number], loads, results_bytes) for number, device in enumerate(events))
    return PipelineSimulation(seconds, events, peaks)


def step_seconds(order: Sequence[Actions], loads: Sequence[PipelineStageLoad], *, micro_batches: int) -> float:
    """How long a step takes, and nothing else: :func:`simulate_pipeline` without events and memory."""
    _, ends = _run(order, loads, micro_batches)
    return max((device[-1] for device in ends if device), default=0.0)


def device_peak_bytes(
    order: Actions,
    loads: Mapping[int, PipelineStageLoad] | Sequence[PipelineStageLoad],
    *,
    micro_batches: int,
    gradients_exist: bool = False,
    lingering: Sequence[int] = (),
    results_bytes: int = 0,
) -> int:
    """What one device holds at most. That depends on the order of its own actions alone, not on when they run.

    Args:
        order: Its actions.
        loads: By pipeline stage, at least those in its actions.
        micro_batches: How many there are.
        gradients_exist: As for :func:`simulate_pipeline`.
        lingering: The device's.
        results_bytes: As for :func:`simulate_pipeline`.
    """
    never = [0.0] * len(order)
    events = _Device(0, loads, micro_batches, gradients_exist, lingering).events(order, never, never)
    return _peak(events, order, loads, results_bytes)


def _peak(
    events: Sequence[PipelineEvent],
    order: Actions,
    loads: Mapping[int, PipelineStageLoad] | Sequence[PipelineStageLoad],
    results_bytes: int,
) -> int:
    """Of all actions, and of what is there behind them."""
    stages = {action.stage for action in order}
    behind = sum(loads[stage].static_bytes + loads[stage].gradient_bytes for stage in stages) + results_bytes
    return max([behind, *(each.peak_bytes for each in events)])


def load_of(stage: PipelineStageLoad, micro_batch: int, micro_batches: int) -> MicroBatchLoad:
    """What a certain micro-batch costs in a stage."""
    return stage.last if stage.last is not None and micro_batch == micro_batches - 1 else stage.micro_batch


def _run(order: Sequence[Actions], loads: Sequence[PipelineStageLoad], micro_batches: int) -> tuple[_Times, _Times]:
    """When each action begins and ends, by device.

    A device goes on until it lacks something that another one has not sent yet; whoever sends it wakes it up.
    """
    stages, devices = len(loads), len(order)
    if any(action.stage >= stages for device in order for action in device):
        raise PipelineError(
            f"an action belongs to none of the {stages} pipeline stages: expected a load for each stage"
        )
    home = {action.stage: number for number, device in enumerate(order) for action in device}
    seconds = {
        work: [
            [getattr(load_of(stage, number, micro_batches), f"{work}_seconds") for number in range(micro_batches)]
            for stage in loads
        ]
        for work in ("forward", "backward")
    }
    arrived: dict[tuple[int, Work, int], float] = {}
    link_free: dict[tuple[int, int], float] = {}
    starts: _Times = [[] for _ in order]
    ends: _Times = [[] for _ in order]
    awake = list(range(devices))[::-1]
    while awake:
        device = awake.pop()
        actions, begun, done = order[device], starts[device], ends[device]
        while len(done) < len(actions):
            stage, work, number = actions[len(done)]
            forward = work == "forward"
            needs_nothing = stage == 0 if forward else stage == stages - 1
            ready = 0.0 if needs_nothing else arrived.pop((stage, work, number), -1.0)
            if ready < 0:
                break
            start = max(ready, done[-1] if done else 0.0)
            end = start + seconds[work][stage][number]
            begun.append(start)
            done.append(end)
            target = stage + 1 if forward else stage - 1
            if not 0 <= target < stages:
                continue
            peer = home[target]
            if peer != device:
                travel = loads[stage].send_forward_seconds if forward else loads[stage].send_backward_seconds
                end = max(end, link_free.get((device, peer), 0.0)) + travel
                link_free[device, peer] = end
                awake.append(peer)
            arrived[target, work, number] = end
    stuck = [device for device in range(devices) if len(ends[device]) < len(order[device])]
    if stuck:
        waiting = ", ".join(f"device {device} for {order[device][len(ends[device])]}" for device in stuck[:4])
        raise PipelineError(f"the devices wait for one another for ever ({waiting}): expected an order that can be run")
    return starts, ends


class _Device:
    """What one device holds while it works off its actions."""

    def __init__(
        self,
        number: int,
        loads: Mapping[int, PipelineStageLoad] | Sequence[PipelineStageLoad],
        micro_batches: int,
        gradients_exist: bool,
        lingering: Sequence[int],
    ) -> None:
        self._number, self._loads, self._micro_batches = number, loads, micro_batches
        self._gradients_exist, self._lingering = gradients_exist, lingering

    def events(self, actions: Actions, starts: list[float], ends: list[float]) -> tuple[PipelineEvent, ...]:
        stages = {action.stage for action in actions}
        live = sum(self._loads[stage].static_bytes for stage in stages)
        with_gradients: set[int] = set()
        if self._gradients_exist:
            live += sum(self._loads[stage].gradient_bytes for stage in stages)
            with_gradients = stages
        events = []
        until = self._lingering or range(len(actions))
        leaves = [0] * len(actions)
        outputs_until: dict[tuple[int, int], int] = {}
        for place, (action, start, end) in enumerate(zip(actions, starts, ends, strict=True)):
            stage = self._loads[action.stage]
            load = load_of(stage, action.micro_batch, self._micro_batches)
            if action.work == "forward":
                peak, again = live + load.forward_peak_bytes, 0.0
                live += load.held_bytes
                outputs_until[action.stage, action.micro_batch] = until[place]
            else:
                again = load.recompute_seconds
                live -= load.held_bytes
                if action.stage in with_gradients:
                    peak = live + load.backward_peak_bytes
                else:
                    peak = live + load.first_backward_peak_bytes
                    live += stage.gradient_bytes
                    with_gradients = with_gradients | {action.stage}
                for last, size in (
                    (outputs_until[action.stage, action.micro_batch], stage.output_bytes),
                    (until[place], stage.input_gradient_bytes),
                ):
                    if last > place:
                        live += size
                        leaves[last] += size
            after = live - leaves[place]
            events.append(PipelineEvent(self._number, action, start, end, again, max(peak, after), after))
            live = after
        return tuple(events)


def _drawn(events: Sequence[PipelineEvent], scale: float, columns: int) -> str:
    line = [" "] * columns
    for each in events:
        first, last = (min(round(at * scale), columns) for at in (each.start_seconds, each.end_seconds))
        middle = min(round((each.start_seconds + each.recompute_seconds) * scale), columns)
        digit = str(each.action.micro_batch % 10)
        mark = digit if each.action.work == "forward" else "b"
        line[first:last] = ["r"] * (middle - first) + [mark] * (last - middle)
    return "".join(line)
