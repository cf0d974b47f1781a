"""The executor: nested non-reentrant checkpoints, one for each segment of the schedule.

The recursion of the schedule is the recursion of the calls, so there is nothing to interpret::

    schedule   0 (1-2) 3              forward                        backward
                                      stage 0, recorded              stage 3
                                      checkpoint( stage 1, 2 )       first saved tensor of 2 → run 1, 2 again; stages 2, 1
                                      stage 3, recorded              stage 0
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_rotor.chain import Chain
from lightning_rotor.options import run_stage
from lightning_rotor.recomputation import recomputed
from lightning_rotor.recursion import make_room_for
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment, segments_in
from lightning_rotor.sequential import Stage
from lightning_rotor.simulator import check_schedule
from lightning_rotor.state import SegmentState
from lightning_rotor.wiring import Wire, Wiring

# Calls for one more segment inside others, most of them torch's.
_CALLS = 60


class Executor:
    """Runs the stages of a chain under a schedule.

    The output, every gradient, the buffers and the random number generators are those of running the stages one after the other, bit for bit.

    Args:
        stages: One for each stage of the chain.
        chain: Says which stages draw random numbers and which cannot be recomputed.
        schedule: What to keep and what to recompute.
        states: For each stage, what recomputation must leave alone; by default there is nothing.
        wanted: Numbers of the values to return; by default those that the last stage makes.
    Raises:
        ScheduleError: The schedule does not fit the chain.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        chain: Chain,
        schedule: Schedule,
        states: Sequence[SegmentState] = (),
        *,
        wanted: Collection[int] | None = None,
    ) -> None:
        check_schedule(chain, schedule)
        make_room_for(_CALLS * schedule.depth)
        self._stages = tuple(stages)
        self._chain = chain
        self._schedule = schedule
        self._states = tuple(states) or (SegmentState(),) * len(self._stages)
        self._runs = {id(segment): self._how_to_run(segment) for segment in segments_in(schedule.items)}
        self._wirings: dict[int, Wiring] = {}
        self._wire_of_all = self._wire(schedule.items, self._stages[-1].writes if wanted is None else wanted)

    @property
    def schedule(self) -> Schedule:
        """What is kept and what is recomputed."""
        return self._schedule

    @property
    def wire(self) -> Wire:
        """Which values it takes, and which it returns."""
        return self._wire_of_all

    def __call__(self, value: Any) -> Any:
        """Run the forward; autograd does the rest.

        Args:
            value: Input of the first stage.
        Returns:
            Output of the last stage.
        """
        return self._run(self._schedule.items, value)

    def _wire(self, items: tuple[Item, ...], wanted: Collection[int]) -> Wire:
        """Find out what items take and make when somebody wants some values of them; segments in them likewise."""
        needed = set(wanted)
        wires: list[Wire] = []
        for item in reversed(items):
            wire = (
                self._stages[item.stage].wiring.wire
                if isinstance(item, Leaf)
                else self._wire(item.items, tuple(needed))
            )
            wires.append(wire)
            needed.update(wire.reads)
        wiring = Wiring.of(reversed(wires), wanted)
        self._wirings[id(items)] = wiring
        return wiring.wire

    def _run(self, items: tuple[Item, ...], value: Any) -> Any:
        return self._wirings[id(items)].run(value, partial(self._run_item, items))

    def _run_item(self, items: tuple[Item, ...], index: int, value: Any) -> Any:
        match items[index]:
            case Leaf(stage, option):
                return run_stage(self._stages[stage], value, option)
            case Segment() as segment:
                return self._run_segment(segment, value)

    def _run_segment(self, segment: Segment, value: Any) -> Any:
        run = self._runs[id(segment)]
        # Arguments are bound, never closed over: the recomputation runs long after these variables have changed.
        if isinstance(value, torch.Tensor):
            return run(partial(self._run, segment.items), value)
        flat, spec = tree_flatten(value)
        return run(partial(self._run_flat, segment.items, spec), *flat)

    def _run_flat(self, items: tuple[Item, ...], spec: TreeSpec, *flat: Any) -> Any:
        return self._run(items, tree_unflatten(flat, spec))

    def _how_to_run(self, segment: Segment) -> Callable[..., Any]:
        numbers = range(segment.first, segment.last + 1)
        return partial(
            recomputed,
            name=f"the segment from {self._stages[segment.first].name!r} to {self._stages[segment.last].name!r}",
            draws_random=any(self._chain.stages[number].draws_random for number in numbers),
            state=sum((self._states[number] for number in numbers), SegmentState()),
        )
