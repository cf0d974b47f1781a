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

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.autograd.graph import Node

from lightning_rotor.chain import Chain
from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.inversion import Way, run_inverted
from lightning_rotor.execution.passes import (
    FirstPass,
    Recomputation,
    changed_meanwhile,
    first_changed,
    is_checkpointing,
    is_recomputing,
    passing_first,
    repeating,
    run_stage,
)
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.sharding import Unit, left_as_found, units_in
from lightning_rotor.private.values import TreeSpec, like, tensors_in, tree_flatten, tree_leaves, tree_unflatten
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment, make_room_for
from lightning_rotor.simulator import check_schedule
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.wiring import Wire, Wiring, unpacked

NO_STATE = SegmentState()
# Calls that one more level of segments takes, most of them torch's.
_CALLS = 60


class Executor:
    """Runs the stages of a chain under a schedule, or raises ScheduleError if that does not fit.

    Output, gradients, buffers and generators are those of running the stages one after the other, bit for bit.
    ``schedule`` is what it was given, ``states`` says for each stage what recomputation must leave alone, ``wanted``
    which values to return (by default those of the last stage), ``root`` and ``inputs`` are names for messages: of the
    user's module, and of the chain's inputs. ``watch`` times its calls. ``wire`` are the values that it takes, and
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
        return self._run(value) if self.watch is None else self.watch.timed(self._run, value)

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
            state=(state := sum((self._states[number] for number in numbers), SegmentState())),
            known_draws=set(state.drawn),
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
# One recomputed segment.


class Clock(Protocol):
    """The time on a device."""

    def now(self) -> Any:
        """A point in time."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds between two of them."""


def typical(seconds: Sequence[float]) -> float:
    """The middle of the faster half, for interruptions never make a run faster."""
    return max(sorted(seconds)[len(seconds) // 4], 0.0)


class Stopwatch:
    """Times calls of an executor with their backward, and what runs again in it: from the second call to the sixth.

    The first warms up. ``calls`` counts them, ``laps`` are when what runs again for the last one began and ended, or
    None. Each is to have one backward.
    """

    def __init__(self, clock: Clock) -> None:
        self.calls = 0
        self.laps: list[Sequence[Any]] | None = None
        self._clock = clock
        self._found: list[tuple[list[Sequence[Any]], list[Sequence[Any]]]] = []

    def timed(self, run: Callable[[Any], Any], value: Any) -> Any:
        """The output of a call. Its backward lasts until its inputs have their gradients, or autograd is at the end."""
        self.calls += 1
        laps: list[Sequence[Any]] | None = [] if 1 < self.calls <= 1 + TIMED_CALLS else None
        self.laps = laps
        if laps is None:
            return run(value)
        times, sources = [self._clock.now()], _nodes_of(value)
        output = run(value)
        times.append(self._clock.now())

        def begin(_: Any) -> None:
            if len(times) == 2:
                times.append(self._clock.now())
                private.at_end_of_backward(end)

        def note(_: Any) -> None:
            if len(times) > 2:
                times[3:] = [self._clock.now()]

        def end() -> None:
            if len(times) == 3:
                note(None)
            self._found.append(([times[:2], times[2:]], laps))

        for node in _nodes_of(output):
            private.before_node(node, begin)
        for node in sources:
            private.before_node(node, note)
        return output

    @contextmanager
    def timing(self, laps: list[Sequence[Any]] | None) -> Iterator[None]:
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
        return self._typical([laps for _, laps in self._found])

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a call and its backward; None before the second one's."""
        return self._typical([laps for laps, _ in self._found])

    def _typical(self, found: Sequence[Sequence[Sequence[Any]]]) -> float | None:
        seconds = [sum(self._clock.seconds_between(*lap) for lap in laps) for laps in found]
        return typical(seconds) if seconds else None


def _nodes_of(value: Any) -> list[Node]:
    """What has made the tensors in a value, each once."""
    nodes = (tensor.grad_fn for tensor in tensors_in(value))
    return [*dict.fromkeys(node for node in nodes if node is not None)]


TIMED_CALLS = 5


class _Inputs:
    """Inputs of one segment, until the last backward that runs through it has them.

    Its backwards, the most expensive moments, go without them, unless the graph is kept. An inner segment gets them
    from the recomputation around it, which does the same; where somebody's hooks save tensors elsewhere, they do so.
    ``stamps`` are those of the tensors among the leaves, ``spell`` names a leaf.
    """

    def __init__(
        self, name: str, leaves: list[Any], spec: TreeSpec, stamps: list[int], spell: Callable[[int, TreeSpec], str]
    ) -> None:
        self._name, self._spec, self._stamps, self._spell = name, spec, stamps, spell
        self._hooks = private.hooks_for_saved_tensors()
        self._tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._kinds = [(leaves[place].requires_grad, leaves[place].is_leaf) for place in self._tensors]
        # Hooks bring back what they like. A recomputation makes it anew, in other memory, by the same operations.
        self._anew = is_checkpointing() or is_recomputing()
        self._leaves: list[Any] | None = [*leaves]
        if self._hooks is not None:
            with torch.no_grad():
                for place in self._tensors:
                    self._leaves[place] = self._hooks[0](leaves[place])

    def leaves(self) -> list[Any]:
        """The leaves of the inputs, for a recomputation."""
        if self._leaves is None:
            raise ExecutionError(
                f"{self._name} is recomputed again after a backward that did not keep the graph: "
                "pass retain_graph=True to all but the last backward"
            )
        leaves = [*self._leaves]
        if self._hooks is None and not self._anew and _are_needed_no_more(leaves[place] for place in self._tensors):
            self._leaves = None
        for place, kind in zip(self._tensors, self._kinds, strict=True):
            tensor = leaves[place] if self._hooks is None else self._hooks[1](leaves[place])
            leaves[place] = _alone(tensor, *kind)
        return leaves

    def require_unchanged(self, leaves: Sequence[Any]) -> Any:
        """The inputs, from leaves that must be what they were."""
        tensors = [leaves[place] for place in self._tensors]
        before = self._stamps[: len(tensors)] if self._anew else self._stamps
        number = first_changed(before, tensors, or_copies=self._hooks is not None and not self._anew)
        if number is not None:
            raise changed_meanwhile(
                self._spell(self._tensors[number], self._spec),
                "Overwrite it behind that, give the module a copy of its own (x.clone())",
            )
        return tree_unflatten(leaves, self._spec)


def _are_needed_no_more(tensors: Iterable[torch.Tensor]) -> bool:
    """True if the running backward goes on to all that made some inputs, and frees that graph.

    Any later backward then meets freed nodes, as in plain training, unless they saved nothing. If it leaves out one
    node, another backward may still come from there: two heads that read one input each, or untrained inputs.
    """
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    if not nodes or private.backward_number() is None or private.backward_keeps_graph():
        return False
    return all(map(private.backward_reaches, nodes))


def _alone(tensor: torch.Tensor, learns: bool, is_leaf: bool) -> torch.Tensor:
    """An input for another pass, in the same memory: hooks that it gets are not the first pass's."""
    if not learns:
        return tensor
    alone = tensor.detach().requires_grad_()
    return like(alone if is_leaf else alone.view_as(alone), tensor)


def recomputed(
    function: Callable[..., Any],
    *inputs: Any,
    name: str = "segment",
    draws_random: bool = True,
    state: SegmentState = NO_STATE,
    known_draws: set[str] | None = None,
    spell_input: Callable[[int, TreeSpec], str] = "input {}".format,
    watch: Stopwatch | None = None,
) -> Any:
    """Run a function without keeping what its backward needs; the backward runs it again.

    The function must give the same bits every time. Tensors in its inputs are held until the backward has recomputed
    it, if that frees the graph. Setting the generators back takes 5 kB on the host. ``state`` is what else it reads and
    changes, or might change some day; ``known_draws`` are the generators that it is known to draw from, and grow;
    ``watch`` times the second run; ``spell_input`` names a leaf of the inputs.

    Raises:
        ExecutionError: It changes an input, or unexpectedly a parameter or buffer, which would silently spoil the
            recomputation. In the backward: one of them has changed since, or it saves other tensors than before.
    """
    leaves, spec = tree_flatten(inputs)
    tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
    before = private.stamps(tensors)
    if torch.is_grad_enabled():
        timing = nullcontext if watch is None else partial(watch.timing, watch.laps)
        held = _Inputs(name, leaves, spec, before, spell_input)
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
        first_pass = FirstPass(state, device if draws_random else None, known_draws)
        again = partial(_run_again, function, held, first_pass, timing)
        with passing_first(first_pass), Recomputation(name, again).dropping():
            output = function(*inputs)
        first_pass.tell_draws(partial(function, *inputs))
    else:
        output = function(*inputs)
    if first_changed(before, tensors) is not None:
        raise ExecutionError(
            f"{name} changes its input in place, so it cannot be recomputed from it: expected an untouched input. "
            "Use an operation that is not in place there, or measure again if the model has changed since"
        )
    return output


def _run_again(
    function: Callable[..., Any],
    inputs: _Inputs,
    first_pass: FirstPass,
    timing: Callable[[], AbstractContextManager[None]],
) -> None:
    leaves = inputs.leaves()  # for which a segment around this one may run again
    with timing(), first_pass.replayed(), repeating():
        function(*inputs.require_unchanged(leaves))


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
        backward = private.backward_number()
        if self._once and self._backward not in (None, backward):
            raise ExecutionError(
                "backward ran a second time through a graph whose saved tensors are freed: expected one backward per "
                "forward. Call backward(retain_graph=True) the first time, or run the forward again"
            )
        if self.on_backward is not None and self._backward != backward:
            self.on_backward()
        if not private.backward_keeps_graph():
            self._backward = backward


def await_backward(output: Any, value: Any, *, once: bool) -> ReferenceType[Pending]:
    """A reference to what waits for the backward of a call, dead when its graph is gone. ``value`` is its input."""
    pending = Pending(once=once)
    given = {id(tensor.grad_fn) for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor)}
    for tensor in tree_leaves(output):
        # Inputs that are handed through belong to the caller's graph.
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None and id(tensor.grad_fn) not in given:
            private.before_node(tensor.grad_fn, pending)
    return ref(pending)
