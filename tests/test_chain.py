"""Chains check what they are made of."""

from __future__ import annotations

import pickle
import random
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given

from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.errors import ScheduleError
from tests.strategies import chains, random_chain

CHAIN = random_chain(random.Random(3), 4, "options")


def test_totals_are_those_of_keeping_every_stage() -> None:
    keeps = [stage.keep for stage in CHAIN]
    assert CHAIN.step_seconds == pytest.approx(sum(keep.forward_seconds + keep.backward_seconds for keep in keeps))
    assert CHAIN.parameter_gradient_bytes == sum(keep.parameter_gradient_bytes for keep in keeps)
    assert CHAIN.names == ("stage0", "stage1", "stage2", "stage3")
    assert len(CHAIN) == 4


@given(chains())
def test_chains_are_values(chain: Chain) -> None:
    copy = pickle.loads(pickle.dumps(chain))
    assert copy == chain
    assert hash(copy) == hash(chain)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field"):
        chain.input_bytes = 0  # type: ignore[misc]


def test_fingerprint_names_sizes_but_not_timings() -> None:
    first, *rest = CHAIN.stages
    faster = replace(CHAIN, stages=(replace(first, discard_seconds=first.discard_seconds / 2), *rest))
    larger = replace(CHAIN, stages=(replace(first, output_bytes=first.output_bytes + 1), *rest))
    elsewhere = replace(CHAIN, device="cuda:0")
    assert faster.fingerprint == CHAIN.fingerprint
    assert len({CHAIN.fingerprint, larger.fingerprint, elsewhere.fingerprint}) == 3


def test_chain_without_stages_is_refused() -> None:
    with pytest.raises(ScheduleError, match="the chain has no stages: expected at least one"):
        Chain(())


def test_stage_without_options_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stage 'stage0' has no option: expected at least one way to keep it"):
        replace(CHAIN.stages[0], options=())


@pytest.mark.parametrize("name", ["input_bytes", "rng_state_bytes"])
def test_negative_sizes_of_a_chain_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="sizes of a chain count bytes and are never negative"):
        replace(CHAIN, **{name: -1})


@pytest.mark.parametrize(
    "name", [field.name for field in fields(Option) if field.name.endswith(("_bytes", "_tensors"))]
)
@pytest.mark.parametrize("value", [-1, 0.5, float("nan")])
def test_sizes_of_an_option_are_whole_and_not_negative(name: str, value: float) -> None:
    with pytest.raises(ScheduleError, match=f"Option 'keep': {name} is .*, expected a whole number"):
        replace(CHAIN.stages[0].keep, **{name: value})


@pytest.mark.parametrize("name", [field.name for field in fields(StageCost) if field.name.endswith("_bytes")])
def test_sizes_of_a_stage_are_whole_and_not_negative(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"StageCost 'stage0': {name} is -1, expected a whole number"):
        replace(CHAIN.stages[0], **{name: -1})


def test_no_option_discards_at_a_larger_peak_than_the_stage() -> None:
    stage = CHAIN.stages[0]
    larger = replace(stage.keep, discard_peak_bytes=stage.discard_peak_bytes + 1)
    message = f"option .keep. is .*, expected at most the stage.s own {stage.discard_peak_bytes}"
    with pytest.raises(ScheduleError, match=message):
        replace(stage, options=(larger,))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_durations_are_finite_and_not_negative(value: float) -> None:
    with pytest.raises(ScheduleError, match=r"forward_seconds is .*, expected a finite duration that is not negative"):
        replace(CHAIN.stages[0].keep, forward_seconds=value)
    with pytest.raises(ScheduleError, match=r"discard_seconds is .*, expected a finite duration that is not negative"):
        replace(CHAIN.stages[0], discard_seconds=value)
