"""Ways to keep a stage of a joint graph: torch's minimum cuts at several budgets, of which each stage takes its share.

So an option says per operation what is saved and what is made again, such as pointwise chains, which cost nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from lightning_rotor.compiling.graph_costs import owner
from lightning_rotor.compiling.joint_graph import Stages
from lightning_rotor.private.partitioning import chosen_by_torch, is_of_sizes

_log = logging.getLogger(__name__)
# Few, since each is a minimum cut of the whole graph, while a user waits for the compiler.
BUDGETS = (1.0, 0.6, 0.3)
"""Activation memory budgets under which torch is asked; the first one is what it does by default."""


@dataclass(frozen=True)
class StageOption:
    """One way to keep a stage.

    Attributes:
        name: ``"keep"`` for torch's default, else the budget.
        saved: Nodes of the stage that are saved, its output aside.
        again: Nodes that its backward makes again from those.
        needs_input: The boundary before the stage is saved, too.
        needs_output: The boundary behind it is saved, too.
    """

    name: str
    saved: frozenset[fx.Node]
    again: frozenset[fx.Node]
    needs_input: bool
    needs_output: bool


def options_of(stages: Stages, budgets: Sequence[float] = BUDGETS) -> list[list[StageOption]]:
    """Options of each stage, ``"keep"`` first."""
    choices = []
    for budget in budgets:
        name = "keep"
        if budget != 1.0:
            name = f"budget {budget:g}"
        try:
            # Once a budget, for the whole graph: its minimum cut knows what fusion makes free to make again.
            choices.append((name, chosen_by_torch(stages.joint, stages.parts, budget)))
        except Exception as error:
            # Its solvers refuse some graphs, but for the default.
            if not choices:
                raise
            _log.info("no stage of the graph has an option under %s: %s", name, error)
    options = []
    for number in range(len(stages)):
        distinct: dict[object, StageOption] = {}
        for name, chosen in choices:
            option = _option(stages, number, name, chosen)
            # Mostly they are alike: a lower budget gives something up in a few stages.
            distinct.setdefault((option.saved, option.needs_input, option.needs_output), option)
        options.append(list(distinct.values()))
    return options


def _option(stages: Stages, number: int, name: str, chosen: frozenset[fx.Node]) -> StageOption:
    """The share of a stage in a choice for the whole graph."""
    boundary = stages.boundaries[number]
    output = stages.output(number)
    own = set(stages.nodes[number])
    saved = set()
    for node in own & chosen:
        # Which boundaries are saved, the schedule says.
        if owner(node) not in (boundary, output) and not is_of_sizes(node):
            saved.add(node)
    again: set[fx.Node] = set()
    needs_input = needs_output = False
    # What the backward reads of the stage itself is saved, or made again from what is.
    waiting = [node for node in own if node is not output and stages.backward_readers(node)]
    # The backward of a ReLU reads what it has returned, so that its stage saves the boundary, and not the next one.
    if output is not None and _belongs_to_maker(stages, output):
        needs_output = True
    if boundary is not None and stages.backward_readers(boundary) and not _belongs_to_maker(stages, boundary):
        needs_input = True
    # What is there anyway, so that nothing need be made again to have it.
    there = saved.union(stages.free, stages.always_saved, stages.parts.outputs)
    while waiting:
        node = waiting.pop()
        if node in again or node in there:
            continue
        if node is output:
            needs_output = True
        elif node is boundary or node not in own:
            # Also through a view of it: a boundary must be there for each stage that is made again from it.
            needs_input = boundary is not None
        else:
            again.add(node)
            waiting += node.all_input_nodes
    return StageOption(name, frozenset(saved), frozenset(again), needs_input, needs_output)


def _belongs_to_maker(stages: Stages, boundary: fx.Node) -> bool:
    """True if a backward node that reads a boundary is the one of the operation that made it, as ReLU's is."""
    for user in stages.backward_readers(boundary):
        name = str(getattr(user.target, "__name__", ""))
        if name.startswith(_BY_RESULT):
            return True
    return False


# Backwards that are computed from the operation's result. A compiler writes that of ReLU as a comparison.
_BY_RESULT = (
    "threshold_backward",
    "le.",
    "tanh_backward",
    "sigmoid_backward",
    "_softmax_backward",
)
