"""Modules that are compiled as a whole train under a limit to the bits of plain compiled training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lightning_rotor import Checkpointable
from tests.grids import few
from tests.training import assert_same_bits

WIDTH, STEPS = 32, 3


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layers(*more: Callable[[], nn.Module]) -> nn.Sequential:
    made: list[nn.Module] = []
    for _ in range(3):
        made += [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), *(one() for one in more)]
    return nn.Sequential(*made)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(WIDTH, WIDTH), layers()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x @ self.words.weight))


def with_hook() -> nn.Module:
    net = layers()
    net[3].register_forward_hook(lambda module, x, y: 1.5 * y)
    net.register_forward_pre_hook(lambda module, given: (0.5 * given[0],))
    return net


class Training:
    """A few steps of a module under a limit, or without one.

    Attributes:
        seen: Losses, gradients, weights and buffers.
        graphs: Number of graphs that were compiled.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        limit: str | int | None,
        *,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        accumulated: int = 1,
        sizes: tuple[int, ...] = (8,) * STEPS,
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        net = make()
        net.compile(backend="aot_eager", **options)
        self.module: Any = net if limit is None else Checkpointable(net, mem_limit=limit, show_progress=False)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        self.seen: list[torch.Tensor] = []
        for step, size in enumerate(sizes):
            x = torch.randn(32, size, WIDTH, generator=torch.Generator().manual_seed(step))
            torch.manual_seed(step)
            with context():
                loss = self.module(x).float().square().mean()
            loss.backward()
            self.seen.append(loss.detach())
            if (step + 1) % accumulated == 0:
                self.seen += [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
        self.seen += [value.detach() for value in net.state_dict().values()]
        self.graphs = counters["stats"]["unique_graphs"]


CASES: dict[str, dict[str, Any]] = {
    "autocast": {"make": layers, "context": partial(torch.autocast, "cpu", torch.bfloat16)},
    "accumulation": {"make": layers, "accumulated": 2, "sizes": (8,) * 4},
    "dropout": {"make": partial(layers, partial(nn.Dropout, 0.1))},
    "batch normalization": {"make": partial(layers, partial(nn.BatchNorm1d, 8))},
    "tied weights": {"make": Tied},
}


@pytest.mark.parametrize("case", few(CASES, "dropout"))
def test_under_pressure_bits_are_those_of_the_compiled_training(case: str) -> None:
    plain = Training(limit=None, **CASES[case])
    roomy = Training(limit="1GiB", **CASES[case])
    assert_same_bits(plain.seen, roomy.seen)
    assert plain.graphs == roomy.graphs == 1
    limit = int(0.85 * roomy.module.plan.peak_bytes)
    tight = Training(limit=limit, **CASES[case])
    assert_same_bits(plain.seen, tight.seen)
    # One more, which is planned inside.
    assert tight.graphs == 2
    (stage,) = tight.module.plan.chain.stages
    assert [option.name for option in stage.options] == ["keep", "planned inside"]
    assert tight.module.plan.peak_bytes <= limit


# The compiler looks at every tensor's gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_hooks_of_a_compiled_module_run() -> None:
    plain = Training(with_hook, None)
    assert_same_bits(plain.seen, Training(with_hook, "1GiB").seen)


@pytest.mark.parametrize("dynamic", few([None, True, False], True))
def test_lengths_are_compiled_as_often_as_without_a_limit(dynamic: bool | None) -> None:
    sizes = (8, 6, 4, 8)
    plain = Training(layers, None, sizes=sizes, dynamic=dynamic)
    roomy = Training(layers, "1GiB", sizes=sizes, dynamic=dynamic)
    assert_same_bits(plain.seen, roomy.seen)
    assert plain.graphs == roomy.graphs


def test_a_sparse_gradient_is_compared() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.body = nn.Embedding(WIDTH, WIDTH, sparse=True), layers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(self.words(x))

    net, x = Words(), torch.arange(256).reshape(8, 32) % WIDTH
    net.compile(backend="aot_eager")

    def gradients(module: Any) -> list[torch.Tensor]:
        net.zero_grad()
        module(x).square().sum().backward()
        return [parameter.grad.to_dense().clone() for parameter in net.parameters() if parameter.grad is not None]

    expected = gradients(net)
    roomy = Checkpointable(net, mem_limit="1GiB", show_progress=False)
    assert_same_bits(expected, gradients(roomy))
    assert roomy.plan is not None
    tight = Checkpointable(net, mem_limit=int(0.8 * roomy.plan.peak_bytes), show_progress=False)
    assert_same_bits(expected, gradients(tight))
