"""Times of an executor's calls with their backward, and of what runs again in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

from torch.autograd.graph import Node

from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import tensors_in

TIMED_CALLS = 5
"""Calls that are timed, after one that warms up."""

_Lap: TypeAlias = Sequence[Any]
"""Two points in time, as the clock gives them."""


class Clock(Protocol):
    """The time on a device."""

    def now(self) -> Any:
        """A point in time."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds between two of them."""


def typical(seconds: Sequence[float]) -> float:
    """The first quartile: interruptions only make a run slower."""
    return max(sorted(seconds)[typical_rank(len(seconds))], 0.0)


def typical_rank(number: int) -> int:
    """Place of the typical one among so many durations in order: so many are shorter."""
    return number // 4


class Stopwatch:
    """Times calls of an executor with their backward, and what runs again in it: from the second call to the sixth.

    The first warms up. Each call is to have one backward.

    Attributes:
        calls: Number of calls so far.
        laps: When what runs again for the last call began and ended; None if that call is not timed.
    """

    def __init__(self, clock: Clock) -> None:
        self.calls = 0
        self.laps: list[_Lap] | None = None
        self._clock = clock
        # Of each timed call: its forward and its backward.
        self._step_laps: list[list[_Lap]] = []
        self._again_laps: list[list[_Lap]] = []

    def timed(self, run: Callable[[Any], Any], value: Any) -> Any:
        """The output of a call. Its backward lasts until its inputs have their gradients, or autograd is at the end."""
        self.calls += 1
        # Events cost a GPU's queue next to nothing, but nodes' hooks cost the host microseconds, so timing ends.
        is_timed = 1 < self.calls <= 1 + TIMED_CALLS
        laps: list[_Lap] | None = [] if is_timed else None
        self.laps = laps
        if laps is None:
            return run(value)
        times = [self._clock.now()]
        sources = _nodes_of(value)
        output = run(value)
        times.append(self._clock.now())
        # From here on the times are: forward begins, forward ends, backward begins, backward ends.

        def begin(_: Any) -> None:
            # Outputs may have several nodes, of which each calls this. The first begins the backward.
            if len(times) == 2:
                times.append(self._clock.now())
                private.at_end_of_backward(end)

        def reach_inputs(_: Any) -> None:
            if len(times) > 2:
                # The last input to get its gradient ends it: what autograd does behind them belongs to other modules.
                times[3:] = [self._clock.now()]

        def end() -> None:
            # No input learns, as for the first module of a model. The end of the whole backward is the nearest there
            # is.
            if len(times) == 3:
                times.append(self._clock.now())
            self._step_laps.append([times[:2], times[2:]])
            self._again_laps.append(laps)

        for node in _nodes_of(output):
            private.before_node(node, begin)
        for node in sources:
            private.before_node(node, reach_inputs)
        return output

    @contextmanager
    def timing(self, laps: list[_Lap] | None) -> Iterator[None]:
        """Context of what runs again for a call with these laps."""
        start = None if laps is None else self._clock.now()
        try:
            yield
        finally:
            if laps is not None:
                laps.append((start, self._clock.now()))

    @property
    def again_seconds(self) -> float | None:
        """Seconds of what runs again for a call; None before the second one's backward."""
        return self._typical(self._again_laps)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a call and its backward; None before the second one's."""
        return self._typical(self._step_laps)

    def _typical(self, calls: Sequence[Sequence[_Lap]]) -> float | None:
        """The typical sum of the laps of a call; None without any call."""
        return typical(list(map(self._sum, calls))) if calls else None

    def _sum(self, laps: Sequence[_Lap]) -> float:
        return sum(self._clock.seconds_between(*lap) for lap in laps)


def _nodes_of(value: Any) -> list[Node]:
    """The nodes of autograd's graph that have made the tensors in a value, each once."""
    nodes = dict.fromkeys(tensor.grad_fn for tensor in tensors_in(value))
    return [node for node in nodes if node is not None]
