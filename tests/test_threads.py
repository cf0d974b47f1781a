"""A trace is nobody else's business: what it shows itself in its own thread, other threads do not see."""

from __future__ import annotations

import builtins
import gc
import json
import os
import threading
from collections.abc import Callable
from copy import deepcopy
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import fx, nn

from lightning_rotor import sequentialize


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
    # Into a pipe: a list or a queue would be what the forward changes.
    receiving, sending = os.pipe()

    def work() -> None:
        os.write(sending, json.dumps(_other_work(symbol)).encode() + b"\n")

    def meanwhile() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    before = builtins.isinstance, nn.Module.__call__, nn.Module.__init__, nn.Module.__setattr__
    cut = sequentialize(Waiting(meanwhile, data_decide=data_decide), (torch.ones(2, 4),))
    assert len(cut.stages) > 1
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        received = [json.loads(line) for line in pipe]
    assert received
    assert all(each == expected for each in received)
    assert before == (builtins.isinstance, nn.Module.__call__, nn.Module.__init__, nn.Module.__setattr__)


def test_two_threads_record_at_once() -> None:
    """The second begins while the first is in its forward, and ends after it."""
    before = nn.Module.__call__, nn.Module.__init__, vars(torch.autograd.Function)["apply"]
    nets = [Waiting(lambda: None, data_decide=False) for _ in range(2)]
    cuts: SimpleQueue[Any] = SimpleQueue()
    other = threading.Thread(target=lambda: cuts.put(sequentialize(nets[1], (torch.ones(2, 4),))))

    def start() -> None:
        if other.ident is None:
            other.start()

    nets[0].meanwhile = start
    cuts.put(sequentialize(nets[0], (torch.ones(2, 4),)))
    other.join(60)
    assert [len(cuts.get(timeout=60).stages) for _ in nets] == [6, 6]
    assert before == (nn.Module.__call__, nn.Module.__init__, vars(torch.autograd.Function)["apply"])
