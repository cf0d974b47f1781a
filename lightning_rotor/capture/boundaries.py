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

import operator
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import accumulate, pairwise, takewhile

import torch
from torch import fx

from lightning_rotor.capture.graph_stage import (
    IN_PLACE,
    OF,
    SIZE,
    VALUED,
    GraphSlice,
    name_of,
    require_as_recorded,
    require_check,
)
from lightning_rotor.capture.operations import is_invertible_as_a_whole, words
from lightning_rotor.capture.recorder import Recording
from lightning_rotor.capture.writer import OpMemory
from lightning_rotor.errors import ModelError
from lightning_rotor.private.values import attribute_of, tree_unflatten
from lightning_rotor.stages.sequential import Stage, Wire, Wiring, packed

# -------------------------------------------------------------------- Names of stages in the user's terms.


_SPLITS = ("chunk", "split", "unbind", "tensor_split", "split_with_sizes")
"""Several views of one storage, of which a stage cannot be measured alone: a copy of each is another storage."""
_PIECES = (*_SPLITS, torch.chunk, torch.split, torch.unbind, torch.tensor_split)
_VIEWS = words(
    "contiguous expand flatten getitem narrow permute reshape select squeeze swapaxes t transpose unflatten unsqueeze",
    "view",
).union(_SPLITS)
"""What a stage is not named after: it shows its input in another way; a few of these copy if they must."""


class Names:
    """Names of stages in the user's terms."""

    def __init__(self, body: Sequence[fx.Node]) -> None:
        # How many operations run inside of each module.
        self._inside = Counter(path for node in body for path in _paths_around(node))
        self._taken: Counter[str] = Counter()

    def of(self, nodes: Sequence[fx.Node]) -> str:
        """Name of the module that all of it is, or of the first and the last."""
        name = self._describe(nodes)
        self._taken[name] += 1
        return name if self._taken[name] == 1 else f"{name} ({self._taken[name]})"

    def _describe(self, nodes: Sequence[fx.Node]) -> str:
        audible = [node for node in nodes if SIZE not in node.meta and node.target not in _OURS]
        working = [node for node in audible if node.op == "call_module" or name_of(node) not in _VIEWS]
        working = working or audible or list(nodes)
        paths = [str(node.meta["module"]).split(".") for node in working]
        common = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
        prefix = ".".join(parts[0] for parts in common)
        if prefix and self._inside[prefix] == sum(prefix in _paths_around(node) for node in nodes):
            return prefix
        first, last = self._label(working[0]), self._label(working[-1])
        return first if first == last else f"{first} … {last}"

    @staticmethod
    def _label(node: fx.Node) -> str:
        path = str(node.meta["module"])
        if node.op == "call_module":
            return path
        return f"{path}.{name_of(node)}" if path else name_of(node)


_OURS = (require_as_recorded, require_check, tree_unflatten)  # no code of the user's


def _paths_around(node: fx.Node) -> list[str]:
    """The module that an operation runs in, and those around it."""
    return list(accumulate(str(node.meta["module"]).split("."), "{}.{}".format))


MOST_STAGES = 256
"""The time of planning grows with the cube of the stages, and the least of several hundred matter little."""
_NOTHING = 4096
"""A stage that weighs less than this part of all is not worth a cut."""


def stages_of(recording: Recording) -> list[Stage]:
    """Cut a recording into stages; ``ModelError`` if it is empty."""
    inputs = [node for node in recording.graph.nodes if node.op == "placeholder"]
    body = [node for node in recording.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    (result,) = [node for node in recording.graph.nodes if node.op == "output"]
    if not body:
        raise ModelError(
            f"the forward of {type(recording.root).__name__} computes nothing: expected at least one operation"
        )
    lives = _Lives(inputs, body, result)
    cuts = lives.behind_results(lives.cuts(recording.memory))
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
        piece = GraphSlice([values[index] for index in reads], nodes, given)
        writes = (len(values),) if is_last else tuple(number[node] for node in outputs)
        stages.append(Stage(names.of(nodes), (piece,), Wiring.of([Wire(tuple(reads), writes)], writes)))
    return stages


class _Lives:
    """What is alive after each operation."""

    def __init__(self, inputs: Sequence[fx.Node], body: Sequence[fx.Node], result: fx.Node) -> None:
        self._body = body
        position = {node: index for index, node in enumerate(body)} | {result: len(body)}
        self.last_use = {node: max((position[user] for user in node.users), default=-1) for node in (*inputs, *body)}
        # By the number of operations that have run: what is read later, without the chain's inputs.
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

    def cuts(self, memory: Mapping[fx.Node, OpMemory]) -> list[int]:
        """Numbers of operations before each cut: one between any two that save something, where the least is alive."""
        saving = [index for index, node in enumerate(self._body) if memory[node].saved_bytes]
        held = [self._held_bytes(place, memory) for place in range(len(self._body))]
        first_alone: dict[fx.Node, int] = {}  # for each value that is alive by itself somewhere
        for place in range(1, len(self._body)):
            values = self._values(place)
            if len(values) == 1 and self._is_possible(place):
                first_alone.setdefault(values[0], place)
        cuts = set(first_alone.values())
        saved: set[fx.Node] = set()
        for index, following in pairwise(saving):
            saved |= memory[self._body[index]].saved
            places = [
                place
                for place in range(index + 1, following + 1)
                if self._is_possible(place) and not self._misleads(place, saved, memory)
            ]
            if places:
                # Where that is the same, copies in another layout belong to what is before them as well.
                cuts.add(min(places, key=lambda place: (held[place], len(self._alive[place]), -place)))
        alone = {
            index
            for index, node in enumerate(self._body)
            if node.op == "call_module" and is_invertible_as_a_whole(node.meta[OF])
        }
        ends = {index: index + 1 + self._is_check(index + 1) for index in alone}
        around = (place for ends_of in ends.items() for place in ends_of if 0 < place < len(self._body))
        cuts.update(filter(self._is_possible, around))
        return thinned(sorted(cuts), [memory[node].made_bytes + memory[node].saved_bytes for node in self._body], alone)

    def _is_check(self, place: int) -> bool:
        """True if an operation checks what the one before it, code that runs as it is, has returned."""
        return place < len(self._body) and self._body[place].target is require_as_recorded

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

    def _misleads(self, place: int, saved: Set[fx.Node], memory: Mapping[fx.Node, OpMemory]) -> bool:
        """True if the stages around a cut look larger, each by itself, than they are together.

        A carried part of something does that: in attention written by hand, the value holds query and key too, which
        may have been saved before. So does a part of a parameter that was divided for a few operations, as its copy is
        a tensor like others. Code that carries a part past other modules means it.
        """
        around = {str(self._body[index].meta["module"]) for index in (place - 1, place)}
        return any(
            memory[node].pieces & saved
            or ((memory[node].pieces or memory[node].of_parameters) and around == {str(node.meta["module"])})
            for node in self._values(place)
        )

    def _held_bytes(self, place: int, memory: Mapping[fx.Node, OpMemory]) -> int:
        storages: dict[fx.Node, int] = {}
        for node in self._values(place):
            storages.update(memory[node].storages)
        return sum(storages.values())

    def _values(self, place: int) -> list[fx.Node]:
        """Values whose storage counts."""
        return [node for node in self._alive[place] if SIZE not in node.meta and VALUED not in node.meta]

    def _is_possible(self, place: int) -> bool:
        return (
            bool(self._values(place))
            and not self._is_check(place)
            and not any(node.target in _PIECES for node in self._alive[place])
            and not self._in_place(self._body[place])
        )

    def _in_place(self, node: fx.Node) -> bool:
        # Such a stage cannot start behind a cut: the profiler would merge the two.
        target = node.meta[OF] if node.op == "call_module" else node.target
        return (
            attribute_of(target, "inplace") is True
            or node.kwargs.get("inplace") is True
            or target in (*IN_PLACE, operator.setitem)
            or (node.op == "call_method" and str(target).endswith("_") and not str(target).endswith("__"))
        )


def thinned(cuts: Sequence[int], weights: Sequence[int], alone: Set[int] = frozenset()) -> list[int]:
    """Cuts left once the lightest stages, while weightless or too many, joined their lighter neighbours.

    Operations in ``alone`` join nothing, unless there are too many stages.
    """
    sums, ends = [0, *accumulate(weights)], [0, *cuts, len(weights)]

    def weight(stage: int) -> int:
        return sums[ends[stage + 1]] - sums[ends[stage]]

    def lighter_first(cut: int) -> list[tuple[int, int]]:
        return sorted((weight(stage), stage) for stage in (cut - 1, cut))

    while len(ends) > 2:
        too_many = len(ends) > MOST_STAGES + 1
        may_join = [too_many or alone.isdisjoint(range(*stage)) for stage in pairwise(ends)]
        between = [cut for cut in range(1, len(ends) - 1) if may_join[cut - 1] and may_join[cut]]
        cut = min(between, key=lighter_first, default=0)
        if not cut or (not too_many and lighter_first(cut)[0][0] >= sums[-1] / _NOTHING):
            break
        del ends[cut]
    return ends[1:-1]
