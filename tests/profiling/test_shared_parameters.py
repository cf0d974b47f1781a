"""Gradients of parameters that several stages share: which wait in autograd's engine, and which do not stay."""

from __future__ import annotations

from torch import nn

from lightning_rotor.profiling.shared_parameters import added_gradient_bytes, shared_later, waiting_gradient_bytes
from lightning_rotor.stages.sequential import Stage, sequential_stages

WEIGHT_BYTES = 8 * 8 * 4


def linear() -> nn.Linear:
    return nn.Linear(8, 8, bias=False)


def stages_of(*layers: nn.Module) -> list[Stage]:
    return list(sequential_stages(nn.Sequential(*layers)))


def test_a_gradient_waits_from_its_last_reader_to_its_first() -> None:
    tied = linear()
    stages = stages_of(nn.Tanh(), tied, nn.Tanh(), tied, nn.Tanh(), tied, nn.Tanh())
    assert waiting_gradient_bytes(stages, 1) == (0, 0, *[WEIGHT_BYTES] * 4, 0)
    assert waiting_gradient_bytes(stages, 512) == (0, 0, *[512] * 4, 0)


def test_nothing_waits_for_parameters_that_are_frozen_or_read_once() -> None:
    tied = linear().requires_grad_(False)
    assert waiting_gradient_bytes(stages_of(tied, linear(), tied), 1) == (0, 0, 0)


def test_a_stage_knows_which_of_its_parameters_one_later_stage_shares() -> None:
    tied = linear()
    assert shared_later(stages_of(tied, tied, linear(), tied)) == [{0: False}, {0: True}, {}, {}]


def test_gradients_are_added_to_those_that_later_stages_have_left() -> None:
    tied = linear()
    stages = stages_of(tied, linear(), tied)
    shared = shared_later(stages)
    assert added_gradient_bytes(stages, shared, [(WEIGHT_BYTES,)] * 3, 1) == [WEIGHT_BYTES, 0, 0]
    # Where nothing learned, there are no sizes.
    assert added_gradient_bytes(stages, shared, [()] * 3, 1) == [0, 0, 0]
    # A sparse gradient, smaller than its parameter: the sum may be as large as both.
    assert added_gradient_bytes(stages, shared, [(16,)] * 3, 1) == [0, 0, 0]
