r"""Where to cut a graph into stages.

A plan chooses between cuts alone: what is behind one can be recomputed without what is before it. So there should be a cut between any
two operations that save something for the backward. In a transformer's block that is what a planner needs to drop the cheap outputs and
keep the dear ones, in a residual network what it needs to keep a convolution's output and recompute its normalization::

    x ─┬─ norm ─ qkv ─ attention ─ proj ─ + ─┬─ norm ─ fc1 ─ gelu ─ fc2 ─ + ─
       │      cut   cut         cut      │   cut     cut   cut    cut     │   cut
       └─────────────────────────────────┘   └────────────────────────────┘

Between two such operations the cut is where the least is alive, so additions and views belong to what is before them: a boundary of two
tensors would be of no use there. What else is alive at a cut (the shortcut x, a mask) is carried along, see :class:`lightning_rotor.chain.Skip`.
Parameters and buffers are none of it, for every stage reads them where they are.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping, Sequence, Set
from itertools import accumulate, pairwise

import torch
from torch import fx, nn

from lightning_rotor.errors import ModelError
from lightning_rotor.sequential import Stage
from lightning_rotor.tracing.footprints import Footprint, parts_of
from lightning_rotor.tracing.modules import ModuleCalls
from lightning_rotor.tracing.names import Names, weightless
from lightning_rotor.tracing.proxies import IN_PLACE
from lightning_rotor.tracing.recorder import Recorder
from lightning_rotor.tracing.slices import GraphSlice
from lightning_rotor.tracing.tracer import Tracer
from lightning_rotor.wiring import Wire, Wiring, packed

# The time of planning grows with the cube of the stages, and the least of several hundred matter little.
MOST_STAGES = 256


def stages_of(
    module: nn.Module, graph: fx.Graph, tracer: Tracer | Recorder, footprints: Mapping[fx.Node, Footprint] | None = None
) -> list[Stage]:
    """Cut a graph into stages.

    Args:
        module: What it was traced from.
        graph: Its operations.
        tracer: What traced it.
        footprints: What each operation takes; without them only places where one value is alive are cut.
    Raises:
        ModelError: There are no operations.
    """
    inputs, body = parts_of(graph)
    (result,) = [node for node in graph.nodes if node.op == "output"]
    if not body:
        raise ModelError(f"the forward of {type(module).__name__} computes nothing: expected at least one operation")
    lives = _Lives(module, inputs, body, result, tracer.calls)
    cuts = lives.behind_results(lives.single_cuts() if footprints is None else lives.cuts(footprints))
    names = Names(body)
    values = (*inputs, *body)
    number = {node: index for index, node in enumerate(values)}
    stages: list[Stage] = []
    for start, end in zip((0, *cuts), (*cuts, len(body)), strict=True):
        nodes, is_last = body[start:end], end == len(body)
        inside = set(nodes)
        read = [node for step in nodes for node in step.all_input_nodes] + (result.all_input_nodes if is_last else [])
        reads = sorted({number[node] for node in read if node in number and node not in inside})
        outputs = [node for node in nodes if lives.last_use[node] >= end]
        given = result.args[0] if is_last else packed(outputs)
        piece = GraphSlice(
            [values[index] for index in reads],
            nodes,
            given,
            root=module,
            owners=tracer.owners,
            constants=tracer.constants,
        )
        writes = (len(values),) if is_last else tuple(number[node] for node in outputs)
        stages.append(Stage(names.of(nodes), (piece,), Wiring.of([Wire(tuple(reads), writes)], writes)))
    return stages


class _Lives:
    """What is alive after each operation."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[fx.Node],
        body: Sequence[fx.Node],
        result: fx.Node,
        calls: ModuleCalls,
    ) -> None:
        self._module = module
        self._calls = calls
        self._body = body
        position = {node: index for index, node in enumerate(body)} | {result: len(body)}
        self.last_use = {node: max((position[user] for user in node.users), default=-1) for node in (*inputs, *body)}
        self._weightless = weightless(body)
        # By the number of operations that have run: what is read later. The chain's inputs are not among it, the caller holds them anyway.
        self._alive: list[list[fx.Node]] = []
        alive: dict[fx.Node, None] = {}
        for index, node in enumerate(body):
            self._alive.append(list(alive))
            for used in node.all_input_nodes:
                if self.last_use.get(used) == index:
                    alive.pop(used, None)
            if self.last_use[node] > index:
                alive[node] = None
        self._alive.append(list(alive))

    def single_cuts(self) -> list[int]:
        """After how many operations one value alone is alive, a new one each time."""
        before: fx.Node | None = None
        cuts: list[int] = []
        for place in range(1, len(self._body)):
            values = self._values(place)
            if len(values) == 1 and values[0] is not before and self._is_possible(place):
                before = values[0]
                cuts.append(place)
        return cuts

    def cuts(self, footprints: Mapping[fx.Node, Footprint]) -> list[int]:
        """After how many operations to cut: once between any two that save something, where the least is alive."""
        saving = [index for index, node in enumerate(self._body) if footprints[node].saved_bytes]
        held = [self._held_bytes(place, footprints) for place in range(len(self._body))]
        cuts = set(self.single_cuts())
        saved: set[int] = set()
        for index, following in pairwise(saving):
            saved |= footprints[self._body[index]].saved
            places = [
                place
                for place in range(index + 1, following + 1)
                if self._is_possible(place) and not self._misleads(place, saved, footprints)
            ]
            if places:
                # Where that is the same, copies in another layout belong to what is before them as well.
                cuts.add(min(places, key=lambda place: (held[place], len(self._alive[place]), -place)))
        alone = {index for index, node in enumerate(self._body) if self._inverts_as_a_whole(node)}
        cuts.update(place for index in alone for place in (index, index + 1) if self._may_cut(place))
        return thinned(
            sorted(cuts), [footprints[node].made_bytes + footprints[node].saved_bytes for node in self._body], alone
        )

    def _may_cut(self, place: int) -> bool:
        return 0 < place < len(self._body) and self._is_possible(place)

    def _inverts_as_a_whole(self, node: fx.Node) -> bool:
        return node.op == "call_module" and self._calls.inverts_as_a_whole(self._module.get_submodule(str(node.target)))

    def behind_results(self, cuts: Sequence[int]) -> list[int]:
        """The cuts before which something is made that is read behind them."""
        # torch's attention, for one, may prepare a mask that it does not need.
        kept, start = [], 0
        for place in cuts:
            made = set(self._body[start:place])
            if not made.isdisjoint(self._values(place)):
                kept.append(place)
                start = place
        return kept

    def _misleads(self, place: int, saved: Set[int], footprints: Mapping[fx.Node, Footprint]) -> bool:
        """Whether the stages around a cut would look larger, each by itself, than they are together.

        That is so where a part of something is carried along, the value in attention written by hand for instance: for its sake query and
        key are held, too, which may have been saved before. And where a parameter is that was divided for a few operations: a copy of it
        is a tensor like others. Code that carries a part past other modules means it (ShuffleNet).
        """
        around = {str(self._body[index].meta["module"]) for index in (place - 1, place)}
        return any(
            footprints[node].pieces & saved
            or ((footprints[node].pieces or footprints[node].of_parameters) and around == {str(node.meta["module"])})
            for node in self._values(place)
        )

    def _held_bytes(self, place: int, footprints: Mapping[fx.Node, Footprint]) -> int:
        storages: dict[int, int] = {}
        for node in self._values(place):
            storages.update(footprints[node].storages)
        return sum(storages.values())

    def _values(self, place: int) -> list[fx.Node]:
        """What weighs something."""
        return [node for node in self._alive[place] if node not in self._weightless]

    def _is_possible(self, place: int) -> bool:
        return (
            bool(self._values(place))
            and not any(node.target in _PIECES for node in self._alive[place])
            and not self._in_place(self._body[place])
        )

    def _in_place(self, node: fx.Node) -> bool:
        # Such a stage cannot start behind a cut. The profiler would see it and merge the two; this way they have one name.
        target = self._module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        return (
            bool(getattr(target, "inplace", False))
            or node.kwargs.get("inplace") is True
            or target in (*IN_PLACE, operator.setitem)
            or (node.op == "call_method" and str(target).endswith("_") and not str(target).endswith("__"))
        )


def thinned(cuts: Sequence[int], weights: Sequence[int], alone: Set[int] = frozenset()) -> list[int]:
    """The cuts that matter: the lightest stage joins its lighter neighbour, as long as it weighs next to nothing or there are too many.

    Args:
        cuts: Rising places.
        weights: Bytes that each operation makes and saves.
        alone: Operations to which nothing is joined, unless there are too many stages.
    """
    sums = [0, *accumulate(weights)]
    left = {end: start for start, end in pairwise((0, *cuts, len(weights)))}
    right = {start: end for end, start in left.items()}
    lightest = [(sums[end] - sums[start], start, end) for end, start in left.items()]
    heapq.heapify(lightest)
    while len(right) > 1 and lightest:
        weight, start, end = heapq.heappop(lightest)
        if right.get(start) != end:
            continue  # it has joined another since
        if len(right) <= MOST_STAGES and weight >= sums[-1] / _NOTHING:
            break
        before, after = left.get(start), right.get(end)
        if len(right) <= MOST_STAGES:
            before = None if before is not None and not alone.isdisjoint(range(before, start)) else before
            after = None if after is not None and not alone.isdisjoint(range(end, after)) else after
            if before is after is None or not alone.isdisjoint(range(start, end)):
                continue
        if after is None or (before is not None and sums[start] - sums[before] <= sums[after] - sums[end]):
            del right[start]
            start = left.pop(start)
        else:
            del left[end]
            end = right.pop(end)
        left[end], right[start] = start, end
        heapq.heappush(lightest, (sums[end] - sums[start], start, end))
    return sorted(right)[1:]


# A stage that weighs less than this part of all is not worth a cut.
_NOTHING = 4096


# Several views of one storage: a stage that takes them cannot be measured alone, for a copy of each is another storage.
_PIECES = (
    "chunk",
    "split",
    "unbind",
    "tensor_split",
    "split_with_sizes",
    torch.chunk,
    torch.split,
    torch.unbind,
    torch.tensor_split,
)
