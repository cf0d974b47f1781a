"""Which variants of a compiled stage are worth having, and when two results are the same. Compiling is in test_compiled."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.capture.compiled import CannotRepeatError, CompiledModules
from lightning_rotor.chain import StageCost
from lightning_rotor.profiling.variant_costs import (
    _agree,
    _Outcome,
    _outcome,
    _repeatable_outcome,
    _worthwhile,
    with_variants,
)
from tests.profiling.stage_runs import profiler_of


@cache
def kept() -> StageCost:
    return profiler_of(nn.GELU()).measure().cost


def cost(**changes: Any) -> StageCost:
    return replace(kept(), options=(replace(kept().keep, **changes),))


def test_a_variant_pays_if_it_takes_less_in_some_respect_than_each_before() -> None:
    saved_bytes = kept().keep.saved_bytes + 4096
    costs = {
        "keep": cost(saved_bytes=saved_bytes),
        "the same": cost(saved_bytes=saved_bytes),
        "less": cost(saved_bytes=saved_bytes - 1024),
        "more": cost(saved_bytes=saved_bytes + 1024),
        "lower peak": cost(saved_bytes=saved_bytes, forward_peak_bytes=kept().keep.forward_peak_bytes - 1),
        "least": cost(saved_bytes=saved_bytes - 4096),
    }
    assert _worthwhile(costs) == ("keep", "less", "lower peak", "least")


def test_a_variant_that_saves_fewer_skips_pays() -> None:
    costs = {"keep": cost(saved_skips=(0, 1)), "fewer": cost(saved_skips=(0,)), "others": cost(saved_skips=(2,))}
    assert _worthwhile(costs) == ("keep", "fewer", "others")


def test_seconds_do_not_choose_variants() -> None:
    assert _worthwhile({"keep": cost(), "faster": cost(forward_seconds=0.0, backward_seconds=0.0)}) == ("keep",)


def test_results_agree_to_the_bit_or_by_rounding_at_the_scale_of_their_group() -> None:
    large, small = torch.full((4,), 1000.0), torch.full((4,), 1e-6)
    one = _Outcome([large], [small, large, None], [small])
    near = _Outcome([large * (1 + 1e-6)], [small * 2, large, None], [small])
    assert _agree(one, one)
    assert not _agree(near, one)
    assert _agree(near, one, exact=False)
    # A buffer is a group of its own: its entries are small, and twice as much is no rounding.
    other_buffer = _Outcome([large], [small, large, None], [small * 2])
    assert not _agree(other_buffer, one, exact=False)
    assert not _agree(_Outcome([large], [small, large, small], [small]), one, exact=False)
    assert not _agree(_Outcome([large], [small, large, None], []), one)
    assert not _agree(_Outcome([large.double()], [small, large, None], [small]), one, exact=False)


def test_an_outcome_has_gradients_and_buffers_and_leaves_the_stage_as_it_is() -> None:
    layer = nn.BatchNorm1d(64)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    outcome = _outcome(profiler_of(layer))
    assert [len(group) for group in outcome.groups] == [1, 3, 1, 1, 1]
    assert all(gradient is not None for gradient in outcome.gradients)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert layer.weight.grad is None


def test_a_stage_that_draws_has_no_repeatable_outcome() -> None:
    with pytest.raises(CannotRepeatError, match="it draws random numbers"):
        _repeatable_outcome(profiler_of(nn.Dropout()))


def test_a_stage_that_is_not_compiled_has_no_variants() -> None:
    profiler = profiler_of(nn.Tanh())
    alone = profiler.measure()
    assert with_variants(profiler, alone, CompiledModules(), "kin", {}) is alone
