"""The executor: nested non-reentrant checkpoints, one for each segment of the schedule.

The recursion of the schedule is the recursion of the calls, so there is nothing to interpret::

    schedule   0 (1-2) 3              forward                        backward
                                      stage 0, recorded              stage 3
                                      checkpoint( stage 1, 2 )       first saved tensor of 2 → run 1, 2 again;
                                      stage 3, recorded              stages 2, 1, 0
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from lightning_rotor.chain import Chain
from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.inversion import Way, run_inverted
from lightning_rotor.execution.options import run_stage
from lightning_rotor.execution.recomputation import Stopwatch, recomputed
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.private.sharding import Unit, left_as_found, units_in
from lightning_rotor.private.torch_names import backward_keeps_graph, backward_number
from lightning_rotor.private.values import TreeSpec, tree_leaves, tree_unflatten
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment, make_room_for
from lightning_rotor.simulator import check_schedule
from lightning_rotor.stages.sequential import Stage, Wire, Wiring, unpacked

# Calls that one more level of segments takes, most of them torch's.
_CALLS = 60


class Executor:
    """Runs the stages of a chain under a schedule, or raises ScheduleError if that does not fit.

    Output, gradients, buffers and generators are those of running the stages one after the other, bit for bit.
    ``schedule`` is what it was given, ``states`` says for each stage what recomputation must leave alone, ``wanted``
    which values to return (by default those of the last stage), ``root`` and ``inputs`` are names for messages: of the
    user's module, and of the chain's inputs. ``watch`` times its segments. ``wire`` are the values that it takes, and
    those that it returns.
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
        watch: Stopwatch | None = None,
    ) -> None:
        check_schedule(chain, schedule)
        make_room_for(_CALLS * schedule.depth)
        self._stages = tuple(stages)
        self._chain = chain
        self.schedule, self.watch = schedule, watch
        named = None if root is None else (root, "")
        self._states = tuple(replace(state, root=named) for state in states or (SegmentState(),) * len(self._stages))
        self._names = dict(enumerate(inputs)) | {
            number: f"output of {stage.name!r}" for stage in self._stages for number in stage.writes
        }
        self.wire, self._run = self._compiled(schedule.items, self._stages[-1].writes if wanted is None else wanted)

    def __call__(self, value: Any) -> Any:
        """Run the forward on the first stage's input; autograd does the rest."""
        if self.watch is not None:
            self.watch.calls += 1
        return self._run(value)

    def _compiled(self, items: tuple[Item, ...], wanted: Collection[int]) -> tuple[Wire, Callable[[Any], Any]]:
        """What runs items, and segments in them, and returns the wanted values; and which values it takes."""
        needed = set(wanted)
        wires: list[Wire] = []
        steps: list[Callable[[Any], Any]] = []
        for item in reversed(items):
            if isinstance(item, Segment):
                wire, run = self._compiled(item.items, tuple(needed))
                wires.append(wire)
                steps.append(self._recomputing(item, run, wire.reads))
            else:
                wires.append(self._stages[item.stage].wiring.wire)
                steps.append(self._step(item))
            needed.update(wires[-1].reads)
        wiring = Wiring.of(reversed(wires), wanted)
        return wiring.wire, partial(wiring.run, functions=steps[::-1])

    def _step(self, leaf: Leaf) -> Callable[[Any], Any]:
        """What runs a stage."""
        stage, costs = self._stages[leaf.stage], self._chain.stages[leaf.stage]
        option, units = costs.options[leaf.option], units_in(stage.modules)
        if option.inverts:
            return partial(run_inverted, Way(stage, option.fused, costs.draws_random, self._states[leaf.stage]))
        return (
            partial(_run_units, units, stage, leaf.option) if units else partial(run_stage, stage, option=leaf.option)
        )

    def _recomputing(self, segment: Segment, run: Callable[[Any], Any], reads: Sequence[int]) -> Callable[[Any], Any]:
        """What runs a segment, which ``run`` does with the values that it reads."""
        numbers = range(segment.first, segment.last + 1)
        names = [self._names.get(number, "module's input") for number in reads]
        # Bound, never closed over: the recomputation runs long after a variable of a closure would have changed.
        return partial(
            recomputed,
            run,
            spell_input=partial(_name_of_leaf, names),
            name=f"the segment from {self._stages[segment.first].name!r} to {self._stages[segment.last].name!r}",
            draws_random=any(self._chain.stages[number].draws_random for number in numbers),
            state=sum((self._states[number] for number in numbers), SegmentState()),
            watch=self.watch,
        )


def _run_units(units: Sequence[Unit], stage: Stage, option: int, value: Any) -> Any:
    with left_as_found(units):
        return run_stage(stage, value, option)


def _name_of_leaf(names: Sequence[str], leaf: int, spec: TreeSpec) -> str:
    """The name of the value that a leaf belongs to, of the one input of a segment."""
    (given,) = tree_unflatten(range(spec.num_leaves), spec)
    values = unpacked(given, len(names))
    return next(name for name, value in zip(names, values, strict=True) if leaf in tree_leaves(value))


# ----------------------------------------------------------------------------------------------------
# The backward of a call: whether it is still to come, and a second one through freed tensors told in words that help.


class Pending:
    """Hangs at the outputs of a call, and goes with its graph. ``waits`` is True until its backward begins.

    With ``once``, saved tensors are freed in the backward: a second one is an ``ExecutionError`` that names the remedy.
    ``on_backward`` is called when one begins.
    """

    __slots__ = ("__weakref__", "_backward", "_once", "on_backward")

    def __init__(self, *, once: bool) -> None:
        self._once = once
        self.on_backward: Callable[[], None] | None = None
        self._backward: int | None = None

    @property
    def waits(self) -> bool:
        """True until a backward has come that does not retain the graph."""
        return self._backward is None

    def __call__(self, _: Any) -> None:
        """A backward has reached the call."""
        backward = backward_number()
        if self._once and self._backward not in (None, backward):
            raise ExecutionError(
                "backward ran a second time through a graph whose saved tensors are freed: expected one backward per "
                "forward. Call backward(retain_graph=True) the first time, or run the forward again"
            )
        if self.on_backward is not None and self._backward != backward:
            self.on_backward()
        if not backward_keeps_graph():
            self._backward = backward


def await_backward(output: Any, value: Any, *, once: bool) -> ReferenceType[Pending]:
    """A reference to what waits for the backward of a call, dead when its graph is gone. ``value`` is its input."""
    pending = Pending(once=once)
    given = {id(tensor.grad_fn) for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor)}
    for tensor in tree_leaves(output):
        # Inputs that are handed through belong to the caller's graph.
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None and id(tensor.grad_fn) not in given:
            tensor.grad_fn.register_prehook(pending)
    return ref(pending)
