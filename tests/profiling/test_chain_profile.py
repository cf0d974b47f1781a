"""Known costs over the stages of another cut: what fits them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.chain import Chain
from lightning_rotor.invertible import AdditiveCoupling
from lightning_rotor.planned.prepared import Costs
from lightning_rotor.planned.records import recalled, record_of
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.chain_profile import profile_over
from lightning_rotor.stages.sequential import sequential_stages


class Counting(nn.Linear):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(input)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.Dropout(), Counting())


def profile_of(net: nn.Sequential) -> Profile:
    return profile_chain(sequential_stages(net), torch.randn(4, 2, 4), repeats=1)


def over(net: nn.Sequential, profile: Profile, **changes: Any) -> Profile:
    given: dict[str, Any] = {
        "chain": profile.chain,
        "group_sizes": profile.group_sizes,
        "remembered": profile.remembered,
        "drawn": profile.drawn,
    }
    given.update(changes)
    return profile_over(sequential_stages(net), given.pop("chain"), **given)


def test_costs_of_equal_stages_are_taken_over_with_what_they_remember_and_draw() -> None:
    profile = profile_of(network())
    assert profile.group_sizes == (2, 1, 1)
    assert profile.remembered == [[], [], [0]]
    assert profile.drawn == [[], ["torch's CPU generator"], []]
    other = network()
    taken = over(other, profile)
    assert taken.chain is profile.chain
    assert (taken.group_sizes, taken.remembered, taken.drawn) == (
        profile.group_sizes,
        profile.remembered,
        profile.drawn,
    )
    assert list(taken.state.remembered) == [other[3]]
    assert taken.copied_bytes == 0  # torch counts no copies on the CPU


def test_a_profile_is_shown_by_its_chain() -> None:
    profile = profile_of(network())
    assert repr(profile) == f"<Profile of {profile.chain!r}>"


def test_a_chain_without_randomness_draws_none() -> None:
    assert profile_of(network()).draws_random
    assert not profile_of(nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 8))).draws_random


def test_costs_of_other_stages_are_refused() -> None:
    profile = profile_of(network())
    with pytest.raises(ValueError, match="the costs are of other stages than the model has"):
        over(network().append(nn.Tanh()), profile)
    with pytest.raises(ValueError, match="the costs are of other stages than the model has"):
        over(network(), profile, group_sizes=(3, 1))
    renamed = replace(profile.chain, stages=tuple(replace(stage, name="?") for stage in profile.chain))
    with pytest.raises(ValueError, match="the costs name other stages than the model has"):
        over(network(), profile, chain=renamed)


def test_costs_of_compiled_variants_are_refused() -> None:
    profile = profile_of(network())
    options = tuple(replace(profile.chain.stages[1].keep, name=name) for name in ("keep", "budget 0.5"))
    stages = (*profile.chain.stages[:1], replace(profile.chain.stages[1], options=options), *profile.chain.stages[2:])
    with pytest.raises(ValueError, match="a compiled stage was measured with variants"):
        over(network(), profile, chain=replace(profile.chain, stages=stages))


def invertible_network() -> nn.Sequential:
    couplings = [AdditiveCoupling(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))) for _ in range(2)]
    return nn.Sequential(nn.Linear(8, 8), *couplings)


def test_costs_of_inverted_stages_are_taken_over_where_the_model_still_inverts_them() -> None:
    profile = profile_chain(sequential_stages(invertible_network()), torch.randn(4, 8), repeats=1)
    assert any(option.inverts for cost in profile.chain for option in cost.options)
    record = record_of("call", Costs(profile))
    record = json.loads(json.dumps(record))  # as a checkpoint holds it
    recorded = recalled(record, sequential_stages(invertible_network()))
    assert recorded is not None
    assert recorded[0].chain == profile.chain
    plain = nn.Sequential(nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    assert recalled(record, sequential_stages(plain)) is None
    with pytest.raises(ValueError, match="an inverse that the model has no more"):
        over(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), profile, chain=named(profile))


def named(profile: Profile) -> Chain:
    """The costs under the names of plain layers."""
    names = [stage.name for stage in sequential_stages(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))]
    stages = [replace(stage, name=name) for stage, name in zip(profile.chain, names, strict=True)]
    return replace(profile.chain, stages=tuple(stages))
