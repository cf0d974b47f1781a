"""What one call costs: compiled stages are measured as they are, and with other code only where there is too little room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor import Checkpointable
from lightning_rotor.errors import ModelError
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned import call_profiler
from lightning_rotor.planned.budget_source import BudgetSource, MeasuringBegins
from lightning_rotor.planned.call_profiler import CallProfiler
from lightning_rotor.planned.plan_settings import PlanSettings
from lightning_rotor.planned.prepared import Costs
from lightning_rotor.profiling import Profile


class Measured:
    """A profiler under a budget, its events, and the options under which compiled stages were measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, available_bytes: int, *, compiled: bool) -> None:
        net = Checkpointable(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(4, 8))
        self.signature, entry = net._planned.plans.cache.latest
        self.profile = entry.profile
        self.choices: list[str] = []
        self.events: list[type] = []
        monkeypatch.setattr(call_profiler, "profile_chain", self._profile)
        monkeypatch.setattr(call_profiler, "compiled_in", lambda stage: compiled)
        source = BudgetSource()
        source.ranks = net._planned.plans._source.ranks
        source.hear = lambda event: self.events.append(type(event))  # type: ignore[method-assign]
        self.profiler = CallProfiler(source, PlanSettings(), lambda profile: Budget(available_bytes))

    def _profile(self, stages: Any, value: Any, *, compiled: Any, **_: Any) -> Profile:
        self.choices.append(compiled.choice)
        return self.profile


@pytest.mark.parametrize(
    ("compiled", "available_bytes", "choices", "anew"),
    [
        pytest.param(False, 1, ["exact"], 0, id="nothing is compiled"),
        pytest.param(True, 2**30, ["off"], 0, id="room for compiled stages as they are"),
        pytest.param(True, 1, ["off", "exact"], 1, id="too little room"),
    ],
)
def test_other_code_is_measured_where_the_budget_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, available_bytes: int, choices: list[str], anew: int
) -> None:
    measured = Measured(monkeypatch, available_bytes, compiled=compiled)
    costs = measured.profiler.measure_as_needed(measured.signature, None)
    assert measured.choices == choices
    assert measured.events == [MeasuringBegins] * len(choices)
    assert costs.compiled_anew == anew
    # Once: several stages have no further code to try.
    assert not measured.profiler.wants_other_code(measured.signature, costs)


def test_costs_of_before_are_measured_again_only_for_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch, 2**30, compiled=True)
    before = Costs(measured.profile)
    assert measured.profiler.measure_as_needed(measured.signature, None, before) is before
    assert not measured.choices
    tight = Measured(monkeypatch, 1, compiled=True)
    assert tight.profiler.wants_other_code(tight.signature, replace(before, profile=tight.profile))
    assert tight.profiler.measure_as_needed(tight.signature, None, Costs(tight.profile)).compiled_anew == 1
    assert tight.choices == ["exact"]


def test_code_that_is_at_fault_by_itself_is_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch, 1, compiled=False)

    def fails(*_: Any, **__: Any) -> Profile:
        raise TypeError("a layer wants two arguments")

    monkeypatch.setattr(call_profiler, "profile_chain", fails)
    with pytest.raises(ModelError, match="cannot be measured stage by stage: a layer wants two arguments"):
        measured.profiler.measure(measured.signature, None)
