"""Planned modules: which are kept when others are chosen, and with what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_rotor import Checkpointable
from lightning_rotor.planned.agreement import Agreement
from lightning_rotor.planned.budget_source import BudgetSource
from lightning_rotor.planned.modules import PlannedModules
from lightning_rotor.planned.plan_settings import PlanSettings
from lightning_rotor.planned.target_search import Target


class Nobody(BudgetSource):
    ranks = Agreement()


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_a_module_that_stays_planned_learns_which_of_its_outputs_the_step_uses() -> None:
    model = nn.ModuleDict({"kept": block(), "dropped": block()})
    loop: Any = SimpleNamespace(
        model=model, may_be_whole=False, is_compiled=False, may_run_as_compiled=False, processes=1
    )
    modules = PlannedModules(loop, Nobody(), PlanSettings(), None)
    modules._plan_only([Target("kept", model["kept"], "a guess"), Target("dropped", model["dropped"], "a guess")])
    before = modules.named("kept")
    modules._plan_only([Target("kept", model["kept"], "90 %", unused_outputs=frozenset([1]))])
    kept = modules.named("kept")
    assert kept is before
    assert kept is not None
    assert (modules.names, kept.target.reason) == (["kept"], "90 %")
    assert kept.plans._profiler.unused_outputs == {1}
    modules.end()


def test_costs_that_were_measured_with_other_unused_outputs_are_measured_anew() -> None:
    net = Checkpointable(block(), torch.randn(3, 4))
    net(torch.randn(3, 4)).sum().backward()
    plans = net._planned.plans
    assert len(plans.cache) == 1
    plans.expect_unused(frozenset())
    assert len(plans.cache) == 1
    plans.expect_unused(frozenset([0]))
    assert len(plans.cache) == 0
    assert not plans.is_prepared((torch.randn(3, 4),), {})
