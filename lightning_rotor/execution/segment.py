"""One segment: its forward keeps nothing that its backward needs, and the backward runs it again.

Its inputs are held from the one to the other. When they may be given up, is most of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node

from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.first_pass import FirstPass, passing_first
from lightning_rotor.execution.moving import unpack_moved
from lightning_rotor.execution.passes import is_checkpointing, is_recomputing, repeating
from lightning_rotor.execution.recomputation import Recomputation
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.execution.stopwatch import Stopwatch
from lightning_rotor.execution.tensors_read import changed_meanwhile, first_changed
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import TreeSpec, like, tree_flatten, tree_unflatten

NO_STATE = SegmentState()


def recomputed(
    function: Callable[..., Any],
    *inputs: Any,
    name: str = "segment",
    draws_random: bool = True,
    state: SegmentState = NO_STATE,
    known_draws: set[str] | None = None,
    name_of_input: Callable[[int, TreeSpec], str] = "input {}".format,
    stopwatch: Stopwatch | None = None,
) -> Any:
    """Run a function without keeping what its backward needs; the backward runs it again.

    The function must give the same bits every time. Tensors in its inputs are held until the backward has recomputed
    it, if that frees the graph. Setting the generators back takes 5 kB on the host. ``state`` is what else it reads and
    changes, or might change some day; ``known_draws`` are the generators that it is known to draw from, and grow;
    ``stopwatch`` times the second run; ``name_of_input`` names a leaf of the inputs.

    Raises:
        ExecutionError: It changes an input, or unexpectedly a parameter or buffer, which would silently spoil the
            recomputation. In the backward: one of them has changed since, or it saves other tensors than before.
    """
    leaves, spec = tree_flatten(inputs)
    tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
    before = private.stamps(tensors)
    if torch.is_grad_enabled():
        timing: Callable[[], AbstractContextManager[None]] = nullcontext
        if stopwatch is not None:
            # With the laps of this call: the stopwatch has those of the next one when this one's backward comes.
            timing = partial(stopwatch.timing, stopwatch.laps)
        held = _Inputs(name, leaves, spec, before, name_of_input)
        device = _device_of(tensors) if draws_random else None
        first_pass = FirstPass(state, device, known_draws)
        again = partial(_run_again, function, held, first_pass, timing)
        with passing_first(first_pass), Recomputation(name, again).dropping():
            output = function(*inputs)
        first_pass.tell_draws(partial(function, *inputs))
    else:
        # The discarded pass of a segment around this one: nothing is saved, and nothing will be asked for.
        output = function(*inputs)
    if first_changed(before, tensors) is not None:
        raise ExecutionError(
            f"{name} changes its input in place, so it cannot be recomputed from it: expected an untouched input. "
            "Use an operation that is not in place there, or measure again if the model has changed since"
        )
    return output


def _device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The first device besides the host that a tensor is on, else the host."""
    for tensor in tensors:
        # Quicker than to ask for the device.
        if not tensor.is_cpu:
            return tensor.device
    return torch.device("cpu")


def _run_again(
    function: Callable[..., Any],
    inputs: _Inputs,
    first_pass: FirstPass,
    timing: Callable[[], AbstractContextManager[None]],
) -> None:
    # Asking for them may make a segment around this one run again.
    leaves = inputs.leaves()
    with timing(), first_pass.replayed(), repeating():
        function(*inputs.require_unchanged(leaves))


class _Inputs:
    """Inputs of one segment, until the last backward that runs through it has them (rule 1 of ``passes``).

    Its backwards, the most expensive moments, go without them, unless the graph is kept. An inner segment gets them
    from the recomputation around it, which does the same; where somebody's hooks save tensors elsewhere, they do so.
    ``stamps`` are those of the tensors among the leaves, ``name_of_leaf`` gives the name of a leaf.
    """

    def __init__(
        self,
        name: str,
        leaves: list[Any],
        spec: TreeSpec,
        stamps: list[int],
        name_of_leaf: Callable[[int, TreeSpec], str],
    ) -> None:
        self._name = name
        self._spec = spec
        self._stamps = stamps
        self._name_of_leaf = name_of_leaf
        self._hooks = private.hooks_for_saved_tensors()
        # Hooks bring back what they like. A recomputation makes it anew, in other memory, by the same operations.
        self._anew = is_checkpointing() or is_recomputing()
        # None once they are given up.
        self._leaves: list[Any] | None = [*leaves]
        # Of the tensors among them: places, kinds and the nodes that made them.
        self._tensors: list[int] = []
        self._kinds: list[tuple[bool, bool]] = []
        self._makers: list[Node | None] = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self._tensors.append(place)
                self._kinds.append((leaf.requires_grad, leaf.is_leaf))
                self._makers.append(leaf.grad_fn)
        if self._hooks is not None:
            # They may move tensors to the host, say, so the originals must not be held here.
            pack, _ = self._hooks
            with torch.no_grad():
                for place in self._tensors:
                    self._leaves[place] = pack(leaves[place])

    def leaves(self) -> list[Any]:
        """The leaves of the inputs, for a recomputation."""
        if self._leaves is None:
            raise ExecutionError(
                f"{self._name} is recomputed again after a backward that did not keep the graph: "
                "pass retain_graph=True to all but the last backward"
            )
        leaves = [*self._leaves]
        # Ours give back what they were given, so what they have packed counts as held here.
        is_moved = self._hooks is not None and self._hooks[1] is unpack_moved
        is_held_here = (self._hooks is None or is_moved) and not self._anew
        if is_held_here and _are_needed_no_more(self._makers):
            self._leaves = None
            self._makers = []
        for place, (learns, is_leaf) in zip(self._tensors, self._kinds, strict=True):
            tensor = leaves[place]
            if self._hooks is not None:
                _, unpack = self._hooks
                tensor = unpack(tensor)
            leaves[place] = _alone(tensor, learns=learns, is_leaf=is_leaf)
        return leaves

    def require_unchanged(self, leaves: Sequence[Any]) -> Any:
        """The inputs, from leaves that must be what they were."""
        tensors = [leaves[place] for place in self._tensors]
        before = self._stamps
        if self._anew:
            # They have other memory then, and the same number of changes.
            before = before[: len(tensors)]
        may_be_copies = self._hooks is not None and not self._anew
        number = first_changed(before, tensors, or_copies=may_be_copies)
        if number is not None:
            raise changed_meanwhile(
                self._name_of_leaf(self._tensors[number], self._spec),
                "Overwrite it behind that, give the module a copy of its own (x.clone())",
            )
        return tree_unflatten(leaves, self._spec)


def _are_needed_no_more(makers: Iterable[Node | None]) -> bool:
    """True if the running backward goes on to the nodes that made some inputs, and frees that graph.

    Any later backward then meets freed nodes, as in plain training, unless they saved nothing. If it leaves out one
    node, another backward may still come from there: two heads that read one input each, or untrained inputs.
    """
    nodes = [node for node in makers if node is not None]
    # Outside of a backward, somebody unpacks saved tensors by hand, and may do so again.
    if not nodes or private.backward_number() is None or private.backward_keeps_graph():
        return False
    return all(map(private.backward_reaches, nodes))


def _alone(tensor: torch.Tensor, *, learns: bool, is_leaf: bool) -> torch.Tensor:
    """An input for another pass, in the same memory: hooks that it gets are not the first pass's."""
    if not learns:
        return tensor
    alone = tensor.detach().requires_grad_()
    # A leaf that requires a gradient must not be changed in place, which code may do with an input that was none.
    return like(alone if is_leaf else alone.view_as(alone), tensor)
