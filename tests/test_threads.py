"""A trace is nobody else's business: what it shows itself in its own thread, other threads do not see."""

from __future__ import annotations

import builtins
import gc
import threading
from collections.abc import Callable
from copy import deepcopy
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import fx, nn

from lightning_rotor import sequentialize
from lightning_rotor.capture.modules import replaced


class Twice(torch.autograd.Function):
    """An autograd function of the user's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class Counting(nn.Module):
    """Sets an attribute and a buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        self.total += 1
        return Twice.apply(self.linear(x))


_COUNTING = Counting()  # making one draws random numbers, which no trace holds


def _other_work(symbol: fx.Proxy) -> list[Any]:
    """What a thread that knows of no trace may do meanwhile."""
    module, x = deepcopy(_COUNTING), torch.ones(2, 4)
    output = module(x)
    output.sum().backward()
    gc.collect()
    return [
        torch.equal(output, 2 * nn.functional.linear(x, module.linear.weight, module.linear.bias)),
        module.last is x,
        module.total.item(),
        module.linear.bias.grad.tolist(),
        isinstance(symbol, torch.Tensor),
        isinstance(symbol, fx.Proxy),
        torch.is_tensor(symbol),
    ]


class Waiting(nn.Module):
    """Its forward lets another thread work whenever it runs. Data decide in it or not: a trace, or a recording."""

    def __init__(self, meanwhile: Callable[[], None], *, data_decide: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.data_decide = data_decide
        self.meanwhile = meanwhile

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.meanwhile()
        if self.data_decide and x.shape[0] > 100:
            x = x + 1
        return x


@pytest.mark.parametrize("data_decide", [False, True], ids=["traced", "recorded"])
def test_another_thread_sees_the_plain_functions_while_a_module_is_traced(data_decide: bool) -> None:
    symbol = fx.Proxy(fx.Graph().placeholder("x"))
    expected = _other_work(symbol)
    received: SimpleQueue[list[Any]] = SimpleQueue()  # a trace would take a list for the module's

    def meanwhile() -> None:
        thread = threading.Thread(target=lambda: received.put(_other_work(symbol)))
        thread.start()
        thread.join()

    before = builtins.isinstance, nn.Module.__call__, nn.Module.__init__, nn.Module.__setattr__
    cut = sequentialize(Waiting(meanwhile, data_decide=data_decide), (torch.ones(2, 4),))
    assert len(cut.stages) > 1
    assert not received.empty()
    while not received.empty():
        assert received.get() == expected
    assert before == (builtins.isinstance, nn.Module.__call__, nn.Module.__init__, nn.Module.__setattr__)


def test_each_thread_has_its_own_replacement() -> None:
    class Owner:
        def name(self) -> str:
            return "plain"

    def named(name: str) -> Callable[[Any], Any]:
        return lambda original: lambda self: f"{name} for {original(self)}"

    plain, inside, go_on = vars(Owner)["name"], threading.Event(), threading.Event()
    seen: list[str] = []

    def other() -> None:
        with replaced(Owner, "name", named("theirs")):
            inside.set()
            go_on.wait(60)
            seen.append(Owner().name())

    thread = threading.Thread(target=other)
    with replaced(Owner, "name", named("mine")):
        thread.start()
        assert inside.wait(60)
        assert Owner().name() == "mine for plain"
        with replaced(Owner, "name", named("inner")):
            assert Owner().name() == "inner for mine for plain"
    assert Owner().name() == "plain"  # though the other thread is not done
    go_on.set()
    thread.join()
    assert seen == ["theirs for plain"]
    assert vars(Owner)["name"] is plain
