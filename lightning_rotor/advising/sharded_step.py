r"""A step under FSDP2 on paper: the simulator's step of a plan, with the parameters and messages of units around it.

P are the parameters of a unit in one piece, or the message that brings them; R its gradients, or the message that takes
them to the shards. What torch 2.11 to 2.15 holds, as ``private.sharding`` tells it::

    forward    │ message P │ P, message P │ compute; the message stays until the next unit has its parameters │ spread
    backward   │ P, that of the next unit is on its way │ compute, gradients pile up │ spread, message R │ its shard
                                                                    the message R stays until the next unit's

The parameters of the rest of the model are there from the first stage on, and their gradients until the last backward.
Messages have one link, on which they go one after the other, while the device computes what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_rotor.private.sharding import UnitSizes
from lightning_rotor.simulator import Event


@dataclass(frozen=True, slots=True)
class ShardedStep:
    """The most that a step holds beyond shards, optimizer state and batch; its seconds, and those without messages."""

    peak_bytes: int
    seconds: float
    busy_seconds: float


def sharded_step(
    events: Sequence[Event],
    unit_of_stage: Sequence[int | None],
    units: Sequence[UnitSizes],
    rest: UnitSizes,
    *,
    reshard: bool,
    gather_seconds: Callable[[int], float],
    reduce_seconds: Callable[[int], float],
) -> ShardedStep:
    """Peak and seconds of a step, from its events without messages, which count whole gradients of parameters.

    ``gather_seconds`` is for a message that brings so many bytes of parameters, ``reduce_seconds`` for gradients.
    """
    walk = _Walk(units, rest, gather_seconds, reduce_seconds)
    last_forward = max(place for place, event in enumerate(events) if event.phase == "forward")
    for place, event in enumerate(events):
        unit = unit_of_stage[event.stage]
        if event.phase == "backward":
            walk.backward(event, unit)
        elif event.phase == "wait":
            # For moves, which plans of spread models have none of.
            continue
        elif event.phase == "recompute":
            # The backward finds it as the recomputation has left it, whatever the forward does with it.
            walk.forward(event, unit, stays=_is_backward_of(events, place + 1, event.stage))
        else:
            walk.forward(event, unit, stays=not reshard)
        if place == last_forward:
            walk.end_forward()
    walk.end_backward()
    # The step is over when the last message is: the optimizer needs it.
    return ShardedStep(walk.peak_bytes, max(walk.now, walk.link_free), walk.busy)


def _is_backward_of(events: Sequence[Event], place: int, stage: int) -> bool:
    """True if the event at a place is there, and the backward of this stage."""
    if place >= len(events):
        return False
    event = events[place]
    return event.phase == "backward" and event.stage == stage


class _Walk:
    """State of the step between events."""

    def __init__(
        self,
        units: Sequence[UnitSizes],
        rest: UnitSizes,
        gather_seconds: Callable[[int], float],
        reduce_seconds: Callable[[int], float],
    ) -> None:
        self._units = units
        self._rest = rest
        self._gather_seconds = gather_seconds
        self._reduce_seconds = reduce_seconds
        self.peak_bytes = 0
        # The rest of the model, in one piece.
        self._base = 0
        self.now = 0.0
        self.link_free = 0.0
        self.busy = 0.0
        # Bytes by the simulator.
        self._level = 0
        # What units have beyond that: parameters, messages, and shards in the place of gradients.
        self._whole: dict[int, int] = {}
        self._message = 0
        self._on_its_way = 0
        self._reduced = 0
        self._gradients = 0
        self._coming: int | None = None
        # When the message of a unit has come.
        self._arrival: dict[int, float] = {}
        # When the gathering of a unit ahead may begin.
        self._may_gather = 0.0
        self._note(rest.gathered_bytes)
        # The message that brings the rest of the model, and what is copied out of it, are there together.
        self._message = rest.gathered_bytes
        self._base = rest.gathered_bytes
        self._note()
        self.now = self._send(gather_seconds(rest.gathered_bytes), 0.0)

    def _note(self, more: int = 0, *, level: int | None = None) -> None:
        beside = sum(self._whole.values())
        beside += self._message + self._on_its_way + self._reduced + self._gradients
        if level is None:
            level = self._level
        self.peak_bytes = max(self.peak_bytes, level + self._base + beside + more)

    def _send(self, seconds: float, since: float) -> float:
        """When a message of so many seconds has arrived that could leave at ``since``."""
        self.link_free = max(self.link_free, since) + seconds
        return self.link_free

    def _compute(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds

    def forward(self, event: Event, unit: int | None, *, stays: bool) -> None:
        """A forward, or a recomputation."""
        if unit is not None and unit not in self._whole:
            gathered = self._units[unit].gathered_bytes
            # The message of the unit before is still there while this one's arrives.
            self._note(gathered)
            self._message = gathered
            self._whole[unit] = gathered
            self._note()
            # It was sent for when the unit before had what it needs.
            self.now = max(self.now, self._send(self._gather_seconds(gathered), self._may_gather))
            self._may_gather = self.now
        self._note(level=event.peak_bytes)
        self._level = event.after_bytes
        self._compute(event.seconds)
        if unit is not None and not stays:
            self._whole.pop(unit)

    def end_forward(self) -> None:
        """The root's forward is over: it lets the last message go."""
        self._message = 0

    def backward(self, event: Event, unit: int | None) -> None:
        """A backward, with the messages of its unit."""
        if unit is not None:
            self._gather_for_backward(unit)
        self._note(level=event.peak_bytes)
        self._level = event.after_bytes
        self._compute(event.seconds)
        if unit is not None:
            self._whole.pop(unit)
            self._reduce(self._units[unit])

    def _gather_for_backward(self, unit: int) -> None:
        gathered = self._units[unit].gathered_bytes
        if unit not in self._whole:
            arrival = self._arrival.pop(unit, None)
            if self._coming == unit:
                self._on_its_way = 0
                self._coming = None
            if arrival is None:
                arrival = self._send(self._gather_seconds(gathered), self.now)
            self.now = max(self.now, arrival)
            # The message with all parameters, and the parameters that are copied out of it.
            self._note(2 * gathered)
            self._whole[unit] = gathered
        # One unit ahead: torch gathers what the backward will need next while it computes this one.
        ahead = unit - 1
        if ahead >= 0 and ahead not in self._whole and self._coming is None:
            self._coming = ahead
            self._on_its_way = self._units[ahead].gathered_bytes
            self._arrival[ahead] = self._send(self._gather_seconds(self._on_its_way), self.now)

    def _reduce(self, sizes: UnitSizes) -> None:
        """Send gradients to the shards."""
        # The message of the unit before goes when this one's is made.
        self._reduced = sizes.reduced_bytes
        self._note()
        # The simulator has counted whole gradients, of which the shard stays.
        self._gradients += sizes.shard_bytes - sizes.gradient_bytes
        self._note()
        self._send(self._reduce_seconds(sizes.reduced_bytes), self.now)

    def end_backward(self) -> None:
        """The rest of the model sends its gradients."""
        self._base = 0
        self._reduce(self._rest)
