r"""Where to cut a graph into stages.

A plan chooses between cuts alone: what is behind one can be recomputed without what is before it. So there should be a
cut between any two operations that save something for the backward::

    x ─┬─ norm ─ qkv ─ attention ─ proj ─ + ─┬─ norm ─ fc1 ─ gelu ─ fc2 ─ + ─
       │      cut   cut         cut      │   cut     cut   cut    cut     │   cut
       └─────────────────────────────────┘   └────────────────────────────┘

Between two such operations the cut is where the least is alive, so additions and views belong to what is before them.
What else is alive at a cut (the shortcut x, a mask) is carried along, see :class:`lightning_rotor.chain.Skip`.
Parameters and buffers are none of it, for every stage reads them where they are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.capture.module_calls import is_invertible_as_a_whole
from lightning_rotor.capture.names_of_stages import SPLITS, StageNames
from lightning_rotor.capture.node_facts import BOUND, IN_PLACE, OF, SIZE, VALUED
from lightning_rotor.capture.recorded_checks import require_as_recorded
from lightning_rotor.capture.recording import Recording
from lightning_rotor.capture.value_memory import OpMemory
from lightning_rotor.errors import ModelError
from lightning_rotor.private.functional_collectives import wait_for
from lightning_rotor.private.values import attribute_of
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.wiring import Wire, Wiring, packed

_PIECES = (*SPLITS, torch.chunk, torch.split, torch.unbind, torch.tensor_split)
"""Operations with several views of one storage, of which a stage cannot be measured alone: a copy of each is another
storage. Their views are taken out right behind them, and no stage ends in between."""
MOST_STAGES = 256
"""The time of planning grows with the cube of the stages, and the least of several hundred matter little."""
_NOTHING = 4096
"""A stage that weighs less than this part of all is not worth a cut."""


def stages_of_recording(recording: Recording) -> list[Stage]:
    """Cut a recording into stages; ``ModelError`` if it is empty."""
    inputs: list[fx.Node] = []
    body: list[fx.Node] = []
    for node in recording.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node)
        elif node.op == "output":
            result = node
        elif node.op != "get_attr":
            # Parameters, buffers and constants belong to no stage: each stage reads them where they are.
            body.append(node)
    if not body:
        raise ModelError(
            f"the forward of {type(recording.root).__name__} computes nothing: expected at least one operation"
        )
    lifetimes = _Lifetimes(inputs, body, result)
    cuts = lifetimes.behind_results(lifetimes.cuts(recording.memory))
    names = StageNames(body)
    values = (*inputs, *body)
    number = {node: index for index, node in enumerate(values)}
    stages: list[Stage] = []
    for start, end in pairwise((0, *cuts, len(body))):
        inside = body[start:end]
        is_last = end == len(body)
        read: set[fx.Node] = set()
        for node in inside:
            read.update(node.all_input_nodes)
        if is_last:
            # The output may show inputs and values of earlier stages as they are.
            read.update(result.all_input_nodes)
        # Parameters have no number.
        read = (read - set(inside)) & number.keys()
        reads = tuple(sorted(map(number.__getitem__, read)))
        returned: Any
        writes: tuple[int, ...]
        if is_last:
            # The nesting that the module returns is one value, behind all others.
            returned = result.args[0]
            writes = (len(values),)
        else:
            outputs = [node for node in inside if lifetimes.last_use[node] >= end]
            returned = packed(outputs)
            writes = tuple(map(number.__getitem__, outputs))
        piece = GraphSlice([values[index] for index in reads], inside, returned)
        wiring = Wiring.of([Wire(reads, writes)], writes)
        stages.append(Stage(names.of(inside), (piece,), wiring))
    return stages


class _Lifetimes:
    """The values that are alive after each operation of a graph.

    Attributes:
        last_use: For each value, the number of the last operation that reads it; -1 if none does.
    """

    def __init__(
        self,
        inputs: Sequence[fx.Node],
        body: Sequence[fx.Node],
        result: fx.Node,
    ) -> None:
        self._body = body
        position = {node: index for index, node in enumerate(body)}
        position[result] = len(body)
        self.last_use: dict[fx.Node, int] = {}
        for node in (*inputs, *body):
            readers = [position[user] for user in node.users]
            self.last_use[node] = max(readers, default=-1)
        # By the number of operations that have run: the values read later, without the chain's inputs.
        self._alive: list[list[fx.Node]] = []
        alive: dict[fx.Node, None] = {}
        for index, node in enumerate(body):
            self._alive.append(list(alive))
            # Inputs are in last_use and never alive: the caller holds them, wherever the cut is.
            for used in node.all_input_nodes:
                if self.last_use.get(used) == index:
                    alive.pop(used, None)
            if self.last_use[node] > index:
                alive[node] = None
        self._alive.append(list(alive))

    def cuts(self, memory: Mapping[fx.Node, OpMemory]) -> list[int]:
        """Numbers of operations before each cut: where one value is alive, and between any two that save something.

        Modules with an inverse are cut out. Stages of next to no weight, and those beyond a number, are joined.
        """
        # Each module with an inverse is a stage by itself: only so can a plan give up its input alone.
        alone = self._invertible()
        cuts = self._at_bottlenecks() | self._between_saving(memory) | self._around(alone)
        weights = []
        for node in self._body:
            weights.append(memory[node].made_bytes + memory[node].saved_bytes)
        return thinned(sorted(cuts), weights, alone)

    def _at_bottlenecks(self) -> set[int]:
        """For each value that is alive by itself somewhere, the first such place."""
        # There the chain carries one value, as between the layers of an nn.Sequential.
        first_alone: dict[fx.Node, int] = {}
        for place in range(1, len(self._body)):
            values = self._values(place)
            if len(values) == 1 and self._is_possible(place):
                first_alone.setdefault(values[0], place)
        return set(first_alone.values())

    def _between_saving(self, memory: Mapping[fx.Node, OpMemory]) -> set[int]:
        """Between any two neighbours of the operations that save something, the place where the least is alive."""
        places = range(len(self._body))
        saving = [place for place in places if memory[self._body[place]].saved_bytes]
        held_bytes = [self._held_bytes(place, memory) for place in places]

        def burden(place: int) -> tuple[int, int, int]:
            # Where the bytes are the same, copies in another layout belong to what is before them as well.
            return held_bytes[place], len(self._alive[place]), -place

        def tells(place: int) -> bool:
            return self._is_possible(place) and not self._misleads(place, saved, memory)

        cuts = set()
        # What was saved up to here; tells asks for it.
        saved: set[fx.Node] = set()
        for index, following in pairwise(saving):
            saved |= memory[self._body[index]].saved
            candidates = list(filter(tells, range(index + 1, following + 1)))
            # None between two views of one storage, for example: both operations stay in one stage.
            if candidates:
                cuts.add(min(candidates, key=burden))
        return cuts

    def _invertible(self) -> set[int]:
        """Numbers of the operations that are a module with an inverse."""
        operations = set()
        for index, node in enumerate(self._body):
            if node.op == "call_module" and is_invertible_as_a_whole(node.meta[OF]):
                operations.add(index)
        return operations

    def _around(self, operations: Set[int]) -> set[int]:
        """The places before and behind some operations, as far as there can be a cut."""
        places: set[int] = set()
        for index in operations:
            end = index + 1
            while self._belongs_to_last(end):
                end += 1
            places.update((index, end))
        # A cut needs operations on both sides.
        inner = places.intersection(range(1, len(self._body)))
        return set(filter(self._is_possible, inner))

    def _belongs_to_last(self, place: int) -> bool:
        """True if an operation checks what a module, code that runs as it is, has returned, or waits for it."""
        return place < len(self._body) and self._body[place].target in (require_as_recorded, wait_for)

    def behind_results(self, cuts: Sequence[int]) -> list[int]:
        """Cuts before which something is made that is read behind them."""
        # torch's attention, for one, may prepare a mask that it does not need.
        kept, start = [], 0
        for place in cuts:
            made = set(self._body[start:place])
            if not made.isdisjoint(self._values(place)):
                kept.append(place)
                start = place
        return kept

    def _misleads(
        self,
        place: int,
        saved: Set[fx.Node],
        memory: Mapping[fx.Node, OpMemory],
    ) -> bool:
        """True if the stages around a cut look larger, each by itself, than they are together.

        A carried part of something does that: in attention written by hand, the value holds query and key too, which
        may have been saved before. So does a part of a parameter that was divided for a few operations, as its copy is
        a tensor like others. Code that carries a part past other modules means it.
        """
        around = {str(self._body[index].meta["module"]) for index in (place - 1, place)}
        for node in self._values(place):
            kept = memory[node]
            if kept.pieces & saved:
                return True
            is_part = bool(kept.pieces or kept.of_parameters)
            if is_part and around == {str(node.meta["module"])}:
                return True
        return False

    def _held_bytes(self, place: int, memory: Mapping[fx.Node, OpMemory]) -> int:
        """Bytes of the storages that are alive at a place."""
        storages: dict[fx.Node, int] = {}
        for node in self._values(place):
            storages.update(memory[node].storages)
        return sum(storages.values())

    def _values(self, place: int) -> list[fx.Node]:
        """Values whose storage counts."""
        # Sizes and numbers are the host's.
        values = []
        for node in self._alive[place]:
            is_number = SIZE in node.meta or VALUED in node.meta
            if not is_number:
                values.append(node)
        return values

    def _is_possible(self, place: int) -> bool:
        """True if there can be a cut at a place."""
        # A stage has to take and give at least one tensor. And a check must not be apart from what it checks.
        if not self._values(place) or self._belongs_to_last(place):
            return False
        if any(node.target in _PIECES for node in self._alive[place]):
            return False
        # A stage is measured with gradients that are made for it, and those of a DTensor are spread in a way of theirs.
        # Of a sparse or jagged tensor, nobody knows which memory it holds.
        if any(BOUND in node.meta for node in self._alive[place]):
            return False
        # The profiler would merge a stage that starts so with the one before.
        return not _in_place(self._body[place])


def _in_place(node: fx.Node) -> bool:
    """True if an operation changes one of its arguments."""
    target = node.meta[OF] if node.op == "call_module" else node.target
    if attribute_of(target, "inplace") is True or node.kwargs.get("inplace") is True:
        return True
    if target in (*IN_PLACE, operator.setitem):
        return True
    # By torch's convention: add_ changes its tensor, __add__ does not.
    name = str(target)
    return node.op == "call_method" and name.endswith("_") and not name.endswith("__")


def thinned(
    cuts: Sequence[int],
    weights: Sequence[int],
    alone: Set[int] = frozenset(),
) -> list[int]:
    """Cuts left once the lightest stages joined their lighter neighbours, while weightless or too many.

    ``weights`` are the bytes that each operation makes and saves. Operations in ``alone`` join nothing, unless there
    are too many stages.
    """
    # Sums of the weights before each operation, so that the weight of a stage is one subtraction.
    sums = [0, *accumulate(weights)]
    ends = [0, *cuts, len(weights)]

    def weight(stage: int) -> int:
        return sums[ends[stage + 1]] - sums[ends[stage]]

    def lighter_first(cut: int) -> list[tuple[int, int]]:
        return sorted((weight(stage), stage) for stage in (cut - 1, cut))

    while len(ends) > 2:
        too_many = len(ends) > MOST_STAGES + 1
        # Asked anew for each cut that goes, as two light stages make a heavier one.
        may_join = []
        for stage in pairwise(ends):
            may_join.append(too_many or alone.isdisjoint(range(*stage)))
        removable = []
        for cut in range(1, len(ends) - 1):
            if may_join[cut - 1] and may_join[cut]:
                removable.append(cut)
        if not removable:
            break
        cut = min(removable, key=lighter_first)
        least_weight, _ = lighter_first(cut)[0]
        if not too_many and least_weight >= sums[-1] / _NOTHING:
            break
        del ends[cut]
    return ends[1:-1]
