"""Calls of modules and autograd functions go to a listener, in its thread and outside of operations alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_rotor.capture.dispatch_check import CHANGES, DispatchCheck
from lightning_rotor.capture.module_calls import ModuleCalls, hide_trainers, tensor_attributes
from lightning_rotor.capture.operations import UntraceableError
from lightning_rotor.capture.python_functions import FUNCTIONS, body_of, is_attention
from lightning_rotor.capture.shown_calls import shown_calls
from lightning_rotor.errors import InverseError


class Double(torch.autograd.Function):
    """A function of the user's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Heard:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.check = DispatchCheck()
        self.calls: list[Any] = []

    def call_module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.calls.append(module)
        return call(module, *args, **kwargs)

    def call_function(self, function: Callable[..., Any], args: Any, kwargs: Any, *, own_code: str) -> Any:
        self.calls.append(own_code)
        return function(*args, **kwargs)


X = torch.ones(2, 2)


def test_calls_are_heard_and_do_what_they_do() -> None:
    net, heard, originals = nn.Sequential(nn.ReLU()), Heard(), (nn.Module.__call__, nn.Module.__init__)
    with shown_calls(heard):
        assert torch.equal(net(X), X)
        assert torch.equal(Double.apply(X), 2 * X)
        made = nn.Tanh()
    assert heard.calls == [net, net[0], "Double.apply"]
    assert not heard.check.was_there(made)
    assert heard.check.was_there(net)
    assert (nn.Module.__call__, nn.Module.__init__) == originals


def test_operations_and_other_threads_are_not_heard() -> None:
    net, heard = nn.ReLU(), Heard()
    with shown_calls(heard):
        with heard.check.aside():
            net(X)
        thread = threading.Thread(target=net, args=(X,))
        thread.start()
        thread.join()
    assert heard.calls == []


def test_what_no_recording_sees_is_refused_below_python() -> None:
    check = DispatchCheck()
    with pytest.raises(UntraceableError, match=r"computes aten\.mul\.Tensor in a way that no recording sees"), check:
        X * 2


def test_of_an_operation_it_is_told_what_its_name_does_not_say() -> None:
    check = DispatchCheck()

    def seen_in(code: Callable[[], Any]) -> tuple[bool, bool, bool]:
        with check, check.aside(), check.watching(in_module=False, in_unit=False) as seen:
            code()
        return seen.draws, seen.accumulates, seen.reads_values

    assert seen_in(lambda: X * 2) == (False, False, False)
    assert seen_in(lambda: F.dropout(X)) == (True, False, False)
    assert seen_in(lambda: X.cumsum(0)) == (False, True, False)
    assert seen_in(lambda: X[X > 0]) == (False, False, True)
    assert seen_in(lambda: X[torch.tensor([0])]) == (False, False, False)
    assert seen_in(X.nonzero) == (False, False, True)


def test_only_what_the_recording_made_may_change_in_place() -> None:
    check, old, lent = DispatchCheck(), torch.zeros(2), torch.zeros(2)
    check.allow([lent])
    with check, check.aside():
        with check.watching(in_module=False, in_unit=False):
            made = torch.zeros(2) + 1
            made.add_(1)
            assert not check.is_older(made)
            assert check.is_older(old)
            for tensor in (old, lent):
                with pytest.raises(UntraceableError, match=CHANGES):
                    tensor.add_(1)
        with check.watching(in_module=True, in_unit=False):
            lent.add_(1)
        with check.watching(in_module=True, in_unit=True):
            old.add_(1)
    check.trust([old])
    assert not check.is_older(old)


def test_the_innermost_module_that_fails_is_the_culprit() -> None:
    net = nn.Sequential(nn.Sequential(nn.ReLU()))
    calls = ModuleCalls(net)
    paths: list[str] = []

    def fail() -> None:
        paths.append(calls.path)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), calls.inside(net[0]), calls.inside(net[0][0]):
        fail()
    assert paths == ["0.0"]
    assert calls.culprit is net[0][0]
    assert calls.path == ""
    with pytest.raises(UntraceableError, match="Tanh is called but is no submodule"):
        calls.path_of(nn.Tanh())


def test_an_inverse_that_fails_says_where() -> None:
    net = nn.Sequential(nn.ReLU())
    with pytest.raises(InverseError, match="bad") as caught, ModuleCalls(net).inside(net[0]):
        raise InverseError("bad", stage="ReLU")
    assert caught.value.stage == "0"


def test_trainers_are_hidden_and_tensors_in_attributes_found() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.kept = torch.zeros(2)
            self.same = self.layer.weight
            self._trainer = object()

    net: Any = Net()
    assert tensor_attributes(net) == ((net, "kept"),)
    hide_trainers(net, lambda module: False)
    with pytest.raises(UntraceableError, match="asks the Trainer for 'global_step'"):
        _ = net._trainer.global_step


def test_functions_that_are_opened_do_the_same() -> None:
    assert F.normalize in FUNCTIONS
    assert torch.equal(body_of(F.normalize)(X), F.normalize(X))
    attention = nn.MultiheadAttention(4, 2)
    assert is_attention(attention)
    assert not is_attention(attention.eval())
    assert not is_attention(nn.Linear(2, 2))
