"""One recomputed segment: the single place where this package touches ``torch.utils.checkpoint``.

torch's non-reentrant checkpoint builds the original graph, drops every tensor that it saves, and runs the function
again when the backward first asks for one. This module keeps the second run from updating buffers, drawing other random
numbers and counting calls.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.segment_state import FirstPass, SegmentState
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import TreeSpec, tree_flatten, tree_unflatten
from lightning_rotor.stages.state import changed_meanwhile, first_changed

NO_STATE = SegmentState()


class _Flags(threading.local):
    """Flags of this thread: backward passes of CUDA graphs run in other threads than the forward."""

    recomputing = 0
    checkpointing = 0


_flags = _Flags()


def is_recomputing() -> bool:
    """True if the current forward repeats one that has already run, so that nothing should come of it.

    That is while a segment is recomputed in the backward, and while costs are measured. What modules and their hooks
    can reach in Python is put back by itself. Ask here before writing to a file or a server, which cannot be undone.
    """
    return _flags.recomputing > 0


def is_checkpointing() -> bool:
    """True if the current forward drops its saved tensors because it will be recomputed."""
    return _flags.checkpointing > 0


@contextmanager
def repeating(repeats: bool = True) -> Iterator[None]:
    """Context in which :func:`is_recomputing` gives ``repeats``."""
    before = _flags.recomputing
    _flags.recomputing = before + 1 if repeats else 0
    try:
        yield
    finally:
        _flags.recomputing = before


@contextmanager
def passing_first(first_pass: FirstPass) -> Iterator[None]:
    """Context of a forward that drops its saved tensors."""
    _flags.checkpointing += 1
    try:
        with first_pass.watching():
            yield
    finally:
        _flags.checkpointing -= 1


class Clock(Protocol):
    """The time on a device."""

    def now(self) -> Any:
        """A point in time."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds between two of them."""


class Stopwatch:
    """Times what calls of an executor run in segments, first and again, the second to the sixth: the first warms up.

    ``calls`` counts them. Each is to have one backward.
    """

    def __init__(self, clock: Clock) -> None:
        self.calls = 0
        self._clock, self._seconds = clock, [list[float]() for _ in range(_TIMED_CALLS)]
        self._laps: list[tuple[int, Any, Any]] = []

    @contextmanager
    def timing(self, call: int) -> Iterator[None]:
        """Context of what runs in a segment for the call with this number."""
        if not 1 < call <= 1 + _TIMED_CALLS:
            yield
            return
        start = self._clock.now()
        try:
            yield
        finally:
            self._laps.append((call - 2, start, self._clock.now()))

    @property
    def is_done(self) -> bool:
        """True if all calls that are timed have run, and had their backward if another call came."""
        return self.calls > 1 + _TIMED_CALLS

    @property
    def seconds(self) -> float | None:
        """Seconds that a call spends in segments; None before the second one runs.

        Of each lap the faster ones count, as of the profile's stages: a disturbance makes none faster.
        """
        for call, *lap in self._laps:
            self._seconds[call].append(self._clock.seconds_between(*lap))
        self._laps.clear()
        most = max(map(len, self._seconds))
        whole = zip(*(each for each in self._seconds if len(each) == most), strict=True)
        return sum(sorted(each)[len(each) // 4] for each in whole) if self.calls > 1 else None


_TIMED_CALLS = 5


class _Again(AbstractContextManager[None]):
    """Context of the recomputation. It is entered once for each backward, and makes its contexts anew each time."""

    def __init__(self, *contexts: Callable[[], AbstractContextManager[None]]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        self._entered = ExitStack()
        for context in self._contexts:
            self._entered.enter_context(context())

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class _Inputs:
    """Inputs of one segment, until the last backward that runs through it has them.

    Its backwards, the most expensive moments, go without them, unless the graph is kept. Inner segments get their
    inputs from the recomputation around them, which does the same.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tensors: list[torch.Tensor | None] = []
        self._last_backward: int | None = None  # the one that gives them up

    def save(self, tensor: torch.Tensor) -> int:
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def hand_out(self, number: int) -> torch.Tensor:
        tensor = self._tensors[number]
        if tensor is None:
            raise ExecutionError(
                f"{self._name} is recomputed again after a backward that did not keep the graph: "
                "pass retain_graph=True to all but the last backward"
            )
        if self._are_needed_no_more():
            self._tensors[number] = None
        return tensor

    def _are_needed_no_more(self) -> bool:
        """True if the running backward goes on to all that made the inputs, and frees that graph.

        Any later backward then meets freed nodes, as in plain training, unless they saved nothing. If it leaves out one
        node, another backward may still come from there: two heads that read one input each, or untrained inputs.
        """
        backward = private.backward_number()
        if backward is not None and backward != self._last_backward:
            nodes = [tensor.grad_fn for tensor in self._tensors if tensor is not None and tensor.grad_fn is not None]
            if nodes and not private.backward_keeps_graph() and all(map(private.backward_reaches, nodes)):
                self._last_backward = backward
        return backward is not None and backward == self._last_backward


def _unless_changed(
    function: Callable[..., Any],
    spec: TreeSpec,
    before: list[int],
    or_copies: bool,
    spell_input: Callable[[int, TreeSpec], str],
    *leaves: Any,
) -> Any:
    """Run a function on inputs that must be what they were."""
    tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
    number = first_changed(before, tensors, or_copies=or_copies)
    if number is not None:
        place = next(place for place, value in enumerate(leaves) if value is tensors[number])
        raise changed_meanwhile(
            spell_input(place, spec), "Overwrite it behind that, give the module a copy of its own (x.clone())"
        )
    return function(*tree_unflatten(leaves, spec))


def recomputed(
    function: Callable[..., Any],
    *inputs: Any,
    name: str = "segment",
    draws_random: bool = True,
    state: SegmentState = NO_STATE,
    spell_input: Callable[[int, TreeSpec], str] = "input {}".format,
    watch: Stopwatch | None = None,
) -> Any:
    """Run a function without keeping what its backward needs; the backward runs it again.

    The function must give the same bits every time. Tensors in its inputs are held until the backward has recomputed
    it, if that frees the graph. Setting the generators back takes 5 kB on the host. ``state`` is what else it reads and
    changes, or might change some day; ``watch`` times the recomputation; ``spell_input`` names a leaf of the inputs.

    Raises:
        ExecutionError: It changes an input, or unexpectedly a parameter or buffer, which would silently spoil the
            recomputation. In the backward: one of them has changed since.
    """
    leaves, spec = tree_flatten(inputs)
    tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
    before = expected = private.stamps(tensors)
    hooks: AbstractContextManager[Any] = nullcontext()
    or_copies = False
    nested = _flags.checkpointing or _flags.recomputing
    if nested:
        # Inside another segment, whose recomputation makes the inputs anew, in other memory, by the same operations.
        expected = before[: len(tensors)]
    elif private.hooks_for_saved_tensors() is not None:
        or_copies = True  # somebody's hooks bring back what they like
    else:
        held = _Inputs(name)
        hooks = torch.autograd.graph.saved_tensors_hooks(held.save, held.hand_out)
    with hooks, nullcontext() if watch is None or nested else watch.timing(watch.calls):
        output = checkpoint(
            partial(_unless_changed, function, spec, expected, or_copies, spell_input),
            *leaves,
            use_reentrant=False,
            preserve_rng_state=draws_random,
            context_fn=partial(_contexts, state, watch),
        )
    if first_changed(before, tensors) is not None:
        raise ExecutionError(
            f"{name} changes its input in place, so it cannot be recomputed from it: expected an untouched input. "
            "Use an operation that is not in place there, or measure again if the model has changed since"
        )
    return output


def _contexts(
    state: SegmentState, watch: Stopwatch | None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    first_pass = FirstPass(state)
    timing = nullcontext if watch is None else partial(watch.timing, watch.calls)
    return passing_first(first_pass), _Again(timing, first_pass.replayed, repeating)


def without_saved_tensors(
    function: Callable[[Any], Any], value: Any, first_pass: FirstPass, *, draws_random: bool
) -> Any:
    """The output of a function whose graph will be dropped; a backward inside of the function runs it again."""
    return checkpoint(
        function,
        value,
        use_reentrant=False,
        preserve_rng_state=draws_random,
        context_fn=lambda: (nullcontext(), _Again(first_pass.replayed, repeating)),
    )
