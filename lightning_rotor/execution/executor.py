"""The executor: nested non-reentrant checkpoints, one for each segment of the schedule.

The recursion of the schedule is the recursion of the calls, so there is nothing to interpret::

    schedule   0 (1-2) 3              forward                        backward
                                      stage 0, recorded              stage 3
                                      checkpoint( stage 1, 2 )       first saved tensor of 2 → run 1, 2 again; stages 2, 1
                                      stage 3, recorded              stage 0

What an item saves of its output is settled when it is known whether the stage behind will drop that: see :mod:`lightning_rotor.inversion`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_rotor.chain import Chain, Option
from lightning_rotor.inversion import Inversion, Output, SavedOutput, Way
from lightning_rotor.options import run_stage, way_of
from lightning_rotor.recomputation import recomputed
from lightning_rotor.recursion import make_room_for
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment, leaves, segments_in
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
        self._ways = {
            leaf.stage: self._way(leaf.stage) for item in schedule.items for leaf in leaves(item) if self.inverts(leaf)
        }
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
        run = _Row(self, items).run_item if any(map(self.inverts, items)) else partial(self.run_item, items)
        return self._wirings[id(items)].run(value, run)

    def run_item(self, items: tuple[Item, ...], index: int, value: Any) -> Any:
        """Run a segment or a stage that is not inverted."""
        match items[index]:
            case Leaf(stage, option):
                return run_stage(self._stages[stage], value, option)
            case Segment() as segment:
                return self._run_segment(segment, value)

    def option_of(self, leaf: Leaf) -> Option:
        """How a stage is to run."""
        return self._chain.stages[leaf.stage].options[leaf.option]

    def inversion(self, item: Item, value: Any) -> Inversion | None:
        """A run of an inverted stage; None if the item is something else."""
        return Inversion(self._ways[item.first], value) if self.inverts(item) else None

    def inverts(self, item: Item) -> bool:
        """Whether an item is an inverted stage."""
        return isinstance(item, Leaf) and self.option_of(item).inverts

    def _way(self, number: int) -> Way:
        draws_random = self._chain.stages[number].draws_random
        return way_of(self._stages[number], draws_random=draws_random, state=self._states[number])

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


class _Row:
    """One run of items of which some are inverted stages: each tells the item before it what becomes of the boundary between them."""

    def __init__(self, executor: Executor, items: tuple[Item, ...]) -> None:
        self._executor = executor
        self._items = items
        self._before: SavedOutput | Output | None = (
            None  # what the item before needs of its output, if that is not settled
        )

    def run_item(self, index: int, value: Any) -> Any:
        """Run one of the items."""
        item, before = self._items[index], self._before
        self._before = None
        inversion = self._executor.inversion(item, value)
        if inversion is not None and before is not None:
            before.refer(inversion.boundary, value)
        behind = self._items[index + 1] if index + 1 < len(self._items) else None
        is_dropped = behind is not None and self._executor.inverts(behind)
        if inversion is not None:
            output = inversion.run()
            if is_dropped:
                self._before = inversion.output
            else:
                inversion.output.keep(output)
            return output
        if is_dropped and isinstance(item, Leaf) and self._executor.option_of(item).saved_output_bytes:
            self._before = saved = SavedOutput()
            with saved.watching():
                return self._executor.run_item(self._items, index, value)
        return self._executor.run_item(self._items, index, value)
