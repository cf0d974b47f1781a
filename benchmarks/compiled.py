"""A GPT as one compiled graph: plain, under torch's activation memory budgets, and planned at the same peaks.

Run as ``python -m benchmarks.compiled [--device cuda]``. Peaks are the allocator's, beyond what is there before a step.
Times are medians of steps that all rows take in turn, on the CPU of the process's own time.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import median
from types import FunctionType
from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import nn

from lightning_rotor.compiling.partitioner import Partitioner
from lightning_rotor.private.compiler import activation_budget
from lightning_rotor.private.partitioning import under_partitioner
from lightning_rotor.profiling import StepMeter

BUDGETS = (0.5, 0.2)
# One graph may be compiled again, when its measured peak has shown what counting has missed.
MOST_COMPILATIONS = 2
_numbers = count()


class Block(nn.Module):
    """Attention and two linear layers, each on a normalized input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, length, width)`` in and out."""
        batch, length, width = x.shape
        heads = self.query(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(mixed, self.dropout, self.training)
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.between(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """Tokens in, loss of the next ones out, so that one graph holds it all."""

    def __init__(self, width: int, heads: int, blocks: int, words: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``(batch, length)`` in, the mean loss out."""
        logits = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


@dataclass
class Row:
    """One way to compile the model.

    Attributes:
        name: For the table.
        net: The model, with gradients of its own.
        compiled: What a step calls.
        peak_bytes: Of a step, beyond what is there before.
        compile_seconds: Of the first steps, all compilations together.
        schedule: Of a planned one.
        seconds: Of each timed step.
        gradients: Of one step.
    """

    name: str
    net: nn.Module
    compiled: Callable[..., Any]
    peak_bytes: int = 0
    compile_seconds: float = 0.0
    schedule: str = ""
    seconds: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)

    def step(self, tokens: torch.Tensor) -> None:
        """One step without an optimizer."""
        for parameter in self.net.parameters():
            parameter.grad = None
        torch.manual_seed(2)
        self.compiled(tokens).backward()


def measured_peak(row: Row, tokens: torch.Tensor) -> int:
    """Peak of a step beyond what is there before it."""
    for parameter in row.net.parameters():
        parameter.grad = None
    if tokens.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        row.step(tokens)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before_bytes
    meter = StepMeter(tokens.device)
    meter.start(None)
    row.step(tokens)
    return max(phase.peak_bytes for phase in meter.stop().phases)


def _called(net: nn.Module, tokens: torch.Tensor) -> Any:
    return net(tokens)


def compiled_row(name: str, net: nn.Module, tokens: torch.Tensor, context: Any) -> Row:
    """A row that was compiled in a context, with its peak and gradients."""
    own = copy.deepcopy(net)
    # Dynamo keeps compiled code with the code object that it stands for, so each row has its own.
    code = _called.__code__.replace(co_name=f"_called_{next(_numbers)}")
    function = FunctionType(code, globals())
    row = Row(name, own, partial(torch.compile(function, dynamic=False), own))
    began = time.perf_counter()
    with context:
        row.step(tokens)
    row.compile_seconds = time.perf_counter() - began
    row.step(tokens)
    row.gradients = [parameter.grad.clone() for parameter in own.parameters() if parameter.grad is not None]
    row.peak_bytes = measured_peak(row, tokens)
    return row


def planned_row(net: nn.Module, tokens: torch.Tensor, plain: Row, kept_bytes: int, target_bytes: int) -> Row | None:
    """The row of a plan whose measured peak is at most the target's; None if none was found."""
    budget_bytes = target_bytes - (plain.peak_bytes - kept_bytes)
    spent_seconds = 0.0
    for _ in range(MOST_COMPILATIONS):
        partitioner = Partitioner(budget_bytes)
        try:
            row = compiled_row("", net, tokens, under_partitioner(partitioner, partitioner.key))
        except Exception as error:  # Dynamo wraps those of backends
            print("no plan:", str(error)[:200].replace("\n", " "))
            return None
        spent_seconds += row.compile_seconds
        split = partitioner.splits[0]
        row.schedule, row.compile_seconds = str(split.schedule), spent_seconds
        row.name = f"planned, counted {split.peak.peak_bytes / 1e6:.2f} MB"
        if row.peak_bytes <= target_bytes:
            return row
        budget_bytes -= int(1.02 * (row.peak_bytes - target_bytes))
    return row


def time_in_turn(rows: list[Row], tokens: torch.Tensor, budget_seconds: float) -> None:
    """Time steps of all rows, one after the other, round by round."""
    clock = time.perf_counter if tokens.is_cuda else time.process_time
    began = time.perf_counter()
    while time.perf_counter() - began < budget_seconds or len(rows[0].seconds) < 3:
        for row in rows:
            if tokens.is_cuda:
                torch.cuda.synchronize()
            start = clock()
            row.step(tokens)
            if tokens.is_cuda:
                torch.cuda.synchronize()
            row.seconds.append(clock() - start)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="for timing all rows")
    parser.add_argument("--blocks", type=int, help="fewer than by default, to try it")
    options = parser.parse_args()
    # Each row shows what compiling costs, and what was counted.
    torch._inductor.config.force_disable_caches = True
    on_gpu = options.device.startswith("cuda")
    width, heads, blocks, words, batch, length = (768, 12, 8, 8192, 16, 512) if on_gpu else (128, 4, 4, 256, 8, 128)
    blocks = options.blocks or blocks
    torch.manual_seed(0)
    net = GPT(width, heads, blocks, words, options.dropout).to(options.device)
    tokens = torch.randint(words, (batch, length), device=options.device)
    name = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name}; GPT of {blocks} blocks, width {width}, batch {batch} × {length}")
    plain = compiled_row("plain compiled", net, tokens, nullcontext())
    keep = Partitioner(None)
    kept = compiled_row("planner's graph, nothing planned", net, tokens, under_partitioner(keep, keep.key))
    kept_bytes = keep.splits[0].peak.peak_bytes
    kept.name += f", counted {kept_bytes / 1e6:.2f} MB"
    rows = [plain, kept]
    for budget in BUDGETS:
        row = compiled_row(f"torch's budget {budget:g}", net, tokens, activation_budget(budget))
        rows.append(row)
        planned = planned_row(net, tokens, plain, kept_bytes, row.peak_bytes)
        if planned is not None:
            rows.append(planned)
    time_in_turn(rows, tokens, options.seconds)
    plain_seconds = median(plain.seconds)
    print("| way | peak | time to plain | compiling | gradients off by at most | schedule |")
    print("|---|--:|--:|--:|--:|---|")
    for row in rows:
        pairs = zip(row.gradients, plain.gradients, strict=True)
        off = max(float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)) for mine, theirs in pairs)
        print(
            f"| {row.name} | {row.peak_bytes / 1e6:.2f} MB | {median(row.seconds) / plain_seconds:.3f} "
            f"| {row.compile_seconds:.1f} s | {off:.1e} | `{row.schedule}` |"
        )


if __name__ == "__main__":
    main()
