"""Pairs of graphs for schedules: what the forward saves, and how often the backward makes the rest."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from lightning_rotor.compiling.backward_writer import graphs_for
from lightning_rotor.compiling.joint_graph import Stages
from lightning_rotor.compiling.stage_options import options_of
from lightning_rotor.schedule import Schedule
from tests.compiling.joint_graphs import looked_at, perceptron

PRODUCT = torch.ops.aten.addmm.default


def counts(schedule: str) -> tuple[int, int]:
    """What the forward of a perceptron saves beside its inputs, and the forward products in the backward."""

    def look(stages: Stages) -> tuple[int, int]:
        forward, backward = graphs_for(stages, options_of(stages, budgets=(1.0,)), Schedule.parse(schedule))
        output = next(iter(reversed(forward.graph.nodes)))
        saved = [node for node in output.args[0][1:] if isinstance(node, fx.Node) and node.op != "placeholder"]
        again = [node for node in backward.graph.nodes if node.target is PRODUCT]
        return len(saved), len(again)

    return looked_at(perceptron(), look)


@pytest.mark.parametrize(
    ("schedule", "saved", "again"),
    [
        pytest.param("0-5", 5, 0, marks=pytest.mark.wide),
        ("(0-1) 2-5", 4, 1),
        ("(0-3) 4-5", 2, 2),  # both products of the segment run again
        ("((0-1) 2-3) 4-5", 2, 3),  # the first product once for each level
    ],
)
def test_what_is_not_saved_is_made_again_once_for_each_segment_around_it(schedule: str, saved: int, again: int) -> None:
    assert counts(schedule) == (saved, again)
