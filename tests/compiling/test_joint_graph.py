"""Stages of joint graphs: boundaries where one activation is alive, and what no recomputation may run again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_rotor.compiling.graph_costs import node_bytes
from lightning_rotor.compiling.joint_graph import Stages, reads_of_sizes
from tests.compiling.joint_graphs import ROWS, WIDTH, Residual, looked_at, perceptron

ACTIVATION_BYTES = ROWS * WIDTH * 4


def shape_of(stages: Stages) -> tuple[int, list[int], list[int]]:
    """Number of stages, bytes of their boundaries, and of what is always saved."""
    boundaries = [0 if node is None else node_bytes(node) for node in stages.boundaries]
    return len(stages), boundaries, sorted(map(node_bytes, stages.always_saved))


def test_each_activation_of_layers_in_a_row_is_a_boundary() -> None:
    count, boundaries, saved = looked_at(perceptron(), shape_of)
    assert count == 6
    assert boundaries == [0] + [ACTIVATION_BYTES] * 5
    assert saved == []


def test_inside_of_a_residual_block_two_are_alive_so_nothing_is_cut() -> None:
    def look(stages: Stages) -> list[int]:
        return list(map(len, stages.nodes))

    # The input of the graph is no activation, so the first block is cut: product, activation, sum.
    assert looked_at(Residual(), look) == [1, 1, 1, 3, 3]


def test_stages_have_all_activations_each_once_and_in_order() -> None:
    def look(stages: Stages) -> bool:
        activations = [node for node in stages.parts.forward if node not in stages.free]
        in_stages = [node for part in stages.nodes for node in part]
        assert all(stages.of[node] == number for number, part in enumerate(stages.nodes) for node in part)
        assert stages.output(len(stages) - 1) is None
        assert stages.output(0) is stages.boundaries[1]
        return in_stages == activations

    assert looked_at(Residual(), look)


class Noisy(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.first(x), self.dropout, training=self.dropout > 0)
        return self.second(x)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_random_numbers_are_saved_and_not_drawn_again(dropout: float) -> None:
    _, _, saved = looked_at(Noisy(dropout), shape_of)
    assert bool(saved) == bool(dropout)


def test_sizes_are_numbers_where_no_size_is_a_symbol() -> None:
    assert not looked_at(perceptron(), reads_of_sizes)
