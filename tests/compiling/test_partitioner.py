"""Joint graphs that are split under a plan: the same bits, the counted peak, and what is refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from lightning_rotor.compiling.partitioner import Partitioner, Saving
from lightning_rotor.private.partitioning import under_partitioner
from lightning_rotor.profiling import StepMeter

WIDTH, LENGTH, BATCH = 32, 64, 4


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


def transformer(dropout: float = 0.0, depth: int = 2) -> nn.Module:
    return nn.Sequential(*(Block(dropout) for _ in range(depth)))


def small() -> nn.Module:
    """What is refused whatever it computes."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def convolutions() -> nn.Module:
    blocks = ((nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4))
    return nn.Sequential(*(layer for block in blocks for layer in block))


CONVOLUTIONS = convolutions()
TOKENS, IMAGES = (BATCH, LENGTH, WIDTH), (8, 4, 16, 16)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    # What is in a cache is not split again.
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


def backend(partition: Any) -> Any:
    """AOTAutograd alone: graphs run as they are, and free what they have read."""

    def run_as_it_is(graph: Any, _: Any) -> Any:
        def run(args: list[Any]) -> Any:
            return torch.fx.Interpreter(graph).boxed_run(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(fw_compiler=run_as_it_is, bw_compiler=run_as_it_is, partition_fn=partition)


def train(
    net: nn.Module,
    shape: tuple[int, ...],
    by: Any,
    context: AbstractContextManager[Any] | None = None,
    *,
    steps: int = 2,
) -> tuple[list[torch.Tensor], int]:
    """Output, gradients and buffers of the last step, and its peak."""
    torch._dynamo.reset()
    net = copy.deepcopy(net)
    compiled = torch.compile(net, backend=by, dynamic=False)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    peak_bytes = 0
    with context or nullcontext():
        for step in range(steps):
            torch.manual_seed(3)
            net.zero_grad()
            meter = StepMeter(torch.device("cpu"))
            # Not while code is compiled: torch has one profiler, which the count of workspaces needs.
            if step:
                # What earlier runs have left in cycles would be freed in this one, and lower its peak.
                gc.collect()
                meter.start(None)
            try:
                output = compiled(x)
                output.backward(gradient)
            finally:
                # Later tests need the profiler as well.
                if step:
                    peak_bytes = max(phase.peak_bytes for phase in meter.stop().phases)
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    return [output.detach(), *gradients, *net.buffers()], peak_bytes


@pytest.mark.parametrize(
    ("net", "shape", "shares"),
    [
        pytest.param(transformer(), TOKENS, (0.85,), id="transformer", marks=pytest.mark.wide),
        pytest.param(transformer(0.2, depth=1), TOKENS, (0.8,), id="dropout"),
        pytest.param(CONVOLUTIONS, IMAGES, (0.9,), id="batch norm"),
    ],
)
def test_a_planned_pair_of_graphs_computes_the_same_bits_within_its_budget(
    net: nn.Module, shape: tuple[int, ...], shares: tuple[float, ...]
) -> None:
    expected, _ = train(net, shape, backend(min_cut_rematerialization_partition))
    keep = Partitioner(None, fused=False)
    kept, _ = train(net, shape, backend(keep))
    assert all(map(torch.equal, expected, kept))
    (split,) = keep.splits
    # Counting holds the output and its gradient, which are here before or are let go of.
    around_bytes = 2 * expected[0].nbytes
    for share in shares:
        budget_bytes = int(share * split.peak.peak_bytes)
        planner = Partitioner(budget_bytes, fused=False)
        planned, peak_bytes = train(net, shape, backend(planner))
        assert len(expected) == len(planned)
        assert all(map(torch.equal, expected, planned))
        (found,) = planner.splits
        assert found.overhead > 0
        assert found.peak.peak_bytes <= budget_bytes
        assert found.peak.peak_bytes - around_bytes <= peak_bytes <= found.peak.peak_bytes


@pytest.mark.wide
def test_inductor_compiles_the_pair_to_the_bits_of_its_own() -> None:
    # Each kernel takes a C++ compiler two seconds, so few of them: no norms and no attention.
    wide = ((nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3))
    net = nn.Sequential(*(layer for block in wide for layer in block), nn.Dropout(0.1))
    expected, plain_bytes = train(net, TOKENS, "inductor")
    keep = Partitioner(None)
    train(net, TOKENS, "inductor", under_partitioner(keep, keep.key), steps=1)
    planner = Partitioner(int(0.7 * keep.splits[0].peak.peak_bytes))
    planned, peak_bytes = train(net, TOKENS, "inductor", under_partitioner(planner, planner.key))
    assert all(map(torch.equal, expected, planned))
    assert peak_bytes < 0.8 * plain_bytes


def test_a_budget_that_no_pair_keeps_is_refused_with_the_least() -> None:
    with pytest.raises(Exception, match=r"the compiled graph takes at least [\d.]+ \w+, but has 1000 B"):
        train(small(), TOKENS, backend(Partitioner(1000, fused=False)))


@pytest.mark.wide
def test_the_least_pair_is_made_where_nothing_saves_so_much_and_that_will_do() -> None:
    net = transformer()
    expected, plain_bytes = train(net, TOKENS, backend(min_cut_rematerialization_partition))
    planner = Partitioner(saving=Saving(10**9, 10**9, or_least=True), fused=False)
    planned, peak_bytes = train(net, TOKENS, backend(planner))
    assert all(map(torch.equal, expected, planned))
    assert peak_bytes < 0.5 * plain_bytes
    with pytest.raises(Exception, match="the compiled graph takes at least"):
        train(net, TOKENS, backend(Partitioner(saving=Saving(10**9, 10**9), fused=False)))


def test_sizes_that_are_symbols_are_refused_by_name() -> None:
    compiled = torch.compile(small(), backend=backend(Partitioner(None, fused=False)), dynamic=True)
    with pytest.raises(Exception, match=r"a graph that was compiled for several sizes cannot be planned"):
        compiled(torch.randn(TOKENS))
