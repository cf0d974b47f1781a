"""Chains of sizes that were never measured, from chains of sizes that were."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lightning_rotor.planning.combined_chain import UnlikeChainsError, combined
from tests.strategies import random_chain


def mean(values):
    return sum(values) / len(values)


def test_bytes_and_seconds_are_combined_each_in_its_way() -> None:
    small = random_chain(random.Random(3), 4, "cnn")
    stage = small.stages[2]
    large = replace(
        small,
        input_bytes=small.input_bytes + 100,
        stages=(*small.stages[:2], replace(stage, discard_seconds=3 * stage.discard_seconds), small.stages[3]),
    )
    chain = combined([small, large], of_bytes=max, of_seconds=mean)
    assert chain.input_bytes == small.input_bytes + 100
    assert chain.stages[2].discard_seconds == pytest.approx(2 * stage.discard_seconds)
    assert chain.names == small.names
    assert [cost.output_bytes for cost in chain] == [cost.output_bytes for cost in small]


def test_a_stages_discarded_peak_is_its_options_largest() -> None:
    chain = random_chain(random.Random(5), 3, "options")
    for stage in combined([chain, chain], of_bytes=max, of_seconds=mean).stages:
        assert stage.discard_peak_bytes >= max(option.discard_peak_bytes for option in stage.options)


def test_chains_of_other_stages_say_nothing_of_each_other() -> None:
    chain = random_chain(random.Random(3), 4, "cnn")
    other = replace(chain, stages=(replace(chain.stages[0], name="other"), *chain.stages[1:]))
    with pytest.raises(UnlikeChainsError, match=r"name: '.*' and others"):
        combined([chain, other], of_bytes=max, of_seconds=mean)
