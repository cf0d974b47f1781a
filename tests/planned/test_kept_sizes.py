"""Sizes for which measured steps have kept the limit."""

from __future__ import annotations

import torch
from torch import nn

from lightning_rotor import Checkpointable
from lightning_rotor.planned.kept_sizes import KeptSizes
from lightning_rotor.planned.signature import Signature
from lightning_rotor.schedule import Schedule

NET = Checkpointable(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), show_progress=False)
PLAIN, LEAN = Schedule.parse("0-1"), Schedule.parse("(0) 1")


def signature(rows: int, length: int) -> Signature:
    found, _ = NET._planned.plans.signature_and_input((torch.randn(rows, length, 8),), {})
    return found


def test_what_is_smaller_in_every_dimension_is_covered_under_the_same_schedule() -> None:
    kept = KeptSizes()
    kept.note(signature(4, 6), PLAIN, 1000)
    assert kept.cover(signature(4, 6), PLAIN, 1000)
    assert kept.cover(signature(3, 5), PLAIN, 900)
    assert not kept.cover(signature(5, 6), PLAIN, 1000)
    assert not kept.cover(signature(4, 7), PLAIN, 1000)
    assert not kept.cover(signature(4, 6), PLAIN, 1001)  # the batch has more than goes into the call
    assert not kept.cover(signature(4, 6), LEAN, 1000)
    assert kept.knows(signature(9, 9), PLAIN)
    assert not kept.knows(signature(4, 6), LEAN)


def test_sizes_that_grow_in_two_dimensions_are_kept_side_by_side() -> None:
    kept = KeptSizes()
    kept.note(signature(8, 2), PLAIN, 1000)
    kept.note(signature(2, 8), PLAIN, 1000)
    assert kept.cover(signature(7, 2), PLAIN, 1000)
    assert kept.cover(signature(2, 7), PLAIN, 1000)
    assert not kept.cover(signature(3, 3), PLAIN, 1000)
    kept.note(signature(8, 8), PLAIN, 1000)
    assert kept.cover(signature(3, 3), PLAIN, 1000)


def test_a_step_that_exceeds_makes_sizes_unknown_again() -> None:
    kept = KeptSizes()
    kept.note(signature(4, 6), PLAIN, 1000)
    kept.note(signature(4, 6), LEAN, 1000)
    kept.forget(signature(2, 2), PLAIN)
    assert not kept.cover(signature(1, 1), PLAIN, 1)
    assert kept.cover(signature(1, 1), LEAN, 1)
