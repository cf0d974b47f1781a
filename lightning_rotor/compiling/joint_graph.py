"""The forward of a joint graph as stages in a row.

A boundary lies wherever exactly one activation is alive::

    tokens ─ embedding ─┬─ norm ─ attention ─ add ─┬─ norm ─ mlp ─ add ─ …
                        └──────────────────────────┘
                        ▲                          ▲                   ▲     boundaries

Views belong to the tensor that they show. What is made of parameters by views alone, or drawn from a seed that is
saved, is free: it can be made again at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from lightning_rotor.compiling.graph_costs import is_view, node_bytes, node_seconds, owner
from lightning_rotor.private import partitioning
from lightning_rotor.private.partitioning import JointParts, takes_part
from lightning_rotor.private.torch_names import schema_of

# Smaller values (numbers, seeds) are saved wherever they cross a boundary.
_SMALL_BYTES = 64
# A stage with a smaller share of the forward's seconds joins the next one.
_LEAST_SHARE = 0.01


@dataclass
class Stages:
    """The forward of a joint graph in stages.

    Attributes:
        joint: The joint graph.
        parts: Its parts.
        order: Places of all nodes.
        free: Nodes that can be made again from what is saved anyway.
        always_saved: Nodes that no recomputation may run again (they draw random numbers, or read what the forward
            changes), and small ones that cross boundaries.
        nodes: Of each stage, in order.
        boundaries: The node that each stage reads; None for the first one.
        of: The stage of each node that is not free.
    """

    joint: fx.GraphModule
    parts: JointParts
    order: dict[fx.Node, int]
    free: set[fx.Node]
    always_saved: list[fx.Node]
    nodes: list[list[fx.Node]] = field(default_factory=list)
    boundaries: list[fx.Node | None] = field(default_factory=list)
    of: dict[fx.Node, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.nodes)

    def output(self, stage: int) -> fx.Node | None:
        """The boundary behind a stage; None behind the last."""
        return self.boundaries[stage + 1] if stage + 1 < len(self) else None

    def is_forward(self, node: fx.Node) -> bool:
        """True if the forward needs a node."""
        return partitioning.is_forward(self.parts, node)

    def backward_readers(self, node: fx.Node) -> list[fx.Node]:
        """Nodes of the backward that read one."""
        readers = []
        for user in node.users:
            # What the graph returns is held anyway, and nothing is computed from it there.
            if user.op != "output" and not self.is_forward(user):
                readers.append(user)
        return readers


def stages_of_joint_graph(joint: fx.GraphModule, parts: JointParts) -> Stages:
    """Cut the forward of a joint graph into stages."""
    order = {node: place for place, node in enumerate(joint.graph.nodes)}
    free: set[fx.Node] = set()
    always_saved: list[fx.Node] = []
    for node in parts.forward:
        if node.op in ("placeholder", "get_attr"):
            # The caller holds inputs, and parameters stay where they are.
            free.add(node)
        elif _must_not_repeat(node, parts):
            several = [user for user in node.users if takes_part(user)]
            # Some of its results the backward alone needs, such as the state of its generator.
            always_saved += several or [node]
        elif node not in always_saved and _takes_nothing(node):
            if all(source in free or source in always_saved for source in node.all_input_nodes):
                free.add(node)
    stages = Stages(joint, parts, order, free, always_saved)
    activations = [node for node in parts.forward if node not in free]
    _cut(stages, activations)
    return stages


def _takes_nothing(node: fx.Node) -> bool:
    """True if a node makes nothing that takes memory: a view, or one of the seeds that were drawn together."""
    return is_view(node) or "inductor_lookup_seed" in str(node.target)


def _must_not_repeat(node: fx.Node, parts: JointParts) -> bool:
    """True if a node would compute other values in the backward."""
    if node.op != "call_function":
        return False
    # Running statistics, which the forward has written to by the time the backward runs.
    if not parts.changed_inputs.isdisjoint(node.all_input_nodes) and not is_view(node):
        return True
    # A seed is saved. What is drawn from it may be drawn again, to the same numbers.
    if "inductor_seeds" in str(node.target):
        return True
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and not _draws_nothing(node)


def _draws_nothing(node: fx.Node) -> bool:
    """True if an attention's dropout is off: such operations count as random whatever their arguments."""
    schema = schema_of(node.target)
    for place, argument in enumerate(schema.arguments):
        if argument.name != "dropout_p":
            continue
        if place < len(node.args):
            return bool(node.args[place] == 0)
        return bool(node.kwargs.get("dropout_p", argument.default_value) == 0)
    return False


def _cut(stages: Stages, activations: list[fx.Node]) -> None:
    """Find boundaries, and divide the activations between them."""
    cuts = _cuts(stages, activations)
    # The planner's time grows with the cube of their number, and next to nothing is to be saved in a small one.
    least_seconds = _LEAST_SHARE * sum(map(node_seconds, activations))
    begin = 0
    boundary = None
    for end, following in [*cuts, (len(activations), None)]:
        part = activations[begin:end]
        is_last = following is None
        if not is_last and sum(map(node_seconds, part)) < least_seconds:
            continue
        stages.nodes.append(part)
        stages.boundaries.append(boundary)
        begin = end
        boundary = following
    for number, part in enumerate(stages.nodes):
        stages.of.update(dict.fromkeys(part, number))
    stages.always_saved += _crossing(stages)


def _cuts(stages: Stages, activations: list[fx.Node]) -> list[tuple[int, fx.Node]]:
    """Places between activations where one alone is alive, with that one."""
    place = {node: number for number, node in enumerate(activations)}
    last_use = _last_uses(activations, place)
    alive: set[fx.Node] = set()
    # What is saved in any case crosses every boundary, and no recomputation begins there.
    saved = set(map(owner, stages.always_saved))
    cuts: list[tuple[int, fx.Node]] = []
    for number, node in enumerate(activations[:-1]):
        alive.add(owner(node))
        crossing = []
        for other in list(alive):
            if last_use.get(other, 0) <= number:
                alive.remove(other)
            elif node_bytes(other) > _SMALL_BYTES and other not in saved and other in place:
                crossing.append(other)
        # Behind a view, or a small value, it is the same boundary once more.
        if len(crossing) == 1 and (not cuts or cuts[-1][1] is not crossing[0]):
            cuts.append((number + 1, crossing[0]))
    return cuts


def _last_uses(activations: list[fx.Node], place: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Places of the last activations that read each one's memory, through views of it as well."""
    last_use: dict[fx.Node, int] = {}
    for node in activations:
        root = owner(node)
        uses = [place[user] for user in node.users if user in place]
        last_use[root] = max(last_use.get(root, 0), place[node], *uses)
        if takes_part(node):
            # Several results live at least until each of them is taken.
            maker = node.all_input_nodes[0]
            last_use[maker] = max(last_use.get(maker, 0), place[node])
    return last_use


def _crossing(stages: Stages) -> Iterable[fx.Node]:
    """Small nodes that a later stage reads."""
    crossing = []
    for node, number in stages.of.items():
        if node_bytes(node) > _SMALL_BYTES:
            continue
        if node in stages.always_saved or node in stages.boundaries:
            continue
        # A stage has one boundary, so whatever else it reads of an earlier one must be there.
        if any(stages.of.get(user, number) > number for user in node.users):
            crossing.append(node)
    return crossing


def reads_of_sizes(stages: Stages) -> bool:
    """True if the graph holds numbers that depend on the sizes of inputs."""
    return any(partitioning.is_of_sizes(node) for node in stages.joint.graph.nodes)
