"""A call of a planned module: when it is planned, what its source hears, and when nothing is asked any more."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.errors import ModelError, ProfilerBusyError, ProfilingError
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.agreement import Agreement
from lightning_rotor.planned.budget_source import BudgetSource, CallBegins, CallRan, NoChain, PlanEvent, ProfilerBusy
from lightning_rotor.planned.forward import PlannedForward
from lightning_rotor.planned.module_plans import ModulePlans
from lightning_rotor.planned.plan_settings import PlanSettings

ROWS = 16


class Source(BudgetSource):
    """Gives every plan as much as it wants, takes every event, and remembers those of calls."""

    def __init__(self) -> None:
        self.ranks = Agreement()
        self.events: list[PlanEvent] = []

    def budget(self, name: str, profile: Any) -> Budget:
        return Budget(10**9)

    def hear(self, event: PlanEvent) -> None:
        if isinstance(event, (CallBegins, CallRan, NoChain, ProfilerBusy)):
            self.events.append(event)


class Branching(nn.Module):
    """Goes another way for other values, which no recording holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x if x.sum() > 0 else -x


def planned(net: nn.Module) -> tuple[PlannedForward, Source]:
    source = Source()
    return PlannedForward(net, source, PlanSettings(show_progress=False), "net"), source


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def called(forward: PlannedForward, net: nn.Module, rows: int = ROWS) -> torch.Tensor:
    output: torch.Tensor = forward(net, (torch.ones(rows, 8),), {})
    return output


def test_a_call_that_trains_is_planned_and_tells_its_source() -> None:
    net = layers()
    forward, source = planned(net)
    output = called(forward, net)
    assert torch.equal(output, net(torch.ones(ROWS, 8)))
    begins, ran = source.events
    assert isinstance(begins, CallBegins)
    assert isinstance(ran, CallRan)
    assert ran.name == "net"
    assert ran.prepared.plan is forward.plans.plan
    pending = ran.pending()
    assert pending is not None
    assert pending.waits
    output.sum().backward()
    assert not pending.waits


@pytest.mark.parametrize("way", ["eval", "no_grad", "inference", "transform"])
def test_outside_of_training_the_module_runs_as_it_is(way: str) -> None:
    net = layers().train(way != "eval")
    forward, source = planned(net)
    x = torch.ones(ROWS, 8)
    match way:
        case "no_grad":
            with torch.no_grad():
                called(forward, net)
        case "inference":
            with torch.inference_mode():
                called(forward, net)
        case "transform":
            torch.func.vmap(lambda row: forward(net, (row,), {}))(x)
        case _:
            assert torch.equal(called(forward, net), net(x))
    assert forward.plans.plan is None
    assert source.events == []


def test_a_steady_call_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net = layers()
    forward, _ = planned(net)
    called(forward, net)
    prepared = []
    prepare = ModulePlans.prepare

    def noting(self: ModulePlans, *args: Any) -> Any:
        prepared.append(args)
        return prepare(self, *args)

    monkeypatch.setattr(ModulePlans, "prepare", noting)
    called(forward, net)
    assert prepared == []
    net[1].register_forward_hook(lambda *_: None)
    called(forward, net)
    assert len(prepared) == 1


def test_a_smaller_call_runs_as_a_larger_one_with_much_room_does() -> None:
    net = layers()
    forward, source = planned(net)
    called(forward, net)
    called(forward, net, rows=ROWS // 2)
    first, second = (event for event in source.events if isinstance(event, CallRan))
    assert second.prepared is first.prepared
    assert second.signature.shapes == ((ROWS // 2, 8),)
    assert forward.plans.cuts_made == 1


def test_a_module_that_is_no_chain_runs_plainly_if_its_source_takes_that() -> None:
    net = Branching()
    forward, source = planned(net)
    assert torch.equal(called(forward, net), net(torch.ones(ROWS, 8)))
    (event,) = source.events
    assert isinstance(event, NoChain)
    assert isinstance(event.error, ModelError)
    assert event.name == "net"


def test_a_module_that_cannot_be_measured_now_runs_plainly_this_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: Any, **__: Any) -> Any:
        raise ProfilerBusyError("torch's profiler records")

    net = layers()
    forward, source = planned(net)
    with monkeypatch.context() as patched:
        patched.setattr("lightning_rotor.planned.call_profiler.profile_chain", busy)
        assert torch.equal(called(forward, net), net(torch.ones(ROWS, 8)))
    assert [type(event) for event in source.events] == [ProfilerBusy]
    called(forward, net)
    assert forward.plans.plan is not None


def test_measuring_a_sample_leaves_modes_alone_and_wants_gradients() -> None:
    net = layers().eval()
    net[0].train()
    forward, _ = planned(net)
    profile = forward.measure(torch.ones(ROWS, 8))
    assert len(profile.chain) == 3
    assert [module.training for module in net.modules()] == [False, True, False, False]
    with torch.no_grad(), pytest.raises(ProfilingError, match="expected gradients to be enabled"):
        forward.measure(torch.ones(ROWS, 8))


def test_a_copy_runs_plainly() -> None:
    forward, _ = planned(layers())
    for other in (copy.deepcopy(forward), pickle.loads(pickle.dumps(forward))):
        assert not other.active
        net = layers()
        assert torch.equal(other(net, (torch.ones(ROWS, 8),), {}), net(torch.ones(ROWS, 8)))
    assert forward.active
