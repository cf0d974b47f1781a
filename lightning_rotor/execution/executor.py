"""The executor: nested recomputations, one for each segment of the schedule.

The recursion of the schedule is the recursion of the calls, so there is nothing to interpret::

    schedule   0 (1-2) 3              forward                        backward
                                      stage 0, recorded              stage 3
                                      recomputed( stage 1, 2 )       first saved tensor of 2 → run 1, 2 again;
                                      stage 3, recorded              stages 2, 1, 0

The forward builds the original graph and drops every tensor that a segment saves. How it runs again, and what that must
not repeat, is in ``passes``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.chain import Chain
from lightning_rotor.errors import RotorWarning, ScheduleError
from lightning_rotor.execution.inversion import Way, run_inverted
from lightning_rotor.execution.moving import MovingCall, OtherMemory
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.execution.segment import NO_STATE, recomputed
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.execution.stopwatch import Stopwatch
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.sharding import Unit, left_as_found, units_in
from lightning_rotor.private.values import TreeSpec, tree_leaves, tree_unflatten
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment, make_room_for
from lightning_rotor.simulator import check_schedule
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.wiring import Wire, Wiring, unpacked

_CALLS = 60
"""Calls that one more level of segments takes, most of them torch's."""
_Step: TypeAlias = Callable[[Any], Any]
"""Runs a stage or a segment on the values that it takes."""


class Executor:
    """Runs the stages of a chain under a schedule, or raises ScheduleError if that does not fit.

    Output, gradients, buffers and generators are those of running the stages one after the other, bit for bit.

    Args:
        states: For each stage, the state that a recomputation must leave alone.
        wanted: Numbers of the values to return, by default those of the last stage.
        root: The user's module, for names in messages.
        inputs: Names of the chain's inputs, for messages.
        stopwatch: Times its calls.
        memory: Where a schedule moves what it moves.

    Attributes:
        schedule: The one that it was given.
        wire: The values that it takes, and those that it returns.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        chain: Chain,
        schedule: Schedule,
        states: Sequence[SegmentState] = (),
        *,
        wanted: Collection[int] | None = None,
        root: nn.Module | None = None,
        inputs: Sequence[str] = (),
        stopwatch: Stopwatch | None = None,
        memory: OtherMemory | None = None,
    ) -> None:
        check_schedule(chain, schedule)
        if schedule.moves and memory is None:
            raise ScheduleError(
                f"schedule {schedule} moves what stages hold, and there is no other memory to move it to: expected a "
                'schedule without moves, or Checkpointable(..., offload="host")'
            )
        # Segments in segments are calls in calls, and Python counts them.
        make_room_for(_CALLS * schedule.depth)
        self._stages = tuple(stages)
        self._chain = chain
        self.schedule = schedule
        self.stopwatch = stopwatch
        named_root = None if root is None else (root, "")
        states = states or (NO_STATE,) * len(self._stages)
        self._states = [replace(state, root=named_root) for state in states]
        # Names of the chain's values by number, for messages.
        self._names = dict(enumerate(inputs))
        for stage in self._stages:
            self._names.update(dict.fromkeys(stage.writes, f"output of {stage.name!r}"))
        last_values = self._stages[-1].writes if wanted is None else wanted
        self._memory = memory
        self._has_warned = False
        # The running call, if it moves something.
        self._moving: MovingCall | None = None
        # All that the schedule says is decided once, here: a steady step calls functions and looks nothing up.
        self.wire, self._run = self._compiled(schedule.items, last_values, is_outermost=True)

    def __call__(self, value: Any) -> Any:
        """Run the forward on the first stage's input; autograd does the rest."""
        if not self.schedule.moves:
            return self._timed(value)
        # The module may be called within its own forward.
        around = self._moving
        self._moving = self._moving_call(value)
        try:
            output = self._timed(value)
            if self._moving is not None:
                self._moving.end_forward()
            return output
        finally:
            self._moving = around

    def _timed(self, value: Any) -> Any:
        return self._run(value) if self.stopwatch is None else self.stopwatch.timed(self._run, value)

    def _moving_call(self, value: Any) -> MovingCall | None:
        """The moves of a call; None if it saves nothing here, since somebody else's hooks do."""
        if not torch.is_grad_enabled():
            return None
        if private.hooks_for_saved_tensors() is not None:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    "a plan that moves what stages hold moves nothing in this call, and the step may take more than "
                    "its limit: other hooks for saved tensors are around it. Expected none, such as save_on_cpu, or "
                    "training without offload",
                    RotorWarning,
                    stacklevel=2,
                )
            return None
        assert self._memory is not None
        given = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        # All of these outlive the call, so moving them would free nothing.
        staying = [*given]
        for stage in self._stages:
            for module in stage.modules:
                staying += module.parameters()
                staying += module.buffers()
        storages = []
        for tensor in staying:
            # A sparse tensor has no storage of its own.
            if tensor.layout == torch.strided:
                storages.append(tensor.untyped_storage())
        return MovingCall(self.schedule, self._memory, storages, given[0].device)

    def _at_top(self, number: int, run: _Step, value: Any) -> Any:
        """Run an item of the schedule itself."""
        return run(value) if self._moving is None else self._moving.run(number, run, value)

    def _compiled(
        self,
        items: tuple[Item, ...],
        wanted: Collection[int],
        *,
        is_outermost: bool = False,
    ) -> tuple[Wire, _Step]:
        """The wire of some items, and the function that runs them and returns the wanted values."""
        needed = set(wanted)
        wires: list[Wire] = []
        steps: list[_Step] = []
        # From the end, as an item has to return what those behind it read.
        for number, item in reversed([*enumerate(items)]):
            if isinstance(item, Segment):
                wire, run = self._compiled(item.items, tuple(needed))
                step = self._recomputing(item, run, wire.reads)
            else:
                wire = self._stages[item.stage].wiring.wire
                step = self._step(item)
            if is_outermost and self.schedule.moves:
                step = partial(self._at_top, number, step)
            wires.append(wire)
            steps.append(step)
            needed.update(wire.reads)
        wiring = Wiring.of(reversed(wires), wanted)
        return wiring.wire, partial(wiring.run, functions=steps[::-1])

    def _step(self, leaf: Leaf) -> _Step:
        """The function that runs a stage under its option."""
        stage = self._stages[leaf.stage]
        costs = self._chain.stages[leaf.stage]
        option = costs.options[leaf.option]
        if option.inverts:
            state = self._states[leaf.stage]
            return partial(run_inverted, Way(stage, option.fused, costs.draws_random, state))
        units = units_in(stage.modules)
        if units:
            # FSDP's hooks gather and release parameters, and a segment around must find them as they were.
            return partial(_run_units, units, stage, leaf.option)
        return partial(run_stage, stage, option=leaf.option)

    def _recomputing(self, segment: Segment, run: _Step, reads: Sequence[int]) -> _Step:
        """The function that runs a segment, which ``run`` does with the values that it reads."""
        numbers = range(segment.first, segment.last + 1)
        state = sum(self._states[segment.first : segment.last + 1], NO_STATE)
        input_names = [self._names.get(number, "module's input") for number in reads]
        first = self._stages[segment.first]
        last = self._stages[segment.last]
        # Bound, never closed over: the recomputation runs long after a variable of a closure would have changed.
        return partial(
            recomputed,
            run,
            name_of_input=partial(_name_of_leaf, input_names),
            name=f"the segment from {first.name!r} to {last.name!r}",
            draws_random=any(self._chain.stages[number].draws_random for number in numbers),
            state=state,
            known_draws=set(state.drawn),
            stopwatch=self.stopwatch,
        )


def _run_units(units: Sequence[Unit], stage: Stage, option: int, value: Any) -> Any:
    with left_as_found(units):
        return run_stage(stage, value, option)


def _name_of_leaf(names: Sequence[str], leaf: int, spec: TreeSpec) -> str:
    """The name of the value that a leaf belongs to, of the one input of a segment."""
    # A nesting of the leaves' own numbers, in the place of tensors.
    (numbered,) = tree_unflatten(range(spec.num_leaves), spec)
    values = unpacked(numbered, len(names))
    for name, value in zip(names, values, strict=True):
        if leaf in tree_leaves(value):
            return name
    raise LookupError("the leaf of none of the values")
