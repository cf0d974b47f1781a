"""What a recording teaches about other sizes makes the next one faster, and is never believed where it does not fit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_rotor import ModelError, sequentialize
from lightning_rotor.capture.cuts import GraphCut
from lightning_rotor.capture.modules import Lessons
from lightning_rotor.planned.known_cuts import KnownCuts

SCALE = torch.ones(16)
SHORT, LONG = torch.randn(6, 16), torch.randn(8, 16)


class Net(nn.Module):
    """No symbol can stand for its input, whose size decides."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 100:
            raise ValueError("too long")
        for layer in self.layers:
            x = F.dropout(layer(x), 0.1)
        return self.act(nn.Identity()(x)).add_(1)


def recorded(net: nn.Module, x: torch.Tensor, lessons: Lessons | None = None) -> GraphCut:
    cut = sequentialize(net, (x,), lessons=lessons)
    assert isinstance(cut, GraphCut)
    assert cut.way == "recording"
    return cut


def scaled_by(scale: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    def act(x: torch.Tensor) -> torch.Tensor:
        return x * scale if x.shape[0] else x

    def change(to: float) -> None:
        nonlocal scale
        scale = to

    return act, change


def test_for_another_size_nobody_looks_at_all_objects_nor_traces_again(monkeypatch: pytest.MonkeyPatch) -> None:
    act, _ = scaled_by(2.0)
    net = Net(act)
    known = KnownCuts(net, most=4)
    first, _ = known.bind((SHORT,), {})

    def looks(*_: Any) -> Any:
        raise AssertionError("it looks at all objects")

    def traces(*_: Any) -> Any:
        raise AssertionError("it runs the forward on symbols")

    monkeypatch.setattr(gc, "get_objects", looks)
    monkeypatch.setattr("lightning_rotor.capture.cutting.cut_graph", traces)
    second, _ = known.bind((LONG,), {})
    assert second is not first
    assert [stage.name for stage in second.stages] == [stage.name for stage in first.stages]
    assert second.reasons == first.reasons
    with pytest.raises(AssertionError, match="on symbols"):
        known.bind((LONG.double(),), {})  # which is not a matter of size


def test_modules_that_had_to_be_one_operation_are_so_at_once() -> None:
    class Hidden(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return x.cos()

    net = Net(Hidden())
    first = recorded(net, SHORT)
    assert first.lessons is not None
    second = recorded(net, LONG, first.lessons)
    assert list(first.opaque) == ["act"]
    assert second.opaque == first.opaque
    assert second.lessons == first.lessons


class ChangesATensor(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 6:
            SCALE.add_(1)
        return super().forward(x)


def test_a_tensor_that_only_longer_inputs_change_is_refused_as_ever() -> None:
    net = ChangesATensor()
    lessons = recorded(net, SHORT).lessons
    assert lessons is not None
    assert not lessons.asks_what_was_there
    for given in (None, lessons):
        with pytest.raises(ModelError, match=r"changes a parameter, or another tensor .* was there before, in place"):
            sequentialize(net, (LONG,), lessons=given)
        assert torch.equal(SCALE, torch.ones(16))


class ScalesLongOnes(Net):
    longer: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.longer(x) if x.shape[0] > 6 else x)


def test_a_variable_that_only_longer_inputs_lead_to_is_watched() -> None:
    net = ScalesLongOnes()
    net.longer, change = scaled_by(2.0)
    lessons = recorded(net, SHORT).lessons
    assert lessons is not None
    assert [code.co_name for code in lessons.closures] == ["forward"]  # which knows its class
    cut = recorded(net, LONG, lessons)
    assert cut.bind((LONG,), {}) is not None
    change(3.0)
    assert cut.bind((LONG,), {}) is None


def test_a_newer_function_with_known_code_and_equal_variables_is_found() -> None:
    act, _ = scaled_by(2.0)
    net = Net(act)
    first = recorded(net, SHORT)
    net.act, change = scaled_by(2.0)
    cut = recorded(net, LONG, first.lessons)
    change(3.0)
    assert cut.bind((LONG,), {}) is None
    assert act(LONG).equal(LONG * 2)


def test_lessons_are_for_calls_that_differ_in_sizes_of_a_module_that_is_the_same() -> None:
    net = Net()
    cut = recorded(net, SHORT)
    assert cut.lessons_for((LONG,), {}) is cut.lessons
    assert cut.lessons_for((LONG.double(),), {}) is None
    assert cut.lessons_for((LONG[None],), {}) is None
    net.eval()
    assert cut.lessons_for((LONG,), {}) is None
